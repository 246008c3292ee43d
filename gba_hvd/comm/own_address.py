"""Which address of this host others reach its servers at: that of the interface Horovod uses.

A host's name is not asked for: many hosts resolve their own to 127.0.0.1. Horovod's launcher names the interface; where
it did not, the route to the launcher shows it. Guessing comes last: interfaces that are down, or that only containers
and virtual machines of this host see, are no way to another host.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from gba_hvd.errors import GbaError

LOOPBACK, _LOOPBACK_ADDRESS = "lo", "127.0.0.1"
_OF_THIS_HOST_ALONE = ("docker", "br-", "veth", "virbr", "vnet", "cni", "flannel", "cali", "podman", "lxc", "lxd")
_WHAT_TO_DO = (
    "companion servers and Horovod talk over IPv4: give this host an IPv4 address on the interface the others reach it "
    "by, and name that one to the launcher (--network-interface NAME)"
)


def own_address(
    environ: Mapping[str, str] = os.environ,
    addresses: Callable[[], Mapping[str, Sequence[Any]]] = psutil.net_if_addrs,
    stats: Callable[[], Mapping[str, Any]] = psutil.net_if_stats,
    source_towards: Callable[[str], str] | None = None,
) -> str:
    """An IPv4 address. addresses, stats: as psutil has them; source_towards: the address packets to there would bear.

    Raises GbaError when the interface Horovod is configured for cannot be, or when only IPv6 leads to other hosts.
    """
    if "HOROVOD_RANK" not in environ and not environ.get("HOROVOD_GLOO_IFACE"):
        return _LOOPBACK_ADDRESS
    is_up = {name: one.isup for name, one in stats().items()}
    found = {name: _of_family(each, socket.AF_INET) for name, each in addresses().items() if is_up.get(name, True)}
    named = environ.get("HOROVOD_GLOO_IFACE", "")
    if named:
        if found.get(named):
            return found[named][0]
        why = "has no IPv4 address" if named in found else "is down" if named in is_up else "is not there"
        usable = ", ".join(name for name, each in found.items() if each) or "none"
        raise GbaError(f"HOROVOD_GLOO_IFACE={named}: it {why} (interfaces that could be used: {usable}); {_WHAT_TO_DO}")
    launcher = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    source = (source_towards or _source_towards)(launcher) if launcher else ""
    if any(source in each for name, each in found.items() if name != LOOPBACK):
        return source
    is_one_host = environ.get("HOROVOD_SIZE", "1") == environ.get("HOROVOD_LOCAL_SIZE", "1")
    outward = [name for name, each in found.items() if each and name != LOOPBACK]
    outward.sort(key=lambda name: name.startswith(_OF_THIS_HOST_ALONE))
    if outward and not (is_one_host and outward[0].startswith(_OF_THIS_HOST_ALONE)):
        return found[outward[0]][0]
    if not is_one_host and not outward and source not in found.get(LOOPBACK, []):
        others = [(name, each) for name, each in addresses().items() if name != LOOPBACK and is_up.get(name)]
        six = [name for name, each in others if _of_family(each, socket.AF_INET6)]
        text = f"only IPv6 addresses (on {', '.join(six)})" if six else "no address but that of the loopback interface"
        raise GbaError(f"this host has {text}; {_WHAT_TO_DO}")
    return _LOOPBACK_ADDRESS


def _of_family(addresses: Sequence[Any], family: socket.AddressFamily) -> list[str]:
    return [str(one.address) for one in addresses if one.family == family]


def _source_towards(host: str) -> str:
    """The address of this host that packets to `host` bear; empty when there is no way there over IPv4."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""
