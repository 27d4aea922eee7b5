"""Machines that are network namespaces of this host, on one switch: their links are cut and made slow."""

from __future__ import annotations

import os
import shutil
import subprocess

PREFIX = "troupe-chaos-"
NETWORK = "10.66.0"
SLOW = {
    "netem": "netem delay 80ms 20ms loss 3%",
    "tbf": "tbf rate 2mbit burst 16kb latency 300ms",  # delays, and drops what would wait for longer
}


def ip(*words: str) -> str:
    """Run `ip`; its output."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def missing() -> str:
    """Why machines cannot be had here; empty where they can."""
    if os.geteuid() != 0:
        return "it needs root, for network namespaces"
    for tool in ("ip", "tc", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        ip("netns", "add", f"{PREFIX}{os.getpid()}-probe")
        ip("netns", "del", f"{PREFIX}{os.getpid()}-probe")
    except RuntimeError as error:
        return f"no network namespace can be made: {error}"
    return ""


class Network:
    """Namespaces with an address each.

    Attributes:
        slow: what makes links slow in this kernel, `netem` or `tbf`; empty where neither does.
    """

    def __init__(self, names: list[str]) -> None:
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
        self._switch = self._prefix + "switch"
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self._switch, "link", "set", "switch", "up")
        for name, address in self._addresses.items():
            there = self.namespace(name)
            ip("netns", "add", there)
            ip("-n", there, "link", "set", "lo", "up")
            ip(
                "-n",
                there,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                name,
                "netns",
                self._switch,
            )
            ip("-n", self._switch, "link", "set", name, "master", "switch", "up")
            ip("-n", there, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", there, "link", "set", "eth0", "up")
        self.slow = next((kind for kind in SLOW if self._can(kind, names[0])), "")

    def address(self, name: str) -> str:
        """Of a machine."""
        return self._addresses[name]

    def namespace(self, name: str) -> str:
        """Of a machine."""
        return self._prefix + name

    def inside(self, name: str, *words: str) -> list[str]:
        """A command line that runs another one on a machine."""
        return ["ip", "netns", "exec", self.namespace(name), *words]

    def cut(self, name: str) -> None:
        """Take a machine off the network."""
        ip("-n", self._switch, "link", "set", name, "down")

    def join(self, name: str) -> None:
        """Put it back."""
        ip("-n", self._switch, "link", "set", name, "up")

    def slow_down(self, name: str) -> None:
        """Delay, and lose some of, what a machine sends and gets."""
        self._shape(name, self.slow)

    def speed_up(self, name: str) -> None:
        """As before."""
        for namespace, device in self._ends(name):
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], check=True)

    def close(self) -> None:
        """Remove the namespaces."""
        for name in [*self._addresses, "switch"]:
            ip("netns", "del", self._prefix + name)

    def _ends(self, name: str) -> list[tuple[str, str]]:
        return [(self._switch, name), (self.namespace(name), "eth0")]

    def _shape(self, name: str, kind: str) -> None:
        for namespace, device in self._ends(name):
            words = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *SLOW[kind].split()]
            subprocess.run(words, check=True, capture_output=True)

    def _can(self, kind: str, name: str) -> bool:
        try:
            self._shape(name, kind)
        except subprocess.CalledProcessError:
            return False
        self.speed_up(name)
        return True
