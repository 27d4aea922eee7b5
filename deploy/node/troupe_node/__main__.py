"""`troupe-node prepare | sync | watch-notice`."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from troupe_node.boot import prepare
from troupe_node.copies import sync
from troupe_node.machine import NodeError
from troupe_node.notice import POLL_S, watch_notice


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    parser = argparse.ArgumentParser(
        "troupe-node", description="What a cloud machine does besides the services."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    boot = commands.add_parser(
        "prepare", help="fetch keys and configuration, then start this role's services"
    )
    boot.add_argument("--no-start", action="store_true", help="leave the services alone")
    copy = commands.add_parser("sync", help="copy the run's directory to its bucket, once")
    copy.add_argument(
        "--last",
        action="store_true",
        help="the learner has ended: copy every file, stop the machines of a complete run, let this one go",
    )
    watch = commands.add_parser("watch-notice", help="wait until this machine is about to be taken")
    watch.add_argument("--poll-s", type=float, default=POLL_S, help="default: %(default)s")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="troupe-node: %(levelname)s: %(message)s")
    try:
        if options.command == "prepare":
            prepare(start=not options.no_start)
        elif options.command == "sync":
            sync(last=options.last)
        else:
            watch_notice(options.poll_s)
    except (NodeError, Boto3Error, BotoCoreError, ClientError, OSError, subprocess.SubprocessError) as error:
        print(f"troupe-node: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
