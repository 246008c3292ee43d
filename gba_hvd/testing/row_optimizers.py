"""`RowOptimizerContract`: what every row optimizer promises."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.embedding.row_optimizers import RowOptimizer, build
from gba_hvd.ps.launch import describe_optimizer
from gba_hvd.shm.layout import Group, Layout

LR = 0.05
ROWS = {"user": [7, 2, 5], "item": [0, 6], "colour": [3, 1]}  # of a step; 5 and 2, 0 and 6 are in one of three shards


@dataclass
class Memory:
    """Three shards of three tables, of which `user` and `item` are one group; what is in no record is filled, too."""

    optimizer: RowOptimizer
    flat: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        tables = {"user": (10, 4), "item": (7, 4), "colour": (6, 2)}
        self.layout = Layout.of(tables, self.optimizer.slots, n_shards=3, seed=0, init_std=1.0)
        rng = np.random.default_rng(0)
        self.flat = rng.normal(size=self.layout.n_shards * self.layout.region_words).astype(np.float32)
        for group in self.layout.groups:
            words = self.words(group, np.arange(self.layout.key_limit(group)))
            self.flat[words[:, group.dim :]] = 0

    def group(self, table: str) -> Group:
        return self.layout.groups[self.layout.place_of_table[table][0]]

    def keys(self, table: str, rows: Sequence[int]) -> np.ndarray:
        return self.layout.place_of_table[table][1] + np.array(rows, np.int64)

    def words(self, group: Group, keys: np.ndarray) -> np.ndarray:
        """int64 [n, record]: where the numbers of these rows stand."""
        return self.layout.record_starts(keys, group).astype(np.int64)[:, None] + np.arange(group.record)

    def records(self, table: str) -> np.ndarray:
        """float32 [rows, record]: a copy."""
        n_rows = next(spec.n_rows for spec in self.layout.tables if spec.name == table)
        records: np.ndarray = self.flat[self.words(self.group(table), self.keys(table, range(n_rows)))]
        return records

    def weights(self, table: str) -> np.ndarray:
        return self.records(table)[:, : self.group(table).dim]

    def step(
        self,
        gradients: Mapping[str, np.ndarray],
        rows: Mapping[str, Sequence[int]] = ROWS,
        scale: float = 1.0,
        lr: float = LR,
        number: int = 1,
    ) -> None:
        """gradients: float32 [rows, dim] of each table."""
        for group in self.layout.groups:
            tables = [table.name for table in group.tables if rows[table.name]]
            if tables:
                keys = np.concatenate([self.keys(table, rows[table]) for table in tables])
                values = np.concatenate([gradients[table] for table in tables], dtype=np.float32)
                self.optimizer.update_(self.flat, self.layout, group, RowGrad(keys, values), scale, lr, number)

    def steps(self, rows: Mapping[str, Sequence[int]] = ROWS, scale: float = 1.0, factor: float = 1.0) -> Memory:
        """Three steps on these rows, by gradients of `factor` and then `scale`."""
        for number in (1, 2, 3):
            some = {table: factor * gradient for table, gradient in gradients(number).items()}
            self.step(some, rows, scale, number=number)
        return self


def gradients(seed: int = 0) -> dict[str, np.ndarray]:
    """Of `ROWS`, of both signs and not small."""
    rng = np.random.default_rng(seed)
    shapes = {table: (len(rows), 2 if table == "colour" else 4) for table, rows in ROWS.items()}
    return {name: rng.choice([-1, 1], size) * rng.uniform(1, 2, size) for name, size in shapes.items()}


class RowOptimizerContract:
    """Give it without an L1 term, and without a threshold for gradients: every row has to move here."""

    @pytest.fixture
    def row_optimizer(self) -> RowOptimizer:
        raise NotImplementedError

    def test_the_rows_of_a_step_move_and_are_counted_and_no_others(self, row_optimizer: RowOptimizer) -> None:
        memory, after = Memory(row_optimizer), Memory(row_optimizer).steps()
        for table, rows in ROWS.items():
            moved = (memory.weights(table) != after.weights(table)).all(axis=1)
            assert np.flatnonzero(moved).tolist() == sorted(rows)
            counts = after.records(table)[:, -1].copy().view(np.uint32)
            assert counts.tolist() == [3 if row in rows else 0 for row in range(len(counts))]

    @pytest.mark.parametrize("table", list(ROWS))
    def test_nothing_but_the_records_of_the_step_is_written(self, row_optimizer: RowOptimizer, table: str) -> None:
        """Neither other rows of the table, nor other tables, nor what is between them, in any shard."""
        memory = Memory(row_optimizer)
        before = memory.flat.copy()
        memory.steps({name: rows if name == table else [] for name, rows in ROWS.items()})
        may_differ = memory.words(memory.group(table), memory.keys(table, ROWS[table])).ravel()
        differ = np.flatnonzero(memory.flat.view(np.uint32) != before.view(np.uint32))
        assert np.setdiff1d(differ, may_differ).tolist() == []

    def test_the_first_step_of_a_row_goes_against_its_gradient(self, row_optimizer: RowOptimizer) -> None:
        """From any weights: an optimizer that computes weights from its slots loses the initial ones if it does not."""
        memory, after = Memory(row_optimizer), Memory(row_optimizer)
        after.step(gradients())
        for table, gradient in gradients().items():
            move = (after.weights(table) - memory.weights(table))[ROWS[table]]
            assert ((move * gradient).sum(axis=1) < 0).all()

    def test_a_larger_learning_rate_moves_rows_further(self, row_optimizer: RowOptimizer) -> None:
        """The argument, which is scheduled, not the optimizer's own."""
        before, short, far = Memory(row_optimizer), Memory(row_optimizer), Memory(row_optimizer)
        short.step(gradients(), lr=LR)
        far.step(gradients(), lr=2 * LR)
        for table in ROWS:
            moves = [np.abs(m.weights(table) - before.weights(table)).sum(axis=1)[ROWS[table]] for m in (short, far)]
            assert (moves[0] < moves[1]).all()

    def test_learning_rate_0_leaves_the_weights(self, row_optimizer: RowOptimizer) -> None:
        """Bit for bit: so rows are frozen for a while. Slots may change."""
        before, after = Memory(row_optimizer).steps(), Memory(row_optimizer).steps()
        after.step(gradients(), lr=0.0, number=4)
        for table in ROWS:
            np.testing.assert_array_equal(after.weights(table), before.weights(table))

    def test_the_scale_belongs_to_the_gradient(self, row_optimizer: RowOptimizer) -> None:
        one, other = Memory(row_optimizer).steps(), Memory(row_optimizer).steps(scale=0.25, factor=4.0)
        for table in ROWS:
            found, expected = (memory.records(table)[:, :-1] for memory in (one, other))
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=False)

    def test_every_slot_is_written(self, row_optimizer: RowOptimizer) -> None:
        """One that stays zero takes memory for nothing, or another one is written in its place."""
        memory = Memory(row_optimizer).steps()
        for table, rows in ROWS.items():
            group = memory.group(table)
            ends = [*group.slots, group.record - 1][1:]
            for slot, start, end in zip(row_optimizer.slots, group.slots, ends, strict=True):
                assert memory.records(table)[rows, start:end].any(axis=1).all(), f"slot {slot.name!r} of {table!r}"

    def test_the_gradient_is_not_written(self, row_optimizer: RowOptimizer) -> None:
        memory = Memory(row_optimizer)
        keys, values = memory.keys("user", ROWS["user"]), gradients()["user"].astype(np.float32)
        given = keys.copy(), values.copy()
        row_optimizer.update_(memory.flat, memory.layout, memory.group("user"), RowGrad(keys, values), 0.5, LR, 1)
        np.testing.assert_array_equal(keys, given[0])
        np.testing.assert_array_equal(values, given[1])

    def test_another_process_builds_the_same(self, row_optimizer: RowOptimizer) -> None:
        assert build(json.loads(json.dumps(describe_optimizer(row_optimizer)))) == row_optimizer
