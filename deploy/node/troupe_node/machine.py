"""The machine, its part in the run, and how it asks AWS."""

from __future__ import annotations

import json
import logging
import os
import pwd
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import boto3
from botocore.config import Config as ClientConfig
from botocore.exceptions import BotoCoreError, ClientError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ROLES = ("learner", "learner-peer", "replay", "actor", "evaluator")
# The user's name inside the image, and where things lie there.
USER = "troupe"
ETC = Path(os.environ.get("TROUPE_ETC", "/etc/troupe"))
STATE = Path(os.environ.get("TROUPE_STATE", "/var/lib/troupe"))
LOGS = Path(os.environ.get("TROUPE_LOGS", "/var/log/troupe"))
PATIENCE_S = 300.0


class NodeError(Exception):
    """Something that a person can mend, in one line."""


@dataclass(frozen=True)
class Node:
    """One machine: what user data says of it, and the run's description."""

    run: str
    role: str
    index: int
    learner: str
    parameters: str
    config: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        """Directory of the run on this machine."""
        return STATE / "runs" / self.run

    @property
    def key(self) -> str:
        """Whose secret key this machine has: that of all learners, if it is one."""
        return self.role.removesuffix("-peer")

    @property
    def host(self) -> str:
        """First label of this machine's name in the private zone; "" for machines that nobody looks up."""
        return {"learner": "learner", "replay": f"replay-{self.index}"}.get(self.role, "")


def client(service: str) -> Any:
    """A client with deadlines; boto3 has none of its own for a connection that hangs in mid-air."""
    config = ClientConfig(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "max_attempts": 5})
    return boto3.client(service, region_name=os.environ["AWS_REGION"], config=config)


def metadata(path: str) -> str | None:
    """A value of the instance metadata service (version 2), None where it says that there is none.

    Raises:
        NodeError: the service does not answer.
    """
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    try:
        ask = urllib.request.Request(
            f"{base}/latest/api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        )
        with urllib.request.urlopen(ask, timeout=5) as reply:
            token = reply.read().decode()
        ask = urllib.request.Request(
            f"{base}/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": token}
        )
        with urllib.request.urlopen(ask, timeout=5) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise NodeError(f"metadata service answers {error.code} to {path}") from error
    except OSError as error:
        raise NodeError(f"metadata service does not answer: {error}") from error


def required_metadata(path: str) -> str:
    """A value that every machine has."""
    value = metadata(path)
    if value is None:
        raise NodeError(f"metadata service has no {path}")
    return value


def patiently(what: str, ask: Callable[[], _T], patience_s: float = PATIENCE_S) -> _T:
    """Ask again until it works: permissions and parameters may come later than the machine.

    Raises:
        NodeError: it did not work within `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except (BotoCoreError, ClientError, NodeError) as error:
            if time.monotonic() >= deadline:
                raise NodeError(f"{what}: {error}") from error
            _log.warning("%s: %s; asking again", what, error)
            time.sleep(min(5.0, patience_s))


def load_node(patience_s: float = PATIENCE_S) -> Node:
    """Read the environment and the run's description."""
    try:
        run, role = os.environ["TROUPE_RUN"], os.environ["TROUPE_ROLE"]
        learner, parameters = os.environ["TROUPE_LEARNER"], os.environ["TROUPE_PARAMETERS"]
        index = int(os.environ.get("TROUPE_INDEX", "0"))
        os.environ["AWS_REGION"]
    except (KeyError, ValueError) as error:
        raise NodeError(f"user data is incomplete: {error}") from error
    if role not in ROLES:
        raise NodeError(f"TROUPE_ROLE {role!r} should be one of {', '.join(ROLES)}")
    ssm = client("ssm")
    text = patiently(
        f"description of the run at {parameters}/config",
        lambda: ssm.get_parameter(Name=f"{parameters}/config")["Parameter"]["Value"],
        patience_s,
    )
    return Node(run, role, index, learner, parameters, json.loads(text))


def make_own(folder: Path, mode: int = 0o750) -> None:
    """Make a folder that belongs to the services' user."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    give(folder)


def write_own(file: Path, text: str, mode: int) -> None:
    """Write a file at once, for the services' user; nobody ever sees it with wider permissions."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as out:
        out.write(text)
    give(new)
    new.replace(file)


def give(path: Path) -> None:
    """Give a path to the services' user, where there is one."""
    try:
        user = pwd.getpwnam(USER)
    except KeyError:
        return
    os.chown(path, user.pw_uid, user.pw_gid)
