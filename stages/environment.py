"""What a run was made with: results differ by more than a point between versions, so they are written down."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "accelerate", "apincse", "datasets", "deepspeed", "mlflow", "numpy", "pyarrow", "ray", "safetensors",
    "scikit-learn", "scipy", "sentencex", "tokenizers", "torch", "transformers",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Git commit, Python, platform and package versions of this process.

    Returns:
        ``{"git": {"commit", "dirty"}, "python", "platform", "packages": {name: version}}``; ``git`` is empty
        outside a checkout (an installed package, a submitted job), packages that are not installed are left out.
    """
    return {
        "git": _git(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path) -> dict[str, Any]:
    """The commit of the checkout that holds these files, and whether tracked files differ from it."""
    here = Path(__file__).name
    try:
        _ask_git(folder, "ls-files", "--error-unmatch", here)  # else: installed inside someone else's repository
        return {
            "commit": _ask_git(folder, "rev-parse", "HEAD"),
            "dirty": bool(_ask_git(folder, "status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def _ask_git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
