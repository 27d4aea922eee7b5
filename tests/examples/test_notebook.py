"""`examples/quickstart.ipynb`, run by Jupyter's own client in a kernel of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
PROGRAM = """\
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def printed(path):
    """What each cell of code has printed or returned, as plain text."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    found = []
    for cell in cells:
        texts = [output.get("text") or output["data"]["text/plain"] for output in cell["outputs"]]
        found.append("".join("".join(text) for text in texts))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_and_prints_what_is_stored_in_it(tmp_path):
    pytest.importorskip("nbclient", reason="`make setup` installs it")
    variables = {"TROUPE_NET__TENSORBOARD_PORT": "0", "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path)}
    variables["PYTHONDONTWRITEBYTECODE"] = ""  # by default Python writes beside what it imports
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, NOTEBOOK, tmp_path / "done.ipynb"],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stored, now = printed(NOTEBOOK), printed(tmp_path / "done.ipynb")
    # How training went depends on when which service was asked for what; what was learned does not.
    assert now[:3] + now[4:] == stored[:3] + stored[4:]
    assert now[3].startswith("return in training: at first ")
    assert now[-1] == "mean return of 5 episodes: 0.95\n"
    (source,) = tmp_path.glob("runs/*/source/notebook_*.py")
    assert "class Corridor" in source.read_text()
