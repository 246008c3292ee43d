"""What a checkpoint consists of, as a JSON document. Written last: it makes the checkpoint visible.

A checkpoint is a base (all rows) or a partial save (some rows) on top of its parent. Restoring one means its chain:
the base, then every partial save up to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recovery.rows import Schema


@dataclass(frozen=True)
class Section:
    """Some rows of one table in one shard: consecutive bytes of a blob.

    start, n_bytes: where it is in the blob. raw_bytes: its size when decoded.
    first: the place of its first row, of `n_rows` consecutive ones; None: the places are in the section, before the
        records.
    step: every row is as of this step: weights, slots, together.
    encoding: how to decode it, see `codec`. checksum: of the bytes in the blob, hexadecimal.
    """

    table: int
    shard: int
    n_rows: int
    first: int | None
    step: int
    start: int
    n_bytes: int
    raw_bytes: int
    encoding: str
    checksum: str


@dataclass(frozen=True)
class Blob:
    """One object of the store, and the sections it consists of: they cover it without gaps."""

    name: str
    n_bytes: int
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class StateBlob:
    """The one object that has what is not a row: dense parameters, optimizer state, position. Opaque bytes, encoded."""

    name: str
    n_bytes: int
    raw_bytes: int
    encoding: str
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """One checkpoint.

    epoch: of the writer's claim (see `claims`); number: counts this run's checkpoints. Newer is larger (epoch, number).
    kind: "full" | "delta" | "mfu" | "ssu" | "scar". parent: name of the checkpoint it is on top of; None for a base.
    step: of the state; rows have the steps of their sections. samples: applied so far.
    saved_unix_s: for people. about: plain JSON of the caller (job, mode, versions ...).
    """

    epoch: int
    number: int
    kind: str
    parent: str | None
    step: int
    samples: int
    saved_unix_s: float
    schema: Schema
    blobs: tuple[Blob, ...]
    state: StateBlob | None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Sorts as (epoch, number)."""
        return f"manifests/{self.epoch:06d}-{self.number:08d}.json"

    @property
    def n_bytes(self) -> int:
        """Bytes in the store, without this document."""
        return sum(blob.n_bytes for blob in self.blobs) + (self.state.n_bytes if self.state else 0)
