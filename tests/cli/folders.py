"""Run directories without a run."""

from pathlib import Path

from troupe.common.config import load_config, to_toml


def make_run(folder: Path, **overrides: str) -> Path:
    """A directory with the configuration of a run, which is returned."""
    folder.mkdir()
    fields = {key.replace("__", "."): value for key, value in overrides.items()}
    (folder / "config.toml").write_text(to_toml(load_config("cartpole-apex", None, fields)))
    return folder
