"""Which rows a save takes: the same however large a shard is, and again after a save that failed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from recovery.callback import CheckpointCallback
from recovery.config import Config
from recovery.errors import BadInput
from recovery.rows import KEY, USES, Column, RowIndices, RowView, Schema, Table
from recovery.selection.scar import Scar
from recovery.selection.selector import Selection
from recovery.testing import train, two_tables
from recovery.torch_rows.tensor_rows import TensorRows


def config_of(policy: str) -> Config:
    return Config(policy=policy) if policy in ("full", "delta") else Config(policy=policy, row_fraction=0.02)


def noted(selection: Selection, rows: TensorRows, kind: str) -> dict[tuple[int, int], RowIndices]:
    """What a save reads: everything that is chosen."""
    choice, found = selection.begin(kind), {}
    for shard in rows.shards():
        for table in range(2):
            slab, places = rows.slab(table, shard), choice(table, shard)
            records = np.concatenate([column[places] for column in slab.columns], axis=1)
            selection.note(table, shard, places, records, slab.counts[places])
            found[table, shard] = places
    return found


def based(policy: str, n_shards: int = 2) -> tuple[Selection, TensorRows]:
    rows = two_tables(n_shards)
    selection = Selection(rows, config_of(policy), rng=np.random.default_rng(0))
    noted(selection, rows, "full")
    selection.commit("base")
    return selection, rows


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["delta", "mfu", "scar"])
@pytest.mark.parametrize("piece", [1, 7, 100])
def test_looking_in_pieces_finds_the_same_rows(policy: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows_at_once in (1 << 20, piece):
        monkeypatch.setattr("recovery.selection.selector._PIECE", rows_at_once)
        selection, rows = based(policy)
        train(rows, 6, seed=1)
        found.append(
            {part: np.arange(10**4)[places].tolist() for part, places in noted(selection, rows, policy).items()}
        )
        assert selection.expected_bytes(policy) > 0
    assert found[0] == found[1]


def test_mfu_takes_the_share_of_the_whole_table_that_was_updated_most() -> None:
    selection, rows = based("mfu", n_shards=3)
    train(rows, 40, seed=1)
    since = np.zeros(5000, np.int64)
    for shard in range(3):
        since[shard::3] = rows.slab(0, shard).counts
    found = noted(selection, rows, "mfu")
    taken = np.concatenate([shard + 3 * np.asarray(found[0, shard]) for shard in range(3)])
    assert len(taken) == 100
    assert since[taken].min() >= np.sort(since)[-100]


@pytest.mark.parametrize("as_one_array", [True, False], ids=["slots beside the weights", "slots apart"])
def test_scar_compares_weights_and_no_optimizer_slots(as_one_array: bool) -> None:
    rows = two_tables(2)
    if as_one_array:
        rows = _Records(rows)  # type: ignore[assignment]
    selection = Selection(rows, config_of("scar"))
    noted(selection, rows, "full")
    selection.commit("base")
    slab = rows.slab(0, 0)
    slab.columns[0][[3, 8], 0] += 1  # weights
    slab.columns[-1][[5, 7], -1] += 1000  # a slot
    found = noted(selection, rows, "scar")
    assert np.asarray(found[0, 0]).tolist() == [3, 8]
    assert len(np.asarray(found[0, 1])) == 0


def test_scar_takes_a_row_that_another_key_has_now_and_looks_at_no_uses() -> None:
    table = Table("t", 6, (Column("weights", 2), Column("slot", 2), KEY, USES), shared_rows=1)
    keys = np.arange(-3, 3)[:, None].view(np.float32)  # those below 0 are no numbers, as float32
    records = np.concatenate([np.zeros((6, 4), np.float32), keys, np.zeros((6, 2), np.float32)], axis=1)
    slab = RowView((records[:, :4], records[:, 4:6], records[:, 6:]), np.zeros(6, np.uint32))
    scar = Scar(_OneSlab(Schema((table,), 1), slab))  # type: ignore[arg-type]
    everything, taken = slice(0, 6), np.array([1, 3])
    scar.saved(0, 0, everything, records, slab.counts)
    assert scar.importance(0, 0, everything).tolist() == [0] * 6
    records[1, 0], records[2, 2], records[4, 6] = 2.0, 2.0, 2.0  # a weight, a slot, uses
    records[3, 4:6] = np.array([1 << 40]).view(np.float32)
    assert scar.importance(0, 0, everything).tolist() == [0, 4, 0, np.inf, 0, 0]
    assert scar.importance(0, 0, slice(3, 5)).tolist() == [np.inf, 0]
    scar.saved(0, 0, taken, records[taken], slab.counts[taken])
    assert scar.importance(0, 0, everything).tolist() == [0] * 6
    records[:, :6] = 5.0
    scar.restored(0, 0)
    assert scar.importance(0, 0, everything).tolist() == [0] * 6


@dataclass(frozen=True)
class _OneSlab:
    schema: Schema
    rows: RowView

    def slab(self, table: int, shard: int) -> RowView:
        return self.rows


class _Records:
    """Rows whose weights and slots lie in one array, as in the shard memory of a job."""

    def __init__(self, rows: TensorRows) -> None:
        self.schema, self.shards, self.step_marks = rows.schema, rows.shards, rows.step_marks
        slabs = {(table, shard): rows.slab(table, shard) for table in range(2) for shard in rows.shards()}
        self._slabs = {part: RowView((np.concatenate(one.columns, axis=1),), one.counts) for part, one in slabs.items()}

    def slab(self, table: int, shard: int) -> RowView:
        return self._slabs[table, shard]


def test_a_delta_of_all_rows_needs_no_places() -> None:
    selection, rows = based("delta")
    rows.touched("user", np.arange(5000))
    with rows.step():
        pass
    assert noted(selection, rows, "delta")[0, 1] == slice(0, 2500)


@pytest.mark.parametrize("policy", ["delta", "mfu", "ssu"])
def test_after_a_save_that_failed_its_rows_are_taken_again(policy: str) -> None:
    selection, rows = based(policy)
    train(rows, 2, seed=1)
    first = noted(selection, rows, policy)
    selection.abandon()
    assert selection.is_valid_for("base")
    again = noted(selection, rows, policy)
    assert len(np.asarray(first[0, 1])) > 0
    for part, places in first.items():
        assert np.array_equal(np.arange(10**4)[places], np.arange(10**4)[again[part]])


def test_after_a_failed_save_the_copies_of_scar_are_of_no_use() -> None:
    selection, rows = based("scar")
    noted(selection, rows, "scar")
    selection.abandon()
    assert not selection.is_valid_for("base")


def test_ssu_needs_a_holder_that_samples_accesses() -> None:
    class Silent:
        def __init__(self, rows: TensorRows) -> None:
            self.schema, self.slab, self.step_marks, self.shards = rows.schema, rows.slab, rows.step_marks, rows.shards

    with pytest.raises(BadInput, match="use mfu"):
        Selection(Silent(two_tables()), config_of("ssu"))


def test_a_kind_that_is_not_the_policy_is_refused() -> None:
    with pytest.raises(BadInput, match="full or mfu"):
        based("mfu")[0].begin("scar")


def test_a_save_that_may_be_the_last_leaves_out_no_change_under_mfu() -> None:
    selection, rows = based("mfu")
    train(rows, 20, seed=1)
    found = noted(selection, rows, "delta")
    changed = sum(np.count_nonzero(rows.slab(0, shard).counts) for shard in rows.shards())
    assert sum(len(np.arange(10**4)[found[0, shard]]) for shard in rows.shards()) == changed
    selection.commit("delta")
    assert all(len(places) == 0 for part, places in noted(selection, rows, "mfu").items() if part[0] == 0)


@pytest.mark.parametrize("save_bytes", [5_000, 60_000])
def test_a_save_with_a_budget_of_bytes_takes_what_was_updated_most_and_leaves_the_rest_due(save_bytes: int) -> None:
    rows = two_tables(3)
    selection = Selection(rows, Config(policy="mfu", save_bytes=save_bytes))
    noted(selection, rows, "full")
    selection.commit("base")
    train(rows, 40, seed=1)
    since = rows.slab(0, 0).counts.copy()
    changed = sum(int(np.count_nonzero(rows.slab(0, shard).counts)) for shard in range(3))
    n_saves, n_taken = 0, 0
    while n_taken < changed:
        found = noted(selection, rows, "mfu")
        selection.commit(f"save {n_saves}")
        taken = {part: len(np.asarray(found[part])) if not isinstance(found[part], slice)
                 else len(rows.slab(*part)) for part in found}  # fmt: skip
        n_bytes = sum(n * (rows.schema.tables[table].record_bytes + 8) for (table, _), n in taken.items())
        assert n_bytes <= save_bytes
        if not n_saves:
            mine = np.asarray(found[0, 0])
            left = np.setdiff1d(np.arange(len(since)), mine)
            assert since[mine].min() >= since[left].max()
        now = sum(n for (table, _), n in taken.items() if table == 0)
        assert now, "the rest is due, and comes"
        n_saves, n_taken = n_saves + 1, n_taken + now
    assert n_taken == changed
    assert n_saves > 1


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(BadInput, match="save_bytes=200 is too little"):
        Selection(two_tables(3), Config(policy="mfu", save_bytes=200))
    with pytest.raises(BadInput, match="in place of row_fraction"):
        Config(policy="mfu", row_fraction=0.5, save_bytes=5000)
    with pytest.raises(BadInput, match="save_bytes=5000 has no effect with policy='delta'"):
        Config(save_bytes=5000)
    with pytest.raises(BadInput, match="give every_s"):
        CheckpointCallback("folder", policy="mfu", save_bytes=5000)
