"""`troupe train PRESET --deterministic`: one seed, one run, to the last bit, however often it is stopped."""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import troupe.services.__main__ as cli
from tests.harness import CHAOS, until
from troupe.certificate import Certificate
from troupe.common.config import load_config
from troupe.common.envs import make_vector
from troupe.common.errors import ConfigError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.checkpoint import load_newest
from troupe.joined import JoinedVector
from troupe.lockstep import LockstepTraining, repeatable, repeatable_config, train

SHORT = {
    "evaluator.enabled": "false",
    "learner.checkpoint_period_steps": "17",
    "learner.certificate_period_updates": "1",
    "run.total_steps": "240",
}
# Full before the end, so that items leave as well.
FEW = {"replay.capacity_items": "100", "replay.samples_per_insert_error": "8"}
REPLAYED = {**FEW, "replay.min_items": "30", "replay.batch_size": "8", "replay.samples_per_insert": "2"}
SEQUENCES = {**FEW, "replay.min_items": "10", "replay.batch_size": "4", "replay.samples_per_insert": "4"}
UNROLLS = {"agent.unroll_steps": "8", "replay.batch_size": "4"}
PASSES = {**UNROLLS, "agent.minibatch_steps": "16"}
CASES = {
    "cartpole-apex": REPLAYED,
    "cartpole-sac": REPLAYED,
    "pendulum-sac": REPLAYED | {"agent.atoms": "21", "agent.layer_norm": "true"},
    "memory-r2d2": SEQUENCES | {"replay.capacity_items": "24", "agent.normalize_rewards": "true"},
    "memory-sac": SEQUENCES | {"replay.capacity_items": "24", "agent.normalize_rewards": "true"},
    "bitflip-apex": REPLAYED
    | {"agent.normalize_rewards": "true", "agent.noise": "0.5", "agent.epsilon_alpha": "7"},
    "cartpole-impala": UNROLLS | {"agent.normalize_returns": "true"},
    "cartpole-clear": {"agent.unroll_steps": "5"},
    "cartpole-ppo": PASSES,
    "memory-ppo": PASSES,
    "cartpole-awr": PASSES,
    "cartpole-vmpo": PASSES,
    "cartpole-pqn": PASSES,
}


def config_of(preset, actors=1, **more):
    slots = {"actor.processes": str(actors), "actor.slots": str(4 // actors)}
    return load_config(preset, None, SHORT | CASES[preset] | slots | more)


def certified(run_dir):
    return list(Certificate.read(run_dir).weights.values())


@functools.cache
def never_stopped(preset):
    """Certificate and final state of a run of one actor."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        train(config_of(preset), run_dir, StopSignal())
        return certified(run_dir), load_newest(run_dir / "checkpoints")


@pytest.mark.parametrize("preset", CASES)
def test_a_seed_gives_the_same_weights_whatever_the_number_of_actors(tmp_path, preset):
    weights, _ = never_stopped(preset)
    assert len(weights) > 3
    assert weights[0].tensors != weights[-1].tensors
    for actors in (2, 4):
        # What others have drawn before must not matter.
        torch.rand(actors), np.random.rand(actors), random.random()
        train(config_of(preset, actors), tmp_path / str(actors), StopSignal())
        assert certified(tmp_path / str(actors)) == weights


def test_another_seed_gives_other_weights(tmp_path):
    train(config_of("cartpole-ppo", **{"run.seed": "2"}), tmp_path / "run", StopSignal())
    assert certified(tmp_path / "run")[0].tensors != never_stopped("cartpole-ppo")[0][0].tensors


class KilledError(Exception):
    """The end of a process that could do nothing about it."""


class Stopped(LockstepTraining):
    """A run that is stopped, or killed, at an update."""

    at, killed = 0, False

    def certify(self, weights):
        if weights.update == self.at and self.killed:
            raise KilledError
        if weights.update == self.at:
            self.stop.set()


def go_on(config, run_dir, at, killed, resume):
    with repeatable():
        training = Stopped(repeatable_config(config), run_dir, StopSignal(), resume=resume)
        training.at, training.killed = at, killed
        try:
            training.run()
        except KilledError:
            training.abandon()


@pytest.mark.parametrize("preset", CASES if CHAOS else ["cartpole-apex", "cartpole-clear", "memory-r2d2"])
@settings(max_examples=50 if CHAOS else 3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_run_that_was_stopped_gives_the_weights_of_the_run_that_was_not(preset, data):
    weights, last = never_stopped(preset)
    updates = st.integers(1, len(weights))
    stops = data.draw(st.lists(st.tuples(updates, st.booleans()), min_size=1, max_size=2), "stops")
    with tempfile.TemporaryDirectory() as folder:
        run_dir, config = (
            Path(folder) / "run",
            config_of(preset, data.draw(st.sampled_from([1, 2, 4]), "actors")),
        )
        for number, (at, killed) in enumerate(stops):
            go_on(config, run_dir, at, killed, resume=number > 0)
        train(config, run_dir, StopSignal(), resume=True)
        assert certified(run_dir) == weights
        resumed = load_newest(run_dir / "checkpoints")
        assert resumed.meta["steps"] == last.meta["steps"] == 240
        assert resumed.arrays.keys() == last.arrays.keys()
        # With moments, target network and generators: what comes after the end would be the same as well.
        assert all((resumed.arrays[name] == array).all() for name, array in last.arrays.items())


def test_what_was_stopped_leaves_the_checkpoint_that_it_goes_on_from(tmp_path):
    config = config_of("cartpole-apex")
    last = len(never_stopped("cartpole-apex")[0])
    go_on(config, tmp_path / "run", last, killed=False, resume=False)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert load_newest(tmp_path / "run" / "checkpoints").meta["updates"] < last
    # A copy of replay for each checkpoint that is kept, and none for others.
    assert sorted(path.name for path in (tmp_path / "run" / "replay").iterdir()) == kept
    assert len(kept) == config.learner.keep_checkpoints
    assert not (tmp_path / "run" / "serial-replay").exists()


def test_a_complete_run_stays_as_it_is(tmp_path, capsys):
    config = config_of("cartpole-ppo")
    train(config, tmp_path / "run", StopSignal())
    kept = [tmp_path / "run" / "status.json", *(tmp_path / "run" / "replay").rglob("*")]
    before = [path.stat().st_mtime_ns for path in kept]
    train(config, tmp_path / "run", StopSignal(), resume=True)
    assert "the run was already complete at 240 steps" in capsys.readouterr().out
    assert before == [path.stat().st_mtime_ns for path in kept]
    assert not (tmp_path / "run" / "serial-replay").exists()


@pytest.mark.parametrize("preset", ["cartpole-apex", "cartpole-ppo"])
def test_checkpoints_too_close_to_collect_anything_between_them_are_refused(tmp_path, preset):
    config = config_of(preset, **{"learner.checkpoint_period_steps": "7"})
    with pytest.raises(ConfigError, match="nothing to learn from in 7 steps: a checkpoint drops"):
        train(config, tmp_path / "run", StopSignal())


def test_a_replay_is_refused_of_which_the_disk_could_not_hold_the_copies_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr("troupe.common.data.plan.disk_limit_bytes", lambda folder: 1 << 16)
    # 100 items are 16 kB: three of them would fit.
    with pytest.raises(ConfigError, match="replay with the 4 copies of it that checkpoints need would take"):
        train(config_of("cartpole-apex"), tmp_path / "run", StopSignal())
    assert not (tmp_path / "run" / "config.toml").exists()
    few = config_of("cartpole-apex", **{"learner.keep_checkpoints": "1", "run.total_steps": "40"})
    train(few, tmp_path / "few", StopSignal())


def test_what_cannot_be_repeated_is_refused_or_left_out():
    config = config_of("cartpole-ppo", **{"agent.compute_dtype": "auto", "learner.torch_threads": "2"})
    repeated = repeatable_config(config)
    assert repeated.agent.compute_dtype == "float32"
    assert repeated.learner.torch_threads == 1
    gpu = config.model_copy(update={"learner": config.learner.model_copy(update={"device": "cuda"})})
    with pytest.raises(ConfigError, match="set learner\\.device to cpu"):
        repeatable_config(gpu)


@pytest.mark.parametrize("processes", [0, 2])
def test_vectors_that_are_joined_play_what_one_would(processes):
    config = config_of("cartpole-ppo").env.model_copy(update={"processes": processes})
    alone = config.model_copy(update={"processes": 0})
    one, joined = (
        make_vector(alone, 5, 1),
        JoinedVector([make_vector(config, 2, 1), make_vector(config, 3, 1)]),
    )
    try:
        assert (one.reset(7) == joined.reset(7)).all()
        ended = 0
        for number in range(40):
            actions = (np.arange(5) + number // 3) % 2
            mine, theirs = one.step(actions), joined.step(actions)
            for name in ("obs", "reward", "terminated", "truncated"):
                assert (getattr(mine, name) == getattr(theirs, name)).all(), name
            assert sorted(mine.final_obs) == sorted(theirs.final_obs)
            assert all((mine.final_obs[slot] == obs).all() for slot, obs in theirs.final_obs.items())
            assert mine.episodes == theirs.episodes
            ended += len(mine.episodes)
        assert ended > 2
    finally:
        one.close()
        joined.close()


WORDS = [f"--{name}={value}" for name, value in (SHORT | CASES["cartpole-apex"]).items()]
WORDS += ["--env.check_timeout_s=0", "--actor.slots=4"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run, made by the command."""
    path = tmp_path_factory.mktemp("certified") / "run"
    assert cli.main(["train", "cartpole-apex", "--deterministic", "--run-dir", str(path), *WORDS]) == 0
    return path


@pytest.fixture
def copy(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run")
    return tmp_path / "run"


def edit(path, former, text):
    before = path.read_text()
    assert former in before
    path.write_text(before.replace(former, text))


def test_verify_finds_a_run_equal(run_dir, capsys):
    assert certified(run_dir) == never_stopped("cartpole-apex")[0]
    assert cli.main(["verify", str(run_dir), "--all"]) == 0
    count = len(certified(run_dir))
    assert f"equal: {count} of {count} certified updates, up to update {count}" in capsys.readouterr().out


def test_verify_needs_no_room_for_the_whole_replay_and_its_copies(run_dir, monkeypatch):
    monkeypatch.setattr("troupe.common.data.plan.disk_limit_bytes", lambda folder: 50_000)
    assert cli.main(["verify", str(run_dir)]) == 0


def test_verify_names_the_update_and_the_tensor_after_a_changed_line_of_the_configuration(copy, capsys):
    line = next(
        line for line in (copy / "config.toml").read_text().splitlines() if line.startswith("target_update")
    )
    edit(copy / "config.toml", line, line.partition("=")[0] + "= 9")
    assert cli.main(["verify", str(copy)]) == 1
    said = capsys.readouterr().out
    # The target network moves after update 9 for the first time, and update 10 is the first to feel it.
    assert "different: update 10, tensor " in said
    assert "equal up to update 9" in said


def test_verify_names_what_was_changed_when_the_run_was_resumed(copy, capsys):
    complete = (copy / "config.toml").read_text()
    assert cli.main(["resume", str(copy), "--agent.target_update_period_updates=9"]) == 0
    assert (copy / "config.toml").read_text() == complete  # nothing was made with it
    for words in (["--total-steps=260"], ["--total-steps=280", "--agent.target_update_period_updates=9"]):
        assert cli.main(["resume", str(copy), *words]) == 0
    assert cli.main(["verify", str(copy)]) == 1
    said = capsys.readouterr().out
    names = "run.total_steps, agent.target_update_period_updates"
    assert f"changed when the run was resumed: {names}\n" in said
    assert "different: update " in said


def test_verify_names_the_update_and_the_tensor_after_a_changed_line_of_code(run_dir, capsys, monkeypatch):
    import troupe.serial as serial

    def annealed(begin, end, updates, over):
        return former(begin, end, updates, over) + (0.1 if updates >= 5 else 0.0)

    former = serial.annealed
    monkeypatch.setattr(serial, "annealed", annealed)
    assert cli.main(["verify", str(run_dir)]) == 1
    assert "different: update 6, tensor " in capsys.readouterr().out


def test_verify_says_which_tensor_of_which_update_is_not_what_is_certified(copy, capsys):
    third = certified(copy)[2]
    name = list(third.tensors)[1]
    edit(copy / "certificate.json", third.tensors[name], "0" * 64)
    assert cli.main(["verify", str(copy)]) == 1
    assert (
        f"different: update 3, tensor {name} (1 of {len(third.tensors)} tensors differ)"
        in capsys.readouterr().out
    )


def test_verify_says_what_is_otherwise_on_this_machine(copy, capsys):
    certificate = Certificate.read(copy)
    certificate.made_with["torch"] = "1.13.0"
    certificate.made_with["features"] = [*certificate.made_with["features"], "avx1024"]
    certificate.write(copy)
    assert cli.main(["verify", str(copy)]) == 0
    said = capsys.readouterr().out
    assert (
        f"different from when it was made: torch: 1.13.0 in the certificate, {torch.__version__} here"
    ) in said
    assert "features: not here: avx1024" in said


def test_verify_refuses_what_has_no_certificate(copy, capsys):
    (copy / "certificate.json").write_text("{}")
    assert cli.main(["verify", str(copy)]) == 5
    (copy / "certificate.json").unlink()
    assert cli.main(["verify", str(copy)]) == 2
    assert "only runs of `troupe train --deterministic`" in capsys.readouterr().err


def test_a_run_whose_certificate_is_lost_goes_on_as_it_was_begun(copy, capsys):
    (copy / "certificate.json").write_text("{}")
    config = (copy / "config.toml").read_text()
    words = ["resume", str(copy), "--total-steps=280"]
    assert cli.main(words) == 5
    assert "remove it, and `troupe resume` begins another one" in capsys.readouterr().err
    assert (copy / "config.toml").read_text() == config
    (copy / "certificate.json").unlink()
    lost = "has lost its certificate: another one begins with the next update"
    assert cli.main(words[:2]) == 0  # complete: there is none, and so no certificate
    assert lost in capsys.readouterr().out
    assert not (copy / "certificate.json").exists()
    assert cli.main(words) == 0
    assert lost in capsys.readouterr().out
    assert min(Certificate.read(copy).weights) > len(never_stopped("cartpole-apex")[0])
    assert load_newest(copy / "checkpoints").meta["steps"] == 280


@pytest.mark.parametrize("update", [0, -1, 3])
def test_verify_refuses_a_certificate_whose_updates_do_not_ascend(copy, capsys, update):
    edit(copy / "certificate.json", '{"update": 3,', f'{{"update": {update},')
    edit(copy / "certificate.json", '{"update": 4,', '{"update": 3,')
    assert cli.main(["verify", str(copy)]) == 5
    assert "its updates do not ascend" in capsys.readouterr().err


def test_verify_shows_nothing_of_a_certificate_that_a_terminal_would_obey(copy, capsys):
    path = copy / "certificate.json"
    found = json.loads(path.read_text())
    found["made_with"] |= {"torch": "\x1b[2J", "features": [["\x1b[2J"], {}, 7], "numpy": {"\x1b": 1}}
    hashes = found["weights"][0]["sha256"]
    found["weights"][0]["sha256"] = {"\x1b[2J": hashes.pop(next(iter(hashes))), **hashes}
    path.write_text(json.dumps(found))
    assert cli.main(["verify", str(copy)]) == 1
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "different: update 1, tensor \\x1b[2J" in said


def test_a_run_that_learned_nothing_cannot_be_verified(tmp_path, capsys):
    words = [*WORDS, "--run.total_steps=8"]
    run_dir = str(tmp_path / "run")
    assert cli.main(["train", "cartpole-apex", "--deterministic", "--run-dir", run_dir, *words]) == 0
    assert cli.main(["verify", run_dir]) == 2
    assert "certifies no update yet" in capsys.readouterr().err


def test_the_last_weights_are_certified_also_of_a_short_run_in_a_relative_directory(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "--learner.certificate_period_updates=100000"]
    assert cli.main(["train", "cartpole-apex", "--deterministic", "--run-dir", "run", *words]) == 0
    assert [each.update for each in certified(Path("run"))] == [
        load_newest(Path("run/checkpoints")).meta["updates"]
    ]
    assert cli.main(["verify", "run"]) == 0
    assert "equal: 1 of 1" in capsys.readouterr().out


@pytest.mark.parametrize("total", [76, 84], ids=["without a checkpoint after it", "with one"])
def test_verify_finds_a_run_equal_that_goes_on_after_its_last_update(tmp_path, capsys, total):
    fields = SHORT | PASSES | {"run.total_steps": total, "learner.certificate_period_updates": 100_000}
    fields |= {"learner.checkpoint_period_steps": 20, "env.check_timeout_s": 0, "actor.slots": 4}
    words = [f"--{name}={value}" for name, value in fields.items()]
    run_dir = str(tmp_path / "run")
    assert cli.main(["train", "cartpole-ppo", "--deterministic", "--run-dir", run_dir, *words]) == 0
    (last,) = certified(tmp_path / "run")
    assert last.steps < 76  # and the checkpoint is at 80
    assert cli.main(["verify", run_dir]) == 0
    assert "equal: 1 of 1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_that_is_killed_is_resumed_to_the_bit_by_another(tmp_path):
    run_dir = tmp_path / "run"
    words = [*WORDS, "--run.total_steps=4000", "--learner.checkpoint_period_steps=100"]

    def command(*words, hashes):
        return [sys.executable, "-m", "troupe", *words], {**os.environ, "PYTHONHASHSEED": hashes}

    arguments, env = command(
        "train", "cartpole-apex", "--deterministic", "--run-dir", str(run_dir), *words, hashes="1"
    )
    process = subprocess.Popen(arguments, env=env)
    try:
        until(lambda: len(list((run_dir / "checkpoints").glob("step-*"))) > 2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    arguments, env = command("resume", str(run_dir), "--env.check_timeout_s=0", hashes="2")
    subprocess.run(arguments, env=env, check=True)
    assert load_newest(run_dir / "checkpoints").meta["steps"] == 4000
    arguments, env = command("verify", str(run_dir), "--all", hashes="3")
    said = subprocess.run(arguments, env=env, check=True, capture_output=True, text=True).stdout
    count = len(certified(run_dir))
    assert count > 500
    assert said.startswith(f"equal: {count:,} of {count:,} certified updates")
