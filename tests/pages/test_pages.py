"""Every block of every page runs as a reader would run it who copies it, with the wheel.

`<!-- not run: REASON -->` before a block excepts it; `<!-- file: NAME -->` says that the reader saves it.
Other tests run every block of the pages in `ELSEWHERE`. The pages in `CHECKOUT` are read in a clone of the
repository, all others in an empty folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bare import build_wheel, install
from tests.pages.blocks import HISTORY, PAGES, ROOT, Block, blocks, to_run
from tests.pages.reader import Reader

WANTED = "TROUPE_TEST_PAGES"
"""With this set, all pages are run, up to two hours on a busy machine; otherwise those that take seconds."""
ELSEWHERE = {
    "docs/replay.md": "tests/replay/test_replay_document.py",
    "docs/protocol.md": "tests/wire/test_protocol_document.py",
}
CHECKOUT = {
    "README.md",
    "docs/aws.md",
    "docs/compatibility.md",
    "docs/models.md",
    "docs/offline.md",
    "docs/scale.md",
    "docs/sweeps.md",
}
INSTALLS = {"examples/outside/README.md"}
"""Pages that install something, into an environment of their own."""
QUICK = {"docs/scale.md", "docs/aws.md"}
RUNS = {
    "README.md": {"pong-ppo-20260102-030405": "cartpole"},
    "docs/board.md": {"my-run": "cartpole"},
    "docs/models.md": {"pong-ppo-1": "pong"},
    "docs/troubleshooting.md": {"my-run": "cartpole"},
}
"""What a reader has in `runs` who comes to a page, and the training that it is from."""
SERVED = {
    "docs/learners.md": [
        Block(
            0,
            "sh",
            "",
            "",
            "_served troupe train cartpole-ppo --run-dir runs/my-run --no-progress "
            "--total-steps 100000000\n"
            "until grep -qs 'ipc://.*/control' runs/my-run/logs/actor-0.log; do sleep 1; done\n",
        )
    ],
    "docs/replay-operations.md": [
        Block(
            0,
            "sh",
            "",
            "",
            "troupe replay serve --bind tcp://127.0.0.1:5560 --data-dir replay-data "
            "--table default:capacity=100000\n",
        ),
        Block(
            0,
            "python",
            "",
            "",
            "from troupe import ReplayClient, Writer\n"
            "writer = Writer(ReplayClient('tcp://127.0.0.1:5560'))\n"
            "writer.append({'obs': [0.0], 'action': 1})\n"
            "writer.item()\n"
            "writer.end_episode()\n"
            "assert writer.flush(60)\n",
        ),
    ],
}
"""What he has running there, as blocks before the first."""
TRAININGS = {
    "cartpole": ["cartpole-ppo", "--total-steps", "20000", "--evaluator.period_s", "1"],
    "pong": ["pong-ppo", "--total-steps", "7000", "--evaluator.episodes", "1"],
}
MAZE = """\
import gymnasium


class Maze(gymnasium.Env):
    def __init__(self, size=5):
        self.size = size
        self.observation_space = gymnasium.spaces.Discrete(size)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self.place, {}

    def step(self, action):
        self.place = max(0, self.place + 2 * int(action) - 1)
        out = self.place == self.size - 1
        return self.place, 1.0 if out else -0.1, out, False, {}


gymnasium.register("Maze-v0", Maze, max_episode_steps=50)
"""
"""`my_games.py`, which pages suppose that a reader has."""

RUNNABLE = [page for page in PAGES if page.name not in HISTORY and to_run(page)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="session")
def trained(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains what a page supposes, once."""
    folder = tmp_path_factory.mktemp("trained")

    def train(name: str) -> Path:
        if not (folder / name).exists():
            quiet = ["--no-progress", "--net.tensorboard_port", "0"]
            words = [programs / "troupe", "train", *TRAININGS[name], "--run-dir", folder / name, *quiet]
            subprocess.run(words, check=True, timeout=900, capture_output=True)
        return folder / name

    return train


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_does_not_run_says_why(page: Path) -> None:
    for block in blocks(page):
        if block.mark == "not run":
            assert len(block.words.split()) > 1, f"line {block.line}: no reason"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [page for page in RUNNABLE if name_of(page) not in ELSEWHERE], ids=name_of)
def test_the_page_runs(
    page: Path, wheel: Path, programs: Path, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    name = name_of(page)
    if name not in QUICK and not os.environ.get(WANTED):
        pytest.skip(f"it takes a minute or more: `make test-pages`, which sets {WANTED}=1")
    folder = tmp_path / "reader"
    if name in CHECKOUT:
        subprocess.run(["git", "clone", "--quiet", "--local", ROOT, folder], check=True, timeout=60)
    elif name.startswith("examples/"):
        shutil.copytree(page.parent, folder)
    else:
        folder.mkdir()
    if name in INSTALLS:
        programs = install(wheel, tmp_path / "environment")
    (folder / ".venv").symlink_to(programs.parent)
    (folder / "my_games.py").write_text(MAZE)
    for run, training in RUNS.get(name, {}).items():
        shutil.copytree(trained(training), folder / "runs" / run)
    reader = Reader(folder, programs)
    try:
        for block in [*SERVED.get(name, []), *to_run(page)]:
            reader.run(block)
    finally:
        reader.close()
