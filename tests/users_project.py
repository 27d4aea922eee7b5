"""A user's own project: the example outside, among folders and files that have the commonest names."""

import shutil
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "outside"
PACKAGES = ("common", "services", "configs")
OWN = """\
import common.units
import configs.units
import services.units
import utils

assert {common.units.OURS, configs.units.OURS, services.units.OURS, utils.OURS} == {True}
"""


def build_project(folder: Path, shadows: bool = True) -> Path:
    """Write one: its environment and its algorithm import its own modules.

    With `shadows` there are also a `signal.py` and a `queue.py`, which hide Python's own from every program
    that puts the folder first in its path: Troupe's own processes may not import them.
    """
    shutil.copytree(EXAMPLE, folder)
    for package in PACKAGES:
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
        (folder / package / "units.py").write_text("OURS = True\n")
    (folder / "utils.py").write_text("OURS = True\n")
    for name in ("signal", "queue") if shadows else ():
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name}.py of the project was imported')\n")
    for name in ("corridor", "munchausen", "a2c"):
        module = folder / "my_package" / f"{name}.py"
        head = "from __future__ import annotations\n"
        module.write_text(module.read_text().replace(head, f"{head}\n{OWN}", 1))
    return folder
