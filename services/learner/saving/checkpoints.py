"""A run's checkpoints: what they say apart from arrays, when they are written, how a run goes on from one."""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from troupe.common import installation, system
from troupe.common.agents import Agent
from troupe.common.config import Config, changed_structure
from troupe.common.envs import EnvSpec
from troupe.common.errors import CheckpointError
from troupe.common.runtime import Deadline
from troupe.common.runtime.checkpoint import CheckpointWriter, begin_from, load_newest
from troupe.services.learner.saving.counters import RunCounters
from troupe.services.learner.saving.finite import check_weights
from troupe.services.learner.saving.kept import Archive

_log = logging.getLogger(__name__)

CHECKPOINT_S = 120.0
"""How long the beginning and the end of a run wait for the disk; a stop by a signal ends sooner by itself."""


class RunCheckpoints:
    """Writes a run's checkpoints beside training, and restores the run from the newest.

    Attributes:
        run_id: the run's own name, which every resumption keeps.
        lockstep: JSON values beside the counters, of a run whose checkpoints hold more than a learner; see
            `troupe.lockstep`. Empty for others.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        agent: Agent,
        spec: EnvSpec,
        counters: RunCounters,
    ) -> None:
        """Save this agent and these counters.

        Args:
            config: the run's configuration.
            directory: `RUN/checkpoints`.
            agent: what learns.
            spec: of its environment.
            counters: how far the run is.
        """
        self.run_id = f"{system.random.getrandbits(64):016x}"
        self.lockstep: dict[str, Any] = {}
        self._config, self._directory = config, directory
        self._agent, self._spec, self._counters = agent, spec, counters
        self._writer = CheckpointWriter(directory, keep=config.learner.keep_checkpoints)
        self._archive = Archive(directory, config.learner.archive_period_s)
        self._saved: tuple[int, int] | None = None
        self._agent_meta: dict[str, Any] = {}
        self._code = {"version": installation.version(), "commit": installation.commit()}
        self._next_s = system.monotonic() + config.learner.checkpoint_period_s

    def begin_run(self, *, resume: bool) -> None:
        """Take the run up where its newest checkpoint is, or give a new one the network to begin with.

        Raises:
            CheckpointError: there is none, or it is of another run or network.
        """
        learner = self._config.learner
        if resume:
            self._restore()
        elif learner.init_from:
            changed = partial(changed_structure, config=self._config)
            found = begin_from(self._agent, learner.init_from, changed, optimizer=learner.init_optimizer)
            _log.info("starting with the network of %s", found)

    def save(self) -> None:
        """Save the run and wait, within a limit, until it is on the disk."""
        deadline = Deadline(CHECKPOINT_S)
        # One at a time: two would write under the same temporary name.
        if self._writer.wait(deadline.remaining_s):
            self._begin()
        if not self._writer.wait(deadline.remaining_s):
            _log.error("the checkpoint was not on disk after %.0f s: continuing without it", CHECKPOINT_S)

    def save_if_due(self) -> None:
        """Begin to save the run every `learner.checkpoint_period_s`, once the one before is on the disk."""
        if system.monotonic() >= self._next_s and self._writer.wait(0.0):
            self._begin()

    def check_current(self) -> None:
        """Raise CheckpointError unless the run is on the disk as it is now: its end is what it was for."""
        if self._saved != (self._counters.steps, self._counters.updates):
            raise CheckpointError(
                f"the last checkpoint could not be written into {self._directory}: mend that, as by making "
                "room, then `troupe resume` the run"
            )

    def wait(self) -> None:
        """Wait, within a limit, for what is being written."""
        self._writer.wait(CHECKPOINT_S)

    def meta(self) -> dict[str, Any]:
        """What a checkpoint says apart from its arrays: how far the run is, and what it is."""
        return {
            **self._counters.to_meta(),
            "agent": self._agent_meta,
            "config": self._config.to_dict(),
            "spec": asdict(self._spec),
            "run": self.run_id,
            "troupe": self._code,
            **({"lockstep": self.lockstep} if self.lockstep else {}),
        }

    def _begin(self) -> None:
        """Save the run unless nothing has happened since: copies of one state would push out others.

        Here only the copy is made; the disk is left to the writer, which must have nothing to do.
        """
        self._next_s = system.monotonic() + self._config.learner.checkpoint_period_s
        reached = (self._counters.steps, self._counters.updates)
        if reached == self._saved:
            return
        arrays, self._agent_meta = self._agent.state()
        # The copy is checked, not the live weights: what is written is what was looked at.
        check_weights(arrays, reached[1])

        def written(path: Path) -> None:
            self._saved = reached
            _log.info("checkpoint %s (%d updates)", path.name, reached[1])
            self._archive.take(path)

        self._writer.begin(arrays, self.meta(), written)

    def _restore(self) -> None:
        arrays, meta, path = load_newest(self._directory)
        # Before anything is loaded: a half-restored agent would be worse than none.
        if changed := changed_structure(meta.get("config"), self._config):
            raise CheckpointError(
                f"{path} was written with {', '.join(changed)}; resume with the run's own config.toml"
            )
        # Kept, since the best checkpoint is written from it too, perhaps before the first new one.
        self._agent_meta = meta.get("agent", {})
        self._agent.load_state(arrays, self._agent_meta)
        counters = self._counters
        try:
            counters.load_meta(meta)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise CheckpointError(f"{path} does not record the run's progress in meta.json") from None
        self._saved = (counters.steps, counters.updates)
        self.run_id = str(meta.get("run", ""))
        lockstep = meta.get("lockstep")
        self.lockstep = lockstep if isinstance(lockstep, dict) else {}
        if other := installation.other_code(meta.get("troupe")):
            _log.warning("%s was written by %s; results may differ", path.name, other)
        _log.info("resumed from %s: %d steps, %d updates", path.name, counters.steps, counters.updates)
