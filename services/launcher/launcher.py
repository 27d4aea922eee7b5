"""The one-machine launcher: starts every service of a run, watches and restarts them, and stops them.

The services are the same processes that run in containers or on many machines. Here they talk over `ipc`
sockets in a private directory, so nothing listens on a port but TensorBoard and the board, and any number of
runs fit on one machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from troupe.common.config import Config, to_toml
from troupe.common.errors import TroupeError
from troupe.common.machine import usable_cores
from troupe.common.permits import modules_of
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import CONFIG_FILE, STATUS_FILE, atomic_write, read_status, write_trouble
from troupe.common.runtime.lifecycle import INTERRUPTED
from troupe.common.runtime.metrics import EVALUATION_RETURN, TRAINING_RETURN
from troupe.common.runtime.usage import CoresUsed
from troupe.services.launcher.curves import chart, drawable
from troupe.services.launcher.evidence import of_run
from troupe.services.launcher.filling import fill
from troupe.services.launcher.findings import STARTING
from troupe.services.launcher.learning import faults
from troupe.services.launcher.panel import LivePanel, can_draw, lost_terminal_tolerated
from troupe.services.launcher.processes import child_specs
from troupe.services.launcher.progress import (
    Estimator,
    RunView,
    ServiceView,
    endless_line,
    line_period_s,
    plain_line,
    run_view,
    settings_of,
    verdict,
)
from troupe.services.launcher.refill import items_before_learning, refill_line
from troupe.services.launcher.silence import Silence
from troupe.services.launcher.supervisor import Child, ChildSpec, stop
from troupe.services.launcher.workspace import (
    BoardPort,
    TensorBoardPort,
    claimed_run_dir,
    has_checkpoint,
    launcher_log,
    own_command,
    saved_steps,
    shell_path,
    socket_directory,
)

_log = logging.getLogger(__name__)

_LEARNER_STOP_S = 40.0  # it writes a checkpoint
_OTHERS_STOP_S = 10.0
_PANEL_PERIOD_S = 1.0
_POLL_S = 0.2
_CHART_MARGIN = 14


def run(
    config: Config,
    run_dir: str | Path,
    *,
    resume: bool = False,
    progress: bool | None = None,
    stop: StopSignal | None = None,
) -> int:
    """Train on this machine until the run is complete or a signal asks to stop.

    Args:
        config: the whole configuration; written to `RUN/config.toml`.
        run_dir: new directory, or with `resume` that of an earlier run.
        resume: go on from the newest whole checkpoint.
        progress: live panel (True), one line every `run.log_every_s` (False), None = panel on a terminal.
        stop: asks to stop; None: signals do, from now on.

    Returns:
        Exit code 0: complete, or stopped cleanly on request; 130: stopped before there was anything to keep.

    Raises:
        TroupeError: with the exit code and a one-line explanation.
    """
    progress = can_draw() if progress is None else progress
    stop_signal = StopSignal(force_after_s=None).install() if stop is None else stop
    run_path = Path(run_dir).expanduser().resolve()
    tensorboard = TensorBoardPort(config.net.tensorboard_port)
    board = BoardPort(config.net, tensorboard.number)
    with (
        claimed_run_dir(run_path, resume=resume) as damaged,
        socket_directory() as sockets,
        launcher_log(run_path) as log,
    ):
        if resume and (steps := saved_steps(run_path)) >= config.run.total_steps and not damaged:
            print("\n".join(_how_to_extend(run_path, config, steps, config.run.total_steps)))
            return 0
        (run_path / STATUS_FILE).unlink(missing_ok=True)  # an old one would look like progress
        atomic_write(run_path / CONFIG_FILE, to_toml(config).encode())
        if config.run.offline and not resume:
            print(f"reading the data set {config.run.offline}", flush=True)
            fill(config, run_path, stop_signal)
        for page in (tensorboard, board):
            if page.taken:  # the file keeps what was asked for, which may be free when the run is resumed
                print(f"port {page.taken} is in use: {page.title} of this run is on port {page.number}")
        try:
            specs = child_specs(config, run_path, sockets, tensorboard, board, resume=resume)
            launcher = _Launcher(
                config,
                run_path,
                sockets,
                stop_signal,
                specs,
                [tensorboard, board],
                resume=resume,
                damaged=damaged,
                progress=progress,
            )
            return launcher.run()
        except TroupeError as error:
            log.error("%s", error)
            raise


class _Launcher:
    """The children of one run, from start to stop."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        sockets: Path,
        stop_signal: StopSignal,
        specs: Sequence[ChildSpec],
        pages: Sequence[TensorBoardPort],
        *,
        resume: bool,
        damaged: str,
        progress: bool,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._stop = stop_signal
        self._pages = pages
        self._resume = resume
        self._damaged = damaged
        self._min_items = items_before_learning(config.replay.sampled_tables())
        self._refills = resume and self._min_items > 0
        self._former_status_ns = self._status_written_ns()
        self._children = [Child(spec) for spec in specs]
        self._learner = self._children[0]
        self._usage = CoresUsed()
        self._estimator = Estimator()
        self._silence = Silence(config.net.liveness_s)
        self._started_at = time.monotonic()
        self._next_line = 0.0
        self._said_wait = ""
        self._ended_well = False
        name = config.run.name or run_dir.name
        title = f"troupe  {name}  {config.env.id}"
        self._panel = LivePanel(title, self._footer()) if progress else None
        self._view = RunView(config.run.total_steps)

    def run(self) -> int:
        """Start, watch, stop; returns the exit code."""
        self._announce()
        self._connect_log()
        try:
            for child in self._children:
                child.start()
            if self._panel is not None:
                self._panel.start()
            self._watch()
            self._ended_well = True
        finally:
            # Whatever happens, from here on no child may survive; a second signal only makes it faster.
            self._stop_all()
            if self._panel is not None:
                self._panel.stop()
            self._connect_log(off=True)
            self._summary()
        return 0 if has_checkpoint(self._run_dir) or self._learner.state == "done" else INTERRUPTED

    def _watch(self) -> None:
        """Supervise until the learner is done or a signal comes."""
        next_show = 0.0
        while not self._stop:
            complete = self._complete()
            for child in self._children:
                # Asked for before the children are looked at: one that ends in between is restarted once too
                # often rather than believed too early.
                child.poll(may_be_done=complete)
            if self._learner.state == "done":
                self._check_learned()
                _log.info("the run is complete")
                return
            if time.monotonic() >= next_show:
                next_show = time.monotonic() + _PANEL_PERIOD_S
                self._show()
            self._stop.wait(_POLL_S)
        saving = ": the learner writes a checkpoint" if has_checkpoint(self._run_dir) else ""
        _log.info("stopping on request%s (a second signal stops at once)", saving)

    def _check_learned(self) -> None:
        """Raise the learner's error where the run got its steps while the learner died of each update.

        Actors go on meanwhile, and the last learner to start found all steps made.
        """
        failure = self._learner.failure
        if failure is not None and not read_status(self._run_dir).get("updates_since_start"):
            raise type(failure)(
                f"the run made all of its steps but has not learned from all of them: {failure}"
            )

    def _tell_refill(self, status: dict[str, Any], written_ns: int) -> None:
        """Say, once every shard has reported, whether a resumed run has its items or must store them."""
        if not self._refills or written_ns == self._former_status_ns:
            return
        if status.get("shards", 0) >= self._config.replay.shards:
            self._refills = False
            self._say(refill_line(int(status["metrics"]["replay/restored_items"]), self._min_items))

    def _status_written_ns(self) -> int:
        with contextlib.suppress(OSError):
            return (self._run_dir / STATUS_FILE).stat().st_mtime_ns
        return 0

    def _complete(self) -> bool:
        """Whether the learner has counted all the steps, so that a child may end by itself."""
        return int(read_status(self._run_dir).get("steps", 0)) >= self._config.run.total_steps

    def _stop_all(self) -> None:
        """Stop the learner first, for it saves the run; then who feeds replay; then replay."""

        def hurry() -> bool:
            return self._stop.signals > 1

        # Replay last: what actors still hold goes there, and it is what a resumed run begins with.
        replay = [child for child in self._children if child.name.startswith("replay")]
        others = [child for child in self._children if child not in replay and child is not self._learner]
        for group, timeout_s in (
            ([self._learner], _LEARNER_STOP_S),
            (others, _OTHERS_STOP_S),
            (replay, _OTHERS_STOP_S),
        ):
            killed = stop(group, timeout_s, hurry)
            if killed:
                why = "on the second signal" if hurry() else "which did not stop in time"
                _log.warning("killed %s, %s", ", ".join(killed), why)
            self._show(final=True)

    def _show(self, *, final: bool = False) -> None:
        config = self._config
        written_ns = self._status_written_ns()
        status = read_status(self._run_dir)
        self._tell_refill(status, written_ns)
        silent = self._silence.look(status, written_ns)
        disk = write_trouble(self._run_dir)
        if "steps" not in status:  # the learner is not up yet
            status = {"steps": saved_steps(self._run_dir)}
        steps = int(status["steps"])
        self._view = run_view(
            status,
            total_steps=config.run.total_steps,
            services=[self._service(child) for child in self._children],
            elapsed_s=time.monotonic() - self._started_at,
            eta_s=self._estimator.eta_s(steps, config.run.total_steps) if "metrics" in status else None,
            disk=f"cannot write into {self._run_dir}: {disk}" if disk else "",
            silent=silent,
            **settings_of(config),
            cores=usable_cores(),
        )
        if self._panel is not None:
            self._panel.footer = self._footer()
            self._panel.show(self._view)
        elif not final and time.monotonic() >= self._next_line and not self._waits_as_said():
            period_s = line_period_s(config.run.log_every_s, self._view.elapsed_s)
            self._next_line = time.monotonic() + period_s
            self._say(f"{time.strftime('%H:%M:%S')} {plain_line(self._view)}")

    def _service(self, child: Child) -> ServiceView:
        cpu, starved, memory = (0.0, 0.0, 0) if child.pid is None else self._usage.of_tree(child.pid)
        return ServiceView(child.name, child.state_text, cpu, memory, child.restarts, starved)

    def _waits_as_said(self) -> bool:
        """Whether the run starts or ends still, and the last line has said so."""
        what = verdict(self._view)[0]
        said, self._said_wait = self._said_wait, what if what in (STARTING, self._view.note) else ""
        return bool(said) and said == what

    def _announce(self) -> None:
        verb = "resuming" if self._resume else "training"
        self._say(f"{verb} {self._config.env.id} in {self._run_dir}")
        self._say(f"{self._pages_line()}logs: {self._run_dir / 'logs'}   stop: Ctrl-C")
        if self._damaged:
            self._say(f"{self._damaged}; continuing from the newest whole one")
        total = self._config.run.total_steps
        if not self._resume and total <= self._min_items:  # a step adds one item at most
            self._say(
                f"this run is too short to learn anything: {total:,} steps, and learning starts at "
                f"{self._min_items:,} items in replay; raise --total-steps or lower --replay.min_items"
            )

    def _pages_line(self) -> str:
        return "".join(f"{page.title}: {page.url}   " for page in self._pages if page.url)

    def _footer(self) -> str:
        return f"{self._pages_line()}logs {self._run_dir / 'logs'}"

    def _summary(self) -> None:
        view = self._view
        if not self._ended_well:
            self._say(f"logs: {self._run_dir / 'logs'}")
            return
        for line in _curve(view):
            self._say(line)
        self._say(f"run directory: {self._run_dir}")
        self._say(f"curves: {own_command('tensorboard')} --logdir {shell_path(self._run_dir)}")
        if view.disk:
            self._say(view.disk)
        if view.trouble:
            self._say(f"environments: {view.trouble}")
        for child in self._children:
            if child.deaths:
                times = "once" if child.deaths == 1 else f"{child.deaths} times, the last"
                self._say(f"{child.name} died {times}: {child.last_death} (log: {child.spec.log_path})")
        if view.metrics:  # the learner was up
            self._say(f"last evaluation: {view.last_evaluation}")
        if line := endless_line(view):
            self._say(line)
        if (view.updates or view.trouble) and _learned_badly(self._run_dir, self._config):
            self._say("something may have kept the run from learning well:")
            self._say(f"  {own_command()} why {shell_path(self._run_dir)}")
        if view.updates and not (view.evaluated or view.unevaluated) and has_checkpoint(self._run_dir):
            self._say(f"to evaluate: {_how_to_evaluate(self._run_dir, self._config)}")
        if view.steps < view.total_steps:
            if not has_checkpoint(self._run_dir):
                self._say("stopped before the first checkpoint: nothing to resume")
                return
            saved = saved_steps(self._run_dir)  # fewer where it was stopped at once, or killed
            kept = f", saved at {saved:,}" if saved < view.steps else ""
            self._say(f"stopped at {view.steps:,} of {view.total_steps:,} steps{kept}; to continue:")
            self._say(f"  {_search_path(self._config)}{own_command()} resume {shell_path(self._run_dir)}")
            return
        if not view.updates:
            needs = f", because replay needs {self._min_items:,} items first" if self._min_items else ""
            self._say(f"nothing was learned: the run was too short for an update{needs}")
        for line in _how_to_extend(self._run_dir, self._config, view.steps, view.total_steps):
            self._say(line)

    def _say(self, line: str) -> None:
        if self._panel is not None:
            self._panel.say(line)
        else:
            with lost_terminal_tolerated():
                print(line, flush=True)

    def _connect_log(self, off: bool = False) -> None:
        """Show the launcher's own warnings to the user, above the panel."""
        root = logging.getLogger("troupe")
        root.handlers = [handler for handler in root.handlers if not isinstance(handler, _SayHandler)]
        if not off:
            root.addHandler(_SayHandler(self._say))


class _SayHandler(logging.Handler):
    """Passes log lines to the user."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{time.strftime('%H:%M:%S')} {record.getMessage()}")


def _learned_badly(run_dir: Path, config: Config) -> bool:
    """Whether the whole record says so: the newest values alone accuse runs that have solved their task."""
    with contextlib.suppress(TroupeError, OSError):  # nothing is recorded of a short run
        return bool(faults(of_run(run_dir, config)))
    return False


def _curve(view: RunView) -> list[str]:
    """The returns of evaluations over the run, or of training where there were too few."""
    width = min(60, shutil.get_terminal_size().columns - _CHART_MARGIN)
    if width < _CHART_MARGIN or not drawable():
        return []
    evaluated = chart(view.returns.get(EVALUATION_RETURN, ()), "mean return of evaluations", width)
    return evaluated or chart(view.returns.get(TRAINING_RETURN, ()), "mean return in training", width)


def _how_to_evaluate(run_dir: Path, config: Config) -> str:
    """The command; who has trained with modules of his own trusts them."""
    modules = modules_of(config)
    permits = f" --modules {','.join(modules)}" if modules else ""
    return f"{_search_path(config)}{own_command()} eval {shell_path(run_dir)} --episodes 20{permits}"


def _search_path(config: Config) -> str:
    """Where a command finds modules of the user's own; what started this one from Python had set it."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if not folders or not modules_of(config):
        return ""
    return f"PYTHONPATH={os.pathsep.join(shell_path(Path(folder)) for folder in folders)} "


def _how_to_extend(run_dir: Path, config: Config, steps: int, total_steps: int) -> list[str]:
    """What to say of a run that has all its steps."""
    resume = f"{_search_path(config)}{own_command()} resume {shell_path(run_dir)}"
    command = f"{resume} --total-steps {2 * max(steps, total_steps)}"
    return [f"complete at {steps:,} steps; to continue, raise the total:", f"  {command}"]
