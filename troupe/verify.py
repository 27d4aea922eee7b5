"""`troupe verify`: makes a run again and compares its weights with the certificate."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from troupe.certificate import Certificate, Weights, circumstances, differences
from troupe.common.config import Config, load_layers
from troupe.common.errors import ConfigError
from troupe.common.machine import temporary_prefix
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import run_config
from troupe.lockstep import LockstepTraining, repeatable, repeatable_config


def verify(run_dir: Path, stop: StopSignal, *, seconds: float | None = None) -> bool:
    """Repeat a run in a temporary directory, and print how its weights compare with its certificate.

    Args:
        run_dir: a run of `troupe train --deterministic`.
        stop: asks for the end.
        seconds: that are repeated, and at least up to the certificate's first line; None: all of it.

    Returns:
        Whether all that were compared are equal.

    Raises:
        ConfigError: it is no such run, or nothing of it is certified yet.
        CheckpointError: its certificate is damaged.
        KeyboardInterrupt: a signal came.
    """
    config = load_layers(run_config=run_config(run_dir)).config
    certificate = Certificate.read(run_dir)
    if not certificate.weights:
        raise ConfigError(
            f"{run_dir} certifies no update yet: it is not complete, and has made fewer than "
            f"{config.learner.certificate_period_updates} (learner.certificate_period_updates)"
        )
    with repeatable(), tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
        for line in differences(certificate.made_with, circumstances()):
            print(f"different from when it was made: {line}", flush=True)
        if certificate.changed:
            print(f"changed when the run was resumed: {', '.join(certificate.changed)}", flush=True)
        training = Repetition(config, Path(folder) / "run", stop, certificate, seconds)
        training.run()
    if stop.signals:
        raise KeyboardInterrupt
    print(training.result(), flush=True)
    return not training.different


class Repetition(LockstepTraining):
    """A run that ends where it differs from a certificate, or where all that was wanted is compared.

    Attributes:
        equal: lines of the certificate that were found equal.
        different: what differs, in words; empty so far.
    """

    def __init__(
        self, config: Config, run_dir: Path, stop: StopSignal, certificate: Certificate, seconds: float | None
    ) -> None:
        # No games are played with the network, and no older checkpoint is needed.
        sections = {
            "evaluator": config.evaluator.model_copy(update={"enabled": False}),
            "learner": config.learner.model_copy(update={"keep_checkpoints": 1}),
        }
        self.wanted, self.seconds = certificate.weights, seconds
        self.equal: list[Weights] = []
        self.different = ""
        self.began_s = time.monotonic()
        super().__init__(repeatable_config(config.model_copy(update=sections)), run_dir, stop)

    def is_certified(self, update: int) -> bool:
        """See `LockstepTraining`."""
        return update in self.wanted

    def certify(self, weights: Weights) -> None:
        """Compare, and stop where that is enough."""
        wanted = self.wanted.get(weights.update)
        if wanted is None:  # the last ones of a run that was stopped before them
            return
        name = wanted.first_difference(weights)
        if name:
            names = wanted.tensors.keys() | weights.tensors.keys()
            count = sum(wanted.tensors.get(each) != weights.tensors.get(each) for each in names)
            self.different = (
                f"update {weights.update:,}, tensor {name} ({count} of {len(names)} tensors differ)"
            )
        elif weights.steps != wanted.steps:
            self.different = (
                f"update {weights.update:,} comes after {weights.steps:,} steps, not {wanted.steps:,}"
            )
        else:
            self.equal.append(weights)
        over = self.seconds is not None and time.monotonic() - self.began_s > self.seconds
        if self.different or over or len(self.equal) == len(self.wanted):
            self.stop.set()

    def run(self) -> None:
        """See `LockstepTraining`."""
        super().run()
        if not self.stop:
            missing = next(update for update in self.wanted if update > self.counters.updates)
            self.different = f"update {missing:,} is never made: the run is complete before"

    def result(self) -> str:
        """What was found, in a line."""
        last = self.equal[-1].update if self.equal else 0
        if self.different:
            before = f"equal up to update {last:,}" if last else "no update before it was certified"
            return f"different: {self.different}; {before}"
        count, total = len(self.equal), len(self.wanted)
        return f"equal: {count:,} of {total:,} certified updates, up to update {last:,}"

    def say(self, text: str) -> None:
        """Say nothing of the run itself."""
