"""Job scripts: their text, what bash makes of them, and what `troupe slurm` writes. No Slurm is needed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import troupe.services.__main__ as cli
from tests.experiments.folders import make_run
from tests.harness import until
from troupe.common.config import load_config
from troupe.common.errors import ConfigError
from troupe.services.slurm import script
from troupe.services.slurm.script import Joining, Resources, RunJob, SweepJob

GOLDEN = Path(__file__).parent / "golden"
RUN = Path("/shared/runs/pong")
PROGRAM = "/shared/venv/bin/troupe"
ASKED = Resources("main", "12:00:00", ["--account=lab"])
RUN_JOB = RunJob(
    run_dir=RUN,
    config=RUN / "slurm" / "pong-apex.toml",
    fields={"run.seed": "3", "env.kwargs": "{mode = 1}"},
    keys_dir=RUN / "slurm" / "keys",
    modules=["my_envs"],
    shards=2,
    actor_nodes=2,
    actors_per_node=16,
    evaluators=1,
    learner_cpus=8,
    gpu=True,
    resources=ASKED,
)
SWEEP = SweepJob(
    folder=Path("/shared/runs/sweep-lr"),
    preset="cartpole-ppo",
    names=["learning_rate=0.001", "learning_rate=0.0003"],
    fields={"run.total_steps": "50000"},
    parallel=2,
    cpus=4,
    gpu=False,
    resources=Resources(),
    options=[],
)
SCRIPTS = {
    "run.sh": script.run_script(RUN_JOB, PROGRAM),
    "join.sh": script.join_script(
        Joining(RUN, RUN / "slurm" / "keys", [], 8, 16, Resources("spare")), PROGRAM
    ),
    "sweep.sh": script.sweep_script(SWEEP, PROGRAM),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_text_is_as_it_was_read_and_approved(name: str) -> None:
    """Where a change is meant: `TROUPE_WRITE_GOLDEN=1 pytest` writes the files, to be read again."""
    if os.environ.get("TROUPE_WRITE_GOLDEN") == "1":
        (GOLDEN / name).write_text(SCRIPTS[name])
    assert SCRIPTS[name] == (GOLDEN / name).read_text()
    assert not re.search("@[a-z_]+@", SCRIPTS[name]), "a name was not filled in"


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_finds_no_mistake(name: str) -> None:
    subprocess.run(["bash", "-n", GOLDEN / name], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", GOLDEN / name], check=True)


HOSTILE = "$(touch pwned)`touch pwned`'\"; touch pwned #"


def _lines_of(folder: Path, text: str) -> str:
    """What bash does with a script whose programs are `echo`."""
    folder.mkdir()
    functions = "srun() { :; }; scancel() { :; }; scontrol() { :; }; mkdir() { :; }; hostname() { echo h; }\n"
    env = os.environ | {f"SLURM_JOB_ID{part}": "7" for part in ("", "_HET_GROUP_1", "_HET_GROUP_2")}
    done = subprocess.run(
        ["bash", "-c", functions + text], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )
    assert not (folder / "pwned").exists(), text
    return done.stdout + done.stderr


@pytest.mark.parametrize("value", [HOSTILE, f"a\n{HOSTILE}", "@run_dir@", "@fields@ @program@"])
def test_a_field_arrives_as_it_is_and_nothing_of_it_runs(tmp_path: Path, value: str) -> None:
    run = tmp_path / f"a b {HOSTILE.replace('/', '')}"
    job = replace(RUN_JOB, run_dir=run, fields={"env.kwargs": value}, config=tmp_path / "c d.toml")
    text = script.run_script(job, shutil.which("echo") or "echo")
    # Where the script would be written; its own folder of the run is not made here.
    told = _lines_of(tmp_path / "work", text.replace('>"$run/slurm/address"', ""))
    assert f"--env.kwargs={value}\n" in told
    assert f"--run-dir {run} " in told
    assert "--job-name='troupe-c d'\n" in text


@pytest.mark.parametrize(
    "job",
    [
        replace(RUN_JOB, run_dir=Path("/a\ntouch pwned")),
        replace(RUN_JOB, config=Path("/a\ntouch pwned.toml")),
        replace(RUN_JOB, resources=Resources("main\ntouch pwned")),
    ],
    ids=["run directory", "preset", "partition"],
)
def test_a_line_break_where_a_comment_would_end_is_refused(job: RunJob) -> None:
    with pytest.raises(ConfigError, match="cannot be used in a job script"):
        script.run_script(job, PROGRAM)


KEEP = "keep() {" + SCRIPTS["run.sh"].partition("keep() {")[2].partition("export -f keep")[0]


def _keep(folder: Path, command: str) -> subprocess.Popen[str]:
    """`keep` of a run's script around a command of bash; its pauses are left out."""
    words = ["bash", "-c", f"{KEEP}\nsleep() {{ :; }}\nkeep bash -c {command!r}"]
    return subprocess.Popen(words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(("status", "starts"), [(0, 1), (2, 1), (4, 1), (5, 1), (3, 2), (137, 2)])
def test_what_dies_is_started_again_unless_that_mends_nothing(
    tmp_path: Path, status: int, starts: int
) -> None:
    command = f"echo start; if [ -e again ]; then exit 0; fi; touch again; exit {status}"
    output, _ = _keep(tmp_path, command).communicate(timeout=60)
    assert output.count("start") == starts


def test_usr1_ends_what_is_kept_with_term(tmp_path: Path) -> None:
    kept = _keep(tmp_path, "trap 'touch termed; exit 0' TERM; touch ready; while :; do sleep 0.1; done")
    until((tmp_path / "ready").exists)
    kept.send_signal(signal.SIGUSR1)
    kept.communicate(timeout=60)
    assert kept.returncode == 0
    assert (tmp_path / "termed").exists()


def test_usr1_that_comes_before_the_number_of_the_command_is_known_ends_it_too(tmp_path: Path) -> None:
    keep = KEEP.replace("child=$!", "kill -USR1 $$; child=$!")
    done = subprocess.run(["bash", "-euc", f"{keep}\nkeep sleep 600"], cwd=tmp_path, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("kind", SCRIPTS)
def test_slurm_puts_nothing_in_the_place_of_a_percent_sign_in_a_path(kind: str) -> None:
    """`%u` would be a user: the job would write its log, or fail to, somewhere else."""
    folder = Path("/shared/100%u")
    jobs = {
        "run.sh": lambda: script.run_script(replace(RUN_JOB, run_dir=folder), PROGRAM),
        "join.sh": lambda: script.join_script(Joining(folder, folder, [], 8, 16, Resources()), PROGRAM),
        "sweep.sh": lambda: script.sweep_script(replace(SWEEP, folder=folder), PROGRAM),
    }
    text = jobs[kind]()
    (output,) = re.findall("#SBATCH --output=(.*) --open-mode", text)
    assert re.fullmatch(r"/shared/100%%u/slurm/(%j|%A-%a)\.log", output.replace("'", ""))
    assert "=/shared/100%u\n" in text, "elsewhere it is a path"


def test_a_dry_run_of_a_sweep_writes_the_script_that_it_would_submit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "lr.toml", tmp_path / "sweep"
    file.write_text(
        '[sweep]\npreset = "cartpole-ppo"\n[sweep.grid]\n"agent.learning_rate" = [1e-4, 1e-3]\n'
        "[run]\ntotal_steps = 1000\n"
    )
    words = ["sweep", str(file), "--dir", str(folder), "--dry-run"]
    assert cli.main(words) == 0
    assert "1,000 steps" in capsys.readouterr().out
    assert not folder.exists()
    assert cli.main([*words, "--slurm"]) == 0
    assert f"submit it: sbatch {folder}/slurm/job.sh" in capsys.readouterr().out
    text = (folder / "slurm" / "job.sh").read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for name in re.findall("learning_rate=[0-9.e-]+", text):
        assert (folder / "values" / f"{name}.toml").exists()
    assert "--array=0-1%" in text


@pytest.mark.timeout(60)
def test_runs_that_are_under_way_are_neither_submitted_nor_trained_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "lr.toml", tmp_path / "sweep"
    file.write_text('[sweep]\npreset = "cartpole-ppo"\n[sweep.grid]\n"agent.learning_rate" = [1e-4, 1e-3]\n')
    words = ["sweep", str(file), "--dir", str(folder), "--slurm"]
    assert cli.main([*words, "--dry-run"]) == 0
    for values in (folder / "values").iterdir():
        make_run(folder / "runs" / values.stem, returns=[(100, 1.0)], steps=100)
    capsys.readouterr()
    for more in ([], ["--dry-run"]):
        assert cli.main([*words, *more]) == 0
        assert "2 runs are still running" in capsys.readouterr().out


def _sweep(folder: Path) -> str:
    """What the script of a sweep has its second job do; `echo` is in the place of `troupe`."""
    job = SweepJob(folder, "cartpole-ppo", ["a", "b c"], {"run.seed": "1"}, 1, 1, False, Resources(), ["--x"])
    text = script.sweep_script(job, shutil.which("echo") or "echo")
    env = os.environ | {"SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(
        ["bash", "-c", text], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()[-1]


def test_a_job_of_a_sweep_begins_its_run_or_goes_on_with_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "b c"
    options = f"--sweep {tmp_path}/values/b c.toml --no-progress --run.seed=1"
    assert _sweep(tmp_path) == f"train cartpole-ppo --x --run-dir {run} {options}"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    assert _sweep(tmp_path) == f"train cartpole-ppo --x --run-dir {run} {options}"
    assert not run.exists(), "what ended without a checkpoint is in the way of `train`"
    (run / "checkpoints" / "step-000000000000").mkdir(parents=True)
    assert _sweep(tmp_path) == f"resume {run} {options}"


def _dry_run(folder: Path, *words: str) -> int:
    return cli.main(["slurm", *words, "--run-dir", str(folder), "--dry-run"])


def test_a_dry_run_writes_the_script_the_configuration_and_private_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "my.toml", tmp_path / "run"
    file.write_text('preset = "cartpole-apex"\n[run]\ntotal_steps = 7000\n')
    monkeypatch.setenv("TROUPE_RUN__SEED", "5")
    words = [str(file), "--nodes", "4", "--actors-per-node", "3", "--replay.batch_size", "64"]
    assert _dry_run(run, *words) == 0
    text = (run / "slurm" / "job.sh").read_text()
    for field in ("run.seed=5", "replay.batch_size=64", "actor.processes=6"):
        assert f"  --{field}" in text, "what holds now holds when the job begins"
    config = load_config(str(run / "slurm" / "my.toml"))
    assert (config.run.total_steps, config.run.seed, config.replay.batch_size) == (7000, 5, 64)
    keys = run / "slurm" / "keys"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()} == {0o600}
    for secret in keys.glob("*.secret"):
        assert secret.read_text().strip() not in text
    before = (keys / "learner.secret").read_text()
    assert _dry_run(run, *words) == 0
    assert (keys / "learner.secret").read_text() == before, "who runs has these"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cartpole-apex", "--nodes", "2"], "leaves none for actors"),
        (["cartpole-apex", "--replay.shards", "17"], "replay.shards"),
        (["cartpole-apex", "--learner.processes", "2"], "a job has one learner"),
        (["cartpole-apex", "--run.total_step", "1"], "run.total_steps"),
        (["cartpole-apex", "--env.id", "gym:Nothing-v0"], "Nothing-v0"),
        ([], "name a preset"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    run = tmp_path / "run"
    assert _dry_run(run, *words) == 2
    assert said in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.parametrize(
    "words",
    [["slurm", "cartpole-apex", "--run-dir", "run"], ["sweep", "cartpole-apex", "--slurm", "--dir", "run"]],
)
def test_without_slurm_one_line_says_so_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert "no sbatch" in error
    assert "--dry-run" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_failed_start_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one that a Slurm refuses; `tests/deploy` has a real one."""
    run, sbatch = tmp_path / "run", tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/sh\necho "sbatch: error: invalid partition" >&2\nexit 1\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    assert cli.main(["slurm", "cartpole-apex", "--partition", "wrong", "--run-dir", str(run)]) == 2
    error = capsys.readouterr().err
    assert "invalid partition" in error
    assert f"--run-dir {run} uses its folder again" in error
    key = (run / "slurm" / "keys" / "learner.secret").read_text()
    assert _dry_run(run, "cartpole-ppo", "--partition", "right", "--nodes", "4") == 0
    text = (run / "slurm" / "job.sh").read_text()
    assert "--partition=right" in text
    assert "wrong" not in text
    assert f"{run}/slurm/cartpole-ppo.toml" in text
    assert (run / "slurm" / "keys" / "learner.secret").read_text() == key


def test_more_actors_need_a_run_and_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    join = ["slurm", "--join", str(run), "--dry-run"]
    assert cli.main(join) == 2
    assert "there is no run directory" in capsys.readouterr().err
    run.mkdir()
    assert cli.main(join) == 2
    assert "slurm/address" in capsys.readouterr().err
    assert _dry_run(run, "cartpole-apex") == 0
    (run / "slurm" / "address").write_text("tcp://node1:10000\n")
    shutil.copy(run / "slurm" / "cartpole-apex.toml", run / "config.toml")
    assert cli.main(join) == 2
    assert "actor.total_slots = 16 leaves no room" in capsys.readouterr().err
    assert _dry_run(run, "cartpole-apex", "--actor.total_slots", "1024") == 0
    shutil.copy(run / "slurm" / "cartpole-apex.toml", run / "config.toml")
    assert cli.main([*join, "--run.seed", "1"]) == 2
    assert "learner of the run" in capsys.readouterr().err
    assert cli.main([*join, "--nodes", "8"]) == 0
    assert "--array=1-8" in (run / "slurm" / "actors.sh").read_text()


def test_trials_of_a_study_are_no_array(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        '[sweep]\npreset = "cartpole-ppo"\ntrials = 2\nstudy = "tpe"\n[sweep.search]\n'
        "agent.learning_rate = {low = 1e-4, high = 1e-3, log = true}\n[run]\ntotal_steps = 1000\n"
    )
    assert cli.main(["sweep", str(file), "--dir", str(tmp_path / "sweep"), "--slurm"]) == 2
    assert "cannot be a job array" in capsys.readouterr().err
