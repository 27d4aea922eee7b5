import csv
import json
import os
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness import evaluated, games, make_reporter, until
from troupe.common.runtime.metrics import MetricsWriter
from troupe.common.wire.control.params import Published
from troupe.services.evaluator.video import encode_gif, encode_mp4
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.reports import Report
from troupe.services.learner.record import episodes
from troupe.services.learner.record.episodes import EpisodesFile
from troupe.services.learner.record.films import MAX_WAITING
from troupe.services.learner.saving.counters import RunCounters


class NoPeers:
    def peers(self):
        return []

    def tell(self, status):
        pass

    def leases(self):
        return {1: {0, 4}, 2: {5, 9}}


@pytest.fixture
def reporter(tmp_path):
    reporter = make_reporter(tmp_path)
    reporter.path = tmp_path
    return reporter


def rows(path):
    with (path / "metrics.csv").open() as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def test_steps_and_episodes_of_all_actors_are_put_together(reporter):
    reporter._counters.budget.report(1, 40)
    reporter._counters.budget.report(2, 60)
    reporter.collect(Report("actor-0", "actor", 1, {}, games([-20, 10], [-10, 20])))
    reporter.collect(Report("actor-1", "actor", 2, {}, games([0, 30, 5, -1.0], [-10, 20, 6, 2.0])))
    reporter.tick(NoPeers(), 0.0, force=True)
    reporter.close()
    got = rows(reporter.path)
    assert float(got["train/episode_return"]["value"]) == -10.0
    assert float(got["train/episodes"]["value"]) == 4
    assert float(got["train/score"]["value"]) == 0.5  # of the games that have one
    assert float(got["train/human_normalized"]["value"]) == pytest.approx(
        (-10 + 20.7) / (14.6 + 20.7), abs=1e-3
    )
    assert got["train/episode_return"]["steps"] == "100"
    assert got["train/episode_return"]["frames"] == "400"
    status = json.loads((reporter.path / "status.json").read_text())
    assert status["steps"] == 100
    assert status["total_steps"] == 1000


def test_the_record_has_curves_of_a_bounded_number_of_actors(reporter):
    for number in reversed(range(100)):
        metrics = {"actor/env_ms": 1.0, "params/staleness": 2.0, "env/lives": 3.0}
        reporter.collect(Report(f"actor-{number}", "actor", number + 1, metrics, games()))
    reporter.close()
    with (reporter.path / "metrics.csv").open() as file:
        found = [(row["name"], row["source"]) for row in csv.DictReader(file)]
    for name, count in (("actor/env_ms", 64), ("params/staleness", 64), ("env/lives", 100)):
        assert {source for each, source in found if each == name} == {f"actor-{i}" for i in range(count)}


def test_evaluations_are_written_at_once(reporter):
    reporter.collect(evaluated(5.0))
    assert float(rows(reporter.path)["eval/episode_return"]["value"]) == 5.0
    assert reporter.evaluated_version == 12
    reporter.close()


def test_games_of_an_evaluation_are_stored_and_are_no_training(reporter):
    reporter.collect(evaluated(4, 6))
    reporter.close()
    (line,) = (reporter.path / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line)["returns"] == [4, 6]
    assert json.loads(line)["version"] == 12
    assert "train/episode_return" not in rows(reporter.path)


def test_an_evaluation_is_dated_by_what_was_played(tmp_path):
    reporter = make_reporter(tmp_path, total_steps=10_000)
    reporter.path = tmp_path
    reporter.writer._started -= 100.0  # the run has been running for so long
    reporter._counters.budget.report(1, 5000)
    reporter._counters.updates = 50
    played = Published(12, [], np.zeros(0, np.uint8), 40, 3, time.monotonic() - 60.0)
    gif = np.frombuffer(encode_gif(np.zeros((2, 8, 8, 3), np.uint8)), np.uint8)
    reporter.collect(Report("evaluator", "evaluator", 3, {}, games(), {"video": gif}, played))
    reporter.collect(evaluated(5.0, played=played))
    reporter.collect(Report("actor-0", "actor", 1, {}, games([-20, 10])))
    reporter.close()
    got = rows(reporter.path)
    row = got["eval/episode_return"]
    assert (row["steps"], row["frames"], row["updates"]) == ("40", "160", "3")
    assert 40 <= float(row["wall_s"]) < 100
    assert float(got["eval/age_s"]["value"]) >= 60
    assert got["train/episode_return"]["steps"] == "5000"
    kept = json.loads((tmp_path / "evaluations.jsonl").read_text())
    assert (kept["steps"], kept["frames"], kept["updates"], kept["version"]) == (40, 160, 3, 12)
    assert 40 <= kept["wall_s"] < 100
    assert [film.name for film in (tmp_path / "videos").iterdir()] == ["eval-video-000000000040.gif"]
    (point,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("Returns/evaluation")
    assert point.step == 40
    assert point.wall_time <= time.time() - 60
    again = MetricsWriter(tmp_path)
    assert again.wall_s >= 100, "the time of a resumed run goes on from its newest row, not from its last"
    again.close()


def test_the_curves_of_a_resumed_run_go_on_from_its_checkpoint(tmp_path):
    def reporter_at(steps, score, resumed_steps):
        counters = RunCounters(4, StepBudget())
        counters.budget.report(1, steps)
        reporter = make_reporter(tmp_path, resumed_steps, counters=counters)
        reporter.collect(evaluated(score))
        return reporter

    for steps, score, resumed in ((100, -20.0, None), (200, -10.0, 100), (200, float("nan"), 200)):
        reporter_at(steps, score, resumed).close()
    reporter = reporter_at(150, 5.0, 150)  # the one at 200 steps is undone
    reporter.tick(NoPeers(), 0.0, force=True)
    reporter.close()
    returns = json.loads((tmp_path / "status.json").read_text())["returns"]
    assert returns == {"eval/episode_return": [[100, -20.0], [150, 5.0]], "train/episode_return": []}


def test_the_status_adds_up_the_shards(reporter):
    for shard, items in (("replay-0", 30.0), ("replay-1", 12.0), ("replay-0", 40.0)):
        reporter.collect(Report(shard, "replay", hash(shard) & 0xFFFF, {"replay/items": items}))
    reporter.tick(NoPeers(), 0.0, force=True)
    reporter.close()
    status = json.loads((reporter.path / "status.json").read_text())
    assert (status["metrics"]["replay/items"], status["shards"]) == (52.0, 2)


def test_a_film_that_cannot_be_written_keeps_nobody_waiting(reporter, tmp_path):
    """A pipe that nobody reads stands for a disk that does not answer."""
    (tmp_path / "videos").mkdir()
    os.mkfifo(tmp_path / "videos" / "eval-video-000000000000.gif")
    gif = np.frombuffer(encode_gif(np.zeros((2, 8, 8, 3), np.uint8)), np.uint8)
    for _ in range(10):
        reporter.collect(Report("evaluator", "evaluator", 3, {}, games(), {"video": gif}))
    assert 10 - MAX_WAITING - 1 <= reporter.films.dropped <= 10 - MAX_WAITING
    reporter.collect(evaluated(5.0))
    assert float(rows(reporter.path)["eval/episode_return"]["value"]) == 5.0
    reporter.films.close(timeout_s=0.1)
    with (tmp_path / "videos" / "eval-video-000000000000.gif").open("rb") as reader:  # now it is read
        assert reader.read(6) == b"GIF89a"
    reporter.close()


def test_an_mp4_is_kept_and_the_gif_is_shown(reporter, tmp_path):
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    film = {"video": encode_gif(frames), "mp4": encode_mp4(frames)}
    blobs = {name: np.frombuffer(data, np.uint8) for name, data in film.items()}
    reporter.collect(Report("evaluator", "evaluator", 3, {}, games(), blobs))
    reporter.close()
    (path,) = (tmp_path / "videos").iterdir()
    assert path.suffix == ".mp4"
    assert path.read_bytes() == film["mp4"]
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert film["video"] in events.read_bytes()


def test_a_film_without_a_frame_takes_no_other_films_place(reporter, tmp_path, caplog):
    whole = encode_gif(np.zeros((2, 8, 8, 3), np.uint8))
    for gif in (whole, b"GIF89a\x08\x00\x08\x00\x00\x00", whole[:-20]):
        blobs = {"video": np.frombuffer(gif, np.uint8)}
        reporter.films.put("evaluator", blobs["video"], None, 0)
        until(reporter.films._films.empty)
    reporter.close()
    (path,) = (tmp_path / "videos").iterdir()
    assert path.read_bytes() == whole
    assert caplog.text.count("without a whole frame") == 2


def test_what_an_evaluator_measures_besides_is_no_evaluation(reporter, tmp_path, caplog):
    caplog.set_level("INFO")
    for metrics in ({"eval/duration_s": 1.0}, {"eval/version": 7.0}, {"eval/episode_return": 3.0}):
        reporter.collect(Report("evaluator", "evaluator", 3, metrics, games([1, 2])))
    assert reporter.evaluated_version == -1
    assert "evaluation of version" not in caplog.text
    reporter.close()
    assert not (tmp_path / "evaluations.jsonl").exists()


def test_films_that_wait_are_written_at_the_end(reporter, tmp_path):
    gif = np.frombuffer(encode_gif(np.zeros((2, 8, 8, 3), np.uint8)), np.uint8)
    reporter.collect(Report("evaluator", "evaluator", 3, {}, games(), {"video": gif}))
    reporter.close()
    assert (tmp_path / "videos" / "eval-video-000000000000.gif").read_bytes() == gif.tobytes()


def test_troubles_of_environments_are_summed_over_processes_and_restarts(reporter):
    def tell(name, incarnation, failures, hangs, *ended, **fields):
        metrics = {"actor/env_restarts_total": failures, "actor/env_hangs_total": hangs}
        reporter.collect(Report(name, "actor", incarnation, metrics, games(*ended, **fields)))

    tell("actor-0", 1, 3.0, 0.0, trouble="gym:X raised A in reset(), slot 0")
    tell("actor-0", 1, 2.0, 0.0)  # late
    tell("actor-1", 2, 1.0, 1.0, trouble="gym:X hangs at step 4, slot 1, for 10 s")
    tell("actor-0", 3, 4.0, 0.0, [1.0, 2], [3.0, 4])  # started again
    for incarnation in range(100, 1200):
        tell("actor-2", incarnation, 0.0, 0.0)
    reporter.collect(Report("evaluator", "evaluator", 9, {"eval/version": 1}))
    reporter.tick(NoPeers(), 0.0, force=True)
    status = json.loads((reporter.path / "status.json").read_text())
    last = "actor-1: gym:X hangs at step 4, slot 1, for 10 s"
    told = {"failures": 8, "hangs": 1, "episodes": 2, "last": last, "unevaluated": ""}
    assert status["environments"] == told


def test_a_resumed_run_knows_its_last_evaluation(tmp_path):
    """As far as the checkpoint goes: what came after it is of parameters that are lost."""
    counters = RunCounters(4, StepBudget())
    first = make_reporter(tmp_path, counters=counters)
    first.collect(evaluated(5.0))
    counters.budget.report(1, 40)
    first.collect(evaluated(7.0, version=13))
    first.close()
    again = make_reporter(tmp_path, 20)
    again.tick(NoPeers(), 0.0, force=True)
    again.close()
    metrics = json.loads((tmp_path / "status.json").read_text())["metrics"]
    assert (metrics["eval/episode_return"], metrics["eval/version"]) == (5.0, 12.0)
    assert again.evaluated_version == -1


@pytest.mark.parametrize(("ends", "counts"), [({}, (1, 3)), ({"ended": True}, (0, 1))])
def test_restarts_are_counted_until_somebody_stops_the_run(tmp_path, ends, counts):
    """What the roster of a learner that died had counted is not lost, and its own death is one more."""

    class Roster(NoPeers):
        def __init__(self, restarts):
            self.restarts = restarts

        def peers(self):
            actor = {"name": "actor-0", "role": "actor", "slots": [], "endpoint": ""}
            return [actor | {"restarts": self.restarts}]

    first = make_reporter(tmp_path)
    first.tick(Roster(2), 0.0, force=True, **ends)
    first.close()
    again = make_reporter(tmp_path, 20)
    again.tick(Roster(1), 0.0, force=True)
    again.close()
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["restarts"], status["peers"][0]["restarts"]) == counts


def test_the_sum_over_shards_does_not_grow_with_new_names(reporter, monkeypatch):
    monkeypatch.setattr("troupe.services.learner.record.reporter.MAX_SHARDS", 2)
    for source, items in (("a", 1.0), ("b", 10.0), ("a", 2.0), ("c", 100.0)):
        reporter.note(source, {"replay/items": items, "replay/items_more": 1.0})
    assert reporter._of_shards == {"replay/items": {"a": 2.0, "c": 100.0}}
    reporter.close()


def test_a_run_that_counts_far_more_steps_than_were_stored_says_so(reporter, caplog):
    def stored(steps):
        reporter.collect(Report("replay-0", "replay", 3, {"replay/steps_inserted_total": steps}))

    reporter._counters.budget = budget = StepBudget(clock=iter(range(0, 10**6, 1000)).__next__)
    budget.report(1, 30_000, 4)
    stored(25_000.0)
    stored(30_000.0)
    assert not caplog.records
    budget.report(1, 5_000_000, 4)
    stored(31_000.0)
    stored(32_000.0)
    (record,) = caplog.records
    assert "5000000 steps were counted and 31000 stored" in record.getMessage()


def test_a_status_that_cannot_be_written_is_counted_and_ends_nothing(reporter, caplog, monkeypatch):
    """Whatever the cause: a directory in its place, or a value that JSON has no word for."""
    (reporter.path / "status.json").mkdir()
    reporter.tick(NoPeers(), 0.0, force=True)
    (reporter.path / "status.json").rmdir()
    monkeypatch.setattr(NoPeers, "peers", lambda self: [{"name": object()}])
    reporter.tick(NoPeers(), 0.0, force=True)
    assert reporter.writer.failed_writes_total == 2
    assert caplog.text.count("cannot write the status") == 1
    monkeypatch.undo()
    reporter.tick(NoPeers(), 0.0, force=True)
    status = json.loads((reporter.path / "status.json").read_text())
    assert status["metrics"]["learner/failed_writes_total"] == 2


def games_in(path):
    with (path / "episodes.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_training_episode_has_a_line(reporter, tmp_path):
    reporter._counters.budget.report(1, 40)
    reporter._counters.version = 9
    two = games([-20.25, 10], [0.1, 30, 5, -1.0])
    reporter.collect(Report("actor-0", "actor", 1, {"params/staleness": 2.0}, two))
    reporter.collect(Report("evaluator", "evaluator", 2, {"eval/version": 1}, two))
    first, second = games_in(tmp_path)
    assert float(first.pop("wall_s")) >= 0
    assert list(first.values()) == ["20", "actor-0", "", "7", "-20.25", "10"]  # half-way to the report
    assert second["steps"] == "40"
    assert (second["slot"], second["return"], second["length"]) == ("5", "0.1", "30")
    with (tmp_path / "episodes.csv").open("a") as file:
        file.write("1.0,40,act")  # killed while it wrote
    again = EpisodesFile(tmp_path, reporter.writer)
    again.take(Report("actor-1", "actor", 1, {}, games([1, 2])), steps=50, version=3)
    more = games([1, 2], [1, 2])
    again.take(Report("actor-1", "actor", 1, {}, more), steps=70, version=3)
    assert [game["actor"] for game in games_in(tmp_path)][2:] == ["actor-1"] * 3
    assert [game["steps"] for game in games_in(tmp_path)][3:] == ["60", "70"]
    reporter.close()


def test_a_header_that_was_half_written_is_written_again(reporter, tmp_path):
    (tmp_path / "episodes.csv").write_text("wall_s,ste")  # killed while it wrote, or the disk was full
    again = EpisodesFile(tmp_path, reporter.writer)
    for number in (1, 2):
        again.take(Report("actor-0", "actor", 1, {}, games([number, 2])), steps=50, version=3)
    assert [game["return"] for game in games_in(tmp_path)] == ["1", "2"]
    reporter.close()


def test_games_that_cannot_be_written_end_nothing(reporter, tmp_path, monkeypatch):
    game = Report("actor-0", "actor", 1, {}, games([1, 2]))
    (tmp_path / "episodes.csv").unlink()
    (tmp_path / "episodes.csv").mkdir()
    reporter.collect(game)
    assert reporter.writer.failed_writes_total == 1
    (tmp_path / "episodes.csv").rmdir()
    monkeypatch.setattr(episodes, "MAX_BYTES", 100)
    for _ in range(50):
        reporter.collect(game)
    assert (tmp_path / "episodes.csv").stat().st_size < 200
    reporter.close()
