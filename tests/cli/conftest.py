from __future__ import annotations

from pathlib import Path

import pytest

from troupe.common.config import Config


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for who looks at tests.envs elsewhere


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, Path, bool, bool | None]]:
    """Stand in for the launcher and record what it is asked to do."""
    from troupe.services.launcher import launcher

    calls: list[tuple[Config, Path, bool, bool | None]] = []

    def run(config: Config, run_dir: Path, *, resume: bool, progress: bool | None, stop: object) -> int:
        calls.append((config, run_dir, resume, progress))
        return 0

    monkeypatch.setattr(launcher, "run", run)
    return calls
