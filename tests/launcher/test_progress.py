"""The panel, the plain line, the verdict."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from rich.console import Console

from tests.harness import leave, until
from troupe.common.runtime import usage
from troupe.services.launcher import launcher, panel, progress, silence
from troupe.services.launcher.panel import LivePanel, can_draw, render
from troupe.services.launcher.progress import (
    Estimator,
    RunView,
    ServiceView,
    duration,
    plain_line,
    run_view,
    verdict,
)

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


RETURNS = {
    "train/episode_return": [[100 * i, -20 + i] for i in range(40)],
    "eval/episode_return": [[0, -21], [2000, 3.5], [4000, 19]],
}


def view(status=STATUS, services=SERVICES, **values):
    options = {"min_items": 5_000, "capacity_items": 200_000, "cores": 2, "elapsed_s": 60.0} | values
    return run_view(status, total_steps=1_000_000, services=services, **options)


def changed(**metrics):
    return view({**STATUS, "metrics": {**STATUS["metrics"], **metrics}})


@pytest.mark.parametrize(
    ("snapshot", "begin", "advice"),
    [
        (view({}), "starting: services are loading", ""),
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
        (
            view({"peers": [{"role": "replay"}], "metrics": {"replay/items": 0}}),
            "waiting for the first actor",
            "",
        ),
        (
            view({"peers": [{"role": "actor"}], "metrics": {"replay/items": 0}}),
            "filling replay before learning starts: 0 of",
            "",
        ),
        (view({"updates": 9_000, "metrics": {"speed/updates_per_s": 0.0}}), "starting", ""),
        (view({"steps": 400}), "starting", ""),  # resumed, before the learner's first status
        (view(services=[ServiceView("actor-0", "restarts in 4 s")]), "actor-0: restarts in 4 s", ""),
        # A run learns the same without its pages.
        (
            view({**STATUS, "note": "last evaluation"}, [ServiceView("board", "failed")]),
            "last evaluation",
            "",
        ),
        (view({**STATUS, "note": "last evaluation"}), "last evaluation", ""),
        (
            view({"note": "x"}, [ServiceView("learner", "done"), ServiceView("replay", "running")]),
            "waiting for replay to end",
            "",
        ),
        (view({"note": "x"}, [ServiceView("learner", "stopped")]), "stopped", ""),
        (view({**STATUS, "steps": 1_000_000}, [ServiceView("learner", "done")]), "complete", ""),
        (
            view({**STATUS, "metrics": {**STATUS["metrics"], "learner/wait_share": 0.63}}, takes_turns=True),
            "acting and learning take turns (learner waits for batches 63%",
            "agent.max_staleness = 1",
        ),
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
        (
            view(services=[ServiceView("learner", "running", 0.1, starved=0.5), *SERVICES[1:]]),
            "bottleneck: this machine, busy with other programs (the run gets 0.7 of the 1.2 cores",
            "stop some of them",
        ),
        (
            view(services=[ServiceView("learner", "running", 0.1, starved=7.5), *SERVICES[1:]]),
            "bottleneck: this machine, busy with other programs (the run gets 0.7 of the 2.0 cores",
            "stop some of them",
        ),
        (
            view(
                {
                    **STATUS,
                    "metrics": {**STATUS["metrics"], "actor/env_ms": 400.0, "learner/wait_share": 0.9},
                },
                [ServiceView("learner", "running", 0.1, starved=0.5), ServiceView("actor-0", "running", 0.1)],
                env_rounds=8,
            ),
            "bottleneck: the environment takes 50 ms a step",
            "--actor.env_threads",
        ),
        (view({"steps": 400, "metrics": {"learner/loss": 0.5}}), "acting and learning take turns", ""),
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
    assert "too early" not in plain_line(view(elapsed_s=10.0))
    assert plain_line(view(elapsed_s=60.0)).endswith(verdict(view(elapsed_s=60.0))[0])


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
    assert view({}).last_evaluation == "none"


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
    assert RunView(10, steps=12).share == 1.0


def test_troubles_of_environments_are_in_panel_and_line():
    last = "actor-0: gym:X raised ValueError: no at step 3, slot 1"
    troubled = view(STATUS | {"environments": {"failures": 1200, "hangs": 1, "last": last}})
    told = f"environments: 1,200 failures and 1 hang, the last: {last}"
    assert plain_line(troubled).endswith(f" | {told}")
    console = Console(file=io.StringIO(), width=200)
    console.print(render(troubled, "title", "footer"))
    assert told in console.file.getvalue()
    for quiet in (STATUS, STATUS | {"environments": {"failures": 0, "hangs": 0, "last": ""}}):
        assert "environments" not in plain_line(view(quiet))


def test_an_evaluation_that_could_not_be_played_says_why():
    why = {"environments": {"unevaluated": "no episode of gym:X ends"}, "version": 9}
    assert view(why).last_evaluation == "none (no episode of gym:X ends)"
    before = view({**STATUS, **why, "version": 361}).last_evaluation
    assert before.endswith("the last version, 361, has not been evaluated (no episode of gym:X ends)")


def test_an_evaluation_of_older_parameters_is_not_the_last_one():
    assert view({**STATUS, "version": 360}).last_evaluation.startswith("return -10.25 (")
    told = view({**STATUS, "version": 361}).last_evaluation
    assert told.startswith("return -10.25 (")
    assert told.endswith("version 360); the last version, 361, has not been evaluated")


def test_a_process_that_gets_no_core_is_starved():
    """Measured on one that shares a core with another."""
    core = sorted(os.sched_getaffinity(0))[0]
    spin = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"]
    both = [subprocess.Popen(spin) for _ in range(2)]
    try:
        meter, process = usage.CoresUsed(), psutil.Process(both[0].pid)
        until(lambda: meter.of_process(process)[1] >= 0.2, step=lambda: time.sleep(0.5))
    finally:
        for one in both:
            one.kill()
            one.wait()


def test_work_by_turns_is_shown_as_what_it_is_on_average(monkeypatch):
    """A learner that learns for two seconds and then waits for two is neither at 100 % nor at 0."""
    meter, shown = usage.CoresUsed(), []
    times = SimpleNamespace()
    process = Mock(pid=0, cpu_times=lambda: times)
    for second in range(40):
        monkeypatch.setattr(usage.system, "monotonic", lambda second=second: float(second))
        ran = second // 4 * 2 + min(second % 4, 2)
        times.user = times.system = ran / 2
        shown.append(meter.of_process(process)[0])
    assert all(0.39 < cores < 0.61 for cores in shown[10:])
    assert [len(samples) for samples in meter._samples.values()] == [11]


def test_a_thread_that_has_just_ended_hides_no_other_that_waits(monkeypatch, tmp_path):
    """Else the next sample seems to have waited since the process began."""
    for thread, text in {"1": "7 1000000000 5", "2": "", "3": "7 2000000000 5"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    threads = [tmp_path / name for name in ("1", "ended", "2", "3")]
    monkeypatch.setattr(usage, "Path", Mock(return_value=Mock(iterdir=lambda: iter(threads))))
    assert usage.waited_s(0) == 3.0


def test_ctrl_c_does_not_move_the_panel():
    """The terminal would show it as ^C behind the last line, and so push what is drawn next one line down."""
    code = (
        "import time; from troupe.services.launcher.panel import LivePanel\n"
        "from troupe.services.launcher.progress import RunView\n"
        "panel = LivePanel('t', 'f'); panel.start()\n"
        "try: panel.show(RunView(10)); panel.say('ready'); time.sleep(600)\n"
        "except KeyboardInterrupt: panel.say('stopping'); panel.stop()\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    shown = bytearray()

    def has_ended():
        try:
            if select.select([terminal], [], [], 1.0)[0]:
                shown.extend(os.read(terminal, 65536))
        except OSError:
            return True
        return False

    try:
        until(lambda: has_ended() or b"ready" in shown, why=lambda: shown)
        os.write(terminal, b"\x03")
        until(has_ended, why=lambda: shown)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert b"stopping" in shown
    assert b"^C" not in shown


def test_the_panel_shows_the_curves_of_the_returns():
    def drawn(returns):
        console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
        console.print(render(view(STATUS | {"returns": returns}), "t", "f"))
        return console.file.getvalue()

    (line,) = [line for line in drawn(RETURNS).splitlines() if "eval returns" in line]
    assert "eval returns  ▁▅█   train returns  ▁▁" in line
    assert line.rstrip(" │").endswith("█")  # both fit
    assert "returns  " not in drawn({"eval/episode_return": [[0, 1]]})


def test_the_live_panel_shows_them_too():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    live = LivePanel("t", "f", console)
    live.start()
    try:
        live.show(view(STATUS | {"returns": RETURNS}))
    finally:
        live.stop()
    assert "eval returns  ▁▅█" in console.file.getvalue()


def test_lines_above_the_panel_are_not_broken():
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    command = f"  troupe resume {'long/' * 10} --total-steps 4000"
    LivePanel("t", "f", console).say(command)
    assert console.file.getvalue() == f"{command}\n"


@pytest.mark.parametrize(("term", "draws"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_draws_nothing_in_place_gets_lines(term, draws, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", term)
    assert can_draw() is draws


def test_a_terminal_without_blocks_is_shown_no_curve(monkeypatch):
    assert launcher._curve(view(STATUS | {"returns": RETURNS}))
    monkeypatch.setattr(sys, "__stdout__", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert not launcher._curve(view(STATUS | {"returns": RETURNS}))
    assert panel._returns(view(STATUS | {"returns": RETURNS})) is None


def test_the_end_shows_evaluations_or_training():
    whole = launcher._curve(view(STATUS | {"returns": RETURNS}))
    assert whole[0] == "mean return of evaluations"
    assert launcher._curve(view(STATUS | {"returns": RETURNS | {"eval/episode_return": [[5, 1]]}}))[0] == (
        "mean return in training"
    )
    assert launcher._curve(view(STATUS)) == []


def test_services_that_are_silent_are_named_until_they_are_heard_again(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(silence.time, "monotonic", lambda: now_s)
    listener = silence.Silence(liveness_s=15.0)

    def look(written_ns, **ages):
        roles = [("actor-0", "actor"), ("replay-0", "replay"), ("someone", "viewer")]
        peers = [
            {"name": n, "role": r, "seen_s_ago": ages[n.replace("-0", "")]}
            for n, r in roles
            if n.replace("-0", "") in ages
        ]
        return listener.look({"peers": peers}, written_ns)

    assert listener.look({}, 0) == {}
    assert look(1, actor=0.5, replay=0.5, someone=99.0) == {}
    now_s += 11
    assert look(2, actor=0.5, replay=11.5) == {"replay-0": 11.5}
    now_s += 5
    assert look(3, actor=0.5) == {"replay-0": 16.5}  # the learner has given it up
    now_s += 1
    assert look(4) == {"replay-0": 17.5}  # the actor has left
    assert look(5, replay=0.1) == {}
    now_s += 12
    assert look(5, replay=0.1) == {"learner": 12.0}  # of the others nothing is known


def test_one_of_hundreds_is_silent_once_some_of_its_heartbeats_are_missing(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(silence.time, "monotonic", lambda: now_s)
    listener = silence.Silence(liveness_s=60.0)
    peer = {"name": "actor-0", "role": "actor", "heartbeat_s": 8.0}
    assert listener.look({"peers": [peer | {"seen_s_ago": 19.0}]}, 1) == {}
    assert listener.look({"peers": [peer | {"seen_s_ago": 21.0}]}, 2) == {"actor-0": 21.0}


def test_the_verdict_names_who_is_silent_and_the_disk_before_what_it_causes():
    silent = view(silent={"learner": 12.4}, eta_s=60.0)
    assert verdict(silent)[0] == "learner has been silent for 12 s"
    line = plain_line(silent)
    assert "updates/s" not in line
    assert "steps/s" not in line
    assert "ETA" not in line
    replay = view(silent={"replay-0": 30.0}, eta_s=60.0)
    assert "replay-0 has been silent for 30 s" in plain_line(replay)
    assert "steps/s 1,23" in plain_line(replay)
    full = view(silent={"learner": 12.4}, disk="cannot write into runs/x: No space left on device")
    assert "No space left on device" in plain_line(full)
    console = Console(width=120, record=True, force_terminal=True, file=io.StringIO())
    console.print(render(full, "troupe", ""))
    assert "No space left on device" in console.export_text()


def test_lines_into_a_file_go_on_once_a_full_disk_has_room(disk):
    code = (
        "import sys\n"
        "from troupe.services.launcher.panel import lost_terminal_tolerated\n"
        "for line in sys.stdin:\n"
        "    with lost_terminal_tolerated():\n"
        "        print(line.strip(), flush=True)\n"
        "    print(file=sys.stderr, flush=True)\n"
    )
    with (disk / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert process.stdin is not None
    assert process.stderr is not None
    for line, room in (("before", None), ("lost " * 2000, 0), ("after", 1 << 20)):
        if room is not None:
            leave(disk, room)
        process.stdin.write(line + "\n")
        process.stdin.flush()
        process.stderr.readline()
    process.communicate(timeout=60)
    assert process.returncode == 0
    lines = (disk / "out").read_text().splitlines()
    assert lines[0] == "before"
    assert lines[-1].endswith("after")  # behind half of the line that had no room
