"""What the Tab key offers, asked as a shell asks."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from troupe.services.commands import COMMANDS, page

ROOT = Path(__file__).parents[2]


def offered(tmp_path, line):
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_IFS": "\n"}
    code = "import sys; sys.modules['torch'] = None; from troupe.services.__main__ import main; main()"
    asked["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(tmp_path)])
    (tmp_path / "mine_too.py").touch()
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, timeout=120, check=True)
    return {word.strip() for word in answer.read_text().split("\n")}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("troupe tr", {"train"}),
        ("troupe train cartpole-i", {"cartpole-impala"}),
        ("troupe train pong-apex --replay.batch", {"--replay.batch_size"}),
        ("troupe sweep cartpole-i", {"cartpole-impala"}),
        ("troupe sweep cartpole-ppo --para", {"--parallel"}),
        ("troupe sweep pong-ppo --suite atari5", {"atari5", "atari57"}),
        ("troupe comp", {"compare"}),
        ("troupe plot runs/x --ti", {"--title"}),
        ("troupe resume runs/x --total", {"--total-steps"}),
        ("troupe config ex", {"explain"}),
        ("troupe replay sn", {"snapshot"}),
        ("troupe replay serve --dat", {"--data-dir"}),
        ("troupe env check atari:pon", {"atari:pong"}),
        ("troupe env check gym:CartPole-v", {"gym:CartPole-v0", "gym:CartPole-v1"}),
        ("troupe env check gym:CartPole-v1 --env.rew", {"--env.reward_clip"}),
        ("troupe actor --mod", {"--modules"}),
        ("troupe eval runs/x --modules mine", {"mine_too"}),
        ("troupe eval runs/x --ren", {"--render"}),
    ],
)
def test_what_may_stand_here_is_offered(tmp_path, line, words):
    assert offered(tmp_path, line) == words


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_parser_of_its_name_and_a_function(name):
    command = COMMANDS[name]
    assert command.make_parser().prog == f"troupe {name}"
    module, function = command.function.split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_page_of_commands_is_up_to_date():
    assert (ROOT / "docs" / "commands.md").read_text("utf-8") == page(), "run `make docs`"
