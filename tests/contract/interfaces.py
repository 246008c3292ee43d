"""What every weighting, rule, compressor, row optimizer and save policy promises: suites to be inherited.

Each suite has one abstract fixture, which gives the implementation under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from gba_hvd import kernels
from gba_hvd.compression import Spec, value_codec
from gba_hvd.compression.error_feedback import Feedback, spans_of
from gba_hvd.compression.sparse_message import read
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.embedding.row_optimizers import RowOptimizer, build
from gba_hvd.ps.coordinator.staleness import Weighting
from gba_hvd.ps.launch import describe_optimizer
from gba_hvd.shm.layout import Layout
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.update_rules import make
from gba_hvd.update_rules.rule import ByOptimizer, DenseStart, NewValues, Received, Rule, Step
from recovery.config import Config
from recovery.restore import restore
from recovery.selection.importance import n_taken
from tests.recovery.holders import train, two_tables, values
from tests.recovery.saving import SMALL, Saver
from tests.recovery.stores import RamStore

N = 600


class WeightingContract:
    @pytest.fixture
    def make_weighting(self) -> Callable[[int], Weighting]:
        """Takes the tolerance, in steps."""
        raise NotImplementedError

    @pytest.mark.parametrize("tolerance", [0, 1, 4, 20])
    def test_a_weight_never_rises_with_staleness(
        self, make_weighting: Callable[[int], Weighting], tolerance: int
    ) -> None:
        weights = [make_weighting(tolerance).weight(staleness) for staleness in range(-3, 200)]
        assert all(0 <= after <= before <= 1 for before, after in pairwise(weights))

    def test_what_is_not_stale_counts_in_full(self, make_weighting: Callable[[int], Weighting]) -> None:
        assert [make_weighting(4).weight(staleness) for staleness in (-5, -1, 0)] == [1.0] * 3

    def test_a_weight_depends_on_the_staleness_only(self, make_weighting: Callable[[int], Weighting]) -> None:
        """A server that starts again weighs as the one before."""
        one, other = make_weighting(4), make_weighting(4)
        asked = [3, 0, 9, 3, 1]
        assert [one.weight(staleness) for staleness in asked] == [other.weight(s) for s in asked[::-1]][::-1]


class RuleContract:
    @pytest.fixture
    def rule_name(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def rule(self, rule_name: str) -> Rule:
        """At step 10, on SGD with momentum, with workers 0 and 1."""
        parameter = torch.nn.Parameter(torch.zeros(N))
        start = DenseStart(np.linspace(-1, 1, N).astype(np.float32), 10, [N], [0], [{}])
        return make(rule_name, spec_of(torch.optim.SGD([parameter], lr=0.1, momentum=0.9)), start, [0, 1])

    @staticmethod
    def step(number: int = 11) -> Step:
        gradient = np.sin(np.arange(N)).astype(np.float32)
        model = np.linspace(-1, 1, N).astype(np.float32)
        for array in (gradient, model):
            array.flags.writeable = False
        pushes = [Received(worker, 0.5, 2 * worker, gradient) for worker in (0, 1)]
        return Step(number, model, gradient, pushes, [0.1], [0, 1])

    def test_a_push_with_the_newest_values_or_unknown_ones_is_not_damped(self, rule: Rule) -> None:
        for dense_step in (10, -1):
            damping = rule.damping(dense_step)
            assert (damping.dense == 1).all() and damping.rows == 1.0

    def test_damping_is_between_0_and_1(self, rule: Rule) -> None:
        step = self.step()
        rule.stepped(step.values + np.float32(0.5), step.gradient, step.lrs, 11)
        for dense_step in (11, 10, 3):
            damping = rule.damping(dense_step)
            assert damping.dense.dtype == np.float32 and damping.dense.shape in ((1,), (N,))
            assert ((damping.dense >= 0) & (damping.dense <= 1)).all() and 0 <= damping.rows <= 1

    def test_a_step_gives_learning_rates_or_finite_values(self, rule: Rule) -> None:
        answer = rule.act(self.step())
        if isinstance(answer, ByOptimizer):
            assert len(answer.lrs) == 1 and answer.lrs[0] >= 0
            return
        shown = rule.shown(answer.values, [0.1]) if answer.shown is None else answer.shown
        for array in (answer.values, answer.momentum, *([] if shown is None else [shown])):
            assert array.dtype == np.float32 and array.shape == (N,) and np.isfinite(array).all()

    def test_a_step_counts_when_it_is_applied_and_not_before(self, rule: Rule) -> None:
        first, again = rule.act(self.step()), rule.act(self.step())
        if isinstance(first, NewValues):
            assert isinstance(again, NewValues)
            np.testing.assert_array_equal(first.values, again.values)
            np.testing.assert_array_equal(first.momentum, again.momentum)
        else:
            assert first == again

    def test_a_rule_that_shows_other_values_says_so(self, rule: Rule) -> None:
        step = self.step()
        answer = rule.act(step)
        new = answer.values if isinstance(answer, NewValues) else step.values
        rule.stepped(new, step.gradient, step.lrs, 11)
        shown = rule.shown(new, step.lrs)
        assert rule.looks_ahead or shown is None or (shown == new).all()


class CoderContract:
    @pytest.fixture
    def kind(self) -> str:
        """The name of a value coder."""
        raise NotImplementedError

    @pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 1000])
    def test_values_take_the_bytes_that_were_announced_and_come_back_in_number(self, kind: str, n: int) -> None:
        given = np.random.default_rng(n).normal(size=n).astype(np.float32)
        encoded = value_codec.encode(given, kind)
        assert len(encoded) == value_codec.n_bytes(kind, n, given.dtype)
        back = value_codec.decode(np.frombuffer(encoded, np.uint8), kind, n, given.dtype)
        assert back.dtype == np.float32 and back.shape == (n,)
        assert np.abs(back - given).sum() <= np.abs(given).sum(), "sending nothing would be nearer"

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_never_becomes_a_number(self, kind: str, bad: float) -> None:
        given = np.linspace(-1, 1, 300).astype(np.float32)
        given[17] = bad
        encoded = np.frombuffer(value_codec.encode(given, kind), np.uint8)
        assert not np.isfinite(value_codec.decode(encoded, kind, 300, given.dtype)[17])

    def test_large_numbers_stay_finite(self, kind: str) -> None:
        given = np.full(300, 3e38, np.float32)
        encoded = np.frombuffer(value_codec.encode(given, kind), np.uint8)
        assert np.isfinite(value_codec.decode(encoded, kind, 300, given.dtype)).all()

    def test_any_bytes_of_the_right_number_are_values_or_refused(self, kind: str) -> None:
        size = value_codec.n_bytes(kind, 300, np.dtype(np.float32))
        for seed in range(20):
            data = np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)
            try:
                assert len(value_codec.decode(data, kind, 300, np.dtype(np.float32))) == 300
            except ValueError:
                continue

    def test_what_is_sent_and_what_waits_is_the_gradient(self, kind: str) -> None:
        feedback = Feedback(Spec("topk", 0.5, values=kind), ["weight"], [N], np.dtype(np.float32))
        spans, n = spans_of([N], [0])
        total, sent = np.zeros(N), np.zeros(N)
        for step in range(5):
            gradient = np.random.default_rng(step).normal(size=N).astype(np.float32)
            feedback.begin()
            message = feedback.encode(gradient, spans, n, gradient[:0])
            feedback.settle()
            total += gradient
            sent += read(message, n, 0).whole()
        np.testing.assert_allclose(sent + feedback.residual, total, rtol=1e-5, atol=1e-5)


class RowOptimizerContract:
    @pytest.fixture
    def row_optimizer(self) -> RowOptimizer:
        raise NotImplementedError

    @staticmethod
    def stepped(optimizer: RowOptimizer, keys: list[int], scale: float, factor: float) -> tuple[Layout, np.ndarray]:
        """The memory of ten rows after three steps on some of them, by gradients of `factor` and then `scale`."""
        layout = Layout.of({"table": (10, 4)}, optimizer.slots, n_shards=1, seed=0, init_std=1.0)
        flat, group = np.zeros(layout.region_words, np.float32), layout.groups[0]
        at = layout.record_starts(np.arange(10), group).astype(np.int64)
        flat[at[:, None] + np.arange(4)] = np.random.default_rng(0).normal(size=(10, 4))
        for step in (1, 2, 3):
            gradient = np.random.default_rng(step).normal(size=(len(keys), 4)).astype(np.float32)
            grad = RowGrad(np.array(keys, np.int64), np.ascontiguousarray(factor * gradient, np.float32))
            optimizer.update_(flat, layout, group, grad, scale, 0.1, step)
        return layout, flat

    def records(self, layout: Layout, flat: np.ndarray) -> np.ndarray:
        out = np.empty((10, layout.groups[0].record), np.float32)
        kernels.gather_rows(flat, layout.record_starts(np.arange(10), layout.groups[0]), 0, out)
        return out

    def test_the_rows_of_a_step_move_and_are_counted_and_no_others(self, row_optimizer: RowOptimizer) -> None:
        before = self.records(*self.stepped(row_optimizer, [], 1.0, 1.0))
        after = self.records(*self.stepped(row_optimizer, [7, 2, 5], 1.0, 1.0))
        moved = np.flatnonzero((before[:, :4] != after[:, :4]).all(axis=1))
        assert moved.tolist() == [2, 5, 7]
        assert np.flatnonzero((before != after).any(axis=1)).tolist() == [2, 5, 7]
        counts = np.ascontiguousarray(after[:, -1]).view(np.uint32)
        assert counts.tolist() == [0, 0, 3, 0, 0, 3, 0, 3, 0, 0]

    def test_the_scale_belongs_to_the_gradient(self, row_optimizer: RowOptimizer) -> None:
        one = self.records(*self.stepped(row_optimizer, [1, 4], 1.0, 1.0))
        other = self.records(*self.stepped(row_optimizer, [1, 4], 0.25, 4.0))
        np.testing.assert_allclose(one[:, :-1], other[:, :-1], rtol=1e-5, atol=1e-6)

    def test_nothing_beyond_the_records_is_written(self, row_optimizer: RowOptimizer) -> None:
        layout, flat = self.stepped(row_optimizer, list(range(10)), 1.0, 1.0)
        group = layout.groups[0]
        inside = np.zeros(len(flat), bool)
        inside[group.at : group.at + group.rows_per_shard * group.record] = True
        assert not flat[~inside].any()

    def test_another_process_builds_the_same(self, row_optimizer: RowOptimizer) -> None:
        assert build(json.loads(json.dumps(describe_optimizer(row_optimizer)))) == row_optimizer


class PolicyContract:
    @pytest.fixture
    def policy(self) -> str:
        """The name of a save policy that takes a share of the rows."""
        raise NotImplementedError

    def test_a_save_takes_its_share_at_most_and_small_tables_whole(self, policy: str) -> None:
        rows = two_tables(2)
        saver = Saver(
            rows, RamStore(), Config(policy=policy, row_fraction=0.02, section_bytes=8 << 10, blob_bytes=32 << 10)
        )
        saver.save()
        train(rows, 30, seed=1)
        manifest = saver.save()
        taken = [0, 0]
        for section in (section for blob in manifest.blobs for section in blob.sections):
            taken[section.table] += section.n_rows
        assert 0 < taken[0] <= n_taken(policy, 5000, 0.02) + 1
        assert taken[1] == 11

    def test_a_restored_row_is_as_of_one_of_the_saves(self, policy: str) -> None:
        rows, store, seen = two_tables(2), RamStore(), []
        saver = Saver(rows, store, Config(policy=policy, row_fraction=0.1, section_bytes=8 << 10, blob_bytes=32 << 10))
        for _ in range(3):
            saver.save()
            seen.append(values(rows))
            train(rows, 5, seed=1)
        found = two_tables(2, seed=None)
        report = restore(store, found, config=SMALL)
        assert report is not None and report.n_lost == 0
        for name, table in values(found).items():
            as_of = np.array([(table == save[name]).all(axis=1) for save in seen])
            assert as_of.any(axis=0).all()
            assert as_of[-1].sum() > (as_of[0] & ~as_of[-1]).sum(), "the newest save has most rows"

    def test_after_a_save_that_failed_the_next_one_is_full_or_right(self, policy: str) -> None:
        rows = two_tables(2)
        saver = Saver(
            rows, RamStore(), Config(policy=policy, row_fraction=0.1, section_bytes=8 << 10, blob_bytes=32 << 10)
        )
        base = saver.save()
        train(rows, 3, seed=1)
        choice = saver.selection.begin(policy)
        taken: Any = choice(0, 0)
        slab = rows.slab(0, 0)
        records = np.concatenate([column[taken] for column in slab.columns], axis=1)
        saver.selection.note(0, 0, taken, records, slab.counts[taken])
        saver.selection.abandon()
        if saver.selection.is_valid_for(base.name):
            again: Any = saver.selection.begin(policy)(0, 0)
            assert set(np.atleast_1d(taken).tolist()) <= set(np.atleast_1d(again).tolist())
            saver.selection.abandon()
