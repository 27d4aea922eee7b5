"""Asks a learner, as a viewer, for its run: with the keys at hand, and within a limit of time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import zmq

from troupe.common.config.loading import config_from_dict
from troupe.common.errors import PeerError, TroupeError
from troupe.common.runtime.files import sound_status
from troupe.common.runtime.lifecycle import Deadline
from troupe.common.wire import messages
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import Link, Question, new_incarnation
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.security.key_options import make_security
from troupe.common.wire.sockets import Context, Security, reachable_endpoint
from troupe.services.doctor.checks import Check
from troupe.services.doctor.run import clock, members


def address(endpoint: str, keys: str, timeout_s: float) -> Iterator[Check]:
    """Join the run at an address to look at it, and say what its learner and shards answer."""
    context: Context = zmq.Context()
    client: ControlClient | None = None
    try:
        security = make_security(keys, "viewer")
        name = f"doctor-{os.getpid()}"
        client = ControlClient(
            context, endpoint, role="viewer", name=name, incarnation=new_incarnation(), security=security
        )
        began_s = time.monotonic()
        welcome = client.join(timeout_s)
        opened = " with the keys of the viewer" if keys else ""
        figure = f"answers in {(time.monotonic() - began_s) * 1e3:,.0f} ms{opened}"
        yield Check("learner", endpoint, figure)
        config = config_from_dict(welcome.config, typed_agent=False)
        values, took_s = ask_status(context, endpoint, security, timeout_s)
        if values is None:
            yield Check("learner", "status", "its version reports none", "note", "update the learner")
        else:
            if isinstance(values.get("clock_s"), int | float):
                ahead_s = float(values["clock_s"]) - (time.time() - took_s / 2)
                yield clock("the learner", ahead_s, "this machine's", took_s / 2)
            yield from members(values, config, live=True)
        for shard in welcome.shards:
            yield _shard(context, reachable_endpoint(shard, endpoint), security, min(timeout_s, 5.0))
    except TroupeError as error:
        yield Check("learner", endpoint, "cannot be asked", "wrong", str(error))
    finally:
        if client is not None:
            client.close("has looked", 1.0)
        context.destroy(linger=0)


def ask_status(
    context: Context, endpoint: str, security: Security | None, timeout_s: float
) -> tuple[dict[str, Any] | None, float]:
    """The status of a learner and the seconds that the answer took; None from one that has no such answer.

    Raises `PeerError` after `timeout_s`.
    """
    link = Link(
        context,
        endpoint,
        "learner",
        name="doctor",
        incarnation=new_incarnation(),
        liveness_s=timeout_s,
        security=security,
    )
    link.connect()
    question = Question(messages.Status().message(1))
    deadline = Deadline(timeout_s)
    began_s = time.monotonic()
    try:
        while not deadline.expired:
            question.send(link)
            link.wait(min(100.0, deadline.remaining_s * 1000))
            for message in link.receive():
                if message.type == messages.StatusOk.TYPE:
                    values = messages.StatusOk.of(message).values
                    return sound_status(values), time.monotonic() - began_s
                if message.type == messages.Error.TYPE:
                    return None, time.monotonic() - began_s
            link.lost()  # raises where keys are in the way
    finally:
        link.close(0)
    raise PeerError(f"{link} sent no status within {timeout_s:.0f} s")


def _shard(context: Context, endpoint: str, security: Security | None, timeout_s: float) -> Check:
    client = ReplayClient(endpoint, ctx=context, name="doctor", security=security)
    began_s = time.monotonic()
    try:
        status = client.status(timeout_s)
    except TroupeError as error:
        advice = f"{error}; open its port for this machine if it is to be seen from here"
        return Check("replay", endpoint, "does not answer here", "note", advice)
    finally:
        client.close(0)
    items = sum(table.get("items", 0) for table in status.get("tables", {}).values())
    used = f"{status.get('bytes', 0) / 2**20:,.0f} of {status.get('bytes_limit', 0) / 2**20:,.0f} MiB"
    figure = f"{items:,} items, {used}, {(time.monotonic() - began_s) * 1e3:,.0f} ms"
    return Check("replay", endpoint, figure)
