"""An entry of `FAMILIES` is all that others need to know of a family."""

import importlib
import tomllib
from pathlib import Path

import pytest

from troupe.common.families import EXTRAS, FAMILIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_what_the_dispatch_calls_and_is_documented(name):
    family = FAMILIES[name]
    module = importlib.import_module(f"troupe.common.envs.{family.module}")
    assert {"make_spec", "make_vector", "settings"} <= set(vars(module))
    assert family.form.startswith(f"{name}:")
    assert f"`{name}:" in (ROOT / "docs/environments.md").read_text()


def test_extras_are_those_of_the_distribution():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)
    for package, extra in EXTRAS.items():
        name = {"ale_py": "ale-py", "cv2": "opencv-python-headless"}.get(package, package.replace("_", "-"))
        assert any(line.startswith(name) for line in extras[extra]), package
