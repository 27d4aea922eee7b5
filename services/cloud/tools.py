"""Terraform and AWS's own command line: what they say, why they fail, and how long they may take."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troupe.common.errors import ConfigError, PeerError, TroupeError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import atomic_write
from troupe.services.cloud.prices import TERRAFORM

_ANSWER_S = 120.0
_CHANGE_S = 2400.0
_COPY_S = 7200.0
_VARIABLES = "terraform.tfvars.json"
# Of the folder: what plans, documents and tests it, and what others have planned there.
_NOT_COPIED = (".terraform", "*.tfstate*", "*.tfvars*", "tests", "examples", "*.md", "*.py")


class ToolError(PeerError):
    """A program has failed, or not ended in time; what it was about may be half done."""


class GivenUpError(TroupeError):
    """The user has asked twice to stop."""

    exit_code = 130


class Tools:
    """Runs programs, which outlive Ctrl-C: what is half done in AWS has to be ended or written down."""

    def __init__(self, folder: Path, region: str, stop: StopSignal) -> None:
        """Create; `region` is AWS's, `stop` counts how often the user has asked for an end."""
        self.folder, self.region, self.stop = folder, region, stop
        self.log = folder / "tools.log"
        # Version 1 of the command line knows only the second name.
        names = ("AWS_REGION", "AWS_DEFAULT_REGION")
        self._env = {**os.environ, **dict.fromkeys(names, region), "AWS_PAGER": "", "CHECKPOINT_DISABLE": "1"}

    def run(self, *words: str | Path, cwd: Path | None = None, timeout_s: float = _ANSWER_S) -> str:
        """Run a program; its output.

        Raises:
            ToolError: it fails, with what it says, or takes too long.
            GivenUpError: the user asks a second time; the program goes on and ends what it is about.
        """
        line = [str(word) for word in words]
        with self.log.open("a") as log:
            log.write(f"{time.strftime('%F %T')} {shlex.join(line)}\n")
        with (self.folder / ".output").open("w+") as output, (self.folder / ".errors").open("w+") as errors:
            # In a session of its own: Ctrl-C in the terminal goes to this program alone.
            child = subprocess.Popen(
                line, cwd=cwd, env=self._env, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
            self._wait(child, line, timeout_s)
            output.seek(0)
            errors.seek(0)
            told, wrong = output.read(), errors.read()
        with self.log.open("a") as log:
            log.write(told[-20_000:] + wrong[-20_000:])
        if child.returncode:
            raise ToolError(f"{shown(line)}: {cause(wrong or told)} (full output: {self.log})")
        return told

    def _wait(self, child: subprocess.Popen[bytes], line: Sequence[str], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
                return
            if self.stop.signals > 1:
                child.returncode = 0  # nobody waits for it any more
                raise GivenUpError(f"given up; `{shown(line)}` (process {child.pid}) is left to finish")
            if time.monotonic() > deadline_s:
                child.send_signal(signal.SIGINT)  # Terraform writes down what it has done
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(60.0)
                child.kill()
                child.wait()
                raise ToolError(f"{shown(line)}: not done in {timeout_s / 60:.0f} minutes (see {self.log})")


def shown(line: Sequence[str]) -> str:
    """The beginning of a command: the program and what it is to do."""
    return " ".join([Path(line[0]).name, *(word for word in line[1:4] if not word.startswith(("-", "/")))])


def cause(text: str) -> str:
    """What a program says went wrong, on one line: Terraform's first box, else the last line."""
    plain = [re.sub(r"^[\s│╷╵|]+", "", line).strip() for line in text.splitlines()]
    first = next((at for at, line in enumerate(plain) if line.startswith("Error:")), None)
    if first is None:
        told = [line for line in plain if line]
        return told[-1] if told else "no word of why"
    following = next((at for at, line in enumerate(plain) if at > first and line.startswith("Error:")), None)
    words = " ".join(" ".join(plain[first:following]).split()).removeprefix("Error: ")
    return words if len(words) < 400 else f"{words[:400]}..."


def check_programs() -> None:
    """Refuse to begin without the programs that are used.

    Raises:
        ConfigError: one is not installed, or no region is chosen.
    """
    for name in ("terraform", "aws"):
        if shutil.which(name) is None:
            raise ConfigError(f"{name} is not installed; docs/aws.md says which programs are needed")


class Terraform:
    """A copy of the configuration with its variables and its state, in a folder of the run."""

    def __init__(self, folder: Path, tools: Tools) -> None:
        """Create; the folder may be there already."""
        self.folder, self._tools = folder, tools

    def copy(self) -> None:
        """Take this version's files along: a later version would change, and not only destroy."""
        ignored = shutil.ignore_patterns(*_NOT_COPIED)
        shutil.copytree(TERRAFORM, self.folder, ignore=ignored, dirs_exist_ok=True)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables as they were last set."""
        file = self.folder / _VARIABLES
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def set(self, changes: Mapping[str, Any]) -> None:
        """Set variables, for the next `apply`."""
        text = json.dumps({**self.variables, **changes}, indent=1, sort_keys=True)
        atomic_write(self.folder / _VARIABLES, text.encode())

    def init(self) -> None:
        """Fetch the provider."""
        self._run("init", timeout_s=600.0)

    def apply(self, **changes: Any) -> None:
        """Set variables, and have AWS be as they say."""
        self.set(changes)
        self._run("apply", "-auto-approve", "-lock-timeout=10m", timeout_s=_CHANGE_S)

    def destroy(self) -> None:
        """Delete everything."""
        self._run("destroy", "-auto-approve", "-lock-timeout=10m", timeout_s=_CHANGE_S)

    def outputs(self) -> dict[str, Any]:
        """What the configuration says."""
        said = json.loads(self._tools.run("terraform", "output", "-json", "-no-color", cwd=self.folder))
        return {name: each["value"] for name, each in said.items()}

    def resources(self) -> list[str]:
        """The addresses of all that there is, by the state on this computer."""
        if not (self.folder / "terraform.tfstate").exists():
            return []
        found = self._tools.run("terraform", "state", "list", cwd=self.folder).split("\n")
        return [line for line in found if line and ".data." not in f".{line}"]

    def _run(self, *words: str, timeout_s: float) -> None:
        self._tools.run(
            "terraform", *words, "-input=false", "-no-color", cwd=self.folder, timeout_s=timeout_s
        )


class Aws:
    """What a run's machines and its bucket are, by AWS's own command line."""

    def __init__(self, tools: Tools, run: str) -> None:
        """Create, for the run of this name in AWS."""
        self._tools, self._run = tools, run

    def account(self) -> str:
        """Whose credentials these are."""
        return str(self._ask("sts", "get-caller-identity")["Arn"])

    def machines(self) -> dict[str, int]:
        """How many machines each role has: those that cost something."""
        tag = f"Name=tag:Run,Values={self._run}"
        states = "Name=instance-state-name,Values=pending,running,shutting-down,stopping"
        said = self._ask("ec2", "describe-instances", "--filters", tag, states)
        counts: dict[str, int] = {}
        for one in (each for group in said["Reservations"] for each in group["Instances"]):
            tags = {tag["Key"]: tag["Value"] for tag in one.get("Tags", ())}
            role = str(tags.get("Role", "actor"))
            counts[role] = counts.get(role, 0) + 1
        return counts

    def copied(self, bucket: str) -> dict[str, int]:
        """Size of every file of the run in the bucket, by its path in the run directory."""
        prefix = f"runs/{self._run}/"
        said = self._ask("s3api", "list-objects-v2", "--bucket", bucket, "--prefix", prefix, empty={})
        return {str(one["Key"])[len(prefix) :]: int(one["Size"]) for one in said.get("Contents") or ()}

    def fetch_one(self, bucket: str, name: str, target: Path) -> bool:
        """Fetch a file of the run; whether there is one."""
        source = f"s3://{bucket}/runs/{self._run}/{name}"
        try:
            self._tools.run("aws", "s3", "cp", "--only-show-errors", source, target)
        except ToolError as error:
            if "(404)" in str(error):
                return False
            raise
        return True

    def fetch(self, bucket: str, target: Path) -> None:
        """Fetch every file of the run."""
        source = f"s3://{bucket}/runs/{self._run}"
        self._tools.run("aws", "s3", "sync", "--only-show-errors", source, target, timeout_s=_COPY_S)

    def _ask(self, *words: str, empty: Any = None) -> Any:
        said = self._tools.run("aws", *words, "--output", "json")
        return json.loads(said) if said.strip() else empty
