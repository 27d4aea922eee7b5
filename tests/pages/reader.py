"""Who copies the blocks of a page, one after the other, into a terminal and a Python of his."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.pages.blocks import Block

HERE = Path(__file__).parent
BLOCK_S = 10 * float(os.environ.get("PAGE_LIMIT_S", 60))
"""A block that takes longer hangs; trainings are stopped long before, see shell.sh."""


class Reader:
    """Runs blocks in a folder; what they leave running is ended by `close`."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        beside = [str(programs), str(Path(sys.executable).parent)]
        self._environment = os.environ | {
            "PATH": os.pathsep.join([*beside, os.environ["PATH"]]),
            "BASH_ENV": str(HERE / "shell.sh"),
            "PAGE_SERVED": str(folder / ".served"),
            "MINARI_DATASETS_PATH": str(folder / ".minari"),
            "TROUPE_NET__TENSORBOARD_PORT": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self._environment.pop("PYTHONPATH", None)
        self._programs = programs
        self._python: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> None:
        """Raises AssertionError with what it printed where it fails."""
        if block.mark == "file":
            path = self._folder / block.words
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "sh":
            self._shell(block)
        else:
            self._interpret(block)

    def _shell(self, block: Block) -> None:
        log = self._folder / f".block-{block.line}.log"
        with log.open("w") as output:  # a file: what is left running would hold a pipe open
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", block.text],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=BLOCK_S,
            )
        assert done.returncode == 0, (
            f"line {block.line}: exit code {done.returncode}\n{log.read_text()[-3000:]}"
        )

    def _interpret(self, block: Block) -> None:
        if self._python is None:
            self._python = subprocess.Popen(
                [self._programs / "python", HERE / "interpreter.py"],
                cwd=self._folder,
                env=self._environment | {"PYTHONPATH": "."},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        stdin, stdout = self._python.stdin, self._python.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(block.text) + "\n")
        stdin.flush()
        printed = []
        for line in stdout:
            if line in ("\x01done\n", "\x01failed\n"):
                break
            printed.append(line)
        else:
            line = ""
        assert line == "\x01done\n", f"line {block.line}:\n{''.join(printed)[-3000:]}"

    def close(self) -> None:
        """End what serves, as by SIGTERM of a supervisor; raises AssertionError where it ended otherwise."""
        if self._python is not None:
            self._python.communicate(timeout=60)
        served = self._folder / ".served"
        logs = []
        for line in reversed(served.read_text().splitlines() if served.exists() else []):
            pid, log, *_ = line.split()
            logs.append(self._folder / log)
            try:
                os.kill(int(pid), signal.SIGTERM)
            except ProcessLookupError:
                continue
        for log in logs:
            code = self._code(log)
            assert code in (0, 143, 130), f"{log.name}: exit code {code}\n{log.read_text()[-3000:]}"

    def _code(self, log: Path) -> int:
        file = log.with_suffix(".code")
        for _ in range(600):
            if file.exists() and (text := file.read_text().strip()):
                return int(text)
            time.sleep(0.1)
        raise AssertionError(f"it does not end by SIGTERM: {log.read_text()[-3000:]}")
