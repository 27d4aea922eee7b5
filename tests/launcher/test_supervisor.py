"""Children are restarted, given up, and stopped for certain. Real processes, small ones."""

import itertools
import logging
import os
import re
import signal
import sys
import textwrap
import time

import psutil
import pytest

from tests.harness import until
from troupe.common.errors import CheckpointError, ConfigError, PeerError, TroupeError
from troupe.services.launcher import supervisor
from troupe.services.launcher.supervisor import Child, ChildSpec, best_error_line, describe_exit, stop

NO_BACKOFF = 0.001


@pytest.fixture
def make(tmp_path):
    children = []

    def make(code, name="actor-0", **options):
        command = [sys.executable, "-c", textwrap.dedent(code)]
        spec = ChildSpec(
            name, lambda restarts: [*command, str(restarts)], tmp_path / f"{name}.log", **options
        )
        children.append(Child(spec, backoff_s=NO_BACKOFF))
        return children[-1]

    yield make
    for child in children:
        child.kill()
        child.close()


def poll_until(child, condition, *, may_be_done=False):
    def poll():
        child.poll(may_be_done=may_be_done)
        time.sleep(0.01)

    until(condition, step=poll, why=lambda: f"{child.state}, restarts {child.restarts}")


def log_of(child):
    return child.spec.log_path.read_text()


def test_a_dead_child_is_started_again_and_told_so(make, caplog):
    child = make("import sys, time; print('life', sys.argv[1], flush=True); time.sleep(600)")
    child.start()
    poll_until(child, lambda: "life 0" in log_of(child))
    with caplog.at_level(logging.WARNING):
        os.kill(child.pid, signal.SIGKILL)
        poll_until(child, lambda: "life 1" in log_of(child))
    assert child.state == "running"
    assert child.restarts == 1
    assert "actor-0 died (SIGKILL): killed from outside" in caplog.text


def test_gives_up_after_five_quick_deaths_and_says_why_and_where(make):
    child = make("import sys; print('trying', sys.argv[1]); raise ValueError('no such game')")
    child.start()
    with pytest.raises(TroupeError) as caught:
        poll_until(child, lambda: False)
    message = str(caught.value)
    assert message == (
        f"actor-0 died (exit code 1) 5 times in a row: ValueError: no such game (log: {child.spec.log_path})"
    )
    assert caught.value.exit_code == 70
    assert child.state == "failed"
    assert log_of(child).count("trying") == 5


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (5, CheckpointError)])
def test_errors_that_trying_again_cannot_mend_end_at_once(make, code, error):
    child = make(f"import sys; print('troupe: error: do that', file=sys.stderr); sys.exit({code})", "learner")
    child.start()
    with pytest.raises(error, match=rf"learner died \(exit code {code}\): do that \(log: ") as caught:
        poll_until(child, lambda: False)
    assert caught.value.exit_code == code
    assert child.restarts == 0


def test_the_exit_code_of_an_unreachable_peer_is_kept(make):
    child = make("raise SystemExit(3)")
    child.start()
    with pytest.raises(PeerError, match="5 times in a row: it gave no reason"):
        poll_until(child, lambda: False)


def test_a_child_that_is_not_essential_fails_alone(make, caplog):
    child = make("raise SystemExit(2)", "evaluator", essential=False)
    child.start()
    poll_until(child, lambda: child.state == "failed")
    child.poll(may_be_done=False)
    assert "the run goes on without it" in caplog.text


def test_long_life_forgives_earlier_deaths(make, monkeypatch):
    monkeypatch.setattr(supervisor, "QUICK_DEATH_S", 0.0)
    child = make("raise SystemExit(1)")
    child.start()
    poll_until(child, lambda: child.restarts > supervisor.MAX_QUICK_DEATHS + 2)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise KeyError('rewards')", "KeyError: 'rewards'"),
        # The same line of a user's code, which strikes at another value, so after other updates.
        ("import sys; sys.exit(f'troupe: error: E: no {sys.argv[1]} (my.py:41)')", "E: no 2 (my.py:41)"),
        # A death from outside in between is no progress.
        ("import os, sys; sys.argv[1] == '1' and os.kill(os.getpid(), 9); raise KeyError(1)", "KeyError: 1"),
    ],
)
def test_the_same_error_again_and_again_without_progress_is_the_end(make, monkeypatch, code, error):
    monkeypatch.setattr(supervisor, "QUICK_DEATH_S", 0.0)  # each lives for long before it dies
    child = make(code, "learner", progress=lambda: 7)
    child.start()
    says = re.escape(f"died (exit code 1) 3 times without progress: {error} (log")
    with pytest.raises(TroupeError, match=says):
        poll_until(child, lambda: False)
    assert child.deaths == (4 if "kill" in code else 3)
    assert child.last_death == f"exit code 1: {error}"


@pytest.mark.parametrize(
    ("code", "progress"),
    [
        ("raise KeyError('rewards')", itertools.count().__next__),  # checkpoints in between
        ("import sys; sys.exit(f'troupe: error: KeyError: 1 (my.py:{sys.argv[1]})')", lambda: 7),
        ("import os; raise KeyError(os.getpid())", lambda: 7),  # another error each time
        ("import os; os.kill(os.getpid(), 9)", lambda: 7),  # from outside, for all that is known
        ("raise SystemExit(3)", lambda: 7),  # it has missed a peer
    ],
)
def test_deaths_that_differ_or_have_progress_between_them_are_not(make, monkeypatch, code, progress):
    monkeypatch.setattr(supervisor, "QUICK_DEATH_S", 0.0)
    child = make(code, "learner", progress=progress)
    child.start()
    poll_until(child, lambda: child.restarts > supervisor.MAX_SAME_DEATHS + 1)


def test_a_hang_again_and_again_without_progress_is_the_end_too(make, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "QUICK_DEATH_S", 0.0)

    def silent(name, progress):
        options = {"signs_path": tmp_path / name, "hang_s": 0.05, "progress": progress}
        child = make("import time; time.sleep(600)", name, **options)
        child.start()
        return child

    learner = silent("learner", lambda: 7)
    says = "it did not respond for 0.05 s (run.hang_s) and was killed"
    ends = rf"died \(SIG\w+\) 3 times without progress: {re.escape(says)} \(log"
    with pytest.raises(TroupeError, match=ends):
        poll_until(learner, lambda: False)
    assert learner.deaths == 3
    assert log_of(learner).splitlines() == [f"troupe: error: {says}"] * 3
    actor, gets_on = silent("actor-0", None), silent("gets-on", itertools.count().__next__)
    poll_until(actor, lambda: gets_on.poll(may_be_done=False) or min(actor.restarts, gets_on.restarts) > 3)


def test_exit_code_0_is_the_end_only_when_the_run_is_complete(make):
    child = make("import sys; print('life', sys.argv[1])", "learner")
    child.start()
    poll_until(child, lambda: child.restarts == 1)
    poll_until(child, lambda: child.state == "done", may_be_done=True)
    assert child.restarts <= 2


def test_what_a_dead_child_had_started_goes_too(make):
    child = make(
        """
        import subprocess, sys
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("started", other.pid, flush=True)
        other.wait()
        """
    )
    child.start()
    poll_until(child, lambda: "started" in log_of(child))
    grandchild = psutil.Process(int(log_of(child).split()[1]))
    os.kill(child.pid, signal.SIGKILL)
    poll_until(child, lambda: child.state == "waiting")
    gone, _ = psutil.wait_procs([grandchild], timeout=30)
    assert gone or grandchild.status() == psutil.STATUS_ZOMBIE


def test_stop_asks_first_and_kills_what_does_not_listen(make):
    polite = make(
        "import signal, time; signal.signal(15, lambda *a: exit(0)); print('up', flush=True); time.sleep(600)"
    )
    deaf = make(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
        "deaf",
    )
    for child in (polite, deaf):
        child.start()
        poll_until(child, lambda child=child: "up" in log_of(child))
    assert stop([polite, deaf], 5.0) == ["deaf"]
    assert polite.returncode() == 0
    assert deaf.returncode() == -signal.SIGKILL
    assert {polite.state, deaf.state} == {"stopped"}
    assert stop([polite, deaf], 10.0) == []


def test_stop_hurries_when_asked(make):
    deaf = make(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    deaf.start()
    poll_until(deaf, lambda: "up" in log_of(deaf))
    assert stop([deaf], 1000.0, hurry=lambda: True) == ["actor-0"]  # longer than a test may take


def test_a_log_that_cannot_be_written_is_a_config_error(tmp_path):
    child = Child(ChildSpec("actor-0", lambda _: ["true"], tmp_path / "absent" / "a.log"))
    with pytest.raises(ConfigError, match="cannot write the log"):
        child.start()


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (["troupe: error: a", "ValueError: b", "bye"], "a"),
        (["Traceback", "zmq.error.ZMQError: b", "bye"], "zmq.error.ZMQError: b"),
        (["2026 ERROR actor: c", "bye"], "2026 ERROR actor: c"),
        (["ERROR: could not bind to port 6006", "bye"], "ERROR: could not bind to port 6006"),
        (["nothing about an Error: here"], "otherwise"),
        ([], "otherwise"),
    ],
)
def test_best_error_line(lines, line):
    assert best_error_line(lines, "otherwise") == line


def test_describe_exit():
    assert [describe_exit(code) for code in (3, -9, -999)] == ["exit code 3", "SIGKILL", "signal 999"]


SILENT_ONCE = """
import os, signal, sys, time
from troupe.common.runtime import watchdog
from troupe.common.runtime.lifecycle import enable_stack_dumps
enable_stack_dumps()
watchdog.start()
print("life", sys.argv[1], flush=True)
time.sleep(2)
if sys.argv[1] == "0":
    {silent}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("silent", "logged"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", ""),
        ("import ctypes; ctypes.PyDLL(None).sleep(60)", "Current thread"),
    ],
)
def test_a_child_that_gives_no_sign_of_life_is_killed_and_started_again(
    make, tmp_path, caplog, silent, logged
):
    child = make(SILENT_ONCE.format(silent=silent), signs_path=tmp_path / "signs", hang_s=6.0)
    child.start()
    with caplog.at_level(logging.WARNING):
        poll_until(child, lambda: "life 1" in log_of(child))
    assert "actor-0 died (SIGKILL): it did not respond for " in caplog.text
    assert "s (run.hang_s) and was killed; restarting" in caplog.text
    assert logged in log_of(child)
    assert child.restarts == 1


def test_a_child_that_gives_signs_is_left_alone_and_one_that_never_starts_is_not(make, tmp_path, caplog):
    lively = make(SILENT_ONCE.format(silent="pass"), "lively", signs_path=tmp_path / "one", hang_s=60.0)
    dead = make("import time; time.sleep(60)", "dead", signs_path=tmp_path / "two", hang_s=0.5)
    lively.start()
    dead.start()
    with caplog.at_level(logging.WARNING):
        poll_until(dead, lambda: lively.poll(may_be_done=False) or dead.restarts)
    assert re.search(r"dead died \(SIG\w+\): it did not respond", caplog.text)
    assert lively.restarts == 0
