"""Ports and keys of this machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from troupe.common.config import Config
from troupe.common.errors import AuthError
from troupe.common.wire.security.keys import ALLOWED_FILE, KEY_ROLES, AllowList, load_keys
from troupe.services.doctor.checks import Check, service_of


def ports(config: Config) -> Iterator[Check]:
    """Whether what the services would bind is free, and who has it where it is not."""
    net = config.net
    wanted = {"net.control": net.control, "net.announce": net.announce}
    if config.inference.mode == "central":
        wanted["net.inference"] = net.inference
    wanted["net.replay"] = net.replay
    places = [(name, *_place(address)) for name, address in wanted.items() if address.startswith("tcp://")]
    for name, host, port in places:
        several = config.replay.shards if name == "net.replay" else 1
        for index in range(several):
            yield _port(name, host, port + index, "; `troupe train` needs no such port")
    if net.tensorboard_port:
        yield _port("net.tensorboard_port", "127.0.0.1", net.tensorboard_port, moves=True)
    if net.metrics_port:
        yield _port("net.metrics_port", "", net.metrics_port)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return ("" if host == "*" else host.strip("[]")), int(port)


def _port(name: str, host: str, port: int, also: str = "", *, moves: bool = False) -> Check:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    looked_at = f"{name} {port}"
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            why = error.strerror or str(error)
            return Check(
                "ports", looked_at, f"cannot be bound ({why})", "wrong", f"set --{name} to another{also}"
            )
        holder, ours = _holder(port)
        if moves:
            return Check("ports", looked_at, f"held by {holder}", "ok")  # the next free one is taken
        if ours:
            return Check(
                "ports", looked_at, f"held by {holder}", "note", f"a second run needs another --{name}"
            )
        return Check(
            "ports", looked_at, f"held by {holder}", "wrong", f"end it, or set --{name} to another{also}"
        )
    return Check("ports", looked_at, "free")


def _holder(port: int) -> tuple[str, bool]:
    """Who listens on a port, and whether that is a service of ours."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                service = service_of(process.cmdline())
                return f"{service or process.name()} (process {connection.pid})", bool(service)
    except (psutil.Error, OSError):
        pass
    return "another program", False


def keys(directory: str) -> Iterator[Check]:
    """Whether the keys at hand can be used, by whom, and whether the allow-list lets them in."""
    if not directory:
        yield Check("keys", "--keys", "not given; services talk over loopback and ipc only")
        return
    folder = Path(directory).expanduser()
    allowed: AllowList | None = None
    try:
        if (folder / ALLOWED_FILE).exists():
            allowed = AllowList(folder / ALLOWED_FILE)
            yield Check("keys", str(folder / ALLOWED_FILE), "can be used")
    except AuthError as error:
        yield Check("keys", str(folder / ALLOWED_FILE), "cannot be used", "wrong", str(error))
    present = [role for role in KEY_ROLES if (folder / f"{role}.secret").exists()]
    if not present:
        advice = "`troupe keys new DIR` makes a set; each machine needs the files of its roles"
        yield Check("keys", directory, "no ROLE.secret there", "wrong", advice)
    for role in present:
        try:
            own = load_keys(folder, role)
        except AuthError as error:
            yield Check("keys", f"{role}.secret", "cannot be used", "wrong", str(error))
            continue
        if allowed is not None and allowed.role_of(own.public) != role:
            listed = allowed.role_of(own.public) or "nobody"
            advice = f"add `{role} {own.public.decode()}` to {ALLOWED_FILE} of the servers"
            yield Check(
                "keys", f"{role}.secret", f"the allow-list gives it the role {listed}", "wrong", advice
            )
        else:
            yield Check("keys", f"{role}.secret", "usable" + (", and in the allow-list" if allowed else ""))
