"""What many tests share: the research data, a small encoder made on the spot, and one Ray for all."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of research data and the raw encoder, which is not part of this repository."""
    folder = (ROOT / os.environ.get("APINCSE_SHARED", "../shared")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no research data at {folder}: set APINCSE_SHARED to run this test")
    return folder


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with two CPUs, shared by all tests of the session."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
