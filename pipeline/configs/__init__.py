"""Ready experiments: one YAML file each, stating only its differences from the defaults."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def names() -> list[str]:
    """The ready configs."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))
