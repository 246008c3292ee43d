"""The worker that claimed renews the claim until it is released, replaced, or the process ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.claim_renewal import ClaimRenewal
from gba_hvd.checkpoint.job_checkpoints import JobCheckpoints
from recovery import CheckpointCallback
from recovery.catalog import claims
from recovery.errors import StoreError
from recovery.testing import RamStore


class WatchedStore(RamStore):
    """Counts what is written; `fails` writes fail first."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.fails, self.n_puts, self._changed = fails, 0, threading.Condition()

    def put(self, name: str, pieces: Any) -> None:
        with self._changed:
            self.n_puts += 1
            self._changed.notify_all()
            if self.fails:
                self.fails -= 1
                raise StoreError("away")
            super().put(name, pieces)

    def await_puts(self, n: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.n_puts >= n, timeout=60)


@pytest.fixture
def claim_of() -> Iterator[Any]:
    renewals: list[ClaimRenewal] = []

    def start(store: WatchedStore) -> ClaimRenewal:
        renewals.append(ClaimRenewal(claims.Claim(1, "job", "0123abcd", lease_s=0.03), lambda: store))
        return renewals[-1]

    yield start
    for one in renewals:
        one.close()


def test_the_claim_is_renewed_until_the_end_and_no_longer(claim_of: Any) -> None:
    store = WatchedStore()
    renewal = claim_of(store)
    store.await_puts(3)
    renewal.close()
    renewal.close()
    (name,) = store.objects
    assert name == f"claims/000001-job.0123abcd/w{store.n_puts:06d}"


def test_a_renewal_that_fails_is_tried_again(claim_of: Any) -> None:
    store = WatchedStore(fails=2)
    renewal = claim_of(store)
    store.await_puts(4)
    renewal.close()
    assert store.fails == 0 and store.objects


def a_job(url: Path) -> JobCheckpoints:
    events = list[Event]()
    engine: Any = type("Engine", (), {})()
    engine.progress, engine.emit = type("Progress", (), {"step": 3}), events.append
    return JobCheckpoints(engine, CheckpointCallback(str(url), policy="delta", lease_s=30.0))


def renewed(job: JobCheckpoints) -> int | None:
    """Epoch of the claim that this worker renews."""
    return None if job._renewal is None else job._renewal.claim.epoch


def test_a_worker_renews_its_newest_claim_until_it_releases_it(tmp_path: Path) -> None:
    job = a_job(tmp_path / "store")
    assert renewed(job) is None
    job.claim_location("job")
    assert renewed(job) == 1
    job.claim_location("job")
    assert renewed(job) == 2
    job.release()
    assert renewed(job) is None


def test_a_worker_renews_no_claim_that_another_one_has_replaced(tmp_path: Path) -> None:
    job = a_job(tmp_path / "store")
    job.claim_location("job")
    state = {**job.state(), "measured": {}}
    job.load_state(state)
    assert renewed(job) == 1
    state["claim"] = {**state["claim"], "epoch": 2, "nonce": "00000000"}
    job.load_state(state)
    assert renewed(job) is None
