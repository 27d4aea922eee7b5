"""The `troupe` command as a person types it: what it prints, and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import troupe.services.__main__ as cli
from tests.cli.folders import make_run
from troupe.common import installation
from troupe.common.config import Config, load_config, preset_names, read_config
from troupe.common.runtime.checkpoint import save_checkpoint
from troupe.services.environment.command import learned_range

pytestmark = pytest.mark.usefixtures("elsewhere")

NEED_ENGINES = (
    "dmlab-impala-paper",
    "football-empty-goal",
    "football-vtrace",
    "minatar-breakout-impala",
    "minatar-ppo",
    "halfcheetah-ppo",
    "simple-spread-ppo",
)


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


def test_resume_warns_of_a_run_that_another_version_wrote(
    launched: list[tuple[Config, Path, bool, bool | None]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(tmp_path / "R")
    this = {"version": installation.version(), "commit": installation.commit()}
    for code, warned in ({"version": "0.0.1", "commit": "f00d"}, 1), (this, 0):
        save_checkpoint(tmp_path / "R" / "checkpoints", {}, {"steps": 5, "troupe": code})
        assert cli.main(["resume", "R"]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if "was written by" in line]
        assert len(lines) == warned
        assert all("by Troupe 0.0.1 (f00d), this is Troupe " in line for line in lines)


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
    assert cli.main(["config", "show", "cartpole-ppo", "--changed"]) == 0
    (tmp_path / "changed.toml").write_text(capsys.readouterr().out)
    shown, preset = load_config(str(tmp_path / "changed.toml")), load_config("cartpole-ppo")
    assert (shown.agent, shown.replay, shown.env) == (preset.agent, preset.replay, preset.env)
    [table] = tomllib.loads((tmp_path / "changed.toml").read_text())["replay"]["tables"]
    assert table == {"name": "default", "capacity": 64, "limiter": "queue"}


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
    hiding = tmp_path / "hiding" / f"{says}.py"  # nor for the process in which it is tried
    hiding.parent.mkdir()
    hiding.write_text(f"raise ImportError(name={says!r})")
    monkeypatch.setenv("PYTHONPATH", f"{hiding.parent}:{os.environ.get('PYTHONPATH', '')}")
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


def test_config_explain_takes_the_names_of_algo(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "explain", "ppo"]) == 0
    head, out = capsys.readouterr().out.split("\n\n", 1)
    assert head == "ppo is policy_gradient with values that `troupe config show --algo ppo --env ID` prints"
    assert cli.main(["config", "explain", "policy_gradient"]) == 0
    assert out == capsys.readouterr().out


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
        assert "--sweep FILE" in out
        assert "--section.field VALUE" in out
        assert "`troupe config explain` lists all fields" in out
        assert len(out.splitlines()) < 60


def test_config_explain_without_a_field_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[run] ")
    assert sum(line.startswith("[agent] Algorithm `") for line in lines) > 4
    for option in ("--replay.batch_size", "--agent.learning_rate", "--net.control"):
        assert any(line.startswith(f"  {option} ") for line in lines)
    assert max(map(len, lines)) <= 110


def test_a_service_without_its_packages_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import troupe.services.__main__ as m; sys.exit(m.main(['learner', '--run-dir', 'R']))"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=root)
    assert run.returncode == 2
    assert (
        run.stderr == "troupe: error: the package torch is not installed: "
        "pip install -c constraints.txt -e '.[learner,actor]'\n"
    )


def test_cheap_commands_do_not_import_torch() -> None:
    code = "import sys, troupe.services.__main__ as m; m.main(['presets']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import troupe.services.__main__ as m; sys.exit(m.main(['config', 'show', 'pong-apex']))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (shown.returncode, shown.stderr) == (0, b"")


def test_env_check_tells_what_an_environment_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "check", "gym:CartPole-v1"]) == 0
    output = capsys.readouterr().out
    assert "network sees   float32 numbers [4]" in output
    assert "observation    Box(" in output
    assert "actions        2 Discrete(2)" in output
    assert (
        "warning        Gymnasium's checker warns: A Box observation space maximum value is infinity."
        in output
    )
    assert "frames per second" in output
    assert "rewards        always 1; used for learning unchanged" in output
    clipped = ["--env.reward_clip", "sign"]
    assert cli.main(["env", "check", "gym:Pendulum-v1", "--steps", "400", *clipped]) == 0
    output = capsys.readouterr().out
    assert re.search(r"rewards +from -\d+\.\d+ to -[\d.]+; used for learning: always -1 ", output)
    assert re.search(r"2 finished, mean return -[\d.]+, 200 steps each\n", output)
    assert cli.main(["env", "check", "tests.envs.counting:Colour-v0", "--steps", "30", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["terminated"], found["truncated"]) == (30, 4, 0)
    assert found["episodes"] == [[6.0, 6]] * 4
    assert found["spec"]["obs_shape"] == [4, 84, 84]


@pytest.mark.parametrize(
    ("preset", "learned"),
    [("pong-apex", (-1.0, 1.0)), ("pong-impala", (-1.0, 1.0)), ("cartpole-ppo", (-0.5, 1.0))],
)
def test_what_a_configuration_makes_of_rewards(preset: str, learned: tuple[float, float]) -> None:
    assert learned_range((-5.0, 10.0), load_config(preset)) == pytest.approx(learned)


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
    assert " in 100 steps; the first failure: tests.envs.broken:Broken-v0 raised RuntimeError" in told


def test_a_resumed_run_is_checked_as_well(
    launched: list[tuple[Config, Path, bool, bool | None]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", env__id="tests.envs.broken:Broken-v0", env__kwargs="{how = 'none'}")
    assert cli.main(["resume", str(run)]) == 2
    assert "returned an observation None instead of float32 [3]" in capsys.readouterr().err
    assert not launched


def test_ctrl_c_while_the_command_is_imported_is_no_traceback(tmp_path: Path) -> None:
    """An import that waits for the signal stands for a slow disk."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'troupe.common.installation':\n"
        "            import time\n"
        "            print('importing', flush=True)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "troupe", "presets"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (130, "")


def test_trackers_and_keys_that_are_missing_are_found_before_a_run_directory_is_made(
    launched: list[tuple[Config, Path, bool, bool | None]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["train", "cartpole-ppo", "--run.trackers", '["mlflow"]']) == 2
    assert "run.trackers has mlflow, which is not installed: pip install" in capsys.readouterr().err
    assert cli.main(["train", "cartpole-ppo", "--serial", "--run.trackers", '["mlflow"]']) == 2
    assert "runs with --serial and --deterministic send nothing to mlflow" in capsys.readouterr().err
    assert cli.main(["train", "cartpole-ppo", "--keys", "nowhere"]) == 4
    told = "cannot read the keys in nowhere: No such file or directory (`troupe keys new DIR` makes keys)"
    assert told in capsys.readouterr().err
    assert not launched
    assert not list(tmp_path.rglob("runs"))
