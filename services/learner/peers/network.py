"""Where learners may reach each other: what they say is not encrypted."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from troupe.common.errors import ConfigError

LOOPBACK = "127.0.0.1"


def own_address(network: str) -> str:
    """The address of this machine in `net.learner_network`; that of loopback where none is named.

    Raises ConfigError where this machine has none there.
    """
    if not network:
        return LOOPBACK
    private = ipaddress.ip_network(network)
    family = socket.AF_INET if private.version == 4 else socket.AF_INET6
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == family and ipaddress.ip_address(each.address.partition("%")[0]) in private:
                return each.address.partition("%")[0]
    raise ConfigError(f"this machine has no address in net.learner_network {network}")


def check_machine(endpoint: str, network: str) -> None:
    """Refuse to join a learner of another machine at `endpoint` where no private network is named.

    It would get seats, and look for the others on the loopback of its own machine.
    """
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if network or not endpoint.startswith("tcp://"):
        return
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError:  # whoever connects tells
        return
    own = {each.address.partition("%")[0] for known in psutil.net_if_addrs().values() for each in known}
    if not any(address in own or ipaddress.ip_address(address).is_loopback for address in found):
        raise ConfigError(
            f"the learner at {endpoint} is on another machine, and gradients are not encrypted: set "
            "net.learner_network of its run to a private network of both"
        )


def check_meeting(host: str, network: str) -> None:
    """Refuse an address to meet at that is neither loopback nor in the network said to be private."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"learners cannot meet at {host!r}, which is no address") from None
    if network:
        if address in ipaddress.ip_network(network):
            return
    elif address.is_loopback:
        return
    raise ConfigError(
        f"learners cannot meet at {host}: gradients are not encrypted, so learners are on one machine or in "
        "the private network that net.learner_network names"
    )
