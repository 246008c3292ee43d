"""Servers listen where other hosts reach them, or the reason why they cannot is said."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.comm.own_address import own_address
from gba_hvd.errors import GbaError

SEVERAL = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2"}


def of(environ: dict[str, str], source: str = "", **interfaces: str) -> str:
    """interfaces: name = addresses; one that begins with "down" is."""
    names = {name.replace("_", "-"): text.split() for name, text in interfaces.items()}

    def address(text: str) -> Any:
        return SimpleNamespace(family=socket.AF_INET6 if ":" in text else socket.AF_INET, address=text)

    return own_address(
        environ,
        lambda: {name: [address(text) for text in texts if text != "down"] for name, texts in names.items()},
        lambda: {name: SimpleNamespace(isup="down" not in texts) for name, texts in names.items()},
        lambda host: source,
    )


def test_the_interface_horovod_was_given_is_used() -> None:
    assert of({**SEVERAL, "HOROVOD_GLOO_IFACE": "ib0"}, eth0="10.0.0.1", ib0="fe80::1 10.1.0.1") == "10.1.0.1"


@pytest.mark.parametrize(
    ("interfaces", "says"),
    [
        ({"eth0": "10.0.0.1"}, r"it is not there \(interfaces that could be used: eth0\)"),
        ({"eth0": "10.0.0.1", "ib0": "down 10.1.0.1"}, "it is down"),
        ({"eth0": "10.0.0.1", "ib0": "fd00::1"}, "it has no IPv4 address"),
    ],
)
def test_one_that_cannot_be_used_is_refused_and_not_replaced_by_another(interfaces: dict[str, str], says: str) -> None:
    with pytest.raises(GbaError, match=says + ".*--network-interface"):
        of({**SEVERAL, "HOROVOD_GLOO_IFACE": "ib0"}, **interfaces)


def test_else_the_way_to_the_launcher_reports_it() -> None:
    environ = {**SEVERAL, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.1.0.9"}
    assert of(environ, "10.1.0.1", lo="127.0.0.1", docker0="172.17.0.1", eth0="10.0.0.1", eth1="10.1.0.1") == "10.1.0.1"
    assert of(environ, "192.168.7.7", lo="127.0.0.1", eth0="10.0.0.1") == "10.0.0.1", "not an address of ours"


def test_interfaces_of_containers_and_those_that_are_down_come_last() -> None:
    assert of(SEVERAL, lo="127.0.0.1", docker0="172.17.0.1", br_7f="172.18.0.1", eth0="10.0.0.1") == "10.0.0.1"
    assert of(SEVERAL, lo="127.0.0.1", eth0="down 10.0.0.1", eth1="10.1.0.1") == "10.1.0.1"
    assert of(SEVERAL, lo="127.0.0.1", docker0="172.17.0.1") == "172.17.0.1"


def test_a_host_with_ipv6_alone_is_refused_where_there_are_others() -> None:
    with pytest.raises(GbaError, match=r"only IPv6 addresses \(on eth0\); .* talk over IPv4"):
        of(SEVERAL, lo="127.0.0.1 ::1", eth0="fd00::1")
    with pytest.raises(GbaError, match="no address but that of the loopback"):
        of(SEVERAL, lo="127.0.0.1", eth0="down fd00::1")
    assert of({**SEVERAL, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}, "127.0.0.1", lo="127.0.0.1") == "127.0.0.1"
    alone = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"}
    assert of(alone, lo="127.0.0.1", eth0="fd00::1") == of({}, eth0="10.0.0.1") == "127.0.0.1"
