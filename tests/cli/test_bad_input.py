"""What a person types wrongly, and what goes wrong inside: one line, and an exit code."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import troupe.services.__main__ as cli
from tests.cli.folders import make_run
from troupe.common.errors import PeerError

pytestmark = pytest.mark.usefixtures("elsewhere")

# What is typed, and what the one line on stderr must say. RUN is a run directory, FULL holds foreign files.
BAD_INPUT = [
    ("trian pong-apex", ["unknown command 'trian'", "nearest: train"]),
    ("train", ["PRESET", "required"]),
    ("train pong-apx", ["unknown preset 'pong-apx'", "nearest: pong-apex"]),
    ("train missing.toml", ["cannot read missing.toml", "No such file"]),
    ("train rates.toml", ["rates.toml says nothing of what to play", 'preset = "NAME"', "--env ID"]),
    ("train pong-apex extra", ["unknown argument extra"]),
    ("train pong-apex --agent.learnig_rate 1", ["agent.learnig_rate", "nearest: agent.learning_rate"]),
    ("train pong-apex --batch-size 5", ["batch_size", "nearest: replay.batch_size"]),
    ("train pong-apex --replay.batch_size", ["--replay.batch_size needs a value"]),
    ("train pong-apex --seed --no-progress", ["--seed needs a value"]),
    ("train pong-apex --no-progres", ["unknown option --no-progres; nearest: --no-progress"]),
    ("train pong-apex --qqq", ["unknown option --qqq; `--help` lists all"]),
    ("train pong-apex --seed one", ["run.seed", "integer"]),
    ("train pong-apex --inference.mode remote", ["inference.mode", "local"]),
    ("train pong-apex --env.id atari:pnog", ["pnog", "atari:pong"]),
    ("train cartpole-apex --env.id gym:CartPole-v99", ["CartPole"]),
    ("train cartpole-apex --env.id nosuchpackage.envs:Maze-v0", ["nosuchpackage", "PYTHONPATH"]),
    ("train cartpole-apex --env.id here:Maze-v0", ["does not look for here in this folder", "PYTHONPATH"]),
    ("train cartpole-apex --env.id json.nothing:Maze-v0", ["json has no module nothing"]),
    ("train pong-apex --env.id gym:ALE/Breakout-v5", ["did you mean atari:breakout?"]),
    ("train pong-apex --env.id PongNoFrameskip-v4", ["did you mean atari:pong?"]),
    ("train pong-apex --env.id CartPole-v1", ["did you mean gym:CartPole-v1?"]),
    ("train PongNoFrameskip-v4", ["is an environment, not a preset", "--algo NAME --env PongNoFrameskip-v4"]),
    ("train --env gym:CartPole-v1", ["PRESET", "troupe train --algo ppo --env gym:CartPole-v1"]),
    ("train --algo ppo", ["--algo ppo needs an environment", "--env gym:CartPole-v1"]),
    ("train --algo poo --env gym:CartPole-v1", ["unknown algorithm 'poo'; nearest: ppo; --algo", "dqn"]),
    ("train pong-ppo --algo ppo --env atari:pong", ["leave out pong-ppo or --algo"]),
    ("config show RUN --algo ppo", ["leave out RUN or --algo"]),
    (
        "train --algo dqn --env gym:Pendulum-v1",
        ["dqn has no starting values", "continuous actions", "--algo ppo"],
    ),
    ("train --algo ppo --env gym:CartPol-v1", ["did you mean gym:CartPole-v1?"]),
    ("train y.yaml", ["y.yaml is not TOML"]),
    ("train pong-apex --agent.algorithm dqn", ["unknown algorithm 'dqn'; nearest: apex"]),
    ("train pong-apex --agent.algorithm ppo", ["unknown algorithm 'ppo'; nearest: policy_gradient"]),
    ("train pong-apex --lr 1e-4", ["nearest: agent.learning_rate"]),
    ("train pong-apex --agent.lr 1e-4", ["nearest: agent.learning_rate"]),
    ("train pong-apex --device cuda", ["nearest: learner.device"]),
    ("train pong-apex --sweep lists.toml", ["agent.learning_rate", "laid over the preset, with one value"]),
    ("train cartpole-apex --env.id Pong", ["Pong"]),
    ("train cartpole-apex --run-dir RUN", ["RUN holds a run that wrote no checkpoint", "--run-dir"]),
    ("train pong-apex --learner.device cuda", ["learner.device", "'cuda'", "no GPU", "use cpu"]),
    ("resume RUN --learner.device cuda:1", ["learner.device", "no GPU", "use cpu"]),
    ("actor --learner tcp://127.0.0.1:1 --slots 0", ["--slots", "1"]),
    ("resume no\x07such", [r"error: no\x07such is not a run directory: it does not exist"]),
    (
        "actor --learner tcp://127.0.0.1:1 --agent.gamma 0.9",
        ["unknown argument --agent.gamma", "its learner"],
    ),
    ("replay serve --replay.shards 2", ["unknown argument --replay.shards", "its learner"]),
    ("train cartpole-apex --run-dir FULL", ["FULL is not empty", "--run-dir"]),
    (
        "train cartpole-apex --run-dir FULL/file/run --net.tensorboard_port 0",
        ["cannot write into the run directory FULL/file/run: Not a directory; choose another place"],
    ),
    ("train cartpole-apex --sweep nowhere.toml", ["cannot read nowhere.toml"]),
    ("resume nowhere", ["error: nowhere is not a run directory: it does not exist"]),
    ("resume FULL/file", ["error: FULL/file is not a run directory: it is not a directory"]),
    ("resume FULL", ["error: FULL is not a run directory: it has no config.toml"]),
    ("resume RUN --env.frame_stack 3", ["cannot resume", "env.frame_stack: ", " -> 3", "structural fields"]),
    (
        "resume RUN --agent.algorithm sac",
        ["cannot resume with agent.algorithm: apex -> sac (command line): structural fields stay as"],
    ),
    ("eval nowhere", ["nowhere is not a directory"]),
    ("eval FULL", ["FULL is neither"]),
    ("eval RUN --episodes none", ["--episodes"]),
    ("eval RUN --seed -1", ["--seed: should be at least 0"]),
    ("eval RUN --epsilon 7", ["--epsilon: should be from 0 to 1"]),
    ("replay serve --data-dri X", ["--data-dri", "did you mean --data-dir?"]),
    ("replay serve --seed -1", ["--seed: should be at least 0"]),
    ("train cartpole-apex --net.metrics_port 65533", ["net.metrics_port (65533)", "at most 6553"]),
    (
        "train pong-impala --learner.processes 3 --net.metrics_port 65531",
        ["net.metrics_port (65531)", "of each of the 6 services: at most 65530"],
    ),
    (
        "train cartpole-apex --net.control tcp://127.0.0.1:7000 --net.replay tcp://127.0.0.1:7001",
        ["net.control, net.replay (command line) would have no effect", "leave out", "docs/services.md"],
    ),
    ("train cartpole-apex --sweep net.toml", ["net.announce (file net.toml) would have no effect"]),
    (
        "resume RUN --net.inference tcp://127.0.0.1:7000",
        ["net.inference (command line) would have no effect"],
    ),
    (
        "sweep cartpole-apex --net.control tcp://127.0.0.1:7000",
        ["net.control (command line) would have no effect"],
    ),
    ("config", ["command"]),
    ("config shwo", ["shwo"]),
    ("config show nothing", ["unknown preset 'nothing'"]),
    ("config explain agent.gama", ["unknown field 'agent.gama'", "nearest: agent.gamma"]),
    ("config explain agent.entropy_costs", ["nearest: agent.entropy_cost"]),
    (
        "config validate cartpole-impala --replay.tables []",
        ["set replay.tables to", 'name = "default", limiter = "queue"'],
    ),
    ("config validate pong-apex --env.id atari:nope", ["nope"]),
    ("config validate --agent.algorithm impala", ["--agent.algorithm", "name the preset or file"]),
    ("train cartpole-ppo --agent.algorithm sac", ["preset cartpole-ppo", "begin from a preset of sac"]),
    (
        "train cartpole-apex --env.frame_skip 4 --env.sticky_actions 0.25",
        [
            "env.frame_skip, env.sticky_actions would have no effect",
            "family `gym`",
            "no pictures",
            "env.kwargs",
        ],
    ),
    (
        "config validate pong-apex --env.kwargs {mode=1}",
        ["env.kwargs would have no effect", "family `atari`"],
    ),
    (
        "train pong-apex --env.id tests.envs.counting:Colour-v0 --env.noop_max 30",
        ["env.noop_max would have no effect", "family `gym`,"],
    ),
    ("config validate own.toml", ["env.episodic_life would have no effect", "family `gym`"]),
    (
        "config validate cartpole-apex --env.id atari:breakout",
        ["agent.torso 'mlp' does not suit atari:breakout", "--agent.torso nature", "pong-apex"],
    ),
    ("train pong-apex --env.id gym:CartPole-v1", ["'small' does not suit", "--agent.torso mlp"]),
    (
        "train cartpole-apex --env.id tests.envs.broken:Broken-v0 --env.kwargs.how raise",
        ["tests.envs.broken:Broken-v0 raised RuntimeError: the physics exploded (broken.py:68) at step 3"],
    ),
    (
        "env check tests.envs.broken:Broken-v0 --env.kwargs.how _exit --env.kwargs.at 0",
        ["tests.envs.broken:Broken-v0 ended the process in reset(), slot 0 (os._exit(3))"],
    ),
    ("env check gym:CartPole-v1 --env.frame_skip 2", ["env.frame_skip would have no effect"]),
    (
        "train cartpole-apex --env.id tests.envs.counting:Picture-v0 --env.kwargs.nested dict "
        "--env.flatten true --replay.capacity_items 2000000000",
        ["replay would take 43,1", "observations of 23,052 bytes", "lower replay.capacity_items"],
    ),
    ("env check", ["ID"]),
    ("env chekc gym:CartPole-v1", ["chekc"]),
    ("presets --yaml", ["--yaml"]),
    ("--frobnicate", ["--frobnicate"]),
]


@pytest.mark.parametrize(("line", "words"), BAD_INPUT, ids=[line for line, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_exit_code_2(
    line: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "RUN")
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "file").write_text("something")
    own = '[env]\nid = "gym:CartPole-v1"\nepisodic_life = false\n[agent]\ntorso = "mlp"\n'
    (tmp_path / "own.toml").write_text(own)
    (tmp_path / "lists.toml").write_text("[agent]\nlearning_rate = [1e-3, 3e-4]\n")
    (tmp_path / "rates.toml").write_text("[agent]\nlearning_rate = 1e-3\n")
    net = '[net]\ncontrol = "tcp://127.0.0.1:5550"\nannounce = "tcp://127.0.0.1:7000"\n'
    (tmp_path / "net.toml").write_text(net)  # the first is the default, as in a file that has every field
    (tmp_path / "here.py").touch()
    (tmp_path / "y.yaml").write_text("agent: {algorithm: ppo}")
    code = cli.main(line.split())
    stdout, stderr = capsys.readouterr()
    assert code == 2
    assert stdout == ""
    assert stderr.startswith("troupe: error: ")
    assert stderr.count("\n") == 1
    for word in words:
        assert word in stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "line",
    [
        *("train cartpole-apex --run-dir secret/run", "resume secret/run", "eval secret/run"),
        *("config show secret/run", "config validate secret/run"),
    ],
)
def test_a_directory_that_may_not_be_looked_into_is_one_line(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Tests may run as root, whom no permission stops.
    for name in ("exists", "is_dir", "is_file"):
        original: Callable[[Path], bool] = getattr(Path, name)

        def look(path: Path, real: Callable[[Path], bool] = original) -> bool:
            if "secret" in path.parts[:-1]:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(Path, name, look)
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err == "troupe: error: cannot look into secret/run: Permission denied\n"


def test_a_bad_value_in_the_environment_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TROUPE_REPLAY__BATCH_SIZE", "lots")
    assert cli.main(["config", "show", "pong-apex"]) == 2
    assert "replay.batch_size" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["yaml", "eval RUN --device cuda"])
def test_what_resembles_nothing_gets_no_suggestion(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    told = capsys.readouterr().err
    assert "nearest" not in told
    assert "did you mean" not in told


def test_exit_codes_of_what_goes_wrong_inside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from troupe.services.launcher import launcher

    outcomes: list[tuple[BaseException, int, str]] = [
        (PeerError("no learner\nat tcp://x"), 3, "troupe: error: no learner at tcp://x\n"),
        (RuntimeError("first\nsecond"), 70, "troupe: error: RuntimeError: first second\n"),
        (KeyboardInterrupt(), 130, ""),
    ]
    for error, code, line in outcomes:

        def run(*_: object, error: BaseException = error, **__: object) -> int:
            raise error

        monkeypatch.setattr(launcher, "run", run)
        assert cli.main(["train", "cartpole-apex", "--run-dir", "R"]) == code
        told = capsys.readouterr().err
        # An error of one's own code, as of this file, ends with its line.
        assert re.sub(r" \(test_bad_input\.py:\d+\)$", "", told, flags=re.MULTILINE) == line


def test_a_run_that_is_stopped_before_there_is_anything_to_keep_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from troupe.services.launcher import launcher

    monkeypatch.setattr(launcher, "run", lambda *_, **__: 130)
    assert cli.main(["train", "cartpole-apex", "--run-dir", "R"]) == 130
    assert not capsys.readouterr().err


def test_a_run_without_a_whole_checkpoint_is_exit_code_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = make_run(tmp_path / "R") / "checkpoints" / "step-000000000001"
    broken.mkdir(parents=True)
    (broken / "arrays.safetensors").write_bytes(b"cut sho")
    for command in (["eval", "R"], ["eval", str(broken)], ["resume", "R", "--net.tensorboard_port", "0"]):
        assert cli.main(command) == 5
        stderr = capsys.readouterr().err
        assert stderr.count("\n") == 1
        assert "checkpoint" in stderr
