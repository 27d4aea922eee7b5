"""The panel, the plain line, the verdict."""

import io

import pytest
from rich.console import Console

from services import progress
from services.panel import LivePanel, render
from services.progress import Estimator, ServiceView, Snapshot, duration, plain_line, snapshot_of, verdict

STATUS = {
    "steps": 250_000,
    "frames": 1_000_000,
    "updates": 9_000,
    "note": "",
    "metrics": {
        "speed/steps_per_s": 1234.5,
        "speed/updates_per_s": 17.25,
        "replay/items": 100_000,
        "learner/wait_share": 0.05,
        "train/episode_return": -12.5,
        "eval/episode_return": -10.25,
        "eval/human_normalized": 0.33,
        "eval/version": 360,
        "params/staleness": 4.5,
        "not a number": "x",
    },
}
SERVICES = [
    ServiceView("learner", "running", 0.6, 300 << 20),
    ServiceView("replay", "running", 0.1, 200 << 20),
    ServiceView("actor-0", "running", 0.5, 250 << 20, restarts=2),
]


def view(status=STATUS, services=SERVICES, **values):
    options = {"min_items": 5_000, "capacity_items": 200_000, "cores": 2, "elapsed_s": 60.0} | values
    return snapshot_of(status, total_steps=1_000_000, services=services, **options)


def changed(**metrics):
    return view({**STATUS, "metrics": {**STATUS["metrics"], **metrics}})


@pytest.mark.parametrize(
    ("snapshot", "begin", "advice"),
    [
        (view({}), "starting", ""),
        (
            view({"updates": 0, "metrics": {"replay/items": 12}}),
            "filling replay before learning starts: 12 of",
            "",
        ),
        (
            view({"updates": 9_000, "metrics": {"replay/items": 12, "speed/updates_per_s": 0.0}}),  # resumed
            "filling replay before learning starts: 12 of",
            "",
        ),
        (view({"updates": 9_000, "metrics": {"speed/updates_per_s": 0.0}}), "starting", ""),
        (view(services=[ServiceView("actor-0", "restarts in 4 s")]), "actor-0: restarts in 4 s", ""),
        (view({**STATUS, "note": "last evaluation"}), "last evaluation", ""),
        (
            changed(**{"learner/wait_share": 0.63}),
            "bottleneck: actors (learner waits for batches 63%",
            "actor.slots",
        ),
        (view(), "bottleneck: learner (learner waits for batches 5%", "smaller network"),
        (
            changed(**{"actor/insert_blocked_share": 0.66}),
            "bottleneck: learner (learner waits for batches 5% of the time, actors for replay 66%)",
            "GPU",
        ),
        (view(cores=1), "bottleneck: CPU (learner 0.6, actors 0.5 of 1 cores", "more cores"),
    ],
)
def test_verdict(snapshot, begin, advice):
    what, help_text = verdict(snapshot)
    assert what.startswith(begin)
    assert advice in help_text
    assert bool(advice) == bool(help_text)


def test_plain_line_has_the_figures():
    line = plain_line(view(eta_s=3725.0))
    for part in (
        "steps 250,000/1,000,000 (25.0%)",
        "frames 1,000,000",
        "updates 9,000",
        "steps/s 1,23",
        "updates/s 17.2",
        "replay 100,000",
        "train return -12.50",
        "eval return -10.25",
        "staleness 4.5",
        "elapsed 0:01:00",
        "ETA 1:02:05",
        "bottleneck: learner",
    ):
        assert part in line
    assert "\n" not in line


def test_the_bar_has_room_on_a_narrow_terminal():
    console = Console(width=80, record=True, force_terminal=True, file=io.StringIO())
    console.print(render(view(eta_s=60.0), "troupe  my-run  atari:pong", ""))
    assert "\u2501" * 10 in console.export_text()


def test_nothing_is_said_to_limit_a_run_that_has_just_begun():
    assert verdict(view(elapsed_s=10.0))[0].startswith("too early")


def test_panel_shows_everything():
    console = Console(width=120, record=True, force_terminal=True, file=io.StringIO())
    console.print(
        render(view(eta_s=60.0), "troupe  my-run  atari:pong", "TensorBoard: http://localhost:6006")
    )
    text = console.export_text()
    for part in (
        "my-run",
        "250,000 / 1,000,000 steps  25.0%  1,000,000 frames",
        "0:01:00 left",
        "100,000 / 200,000",
        "-12.50",
        "-10.25",
        "4.5 versions",
        "actor-0",
        "60%",
        "300 MiB",
        "bottleneck: learner",
        "http://localhost:6006",
    ):
        assert part in text, part


def test_live_panel_draws_and_says():
    console = Console(width=100, force_terminal=True, record=True, file=io.StringIO())
    panel = LivePanel("title", "footer", console)
    panel.start()
    panel.show(view())
    panel.say("[not markup] actor-0 died")
    panel.stop()
    assert "[not markup] actor-0 died" in console.export_text()


def test_last_evaluation_in_words():
    assert view().last_evaluation == "return -10.25 (human-normalised 0.33, version 360)"
    assert view({}).last_evaluation == "none yet"


def test_eta_follows_the_last_minute_and_a_step_back(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    estimator = Estimator()
    assert estimator.eta_s(1000, 10_000) is None
    now[0] = 10.0
    assert estimator.eta_s(2000, 10_000) == pytest.approx(80.0)
    now[0] = 20.0
    assert estimator.eta_s(500, 10_000) is None  # the learner resumed from an older checkpoint
    now[0] = 30.0
    assert estimator.eta_s(1500, 10_000) == pytest.approx(85.0)
    assert estimator.eta_s(10_000, 10_000) == 0.0
    now[0] = 1000.0
    assert estimator.eta_s(10_000, 20_000) is None


def test_duration():
    assert [duration(s) for s in (0, 59.9, 3600 * 30 + 61)] == ["0:00:00", "0:00:59", "30:01:01"]


def test_share_of_an_overshot_run():
    assert Snapshot(10, steps=12).share == 1.0
