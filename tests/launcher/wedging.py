"""Ape-X whose update, or choice of actions, never returns, once, where a file says so."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

from troupe import register_algorithm, structural
from troupe.common.agents.apex import ApexAgent, ApexConfig


@register_algorithm
class WedgingConfig(ApexConfig):
    """Fields of Ape-X."""

    algorithm: Literal["tests.launcher.wedging"] = structural("tests.launcher.wedging", "Ape-X that hangs.")


class WedgingAgent(ApexAgent):
    """Hangs where the folder in TROUPE_TEST_WEDGE has a file with the name of this service."""

    def act(self, *words: Any, **options: Any) -> Any:
        """Choose actions, or never."""
        wedge()
        time.sleep(0.01)  # the test waits for clocks, and leaves the cores to others meanwhile
        return super().act(*words, **options)

    def update(self, *words: Any, **options: Any) -> Any:
        """Learn, or never."""
        wedge()
        return super().update(*words, **options)


def wedge() -> None:
    """Never return, once."""
    file = Path(os.environ["TROUPE_TEST_WEDGE"], Path(sys.argv[0]).parent.name)
    if file.exists():
        file.unlink()
        threading.Event().wait()


make = WedgingAgent
