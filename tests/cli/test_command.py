"""The installed command, where a user's own files have the names of Troupe's packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = "import sys; from troupe.command import main; sys.exit(main())"


@pytest.mark.parametrize("name", ["services.py", "common.py", "common/__init__.py"])
def test_a_file_that_hides_a_package_is_named_in_one_line(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x = 1\n")
    done = presets(tmp_path)
    hides = (tmp_path / name.removesuffix("/__init__.py")).resolve()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"troupe: error: {hides} hides a package of Troupe: rename it\n"


def test_other_files_are_in_nobodys_way(tmp_path):
    (tmp_path / "games.py").write_text("x = 1\n")
    done = presets(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cartpole-apex" in done.stdout


def presets(folder):
    environ = {**os.environ, "PYTHONPATH": f".{os.pathsep}{Path(__file__).parents[2]}"}
    words = [sys.executable, "-c", BEGIN, "presets"]
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
