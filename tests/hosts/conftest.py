"""Hosts to run jobs on, on this machine. Without root, iproute2 or openssh-server these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gba_hvd_tools.virtual_hosts import VirtualHosts, missing

from .job import DESK


@pytest.fixture(scope="session")
def _why_not() -> str:
    return missing()


@pytest.fixture
def _hosts_possible(_why_not: str) -> None:
    if _why_not:
        pytest.skip(_why_not)


@pytest.fixture
def lab(tmp_path: Path, _hosts_possible: None) -> Iterator[VirtualHosts]:
    """A desk, where the launcher runs, and two hosts for workers."""
    with VirtualHosts(tmp_path / "lab", (DESK, "h1", "h2")) as lab:
        yield lab
