import json

import numpy as np
import pytest

from tests.experiments.folders import make_run
from troupe.common.runtime.metrics import CSV_HEADER
from troupe.services.board import traces as module
from troupe.services.board.reducing import Grid, grid, reduce, smoothed
from troupe.services.board.traces import Evaluations, Games, Trace, names_of
from troupe.services.experiments.plot import _smoothed
from troupe.services.experiments.runs import read_series

NAMES = ("speed/steps_per_s", "train/episode_return", "eval/episode_return")


def lines_of_a_run(rng):
    """Rows as a learner writes them, of a run that was resumed several times, with damage between them."""
    lines, steps, wall_s = [CSV_HEADER], 0, 0.0
    for _ in range(60):
        wall_s += 10.0
        steps += int(rng.integers(1, 100))
        if rng.random() < 0.1:
            steps = max(0, steps - int(rng.integers(1, 800)))
        at = f"{wall_s:.3f},{steps},{steps},{steps // 10}"
        lines.append(f"{at},learner,speed/steps_per_s,{rng.random():.6g}")
        lines.append(f"{at},actors,train/episode_return,{rng.random():.6g}")
        if rng.random() < 0.3:
            played = max(0, steps - int(rng.integers(0, 200)))
            lines.append(
                f"{wall_s:.3f},{played},{played},{played // 10},evaluator,{NAMES[2]},{rng.random():.6g}"
            )
        if rng.random() < 0.2:
            lines.append(
                str(
                    rng.choice(
                        [
                            f"{at},learner,train/episode_return,nan",
                            "1,2,3",
                            f"{at},x,train/episode_return,,",
                            "\x00" * 9,
                        ]
                    )
                )
            )
    return lines


@pytest.mark.parametrize("seed", range(8))
def test_a_trace_has_what_plot_reads_however_the_file_grew(tmp_path, seed):
    rng = np.random.default_rng(seed)
    data = ("\n".join(lines_of_a_run(rng)) + "\n").encode()
    file = tmp_path / "metrics.csv"
    file.write_bytes(b"")
    traces = {name: Trace(tmp_path, name) for name in NAMES}
    at = 0
    while at < len(data):  # half lines included
        part = int(rng.integers(1, 2_000))
        with file.open("ab") as growing:
            growing.write(data[at : at + part])
        at += part
        for trace in traces.values():
            trace.read()
            assert trace.is_complete
    for name, series in read_series(file, NAMES).items():
        columns = traces[name].curves[name]
        assert list(columns.steps) == series.steps
        assert list(columns.wall_s) == series.wall_s
        assert list(columns.values) == series.values
        assert [int(u) for u in columns.updates] == [steps // 10 for steps in series.steps]


def test_only_what_is_new_is_read_and_another_file_is_read_anew(tmp_path):
    run = make_run(tmp_path / "run", returns=[(100, 1.0), (200, 2.0)])
    trace = Trace(run, "eval/episode_return")
    taken = []
    take, trace.take = trace.take, lambda block: (taken.append(len(block)), take(block))
    trace.read()
    before, version = taken.copy(), trace.version
    trace.read()
    assert taken == before
    assert trace.version == version
    line = "30,300,300,1,evaluator,eval/episode_return,3\n"
    with (run / "metrics.csv").open("a") as file:
        file.write(line)
    trace.read()
    assert taken == [*before, len(line)]
    assert trace.version != version
    assert list(trace.curves["eval/episode_return"].values) == [1.0, 2.0, 3.0]
    (run / "metrics.csv").write_text(f"{CSV_HEADER}\n{line}")
    trace.read()
    assert list(trace.curves["eval/episode_return"].values) == [3.0]


def test_each_service_has_a_curve_of_its_own(tmp_path):
    rows = [f"1,1,1,1,actor-{i},actor/env_ms,{i}" for i in range(3)]
    (tmp_path / "metrics.csv").write_text("\n".join([CSV_HEADER, *rows, ""]))
    trace = Trace(tmp_path, "actor/env_ms")
    trace.read()
    assert {tag: list(c.values) for tag, c in trace.curves.items()} == {
        "actor/env_ms": [0.0],
        "actor/env_ms/actor-1": [1.0],
        "actor/env_ms/actor-2": [2.0],
    }
    assert names_of(tmp_path) == ["actor/env_ms"]


def test_a_curve_of_any_length_keeps_its_peaks_in_little_room(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_VALUES", 1 << 10)
    rows = [f"{i},{i},{i},{i},learner,learner/loss,{1000 if i == 777 else i % 7}" for i in range(5_000)]
    (tmp_path / "metrics.csv").write_text("\n".join([CSV_HEADER, *rows, ""]))
    trace = Trace(tmp_path, "learner/loss")
    trace.read()
    columns = trace.curves["learner/loss"]
    assert len(columns.values) < 1 << 10
    assert max(columns.values) == 1000
    assert columns.steps[columns.values.index(1000)] == 777
    assert list(columns.steps) == sorted(columns.steps)


def test_games_of_several_actors_are_put_in_order(tmp_path):
    header = "wall_s,steps,actor,slot,version,return,length"
    (tmp_path / "episodes.csv").write_text(
        f"{header}\n2,200,actor-1,3,1,5.5,50\n1,100,actor-0,0,1,4.5,40\nx\n3,30"
    )
    games = Games(tmp_path, "episodes/return")
    games.read()
    (columns,) = games.curves.values()
    assert (list(columns.steps), list(columns.values)) == ([100, 200], [4.5, 5.5])


def test_evaluations_are_figures_of_their_games(tmp_path):
    row = {
        "wall_s": 120,
        "steps": 7,
        "frames": 28,
        "updates": 1,
        "version": 3,
        "returns": [1, 2, 3],
        "lengths": [9, 9, 9],
    }
    lines = [
        json.dumps(row),
        "{",
        "[]",
        json.dumps({**row, "returns": []}),
        json.dumps({**row, "returns": [1e999]}),
    ]
    (tmp_path / "evaluations.jsonl").write_text("\n".join(lines) + "\n" + "[" * 100_000 + "\n")
    evaluations = Evaluations(tmp_path)
    evaluations.read()
    (found,) = evaluations.rows
    assert (found["steps"], found["minutes"], found["games"], found["mean"], found["length"]) == (
        7,
        2.0,
        3,
        2.0,
        9.0,
    )


@pytest.mark.parametrize("columns", [1, 7, 100])
def test_reduced_curves_have_the_least_and_the_largest_of_each_column(columns):
    rng = np.random.default_rng(columns)
    places, values = np.sort(rng.random(1_000)), rng.integers(0, 50, 1_000).astype(float)
    at, y = reduce(places, values, Grid(0.0, 1.0, columns))
    assert at == sorted(at)
    for column in range(columns):
        inside = values[(places >= column / columns) & (places < (column + 1) / columns)]
        found = [value for half, value in zip(at, y, strict=True) if half // 2 == column]
        assert ([min(found), max(found)] if found else []) == (
            [inside.min(), inside.max()] if len(inside) else []
        )


def test_the_last_place_is_shown_and_none_beyond():
    at, y = reduce(np.array([0.0, 10.0, 11.0]), np.array([1.0, 2.0, 3.0]), Grid(0.0, 10.0, 5))
    assert (at, y) == ([0, 8], [1.0, 2.0])


def test_a_grid_lasts_while_a_run_grows():
    first = grid(0.0, 1_000_000.0, 800)
    assert first.last > 1_000_000
    assert grid(0.0, 1_200_000.0, 800) == first
    assert grid(0.0, 0.0, 800).last > 0


def test_smoothing_is_that_of_plot():
    places, values = np.arange(50.0) ** 1.5, np.sin(np.arange(50.0))
    wanted = _smoothed(list(places), list(values), 0.2)[1]
    assert smoothed(places, values, 0.2).tolist() == pytest.approx(list(wanted))


def test_metrics_that_nobody_reports_do_not_fill_memory(tmp_path):
    traces = module.Traces()
    for number in range(10_000):
        traces.read(tmp_path, f"no/{number}")
    assert len(traces._kept) < 10_000
    traces.read(tmp_path, "no/1")
    assert traces._size == sum(traces._sizes.values()) <= module._MAX_KEPT_VALUES
