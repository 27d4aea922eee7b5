"""What every service's command line has, and what its process begins with."""

from __future__ import annotations

import argparse

from troupe.common.runtime import open_files, watchdog
from troupe.common.runtime.lifecycle import enable_stack_dumps
from troupe.common.runtime.logging import add_logging_arguments, setup_logging
from troupe.common.runtime.parser import integer

FIELDS_AT_LEARNER = "fields of the run are given to its learner, which tells the others"
"""Where a service that is no learner gets its configuration."""


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--log-file`, `--log-level` and `--metrics-port`."""
    add_logging_arguments(parser)
    parser.add_argument(
        "--metrics-port",
        type=integer(0, 65535),
        default=0,
        metavar="PORT",
        help="serve /metrics, /healthz and /readyz on this port (default: 0, do not)",
    )
    parser.add_argument(
        "--metrics-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address of --metrics-port (default: %(default)s)",
    )


def begin(service: str, arguments: argparse.Namespace) -> None:
    """Set up logs, stack dumps, the limit of open files, signs of life and, where asked for, the status port.

    Raises:
        ConfigError: the log cannot be written or the port cannot be had.
    """
    setup_logging(service, arguments.log_file, arguments.log_level)
    enable_stack_dumps()
    open_files.raise_limit()
    watchdog.start()
    if arguments.metrics_port:
        from troupe.common.runtime.http import (
            StatusServer,  # its imports take a while, and most runs go without
        )

        StatusServer(service, arguments.metrics_port, host=arguments.metrics_host)
