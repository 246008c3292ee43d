"""`PolicyContract`: what every save policy promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recovery.config import Config
from recovery.restore import restore
from recovery.selection.importance import n_taken
from recovery.testing import SMALL, RamStore, Saver, train, two_tables, values


class PolicyContract:
    """Checked are the size of a save, what a restore gives, and a save after one that failed.

    Not checked: whether `importance` chooses well, or whether `saved` and `restored` remember anything. A policy may
    look at the weights and counts as they are, and nothing else.
    """

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
