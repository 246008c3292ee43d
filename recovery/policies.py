"""Save policies by name: which rows a save takes, once there is a full one to build on.

full, delta   all rows; those that were updated
mfu, scar     the share r of a table that is most important, see `recovery.selection.importance`
ssu           rows out of a sub-sampled stream of accesses
others        the share r that is most important, as a registered class says
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from recovery.registry import Registry
from recovery.rows import RowIndices

POLICIES = ("full", "delta", "mfu", "ssu", "scar")


class SavePolicy(Protocol):
    """How important rows are: of each table, a save takes the share `Config.row_fraction` that is most important.

    A class that a distribution registers in `recovery.save_policies` is constructed with the rows of the process that
    saves, a `recovery.rows.RowSource`; it reads weights, slots and access counters in `rows.slab(table, shard)`. The
    writer's thread makes all calls. After a save that failed, or a restore of some shards, the next save is full.
    """

    def importance(self, table: int, shard: int, rows: slice) -> np.ndarray:
        """float32 or unsigned integers [n], of consecutive rows of a shard; 0: not worth saving."""

    def saved(self, table: int, shard: int, indices: RowIndices, records: np.ndarray, counts: np.ndarray) -> None:
        """These rows have been read for the save in flight.

        records: float32 [n, width], weights and slots; counts: uint32 [n], accesses so far
        """

    def restored(self, table: int, shard: int) -> None:
        """All rows of this shard have just come out of a checkpoint that later saves build on."""


def counts_accesses(policy: str) -> bool:
    """Whether a policy looks at how often rows were accessed; to the others it matters at most whether they were."""
    return policy not in ("full", "delta", "scar")


def lossless_kind(policy: str) -> str:
    """The kind of save under a policy that leaves out no change: where there may be no later save."""
    return "delta" if policy in ("delta", "mfu") else "full"


def is_lossless(kind: str) -> bool:
    return kind in ("full", "delta")


def _made_by_selection(rows: Any) -> SavePolicy:
    raise AssertionError("Selection carries out the built-in policies")


SAVE_POLICIES: Registry[SavePolicy] = Registry(
    "recovery.save_policies", "policy", SavePolicy, dict.fromkeys(POLICIES, _made_by_selection), arguments=("rows",)
)
