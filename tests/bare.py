"""The built wheel, and an environment that has it and no checkout."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def build_wheel(folder: Path) -> Path:
    """Build it in `folder`, from a copy: setuptools leaves folders behind."""
    copy, out = folder / "source", folder / "wheel"
    for name in ("troupe", "common", "services", "configs", "deploy/terraform"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    build = [*PIP, "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", out, copy], check=True, timeout=120)
    return next(out.glob("*.whl"))


def install(wheel: Path, place: Path) -> Path:
    """Make an environment at `place`, with the dependencies of this one; return its programs' folder."""
    venv.create(place, with_pip=False)
    packages = next((place / "lib").glob("python*")) / "site-packages"
    (packages / "dependencies.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    pip = [*PIP, "--python", place / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True, timeout=120)
    return place / "bin"
