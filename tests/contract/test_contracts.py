"""All that is built in keeps what its interface promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import gba_hvd
from gba_hvd.embedding.row_optimizers import RowOptimizer
from gba_hvd.ps.coordinator import staleness
from gba_hvd.ps.coordinator.staleness import Weighting
from gba_hvd.testing import (
    CoderContract,
    PolicyContract,
    RowOptimizerContract,
    RuleContract,
    StoreContract,
    WeightingContract,
)
from gba_hvd.update_rules import RULES
from recovery.storage.fsspec_store import FsspecStore
from recovery.storage.retry import RetryingStore
from recovery.storage.store import Store


class TestStores(StoreContract):
    @pytest.fixture
    def store(self, store: Store) -> Store:
        return store

    def second_view(self, store: Store) -> Store:
        inner = store.store if isinstance(store, RetryingStore) else store
        if isinstance(inner, FsspecStore) and inner.url.startswith("s3"):
            options = inner._fs.storage_options
            return FsspecStore(inner.url, {**options, "skip_instance_cache": True})
        return store


class TestWeightings(WeightingContract):
    @pytest.fixture(params=["threshold", "linear", "inverse", "none", "gap_aware"])
    def make_weighting(self, request: pytest.FixtureRequest) -> Callable[[int], Weighting]:
        return lambda tolerance: staleness.weighting(request.param, tolerance)


class TestRules(RuleContract):
    @pytest.fixture(params=RULES)
    def rule_name(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


class TestCoders(CoderContract):
    @pytest.fixture(params=["none", "fp16", "bf16", "int8"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


class TestRowOptimizers(RowOptimizerContract):
    @pytest.fixture(params=["SGD", "Adagrad", "RowAdagrad", "Adam"])
    def row_optimizer(self, request: pytest.FixtureRequest) -> RowOptimizer:
        made: RowOptimizer = getattr(gba_hvd, request.param)(lr=0.1)
        return made


class TestPolicies(PolicyContract):
    @pytest.fixture(params=["mfu", "scar"])
    def policy(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)
