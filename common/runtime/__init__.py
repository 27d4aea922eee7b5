"""What every service needs to live: signals, deadlines, logs, checkpoints, metrics, health. No torch."""

from troupe.common.runtime.lifecycle import Deadline, StopSignal, run_main

__all__ = ["Deadline", "StopSignal", "run_main"]
