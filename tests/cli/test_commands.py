"""The `troupe` command as a person types it: what it prints, and its exit code."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import services.__main__ as cli
from common.config import Config, load_config, preset_names, read_config, to_toml
from common.errors import PeerError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for who looks at tests.envs elsewhere


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, Path, bool, bool | None]]:
    """Stand in for the launcher and record what it is asked to do."""
    from services.launcher import launcher

    calls: list[tuple[Config, Path, bool, bool | None]] = []

    def run(config: Config, run_dir: Path, *, resume: bool, progress: bool | None, stop: object) -> int:
        calls.append((config, run_dir, resume, progress))
        return 0

    monkeypatch.setattr(launcher, "run", run)
    return calls


NEED_ENGINES = ("dmlab-impala-paper", "football-vtrace", "minatar-breakout-impala", "halfcheetah-ppo")


def make_run(folder: Path, **overrides: str) -> Path:
    folder.mkdir()
    fields = {key.replace("__", "."): value for key, value in overrides.items()}
    (folder / "config.toml").write_text(to_toml(load_config("cartpole-apex", None, fields)))
    return folder


# What is typed, and what the one line on stderr must say. RUN is a run directory, FULL holds foreign files.
BAD_INPUT = [
    ("trian pong-apex", ["unknown command 'trian'", "nearest: train"]),
    ("train", ["PRESET", "required"]),
    ("train pong-apx", ["unknown preset 'pong-apx'", "nearest: pong-apex"]),
    ("train missing.toml", ["cannot read missing.toml", "No such file"]),
    ("train pong-apex extra", ["unknown argument extra"]),
    ("train pong-apex --agent.learnig_rate 1", ["agent.learnig_rate", "nearest: agent.learning_rate"]),
    ("train pong-apex --batch-size 5", ["batch_size", "nearest: replay.batch_size"]),
    ("train pong-apex --replay.batch_size", ["--replay.batch_size needs a value"]),
    ("train pong-apex --seed --no-progress", ["--seed needs a value"]),
    ("train pong-apex --seed one", ["run.seed", "integer"]),
    ("train pong-apex --inference.mode remote", ["inference.mode", "local"]),
    ("train pong-apex --env.id atari:pnog", ["pnog", "atari:pong"]),
    ("train cartpole-apex --env.id gym:CartPole-v99", ["CartPole"]),
    ("train cartpole-apex --env.id nosuchpackage.envs:Maze-v0", ["nosuchpackage", "PYTHONPATH"]),
    ("train cartpole-apex --env.id here:Maze-v0", ["does not look for here in this folder", "PYTHONPATH"]),
    ("train pong-apex --env.id gym:ALE/Breakout-v5", ["did you mean atari:breakout?"]),
    ("train pong-apex --env.id PongNoFrameskip-v4", ["did you mean atari:pong?"]),
    ("train pong-apex --env.id CartPole-v1", ["did you mean gym:CartPole-v1?"]),
    ("train PongNoFrameskip-v4", ["no preset but an environment", "--env.id PongNoFrameskip-v4"]),
    ("train pong-apex --lr 1e-4", ["nearest: agent.learning_rate"]),
    ("train pong-apex --agent.lr 1e-4", ["nearest: agent.learning_rate"]),
    ("train pong-apex --device cuda", ["nearest: learner.device"]),
    ("train pong-apex --sweep lists.toml", ["agent.learning_rate", "laid over the preset, with one value"]),
    ("train cartpole-apex --env.id Pong", ["Pong"]),
    ("train cartpole-apex --run-dir RUN", ["RUN holds a run that wrote no checkpoint", "--run-dir"]),
    ("train pong-apex --learner.device cuda", ["learner.device", "'cuda'", "no CUDA", "use cpu"]),
    ("resume RUN --learner.device cuda:1", ["learner.device", "no CUDA", "use cpu"]),
    (
        "actor --learner tcp://127.0.0.1:1 --agent.gamma 0.9",
        ["unknown argument --agent.gamma", "its learner"],
    ),
    ("replay serve --replay.shards 2", ["unknown argument --replay.shards", "its learner"]),
    ("train cartpole-apex --run-dir FULL", ["FULL is not empty", "--run-dir"]),
    (
        "train cartpole-apex --run-dir FULL/file/run --net.tensorboard_port 0",
        ["FULL/file/run", "cannot create"],
    ),
    ("train cartpole-apex --sweep nowhere.toml", ["cannot read nowhere.toml"]),
    ("resume nowhere", ["nowhere is not a run directory", "does not exist"]),
    ("resume FULL", ["FULL is not a run directory", "no config.toml"]),
    ("resume RUN --env.frame_stack 3", ["cannot resume", "env.frame_stack: ", " -> 3"]),
    ("eval nowhere", ["nowhere is not a directory"]),
    ("eval FULL", ["FULL is neither"]),
    ("eval RUN --episodes none", ["--episodes"]),
    ("eval RUN --seed -1", ["--seed: should be at least 0"]),
    ("eval RUN --epsilon 7", ["--epsilon: should be from 0 to 1"]),
    ("replay serve --data-dri X", ["--data-dri", "did you mean --data-dir?"]),
    ("replay serve --seed -1", ["--seed: should be at least 0"]),
    ("train cartpole-apex --net.metrics_port 65533", ["net.metrics_port (65533)", "at most 6553"]),
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
    (
        "train cartpole-apex --env.frame_skip 4 --env.sticky_actions 0.25",
        ["env.frame_skip, env.sticky_actions would do nothing", "family `gym`", "no pictures", "env.kwargs"],
    ),
    ("config validate pong-apex --env.kwargs {mode=1}", ["env.kwargs would do nothing", "family `atari`"]),
    (
        "train pong-apex --env.id tests.envs.counting:Colour-v0 --env.noop_max 30",
        ["env.noop_max would do nothing", "family `gym`,"],
    ),
    ("config validate own.toml", ["env.episodic_life would do nothing", "family `gym`"]),
    (
        "config validate cartpole-apex --env.id atari:breakout",
        ["agent.torso 'mlp' does not suit atari:breakout", "--agent.torso nature", "pong-apex"],
    ),
    ("train pong-apex --env.id gym:CartPole-v1", ["'small' does not suit", "--agent.torso mlp"]),
    (
        "train cartpole-apex --env.id tests.envs.broken:Broken-v0 --env.kwargs.how raise",
        ["tests.envs.broken:Broken-v0 raised RuntimeError: the physics exploded at step 3, slot 0"],
    ),
    (
        "env check tests.envs.broken:Broken-v0 --env.kwargs.how _exit --env.kwargs.at 0",
        ["tests.envs.broken:Broken-v0 ended the process in reset(), slot 0 (os._exit(3))"],
    ),
    ("env check gym:CartPole-v1 --env.frame_skip 2", ["env.frame_skip would do nothing"]),
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
    (tmp_path / "here.py").touch()
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


def test_train_passes_the_layered_configuration_to_the_launcher(
    launched: list[tuple[Config, Path, bool, bool | None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sweep.toml").write_text("[agent]\nlearning_rate = 0.25\n[replay]\nbatch_size = 7\n")
    monkeypatch.setenv("TROUPE_REPLAY__BATCH_SIZE", "8")
    monkeypatch.setenv("TROUPE_LEARNER__PREFETCH", "9")
    words = "train cartpole-apex --run-dir R --seed 3 --total-steps=1e3 --no-progress --sweep sweep.toml"
    assert cli.main([*words.split(), "--agent.mlp_units", "[3, 4]", "--agent.double=false"]) == 0
    [(config, run_dir, resume, progress)] = launched
    assert (run_dir, resume, progress) == (Path("R"), False, False)
    assert (config.run.seed, config.run.total_steps, config.run.preset) == (3, 1000, "cartpole-apex")
    assert (config.agent.learning_rate, config.replay.batch_size, config.learner.prefetch) == (0.25, 7, 9)
    assert (list(config.agent.mlp_units), config.agent.double) == ([3, 4], False)


def test_train_names_a_run_directory_by_preset_and_time(
    launched: list[tuple[Config, Path, bool, bool | None]],
) -> None:
    assert cli.main(["train", "cartpole-apex"]) == 0
    [(_, run_dir, _, progress)] = launched
    assert run_dir.parent == Path("runs")
    assert run_dir.name.startswith("cartpole-apex-20")
    assert progress is None


def test_what_a_start_that_failed_leaves_behind_does_not_block_the_next(
    launched: list[tuple[Config, Path, bool, bool | None]], tmp_path: Path
) -> None:
    (tmp_path / "R" / "logs").mkdir(parents=True)
    (tmp_path / "R" / "logs" / "launcher.log").write_text("port 6006 is in use")
    (tmp_path / "R" / ".lock").touch()
    assert cli.main(["train", "cartpole-apex", "--run-dir", "R"]) == 0
    assert len(launched) == 1


def test_resume_keeps_the_run_and_says_what_changes(
    launched: list[tuple[Config, Path, bool, bool | None]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(tmp_path / "R", run__seed="5", run__total_steps="1000", net__control="tcp://10.1.1.1:1")
    assert cli.main(["resume", "R", "--total-steps", "9000000"]) == 0
    [(config, run_dir, resume, _)] = launched
    assert (run_dir, resume, config.run.seed, config.run.total_steps) == (Path("R"), True, 5, 9_000_000)
    assert config.net.control == Config().net.control
    assert "run.total_steps: 1000 -> 9000000" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["yaml", "eval RUN --device cuda"])
def test_what_resembles_nothing_gets_no_suggestion(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    told = capsys.readouterr().err
    assert "nearest" not in told
    assert "did you mean" not in told


def test_exit_codes_of_what_goes_wrong_inside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from services.launcher import launcher

    outcomes: list[tuple[BaseException, int, str]] = [
        (PeerError("no learner\nat tcp://x"), 3, "troupe: error: no learner at tcp://x\n"),
        (RuntimeError("first\nsecond"), 70, "troupe: error: internal error, RuntimeError: first second\n"),
        (KeyboardInterrupt(), 130, ""),
    ]
    for error, code, line in outcomes:

        def run(*_: object, error: BaseException = error, **__: object) -> int:
            raise error

        monkeypatch.setattr(launcher, "run", run)
        assert cli.main(["train", "cartpole-apex", "--run-dir", "R"]) == code
        assert capsys.readouterr().err == line


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


def test_presets_lists_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == preset_names()
    assert cli.main(["presets", "--json"]) == 0
    summaries = json.loads(capsys.readouterr().out)
    assert all(summaries.values())


def test_config_show_prints_toml_with_origins(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["config", "show", "pong-apex", "--seed", "4", "--env.kwargs.a", "1"]) == 0
    out = capsys.readouterr().out
    seed = next(line for line in out.splitlines() if line.startswith("seed = 4"))
    assert seed.endswith("# command line")
    (tmp_path / "shown.toml").write_text(out)
    config = load_config("pong-apex", None, {"seed": "4", "env.kwargs.a": "1"})
    assert read_config(tmp_path / "shown.toml") == config
    assert tomllib.loads(out)["run"]["seed"] == 4
    assert cli.main(["config", "show", "pong-apex", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["origins"]["env.id"] == "preset pong-apex"
    assert cli.main(["config", "show", str(make_run(tmp_path / "R")), "--changed"]) == 0
    changed = tomllib.loads(capsys.readouterr().out)
    assert changed["env"]["id"] == "gym:CartPole-v1"
    assert "seed" not in changed["run"]
    assert "net" not in changed


def test_config_validate_accepts_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "validate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == preset_names()
    for line in lines:
        name, said = line.split(": ", 1)
        assert said == "valid" or (name in NEED_ENGINES and "cannot run on this machine" in said)


@pytest.mark.parametrize(
    ("preset", "says"), [("dmlab-impala-paper", "deepmind_lab"), ("football-vtrace", "gfootball")]
)
def test_a_missing_engine_is_named_in_one_line(preset, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, says, None)  # as if it were not installed
    assert cli.main(["train", preset, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert f"needs the module {says}" in error
    assert not (tmp_path / "run").exists()


def test_config_explain_says_what_a_field_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "explain", "agent.n-steps"]) == 0
    out = capsys.readouterr().out
    assert "TROUPE_AGENT__N_STEPS" in out
    assert "structural" in out
    assert "agent.n_steps  (algorithm apex)" in out
    assert "agent.n_steps  (algorithm r2d2)" in out


def test_config_explain_tells_the_fields_of_one_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "explain", "impala"]) == 0
    out = capsys.readouterr().out
    assert "agent.entropy_cost  (algorithm impala)" in out
    assert out.count("  role: ") == out.count("(algorithm impala)")  # nothing else


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["train", "--help"], ["resume", "-h"], ["config", "show", "-h"]]
)
def test_help_is_complete(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "usage: troupe" in out
    if words and words[0] in ("train", "resume", "config"):
        assert "--replay.batch_size" in out
        assert "--agent.learning_rate" in out


def test_a_service_without_its_packages_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import services.__main__ as m; sys.exit(m.main(['learner', '--run-dir', 'R']))"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root)
    assert run.returncode == 2
    assert (
        run.stderr == "troupe: error: the package torch is not installed: pip install -e '.[learner,actor]'\n"
    )


def test_cheap_commands_do_not_import_torch() -> None:
    code = "import sys, services.__main__ as m; m.main(['presets']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import services.__main__ as m; sys.exit(m.main(['config', 'show', 'pong-apex']))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, b"")


def test_env_check_tells_what_an_environment_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "check", "gym:CartPole-v1"]) == 0
    output = capsys.readouterr().out
    assert "network gets   numbers float32 [4]" in output
    assert "shows          Box(" in output
    assert "actions        2 Discrete(2)" in output
    assert "gymnasium      warns: A Box observation space maximum value is infinity." in output
    assert "frames/s" in output
    assert cli.main(["env", "check", "tests.envs.counting:Colour-v0", "--steps", "30", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["terminated"], found["truncated"]) == (30, 4, 0)
    assert found["episodes"] == [[6.0, 6]] * 4
    assert found["spec"]["obs_shape"] == [4, 84, 84]


def test_the_check_before_a_training_can_be_left_out(
    launched: list[tuple[Config, Path, bool, bool | None]], tmp_path: Path
) -> None:
    words = ["cartpole-apex", "--env.id", "tests.envs.broken:Broken-v0", "--env.kwargs.how", "shape"]
    assert cli.main(["train", *words]) == 2
    assert not launched
    assert cli.main(["train", *words, "--env.check_timeout_s", "0"]) == 0
    assert len(launched) == 1


def test_an_environment_that_fails_now_and_then_is_trained_on_with_a_warning(
    launched: list[tuple[Config, Path, bool, bool | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cartpole-apex", "--env.id", "tests.envs.broken:Broken-v0", "--env.kwargs", "{how = 'raise'"]
    words[-1] += ", chance = 0.03, length = 40}"
    assert cli.main(["train", *words]) == 0
    assert len(launched) == 1
    told = capsys.readouterr().err
    assert "troupe: warning: it failed " in told
    assert " in 100 steps, first: tests.envs.broken:Broken-v0 raised RuntimeError" in told


def test_a_resumed_run_is_checked_as_well(
    launched: list[tuple[Config, Path, bool, bool | None]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", env__id="tests.envs.broken:Broken-v0", env__kwargs="{how = 'none'}")
    assert cli.main(["resume", str(run)]) == 2
    assert "returned the observation None" in capsys.readouterr().err
    assert not launched


def test_ctrl_c_while_the_command_is_imported_is_no_traceback(tmp_path: Path) -> None:
    """An import that waits for the signal stands for a slow disk."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'common.installation':\n"
        "            import time\n"
        "            print('importing', flush=True)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "services", "presets"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
