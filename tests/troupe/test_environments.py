"""An environment of a program or a notebook, brought to where another process can make it."""

import importlib
import linecache
import os
import subprocess
import sys
import types

import gymnasium
import numpy as np
import pytest

import troupe
from tests.envs.catch import CatchEnv
from tests.harness import PATIENCE_S
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_spec, make_vector
from troupe.common.errors import ConfigError
from troupe.environments import Brought, bring
from troupe.services.launcher.training import check_unused

FIRST_CELL = """\
from __future__ import annotations

from dataclasses import dataclass
import gymnasium as gym
import numpy.random as draws
from gymnasium.spaces import Discrete
import numpy as np

WIDTHS = {"short": [3], "long": [9, 4]}
unlucky = np.zeros(3)


@dataclass
class Place:
    column: int = 0


class Base(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}

    def __init__(self, render_mode: "Unknown" = None, width="long"):
        self.observation_space = gym.spaces.Box(0, 100, (2,), np.float32)
        self.action_space = Discrete(2)
        self.width = sum(WIDTHS[width])

    def _shown(self):
        return np.array([self.place.column, self.width], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = Place(int(draws.default_rng(seed).integers(3)))
        return self._shown(), {}
"""
SECOND_CELL = """\
def moved(place, action):
    unlucky = place.column + (1 if action else -1)
    return Place(unlucky)


class Walk(Base):
    def step(self, action):
        self.place = moved(self.place, action)
        over = abs(self.place.column) >= self.width
        return self._shown(), float(over), over, False, {}


class ShortWalk(Walk):
    pass


def make_walk(width="short", render_mode=None):
    return Walk(render_mode, width)


def make_unlucky():
    return Walk(), unlucky


def outer():
    class Inner(Walk):
        pass

    return Inner


Inner = outer()
"""


@pytest.fixture
def notebook(monkeypatch):
    """The names that two cells define, as IPython runs them."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    for number, text in enumerate((FIRST_CELL, SECOND_CELL)):
        name = f"/tmp/ipykernel_1/{number}.py"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec", dont_inherit=True), vars(main))
    return main


def test_what_cells_define_becomes_a_module_that_plays_the_same(notebook, tmp_path, monkeypatch):
    brought = bring(notebook.Walk)
    assert brought == bring(notebook.Walk)
    assert brought.id == f"{brought.module}:Walk"
    here = brought.reachable_from(tmp_path / "run")
    assert (tmp_path / "run" / "source" / f"{brought.module}.py").read_text() == brought.source
    # A process that has only the file.
    monkeypatch.delitem(sys.modules, "__main__")
    code = "import sys; from troupe.common.config.env_section import EnvConfig; "
    code += "from troupe.common.envs import make_vector; "
    code += "env = make_vector(EnvConfig(id=sys.argv[1]), 1, 7, evaluation=True); "
    code += "print(env.reset().tolist(), [env.step([1]).obs.tolist() for _ in range(3)])"
    said = subprocess.run(
        [sys.executable, "-P", "-c", code, here.id],
        env={**os.environ, **here.variables()},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    first, rest = make_walks(notebook, "Walk")
    assert said.stdout.strip() == f"{first} {rest}", said.stderr


def make_walks(notebook, name):
    env = make_vector(EnvConfig(id=bring(getattr(notebook, name), here=True).id), 1, 7, evaluation=True)
    return env.reset().tolist(), [env.step(np.ones(1, int)).obs.tolist() for _ in range(3)]


@pytest.mark.parametrize("name", ["ShortWalk", "make_walk"])
def test_a_class_without_code_of_its_own_and_a_factory_are_written_too(notebook, name, monkeypatch):
    brought = bring(getattr(notebook, name))
    module = types.ModuleType(brought.module)
    monkeypatch.setitem(sys.modules, brought.module, module)
    exec(compile(brought.source, brought.module, "exec", dont_inherit=True), vars(module))
    env = getattr(module, name)()
    env.reset(seed=1)
    assert env.unwrapped.width == {"ShortWalk": 13, "make_walk": 3}[name]
    # Only a local variable has this name where it is used.
    assert "unlucky = " not in brought.source.replace("    unlucky = ", "")


def test_what_a_cell_imports_from_beside_the_notebook_is_found(notebook, tmp_path, monkeypatch):
    (tmp_path / "own_rules.py").write_text("WIDTH = 5\n\n\ndef width():\n    return WIDTH\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rules", raising=False)
    cell = "/tmp/ipykernel_1/2.py"
    text = "from own_rules import width\n\ndef make_own():\n    return Walk(width=width())\n"
    linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    exec(compile(text, cell, "exec", dont_inherit=True), vars(notebook))
    brought = bring(notebook.make_own).reachable_from(tmp_path / "run")
    paths = brought.variables()["PYTHONPATH"].split(os.pathsep)
    assert paths.index(str(tmp_path / "run" / "source")) + 1 == paths.index(str(tmp_path))
    former = list(sys.path)
    with brought.findable():
        assert sys.path == [*former, str(brought.folder)]
    assert sys.path == former


def test_a_folder_that_is_no_run_or_holds_something_stays_as_it_is(notebook, tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory: it does not exist"):
        troupe.resume(tmp_path / "mistyped", env=notebook.Walk)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        troupe.train("cartpole-ppo", tmp_path, env=notebook.Walk)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_is_unused_after_the_module_in_it_was_imported(notebook, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    run = tmp_path / "run"
    here = bring(notebook.Walk).reachable_from(run)
    command = [sys.executable, "-c", f"import {here.id.partition(':')[0]}"]
    subprocess.run(command, env={**os.environ, **here.variables()}, check=True)
    assert list((run / "source" / "__pycache__").iterdir())
    check_unused(run)
    (run / "source" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        check_unused(run)


@pytest.mark.parametrize("begin", [troupe.train, troupe.start])
def test_a_training_that_cannot_begin_leaves_no_directory(notebook, tmp_path, begin):
    with pytest.raises(ConfigError, match="no_such_field"):
        begin("cartpole-ppo", tmp_path / "run", {"agent.no_such_field": 1}, env=notebook.Walk)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_named(notebook):
    with pytest.raises(
        ConfigError, match=r"make_unlucky uses unlucky, a ndarray, .* or train with serial=True"
    ):
        bring(notebook.make_unlucky)
    with pytest.raises(ConfigError, match=r"outer.Inner is defined inside a function"):
        bring(notebook.Inner)
    former, notebook.Walk = notebook.Walk, notebook.ShortWalk
    with pytest.raises(ConfigError, match="Walk has been redefined"):
        bring(former)
    typed = types.new_class(
        "Typed", (gymnasium.Env,), exec_body=lambda body: body.update(__module__="__main__")
    )
    notebook.Typed = typed
    with pytest.raises(ConfigError, match="Typed, whose source is not known"):
        bring(typed)


def test_a_module_goes_by_its_name_and_is_found(monkeypatch, tmp_path):
    brought = bring(CatchEnv)
    assert brought.id == "tests.envs.catch:CatchEnv"
    assert (brought.folder / "tests" / "envs" / "catch.py").is_file()
    assert make_spec(EnvConfig(id=brought.id)).obs_shape == (4, 84, 84)
    assert bring("gym:CartPole-v1") == Brought("gym:CartPole-v1")
    # Installed: Python looks there anyway.
    assert bring(gymnasium.make) == Brought("gymnasium.envs.registration:make")
    (tmp_path / "own_maze.py").write_text("class Maze: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    brought = bring(importlib.import_module("own_maze").Maze)
    assert brought == Brought("own_maze:Maze", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/before")
    with brought.findable():
        assert os.environ["PYTHONPATH"].split(os.pathsep)[:2] == ["/before", str(tmp_path)]
    assert os.environ["PYTHONPATH"] == "/before"
    with pytest.raises(ConfigError, match=r"own_maze:Maze cannot be made with kwargs .* must inherit"):
        make_spec(EnvConfig(id=brought.id))


@pytest.mark.parametrize("place", [0, sys.path.index(os.path.dirname(os.__file__)) + 1])  # of a notebook's
@pytest.mark.parametrize("former", [None, "/before"])
def test_services_find_what_the_program_finds(monkeypatch, tmp_path, former, place):
    """An algorithm is named in words, as an environment may be: nothing says in which folder it is."""
    if former is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", former)
    (tmp_path / "own_algorithm.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path[:place], "", *sys.path[place:]])
    child = [sys.executable, "-P", "-c", "import own_algorithm"]
    with Brought("gym:CartPole-v1").findable():
        subprocess.run(child, check=True)
    assert os.environ.get("PYTHONPATH") == former


def test_only_what_makes_environments_is_taken():
    for given, what in ((CatchEnv(), "has been made already"), (3, "class 'int'")):
        with pytest.raises(ConfigError, match=what):
            bring(given)

    def local():
        return CatchEnv()

    with pytest.raises(ConfigError, match="is defined inside a function"):
        bring(local)
    assert make_spec(EnvConfig(id=bring(local, here=True).id)).actions.count == 3
    assert make_spec(EnvConfig(id=bring(lambda: CatchEnv(), here=True).id)).actions.count == 3
    with pytest.raises(ConfigError, match=r"give it again, as in troupe.evaluate\(run, env=Gone\)"):
        make_spec(EnvConfig(id="troupe.common.envs.in_process:Gone"))


@pytest.mark.parametrize(
    ("name", "program", "said"),
    [
        ("maze.py", "print(bring(Maze).id, bring(Maze).folder.samefile('.'))", "maze:Maze True"),
        ("signal.py", "print(bring(Maze))", "cannot import signal.py"),
        ("my-maze.py", "print(bring(Maze))", "cannot import my-maze.py"),
    ],
)
def test_a_program_is_imported_by_its_file(tmp_path, name, program, said):
    head = "import sys; sys.path.append(sys.path.pop(0))\n"  # as for every library that wants `signal`
    (tmp_path / name).write_text(
        f"{head}from troupe.environments import bring\nclass Maze: pass\n{program}\n"
    )
    words = [sys.executable, name]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert said in done.stdout + done.stderr
