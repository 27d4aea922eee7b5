"""Which checkpoints outlast the newest ones, and beginning with one of another run."""

import os
import shutil
import time
from functools import partial

import numpy as np
import pytest

from tests.harness import Context, make_reporter, until
from tests.harness import evaluated as whole
from tests.learner.runs import evaluated, make_config, run_learner
from troupe.common import installation
from troupe.common.agents import make_agent
from troupe.common.config import changed_structure, load_config
from troupe.common.envs import make_spec
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.runtime.checkpoint import (
    begin_from,
    load_checkpoint,
    load_newest,
    newest_first,
    save_checkpoint,
)
from troupe.common.stats.ratings import OPPONENT_GAMES, OPPONENT_VERSION, OPPONENT_WIN_RATE
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.control.params import Published, encode_params
from troupe.common.wire.link import new_incarnation
from troupe.services.learner.record.ratings import Ratings
from troupe.services.learner.saving.kept import Archive, Best

NOTHING = lambda _: []  # noqa: E731 (no field is otherwise)
WEIGHTS = {"w": np.arange(4, dtype=np.float32)}


def names(directory):
    return [path.name for path in newest_first(directory)]


def test_the_archive_keeps_one_now_and_then_for_good(tmp_path):
    archive = Archive(tmp_path, 50.0)
    for steps in range(6):
        path = save_checkpoint(tmp_path, {"w": WEIGHTS["w"] + steps}, {"steps": steps}, keep=1)
        if steps in (2, 5):
            archive._since_s -= 60.0  # so long later
        archive.take(path)
    assert names(tmp_path / "archive") == ["step-000000000005", "step-000000000002"]
    assert load_checkpoint(tmp_path / "archive" / "step-000000000002").arrays["w"][0] == 2
    assert names(tmp_path) == ["step-000000000005"]
    assert load_newest(tmp_path).meta["steps"] == 5  # what is below is no checkpoint to go on with
    # A learner that starts again waits for the rest of the time only, and not for none of it.
    late = time.time() - 49.0
    for kept in (tmp_path / "archive").iterdir():
        os.utime(kept, (late, late))
    again = Archive(tmp_path, 50.0)
    again.take(save_checkpoint(tmp_path, WEIGHTS, {"steps": 7}))
    assert len(names(tmp_path / "archive")) == 2
    again._since_s -= 2.0
    again.take(save_checkpoint(tmp_path, WEIGHTS, {"steps": 8}))
    assert names(tmp_path / "archive")[0] == "step-000000000008"


def test_an_archive_begins_though_no_session_is_as_long_as_its_period(tmp_path, monkeypatch):
    began = time.time()
    for steps in range(3):  # each from a session of its own, as each span of a deterministic run is
        monkeypatch.setattr("troupe.common.system.time", lambda now=began + 30.0 * steps: now)
        Archive(tmp_path, 50.0).take(save_checkpoint(tmp_path, WEIGHTS, {"steps": steps}))
    assert names(tmp_path / "archive") == ["step-000000000002"]


def test_a_clock_that_was_put_back_does_not_stop_the_archive(tmp_path):
    archive = Archive(tmp_path, 50.0)
    archive._since_s += 1e8  # by years
    for steps in range(2):
        archive.take(save_checkpoint(tmp_path, WEIGHTS, {"steps": steps}))
    assert names(tmp_path / "archive") == ["step-000000000000"]


def test_without_a_period_nothing_is_archived(tmp_path):
    archive = Archive(tmp_path, 0.0)
    archive._since_s = 0.0
    archive.take(save_checkpoint(tmp_path, WEIGHTS, {"steps": 1}))
    assert not (tmp_path / "archive").exists()


def played(version):
    return Published(version, *encode_params({"w": WEIGHTS["w"] + version}), version, 1, 0.0)


def test_the_best_is_kept_also_by_a_learner_that_starts_again(tmp_path):
    def best():
        return Best(tmp_path, lambda: {"steps": -1, "agent": {"algorithm": "x"}})

    first = best()
    for version, mean_return in ((3, -5.0), (4, 2.5), (5, 1.0)):
        first.evaluated(played(version), mean_return)
        first.wait(60.0)
    kept = load_newest(tmp_path / "best")
    assert kept.arrays["net/w"][0] == 4
    assert kept.meta["evaluation"] == {"version": 4, "mean_return": 2.5}
    assert (kept.meta["steps"], kept.meta["agent"]) == (4, {"algorithm": "x"})
    again = best()
    for version, mean_return in ((6, 2.0), (7, 2.5)):
        again.evaluated(played(version), mean_return)
        again.wait(60.0)
    assert load_newest(tmp_path / "best").arrays["net/w"][0] == 7  # of equals the newest
    assert names(tmp_path / "best") == ["step-000000000007"]


def test_of_two_evaluations_that_come_at_once_the_first_may_be_the_best(tmp_path):
    best = Best(tmp_path, lambda: {"agent": {}})
    reporter = make_reporter(tmp_path, best=best, ratings=Ratings(tmp_path, -1, lambda opponent: None))
    for version, score in ((2, 0.0), (3, 9.0), (4, 1.0)):
        report = whole(score, version=version, played=played(version))
        if version > 2:
            report.metrics |= {OPPONENT_VERSION: 2.0, OPPONENT_GAMES: 4.0, OPPONENT_WIN_RATE: 0.5}
        reporter.collect(report)
    best.wait(60.0)
    reporter.close()
    kept = load_newest(tmp_path / "best")
    assert kept.meta["evaluation"] == {"version": 3, "mean_return": 9.0}
    np.testing.assert_array_equal(kept.arrays["net/w"], WEIGHTS["w"] + 3)


def evaluator(config, context, returns):
    """Evaluates a version after the other, with these returns; gives what was fetched for each."""
    client = ControlClient(
        context, config.net.control, role="evaluator", name="evaluator", incarnation=new_incarnation()
    )
    try:
        client.join(60.0)
        for mean_return in returns:
            yield evaluated(client, config, mean_return)
    finally:
        client.close()


def test_the_network_of_the_best_evaluation_is_the_one_that_was_played(tmp_path):
    config = make_config(tmp_path)
    running, context = run_learner(config, tmp_path), Context()
    learner = running.service
    try:
        played = evaluator(config, context, [7.0])
        got = next(played)
        weights = {name: array.copy() for name, array in got.params.items()}
        # Meanwhile it learns on.
        learner.agent.load_params({name: array + 1 for name, array in weights.items()})
        until(lambda: names(tmp_path / "checkpoints" / "best"))
        played.close()
    finally:
        running.end()
        context.destroy(linger=0)
    best = load_newest(tmp_path / "checkpoints" / "best")
    assert best.meta["evaluation"] == {"version": got.version, "mean_return": 7.0}
    for name, array in weights.items():
        np.testing.assert_array_equal(best.arrays[f"net/{name}"], array)
    code = {"version": installation.version(), "commit": installation.commit()}
    assert best.meta["troupe"] == load_newest(tmp_path / "checkpoints").meta["troupe"] == code
    agent = make_agent(config.agent, make_spec(config.env), seed=5)
    begin_from(agent, tmp_path / "checkpoints" / "best", NOTHING)
    np.testing.assert_array_equal(agent.params()["hidden.weight"], weights["hidden.weight"])
    with pytest.raises(CheckpointError, match="holds no optimiser"):
        begin_from(agent, tmp_path / "checkpoints" / "best", NOTHING, optimizer=True)


def test_a_new_run_begins_with_the_network_of_another(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    former = run_learner(make_config(first), first)
    until(lambda: names(first / "checkpoints"))
    weights = {name: array + 0.5 for name, array in former.service.agent.params().items()}
    former.service.agent.load_params(weights)
    former.service.counters.updates = 3
    former.end()
    config = make_config(second, **{"learner.init_from": str(first), "run.seed": "9"})
    running = run_learner(config, second)
    running.end()
    begun = load_newest(second / "checkpoints")
    for name, array in weights.items():
        np.testing.assert_array_equal(begun.arrays[f"net/{name}"], array)
        np.testing.assert_array_equal(begun.arrays[f"target/{name}"], array)
    assert begun.meta["updates"] == 0
    shutil.rmtree(first)  # what goes on has its own network, whatever becomes of the other
    running.service.agent.load_params({name: array - 1 for name, array in weights.items()})
    running.service.counters.updates = 5
    running.service.checkpoints.save()
    again = run_learner(config, second, resume=True)
    np.testing.assert_array_equal(again.service.agent.params()["hidden.weight"], weights["hidden.weight"] - 1)
    again.end()


@pytest.mark.parametrize("optimizer", [False, True])
def test_with_the_optimiser_it_learns_as_the_other_would_have(tmp_path, optimizer):
    from tests.agents.contract import agent_of, batch, copied

    one, other = agent_of("apex"), agent_of("apex", seed=1)
    arguments = batch(one)
    for _ in range(3):
        one.update(arguments)
    arrays, meta = one.state()
    save_checkpoint(tmp_path, arrays, {"steps": 1, "agent": meta})
    begin_from(other, tmp_path, NOTHING, optimizer=optimizer)
    for name, array in copied(one.params()).items():
        np.testing.assert_array_equal(other.params()[name], array)
    for agent in (one, other):
        agent.update(arguments)
    same = all(np.allclose(other.params()[name], array) for name, array in one.params().items())
    assert same == optimizer


def test_a_network_of_another_shape_or_algorithm_is_refused_in_a_line(tmp_path):
    small = load_config("cartpole-apex", None, {"agent.hidden_units": "8"}, {})
    spec = make_spec(small.env)
    arrays, meta = make_agent(small.agent, spec).state()
    written = {"steps": 1, "agent": meta, "config": small.to_dict()}
    path = save_checkpoint(tmp_path, arrays, written)
    for preset, meta, why in (
        (
            "cartpole-apex",
            written,
            r": it was trained with agent\.hidden_units = 8 instead of \d+; give this run a network of the "
            "same fields$",
        ),
        ("cartpole-apex", {**written, "config": None}, "does not fit this network: .* size mismatch"),
        ("cartpole-ppo", written, "of algorithm 'apex'"),
    ):
        config = load_config(preset, None, {}, {})
        path = save_checkpoint(tmp_path, arrays, meta)
        with pytest.raises(CheckpointError, match=why) as refused:
            begin_from(make_agent(config.agent, spec), tmp_path, partial(changed_structure, config=config))
        assert f"cannot start with {path}" in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="not a directory"):
        begin_from(make_agent(small.agent, spec), tmp_path / "nothing", NOTHING)
