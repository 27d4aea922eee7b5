"""A shard from its options to its end: bind, join the run if there is one, open the folder, serve."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from troupe.common.data.plan import make_plan
from troupe.common.data.schema import FieldSpec
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError
from troupe.common.runtime import watchdog
from troupe.common.runtime.lifecycle import StopSignal
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.messages import REPLAY_LIMITS
from troupe.common.wire.replay.codec import specs_from_wire
from troupe.common.wire.security.key_options import make_security
from troupe.common.wire.sockets import Context, bound_endpoint, make_router
from troupe.services.replay.folder import clear
from troupe.services.replay.options import ShardOptions
from troupe.services.replay.service import ReplayService
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.storage.snapshot import restore_snapshot

_log = logging.getLogger(__name__)

_SURVIVES = {
    "none": "nothing; a restart begins empty (replay.durable = none)",
    "process": "the death of this process, not a power cut (replay.durable = process)",
    "power": "a power cut (replay.durable = power)",
}
"""What acknowledged items survive, by `replay.durable`; for the log."""


def serve(options: ShardOptions, ctx: Context, stop: StopSignal) -> None:
    """Bind, join the run if there is one, open the folder, and serve."""
    # Bound before joining, for the learner passes the address on. Early requests wait in the socket.
    security = make_security(options.keys, "replay", insecure=options.insecure)
    router = make_router(ctx, options.bind, security, max_message_bytes=REPLAY_LIMITS.array_bytes)
    control, run, specs, item_steps = None, "", None, None
    try:
        endpoint = options.advertise or bound_endpoint(router)
        if options.learner and not options.advertise:
            endpoint = address_towards(options.learner, endpoint)
        if options.learner:
            incarnation = new_incarnation()
            control = ControlClient(
                ctx,
                options.learner,
                role="replay",
                name=f"replay-{options.index}",
                incarnation=incarnation,
                replay_endpoint=endpoint,
                connect_timeout_s=options.join_timeout_s,
                security=security,
            )
            welcome = control.join_unless(lambda: stop.requested)
            if welcome is None:
                return
            run = welcome.run
            if welcome.fields:
                specs = specs_from_wire(welcome.fields)
                item_steps = (welcome.least_item_steps, welcome.most_item_steps)
            from troupe.common.config import section_from_dict  # see with_run

            watchdog.arm(section_from_dict("run", welcome.config.get("run"), source="the run").hang_s)
            options = with_run(options, welcome.config, welcome.seed(incarnation, options.index))
        replay = open_replay(options, run, specs, item_steps)
        _log.info("serving at %s", endpoint)
        # Without keys and off loopback anybody could have files written here.
        permitted = options.snapshot_to or (None if options.insecure and not options.keys else "")
        ReplayService(replay, router, stop, control, snapshots=permitted).run()
        replay.close()
    finally:
        if control is not None:
            control.close()
        # A second for the last acknowledgements: without them actors would send the same chunks again to a
        # shard that is gone.
        router.close(linger=1000)


def address_towards(learner: str, endpoint: str) -> str:
    """Put a host that others can reach in place of a wildcard: the one that packets to the learner leave by.

    Raises:
        ConfigError: there is none, or only one that means something else on other machines.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if host not in ("0.0.0.0", "[::]"):
        return endpoint
    local = ""
    if learner.startswith("tcp://"):
        learner_host, _, learner_port = learner.removeprefix("tcp://").rpartition(":")
        local = _host_towards(learner_host.strip("[]"), learner_port)
    if not local or ipaddress.ip_address(local).is_loopback:
        raise ConfigError(
            f"bound to every interface, but the learner at {learner} does not show by which one "
            f"others reach this shard: give --advertise tcp://HOST:{port}"
        )
    return f"tcp://[{local}]:{port}" if ":" in local else f"tcp://{local}:{port}"


def _host_towards(host: str, port: str) -> str:
    """Return the own address that packets to `host` come from; empty where there is no way to it."""
    with contextlib.suppress(OSError):  # connecting a datagram socket sends nothing
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def with_run(options: ShardOptions, config: dict[str, Any], seed: int) -> ShardOptions:
    """Return the options with what the run's configuration decides; `seed` is the run's for this shard."""
    # Only these sections: to read that of the agent would import its algorithm, and torch with it.
    # It takes a second to import, so not for a shard by itself.
    from troupe.common.config import section_from_dict

    replay = section_from_dict("replay", config.get("replay"), source="the run")
    return replace(
        options,
        tables=tuple(replay.shard_tables(replay.shards)),
        max_bytes=replay.max_bytes,
        volatile=options.volatile or replay.durable == "none",
        durable=options.durable or replay.durable,
        seed=seed if options.seed is None else options.seed,
    )


def open_replay(
    options: ShardOptions,
    run: str = "",
    specs: Sequence[FieldSpec] | None = None,
    item_steps: tuple[int, int] | None = None,
) -> Replay:
    """Open the folder for `run` (empty: for none), and say what is in it, and what it may grow to.

    `specs` and `item_steps` are those of the run's items.
    """
    tables = options.tables
    if options.volatile:
        clear(options.data_dir, [table.name for table in tables])
    if options.restore:
        # What would be refused afterwards is refused before anything is copied.
        make_plan(options.data_dir, tables, options.max_bytes)
        restore(options.restore, options.data_dir, tables, None if options.adopt else run)
    try:
        options.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ConfigError(f"cannot write in {options.data_dir}: {failure.strerror}") from None
    plan = make_plan(options.data_dir, tables, options.max_bytes)
    _log.info("memory plan for %d items: %s", sum(table.capacity for table in tables), plan)
    replay = Replay(
        options.data_dir,
        tables,
        budget_bytes=plan.store_bytes,
        must_fit=options.max_bytes is None,
        seed=options.seed,
        run=run,
        adopt=options.adopt,
        specs=specs,
        item_steps=item_steps,
        durable=options.durable or "process",
    )
    if options.max_bytes is not None and replay.budget_bytes < options.max_bytes:
        _log.warning(
            "%s was made for %d bytes and keeps that size, not %d: to change it, start with another "
            "--data-dir",
            options.data_dir,
            replay.budget_bytes,
            options.max_bytes,
        )
    _log.info("what is acknowledged survives: %s", _SURVIVES["none" if options.volatile else replay.durable])
    if replay.restored_items:
        _log.info("restored %d items from %s", replay.restored_items, options.data_dir)
    return replay


def restore(source: str, folder: Path, tables: Sequence[TableConfig], run: str | None) -> None:
    """Make the folder of these tables from a snapshot of `run` (empty: of none; None: of any)."""
    if "://" not in source:
        source = os.path.abspath(source)
    items = restore_snapshot(source, folder, _log.info, run=run, tables=tables)
    if items is None:
        _log.info("%s was restored from %s before: continuing from what it holds now", folder, source)
    else:
        _log.info("restored the snapshot in %s: %d items", source, items)
