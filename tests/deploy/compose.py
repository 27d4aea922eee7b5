"""A project of Docker Compose that the tests run, and how to look into it."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import ROOT, run

IMAGES = ("learner", "replay", "actor", "evaluator", "tensorboard")
SERVICES = (*IMAGES, "board")
PATIENCE_S = 600.0  # all services share two cores with whatever else runs there, and import torch


def words(*more: str) -> list[str]:
    """Compose as a plugin of docker, or the program of its own that it was."""
    if plugin_works():
        return ["docker", "compose", *more]
    return ["docker-compose", *more]


@functools.cache
def plugin_works() -> bool:
    """Whether `docker compose` is there."""
    return shutil.which("docker") is not None and not _fails("docker", "compose", "version")


def need_compose() -> None:
    """Skip where there is no Compose 2."""
    if not plugin_works() and (not shutil.which("docker-compose") or _fails("docker-compose", "version")):
        pytest.skip("NOT TESTED: Docker Compose 2 is not installed")


def need_docker() -> None:
    """Skip where no Docker daemon answers."""
    need_compose()
    if not shutil.which("docker") or _fails("docker", "info"):
        pytest.skip("NOT TESTED: no Docker daemon answers")


def _fails(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=120).returncode != 0


class Project:
    """One project; `env` is on top of this process's environment."""

    def __init__(self, name: str, env: Mapping[str, str]) -> None:
        self.name = name
        own = {
            key: text for key, text in os.environ.items() if not key.startswith("TROUPE_") or "BUILD" in key
        }
        self.env = {**own, **env}

    def compose(self, *more: str, ok: tuple[int, ...] = (0,), timeout_s: float = 900) -> str:
        """Run a command of Compose; its output."""
        return run(*words("-p", self.name, *more), cwd=ROOT, env=self.env, ok=ok, timeout_s=timeout_s)

    def inspect(self, service: str) -> list[dict[str, Any]]:
        """Every container of a service, running or not, as Docker describes it."""
        ids = self.compose("ps", "-aq", service).split()
        return json.loads(run("docker", "inspect", *ids, cwd=ROOT, env=self.env)) if ids else []

    def execute(self, container: str, *command: str) -> str:
        """Run a command in a container; its output, also where it fails."""
        return run("docker", "exec", container, *command, cwd=ROOT, env=self.env, ok=(0, 1, 2, 3, 126, 137))

    def status(self) -> dict[str, Any]:
        """What the learner last wrote about the run; nothing where it is not there."""
        found = [one for one in self.inspect("learner") if one["State"]["Running"]]
        if not found:
            return {}
        text = self.execute(found[0]["Id"], "sh", "-c", 'cat "$TROUPE_RUN_DIR/status.json"')
        try:
            return json.loads(text)
        except ValueError:
            return {}

    def updates(self) -> int:
        """Updates of the run so far."""
        return int(self.status().get("updates", 0))

    def wait_for(self, what: str, condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        """Poll until `condition()` is true; fail with the logs where that does not happen."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                logs = self.compose("logs", "--tail", "25", "--no-color", ok=(0, 1))
                pytest.fail(
                    f"not within {timeout_s:.0f} s: {what}\n{self.compose('ps', '-a')}\n{logs[-9000:]}"
                )
            time.sleep(2)


def well(container: Mapping[str, Any]) -> bool:
    """Whether a container runs and says itself that it works."""
    state = container["State"]
    return bool(state["Running"]) and state.get("Health", {}).get("Status") == "healthy"


def write_override(folder: Path, text: str) -> Path:
    """A file for a second `-f`."""
    file = folder / "override.yml"
    file.write_text(text)
    return file
