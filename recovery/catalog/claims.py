"""Who may write to a checkpoint location: one writer at a time; one that was cut off is fenced when it returns.

A writer claims a location under an epoch, the fencing token: a number that no other writer has. Manifests are named and
ordered by (epoch, number), so all that an old writer still writes is older than anything of its successor.

What is written, by whom. Objects `claims/EPOCH-WRITER.NONCE/N`, by the claimant, and by a process that it delegated
the renewals to: N = 000000 is the claim, larger ones are lease renewals, `closed` says that the writer left in peace.
Of two processes that renew, one puts a letter before its numbers, so no two write one name. Nothing is ever changed,
so nothing more is asked of the store than that a listing shows what was written before it was asked for.

Why an epoch has one owner. A claimant writes its claim, then lists. It owns the epoch if the listing has its own claim
and no other one of this epoch or a later one. Of two that own the same epoch, neither saw the other's claim: so each
wrote after the other had listed, and listed after it wrote. That is a circle. Of several that see each other, the one
with the largest name tries the next epoch, the others are refused: one gets through.

Why an old owner does no harm. It learns from `check`, before each manifest, that a later epoch exists. If it is stopped
between that and its write, its manifest appears late: complete, but older than the successor's first. Until that one is
there nothing of the successor's was saved, so nothing that was saved is hidden. Its blobs have names of its own epoch.

What a crash leaves. Before the claim is written: nothing. After: a claim without renewals, which is waited for and
passed over. Before `closed`: the same.

Who is alive. Clocks of hosts are not compared, and a store's clock is not asked for. A new claimant lists again and
again for as long as the other promised to renew three times: a new renewal means alive. So an owner that is only
slow may be passed over; it will be fenced, not believed. A writer of the same name is the same job, which was started
again: it is let in at once, and the process it replaces is fenced. Nor is a claim waited for whose claimant and
renewers have all ended on this host. Where workers on other hosts live, and were about to claim again, they are
not hurt: the later of both claims is in force, and the other one is fenced.

Of this host more is known. A claim whose claimant is another living process of this host is not taken over, however
old its newest renewal is, by a writer of the same name neither: the new claimant is refused at once, and has written
nothing. The exceptions are `takeover`, and a job that holds the newest claim and claims again (`again`, `after`). Which
part of its own process holds a claim a claimant does not know: there the lease decides.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from recovery.catalog.writer_process import WriterProcess
from recovery.errors import BadInput, Fenced, StoreError
from recovery.storage.store import Store, epoch_of

log = logging.getLogger("recovery")

_CLAIM = re.compile(r"claims/(?P<epoch>\d{6,9})-(?P<writer>.+)\.(?P<nonce>[0-9a-f]{8})/(?P<sign>[a-z]?\d{6,12}|closed)")
_WRITER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}")
_CLOSED = "closed"
_LONGEST_LEASE_S = 600.0
_LISTINGS = 5
_LOOKS = 10
_ADVICE = (
    "give this job a location of its own, end the other one, or take over from it (takeover=True), which cuts it off"
)


@dataclass(frozen=True, order=True)
class Claim:
    """The right to write under an epoch, until another writer takes over.

    signs: renewals so far; lease_s: one is due every third of it.
    """

    epoch: int
    writer: str
    nonce: str
    signs: int = 0
    lease_s: float = 30.0

    @property
    def name(self) -> str:
        return f"claims/{self.epoch:06d}-{self.writer}.{self.nonce}"


@dataclass(frozen=True, order=True)
class Seen:
    """A claim as a listing shows it. signs: the last parts of its names."""

    epoch: int
    writer: str
    nonce: str
    signs: frozenset[str]

    @property
    def is_closed(self) -> bool:
        return _CLOSED in self.signs

    @property
    def name(self) -> str:
        return Claim(self.epoch, self.writer, self.nonce).name


def claim(
    store: Store,
    writer: str,
    *,
    takeover: bool = False,
    after: Claim | None = None,
    again: bool = False,
    lease_s: float = 30.0,
    looks: int = _LOOKS,
    sleep: Callable[[float], None] = time.sleep,
    nonce: Callable[[], str] = lambda: secrets.token_hex(4),
) -> Claim:
    """Claim a location for `writer`, the job's name.

    May wait for `lease_s` (theirs, if it is longer) to learn whether another writer is alive, and logs that it does.
    Does not wait for one whose processes have ended on this host.
    takeover: do not ask, fence it. after: the claim of a process that died, which this one supersedes.
    again: the claims of this name are those of this job, whose processes know of each other.

    Raises BadInput when another job writes here, at once where its process lives on this host; Fenced when another
    process has written here since `after`.
    """
    if not _WRITER.fullmatch(writer):
        raise BadInput(f"a writer is named by letters, digits, '.', '_' and '-', at most 80, got {writer!r}")
    if not 0 < lease_s <= _LONGEST_LEASE_S:
        raise BadInput(f"lease_s must be positive and at most {_LONGEST_LEASE_S:g} s, got {lease_s}")
    seen = claims_of(store.names("claims/"))
    if after is not None:
        _require_newest(store, seen, after)
    newest = max(seen, default=None)
    if newest is not None and not newest.is_closed and not takeover:
        if newest.writer != writer or not (again or after is not None):
            _refuse_if_lives_here(store, newest)
        if newest.writer != writer:
            _refuse_if_alive(store, newest, lease_s, looks, sleep)
    epochs = [one.epoch for one in seen]
    # Normally there are none beyond the claims; but claims can be deleted by hand.
    epochs += [epoch for name in store.names("manifests/") if (epoch := epoch_of(name)) is not None]
    mine = Claim(max(epochs, default=0) + 1, writer, nonce(), lease_s=lease_s)
    while True:
        try:
            _write(store, mine, "000000")
            others = [one for one in _listing(store, mine, sleep) if one.name != mine.name and one.epoch >= mine.epoch]
        except StoreError:
            with contextlib.suppress(StoreError):  # it would fence the one who wrote it
                store.delete([f"{mine.name}/000000"])
            raise
        if not others:
            return mine
        first = max(others)
        if (first.epoch, first.writer, first.nonce) > (mine.epoch, mine.writer, mine.nonce):
            store.delete([f"{mine.name}/000000"])
            raise BadInput(
                f"{store.url} was claimed by job {first.writer!r}{_where(store, first)} at the same moment: "
                "it continues, this one does not; give each job a checkpoint location of its own"
            )
        mine = replace(mine, epoch=mine.epoch + 1)


def renew(store: Store, claim: Claim, series: str = "") -> Claim:
    """Renew the claim; returns the renewed one. To be called every lease_s / 3.

    series: a letter that distinguishes the renewals of this process from those of another one of the same claim.
    """
    renewed = replace(claim, signs=claim.signs + 1)
    _write(store, claim, f"{series}{renewed.signs:06d}")
    if claim.signs:
        store.delete([f"{claim.name}/{series}{claim.signs:06d}"])
    return renewed


def after_renewals(store: Store, claim: Claim) -> Claim:
    """The claim as the newest renewal without a letter has it: another process continues from there."""
    seen = claims_of(store.names(f"{claim.name}/"))
    numbers = [int(sign) for one in seen for sign in one.signs if sign.isdigit()]
    return replace(claim, signs=max(numbers, default=0))


def is_free_again(store: Store, claim: Claim) -> bool:
    """Whether another writer has taken over since this claim, and has left, without having saved anything."""
    newest = max(claims_of(store.names("claims/")), default=None)
    if newest is None or newest.epoch <= claim.epoch or not newest.is_closed:
        return False
    return all((epoch_of(name) or 0) <= claim.epoch for name in store.names("manifests/"))


def check(store: Store, claim: Claim) -> None:
    """Raises Fenced when another writer has taken over. To be called before each manifest is written."""
    seen = claims_of(store.names("claims/"))
    _require_newest(store, seen, claim)
    if claim.name not in {one.name for one in seen}:
        raise StoreError(
            f"{store.url}: the claim {claim.name} is not listed; the listing is old, or the claim was removed"
        )


def release(store: Store, claim: Claim) -> None:
    """Leave in peace: the next writer need not wait."""
    _write(store, claim, _CLOSED)


def claims_of(names: Iterable[str]) -> list[Seen]:
    """The claims among the names of a listing."""
    found: dict[tuple[int, str, str], set[str]] = {}
    for name in names:
        if match := _CLAIM.fullmatch(name):
            found.setdefault((int(match["epoch"]), match["writer"], match["nonce"]), set()).add(match["sign"])
    return [Seen(*key, frozenset(signs)) for key, signs in found.items()]


def _require_newest(store: Store, seen: Iterable[Seen], claim: Claim) -> None:
    mine = (claim.epoch, claim.writer, claim.nonce)
    later = [one for one in seen if (one.epoch, one.writer, one.nonce) > mine]
    if later:
        newest = max(later)
        raise Fenced(
            f"{store.url}: job {newest.writer!r}{_where(store, newest)} has taken over (epoch {newest.epoch}, this "
            f"process has {claim.epoch}); nothing more is saved from here: end this process, or claim again"
        )


def _refuse_if_lives_here(store: Store, other: Seen) -> None:
    process = WriterProcess.of(_about(store, other))
    if process is not None and process.pid != os.getpid() and process.lives_here():
        raise BadInput(
            f"{store.url} is being written to by job {other.writer!r}{_where(store, other)}, and that process lives on "
            f"this host: {_ADVICE}"
        )


def _refuse_if_alive(store: Store, other: Seen, lease_s: float, looks: int, sleep: Callable[[float], None]) -> None:
    """Wait for a lease renewal of another writer, and look so often meanwhile, also after a pause of this process."""
    if _has_ended_here(store, other):
        log.info(
            "the claim of job %r%s on %s was not released, and its process has ended: it is passed over",
            other.writer, _where(store, other), store.url,
        )  # fmt: skip
        return
    promised_s = _about(store, other).get("lease_s")
    wait_s = max(lease_s, min(promised_s, _LONGEST_LEASE_S)) if isinstance(promised_s, int | float) else lease_s
    _report_wait(store, other, wait_s)
    for _ in range(looks):
        sleep(wait_s / looks)
        now = {one.name: one for one in claims_of(store.names("claims/"))}
        if other.name in now and now[other.name].is_closed:
            return
        new_signs = now[other.name].signs - other.signs if other.name in now else frozenset()
        if new_signs or any(one.epoch > other.epoch for one in now.values()):
            alive = max(now.values())
            raise BadInput(
                f"{store.url} is being written to by job {alive.writer!r}{_where(store, alive)}, which renewed its "
                f"lease in the last {wait_s / looks:.1f} s: {_ADVICE}"
            )


def _report_wait(store: Store, other: Seen, wait_s: float) -> None:
    log.warning(
        "waiting for up to %g s for a renewal by job %r%s, whose claim on %s was not released: it is running, or "
        "was killed. If the claim is not renewed meanwhile, this job continues; if it is, this job is refused. If you "
        "know that the other one is dead, start this one with takeover=True, which does not wait",
        wait_s, other.writer, _where(store, other), store.url,
    )  # fmt: skip


def _listing(store: Store, mine: Claim, sleep: Callable[[float], None]) -> list[Seen]:
    """A listing that is not older than my claim."""
    for attempt in range(_LISTINGS):
        seen = claims_of(store.names("claims/"))
        if mine.name in {one.name for one in seen}:
            return seen
        sleep(0.1 * 2**attempt)
    raise StoreError(f"{store.url}: {mine.name} was written, but {_LISTINGS} listings do not show it: they are old")


def _write(store: Store, claim: Claim, sign: str) -> None:
    about = {"host": socket.gethostname(), "lease_s": claim.lease_s, **asdict(WriterProcess.this())}
    store.put(f"{claim.name}/{sign}", [json.dumps(about, sort_keys=True).encode()])


def _has_ended_here(store: Store, seen: Seen) -> bool:
    """Whether the claimant and all renewers were of this host, and have ended."""
    return all(
        (process := WriterProcess.of(_about(store, seen, sign))) is not None and process.has_ended_here()
        for sign in {"000000", *seen.signs}
    )


def _about(store: Store, seen: Seen, sign: str = "000000") -> dict[str, Any]:
    try:
        about = json.loads(store.get(f"{seen.name}/{sign}"))
    except (StoreError, ValueError):  # half written, or gone: little depends on it
        return {}
    return about if isinstance(about, dict) else {}


def _where(store: Store, seen: Seen) -> str:
    about = _about(store, seen)
    return f" on host {about['host']} (process {about.get('pid')})" if "host" in about else ""
