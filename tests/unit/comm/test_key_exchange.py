"""Workers come to hold one key, and who listens to what they exchange does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gba_hvd.comm.key_exchange import share_key, shared_secret
from gba_hvd.errors import BadInput, StateMismatch
from gba_hvd.membership import resume_job
from tests.unit.thread_world import Meeting, ThreadWorld, Workers

KEY, SECRET, OTHER = bytes(range(32)), b"s" * 32, b"o" * 32


class Wiretap:
    """Everything that crosses the network, as bytes. change: alters it, as an attacker could."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received = b""
        self.change: Callable[[str, Any], Any] = lambda name, value: value
        before = Meeting.exchange

        def exchange(meeting: Meeting, rank: int, name: str, value: Any) -> list[Any]:
            value = self.change(name, value)
            raw = value if isinstance(value, bytes) else value.tobytes() if isinstance(value, np.ndarray) else b""
            self.received += raw
            return before(meeting, rank, name, value)

        monkeypatch.setattr(Meeting, "exchange", exchange)

    def knows(self, key: bytes) -> bool:
        return key in self.received or key.hex().encode() in self.received


@pytest.fixture
def wiretap(monkeypatch: pytest.MonkeyPatch) -> Wiretap:
    return Wiretap(monkeypatch)


def outcomes(workers: Workers, secrets: list[bytes], root: int = 0, is_restart: bool = False) -> list[Any]:
    def act(world: ThreadWorld) -> bytes:
        key = KEY if world.rank == root else None
        return share_key(world, key, root, secrets[world.rank], is_restart)

    return workers.outcomes(list(range(len(secrets))), lambda _: act(workers._here.world))


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize(("size", "root"), [(1, 0), (2, 1), (3, 0)])
def test_all_ranks_hold_the_roots_key_and_a_listener_does_not(
    workers: Workers, wiretap: Wiretap, secret: bytes, size: int, root: int
) -> None:
    assert outcomes(workers, [secret] * size, root) == [KEY] * size
    assert not wiretap.knows(KEY) and (size == 1 or len(wiretap.received) >= 32 * size)


@pytest.mark.slow
def test_the_key_of_a_job_never_crosses_the_network(
    workers: Workers, wiretap: Wiretap, on_host: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[bytes] = []
    monkeypatch.setattr(resume_job, "new_key", lambda: drawn.append(KEY) or KEY)
    jobs = [on_host(host) for host in "aab"]
    workers.together(jobs, lambda job: job.epoch(clicks(50)))
    assert drawn and {job.optimizer.engine.job.key for job in jobs} == {KEY}
    assert wiretap.received and not wiretap.knows(KEY)


@pytest.mark.parametrize(
    ("secrets", "says"),
    [
        ([SECRET, b"", SECRET], r"ranks \[1\] have no GBA_HVD_KEY_FILE .*rank 0 has one"),
        ([b"", SECRET, b""], r"ranks \[1\] have a GBA_HVD_KEY_FILE .*rank 0 has none"),
        ([SECRET, SECRET, OTHER], r"the secret of ranks \[2\] .* is not that of rank 0"),
    ],
)
def test_ranks_with_another_secret_are_named_on_all_ranks(workers: Workers, secrets: list[bytes], says: str) -> None:
    for outcome in outcomes(workers, secrets):
        with pytest.raises(StateMismatch, match=says):
            raise outcome


def test_a_running_job_goes_on_without_a_late_joiner_that_has_another_secret(workers: Workers) -> None:
    *survivors, late_joiner = outcomes(workers, [SECRET, SECRET, OTHER], is_restart=True)
    assert isinstance(late_joiner, StateMismatch)
    assert ["continuing without them" in str(outcome) for outcome in survivors] == [True, True]


def test_what_was_altered_on_the_way_is_noticed(workers: Workers, wiretap: Wiretap) -> None:
    def alter(name: str, value: Any) -> Any:
        return value[:-1] + bytes([value[-1] ^ 1]) if name == "key.sealed" and value else value

    wiretap.change = alter
    assert isinstance(outcomes(workers, [b"", b""])[1], StateMismatch)


def test_without_the_secret_nobody_can_stand_between_root_and_worker(workers: Workers, wiretap: Wiretap) -> None:
    """An attacker puts a public half of its own in the place of the root's."""

    def alter(name: str, value: Any) -> Any:
        return b"\x09" + bytes(31) + value[32:] if name == "key.public" else value

    wiretap.change = alter
    assert all(isinstance(outcome, StateMismatch) for outcome in outcomes(workers, [SECRET, SECRET]))


def test_a_secret_is_read_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file, text = tmp_path / "key", "0123456789abcdef" * 4
    file.write_text(text + "\n")
    file.chmod(0o600)
    assert shared_secret({}) == b""
    assert len(shared_secret({"GBA_HVD_KEY": text})) == 32
    assert shared_secret({"GBA_HVD_KEY_FILE": str(file)}) == shared_secret({"GBA_HVD_KEY": text})


@pytest.mark.parametrize(
    ("mode", "text", "more", "says"),
    [
        (0o644, "x" * 40, {}, r"mode 0644, so others can read it: chmod 600"),
        (0o600, "short", {}, r"has 5 bytes, 32 or more are needed"),
        (0o600, "x" * 40, {"GBA_HVD_KEY": "y" * 40}, r"both GBA_HVD_KEY_FILE and GBA_HVD_KEY are set"),
        (0o600, None, {}, r"cannot be read: No such file"),
    ],
)
def test_a_secret_that_protects_nothing_is_refused(
    tmp_path: Path, mode: int, text: str | None, more: dict[str, str], says: str
) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(BadInput, match=says):
        shared_secret({"GBA_HVD_KEY_FILE": str(file), **more})
