"""ray_config.yaml under Ray's own rules, as it stands and with its AWS part in place of the other."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parent.parent.parent
VARIANTS = ("machines of your own", "AWS")


def launcher_text(variant: str) -> str:
    """The file after following its own instructions: one part with and the other without # before its lines."""
    lines = []
    part = None
    for line in (ROOT / "ray_config.yaml").read_text().splitlines():
        if line.startswith("# --- "):
            name, mark = line.strip("# -").split(": ")
            part = name if mark == "begin" else None
        elif part is not None:
            line = line.removeprefix("#") if part == variant else "#" + line
        lines.append(line)
    return "\n".join(lines)


@pytest.fixture(params=VARIANTS)
def launcher(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each variant, parsed."""
    config: dict[str, Any] = yaml.safe_load(launcher_text(request.param))
    return config


def commands(config: dict[str, Any]) -> list[str]:
    """Every shell command, in order."""
    return [command for key, value in config.items() if key.endswith("_commands") for command in value]


def test_both_variants_are_in_the_file() -> None:
    providers = [yaml.safe_load(launcher_text(variant))["provider"]["type"] for variant in VARIANTS]
    assert providers == ["local", "aws"]
    assert yaml.safe_load(launcher_text(VARIANTS[0])) == yaml.safe_load((ROOT / "ray_config.yaml").read_text())


def test_ray_takes_the_launcher_file(launcher: dict[str, Any]) -> None:
    prepared = prepare_config(launcher)                        # both as `ray up` does
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]
    assert prepared["max_workers"] == 2


def test_what_is_copied_to_the_nodes_is_here_and_suffices_for_the_install(launcher: dict[str, Any]) -> None:
    copied = {remote: local for remote, local in launcher["file_mounts"].items() if not local.startswith("~")}
    assert all(remote == f"~/apincse/{local}" for remote, local in copied.items())
    assert [local for local in copied.values() if not (ROOT / local).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {package.split(".")[0] for package in project["tool"]["setuptools"]["packages"]}
    needed = packages | {"Makefile", "pyproject.toml", "constraints.txt", project["project"]["readme"]}
    assert set(copied.values()) == needed
    assert "cd ~/apincse && make install" in commands(launcher)


def test_every_node_has_the_token_and_asks_for_it(launcher: dict[str, Any]) -> None:
    assert launcher["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("RAY_AUTH_MODE=token" in command for command in launcher["setup_commands"])
    assert not any("--dashboard-host" in command for command in commands(launcher))  # the head's own host by default


def test_the_commands_are_shell(launcher: dict[str, Any]) -> None:
    for command in commands(launcher):
        checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert checked.returncode == 0, f"{command}\n{checked.stderr}"
