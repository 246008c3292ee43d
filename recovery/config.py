"""The settings of checkpoints, in one validated place. Argument beats environment beats default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from recovery.catalog.retention import Keep
from recovery.environment import settings_from
from recovery.errors import BadInput
from recovery.format.row_codec import Encoding
from recovery.old_names import accepts, renamed
from recovery.policies import SAVE_POLICIES

_PREFIX = "RECOVERY_"
_OLD = {"row_fraction": "R", "concurrent_puts": "PUTS"}  # variables that are still read
VERIFY = ("sizes", "state", "bytes")
_LEAST_BUDGET = 1 << 20
_IDLE: dict[str, tuple[Callable[[str], bool], str]] = {  # setting: the policies without a use for it, and why
    "row_fraction": (
        lambda policy: policy in ("full", "delta"),
        "which takes no share of the rows: mfu, ssu, scar and registered policies do",
    ),
    "save_bytes": (
        lambda policy: policy in ("full", "delta", "ssu"),
        "which takes no share of the rows, or lists of a fixed length: mfu, scar and registered policies do",
    ),
    "ssu_period": (lambda policy: policy != "ssu", "which samples no accesses: ssu does"),
    "bits": (
        lambda policy: policy == "full",
        "whose saves are all complete, and these are exact: partial saves are not",
    ),
}


@accepts(r="row_fraction", puts="concurrent_puts")
@dataclass(frozen=True)
class Config:
    """
    job:              name of the job that writes: one of the same name takes over at once. None: a unique name
    policy:           which rows a save takes once there is a base: full, delta, mfu, ssu, scar, or a registered one
    row_fraction:     share of a table's rows that mfu, ssu, scar and registered policies take
    save_bytes:       in place of row_fraction: about the most bytes of the rows of a partial save
    ssu_period:       ssu looks at every so-manieth access
    budget_bytes:     memory for all rows in flight while saving, or restoring (beside the buffers that saves keep); not
                      what the policy needs, nor the list of sections (half a kilobyte for each)
    section_bytes:    rows encoded, checked and restored as one; smaller if the budget asks for it
    blob_bytes:       size of the objects written; smaller if the budget asks for it
    rate_bytes_s:     most bytes written per second; None: as fast as the store takes them
    threads:          that encode
    readers:          that read, verify and decode when rows are restored
    concurrent_puts:  objects written at the same time; more than 1 pays with object stores
    level:            of zstd, see `row_codec.Encoding`
    bits:             8 or 4: partial saves have their weights quantised; None: exact
    keep_last:        checkpoints that this run keeps, with what they are on top of
    keep_every_steps: and the first one of every so many steps
    keep_every_s:     and the first one of every so many seconds
    keep_epochs:      and the last one of each of the newest so many epochs of the training; a checkpoint is of the
                      epoch of the "position" that its `about` has, which jobs of gba_hvd write
    lease_s:          another job may take over when this one has not renewed its claim for so long
    verify:           what is read back before a checkpoint counts as saved and older ones expire: "sizes" (manifests,
                      and the size of every object of the chain), "state" (also the checksum of the training state),
                      "bytes" (also every byte of this save: as much reading as was written)
    strict:           all shards at one step: `save` returns when the last row has been read
    busy_timeout_s:   longest wait for a moment in which a shard is not being changed
    close_timeout_s:  longest wait for the save in flight when the checkpointer is left

    Raises BadInput, also for a setting that the policy has no use for.
    """

    job: str | None = None
    policy: str = "delta"
    row_fraction: float = 0.125
    save_bytes: int | None = None
    ssu_period: int = 2
    budget_bytes: int = 256 << 20
    section_bytes: int = 2 << 20
    blob_bytes: int = 16 << 20
    rate_bytes_s: float | None = None
    threads: int = 1
    readers: int = 4
    concurrent_puts: int = 1
    level: int = -5
    bits: int | None = None
    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_every_s: float | None = None
    keep_epochs: int | None = None
    lease_s: float = 30.0
    verify: str = "state"
    strict: bool = False
    busy_timeout_s: float = 30.0
    close_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if str(field.type).startswith("int") and isinstance(value, float) and value.is_integer():
                object.__setattr__(self, field.name, int(value))  # 1e9 is a number of bytes, too
        SAVE_POLICIES.get(self.policy)
        if not 0 < self.row_fraction <= 1:
            raise BadInput(f"row_fraction is a share of the rows, above 0 and at most 1, got {self.row_fraction}")
        if self.save_bytes is not None and (self.save_bytes < 1 or self.row_fraction != Config.row_fraction):
            raise BadInput(
                f"save_bytes is a number of bytes, in place of row_fraction: got {self.save_bytes} and "
                f"row_fraction={self.row_fraction}"
            )
        if self.budget_bytes < _LEAST_BUDGET:
            raise BadInput(f"budget_bytes must be at least {_LEAST_BUDGET}, got {self.budget_bytes}")
        for name in ("section_bytes", "blob_bytes", "threads", "readers", "concurrent_puts", "ssu_period"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rate_bytes_s", "lease_s", "busy_timeout_s", "close_timeout_s"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise BadInput(f"{name} must be positive, got {getattr(self, name)}")
        if self.verify not in VERIFY:
            raise BadInput(f"verify {self.verify!r} is not known: choose one of {', '.join(VERIFY)}")
        Encoding(self.level, bits=self.bits)
        for field in fields(self):
            is_idle, why = _IDLE.get(field.name, (lambda policy: False, ""))
            if getattr(self, field.name) != field.default and is_idle(self.policy):
                raise BadInput(
                    f"{field.name}={getattr(self, field.name)!r} has no effect with policy={self.policy!r}, {why}. "
                    f"Leave {field.name} out, or choose another policy"
                )
        _ = self.keep

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **arguments: Any) -> Config:
        """Build from RECOVERY_<NAME> variables; arguments that are not None win."""
        values = settings_from(environ, cls, _PREFIX, _OLD)
        given = {name: value for name, value in arguments.items() if value is not None}
        values.update(renamed(given, {"r": "row_fraction", "puts": "concurrent_puts"}))
        return cls(**values)

    @property
    def keep(self) -> Keep:
        """Which checkpoints of this run do not expire. Raises BadInput when that would be none."""
        return Keep(self.keep_last, self.keep_every_steps, self.keep_every_s, self.keep_epochs)

    @property
    def blob_buffer_bytes(self) -> int:
        """Three quarters of the budget: a buffer that is filled, and for each put one and the store's own copy."""
        return min(self.blob_bytes, 3 * self.budget_bytes // 4 // (2 * self.concurrent_puts + 1))

    @property
    def section_buffer_bytes(self) -> int:
        """A quarter of the budget: a buffer that is read into and one per thread, each encoded in two more copies."""
        return min(self.section_bytes, self.blob_buffer_bytes, self.budget_bytes // 4 // (3 * (self.threads + 1)))
