"""Ids as TorchRec has them: all features of a batch in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gba_hvd
from gba_hvd import BadInput, Bag, EmbeddingTables, Feature
from gba_hvd.batch_keys import BatchKeys
from gba_hvd.embedding.keyed_jagged import by_feature
from tests import public_models
from tests.unit.conftest import Clicks
from tests.unit.embedding.test_tables import dense_gradients

MakeTables = Callable[..., EmbeddingTables]


class Keyed:
    """What counts of a `KeyedJaggedTensor`."""

    def __init__(
        self, keys: list[str], values: Tensor, lengths: list[int], weights: Tensor | None = None, varies: bool = False
    ) -> None:
        self._parts = keys, values, torch.tensor([0, *np.cumsum(lengths)]), weights
        self.variable_stride_per_key = lambda: varies

    def keys(self) -> list[str]:
        return self._parts[0]

    def values(self) -> Tensor:
        return self._parts[1]

    def offsets(self) -> Tensor:
        return self._parts[2]

    def weights_or_none(self) -> Tensor | None:
        return self._parts[3]


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
KEYED = Keyed(["user", "item"], torch.tensor([7, 8, 9, 1, 1]), [1, 0, 1, 0, 1, 2], WEIGHTS)  # three samples
BAGS = {
    "user": Bag(torch.tensor([7, 8]), torch.tensor([0, 1, 1]), WEIGHTS[:2]),
    "item": Bag(torch.tensor([9, 1, 1]), torch.tensor([0, 0, 1]), WEIGHTS[2:]),
}


def test_each_key_is_a_bag() -> None:
    found = by_feature(KEYED)
    assert list(found) == ["user", "item"]
    for name, bag in BAGS.items():
        one = found[name]
        assert isinstance(one, Bag)
        for ours, expected in ((one.values, bag.values), (one.offsets, bag.offsets), (one.weights, bag.weights)):
            assert ours is not None and expected is not None and torch.equal(ours, expected)


def test_no_sample_and_one() -> None:
    none, one = Keyed(["a", "b"], torch.empty(0, dtype=torch.int64), []), Keyed(["a"], torch.tensor([1, 2]), [2])
    assert [(len(bag.values), len(bag.offsets)) for bag in bags(none)] == [(0, 0), (0, 0)]
    assert [(bag.values.tolist(), bag.offsets.tolist()) for bag in bags(one)] == [([1, 2], [0])]


def bags(keyed: Keyed) -> list[Bag]:
    return [bag for bag in by_feature(keyed).values() if isinstance(bag, Bag)]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1]), "ids must be a mapping from features .* got a Tensor"),
        (Keyed(["a", "a"], torch.tensor([1, 2]), [1, 1]), "one key twice"),
        (Keyed(["a", "b"], torch.tensor([1, 2, 3]), [1, 1, 1]), "as many samples of each key, got 3 lists for 2 keys"),
        (Keyed(["a", "b"], torch.tensor([1, 2]), [1, 1], varies=True), "a batch size for each key"),
    ],
)
def test_what_is_refused(ids: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        by_feature(ids)


def test_tables_look_them_up_as_bags(make_tables: MakeTables) -> None:
    tables = make_tables({"user": (20, 4), "item": (30, 4)}, mode={"item": "mean"})
    found: list[Any] = []
    for ids in (KEYED, BAGS):
        rows, stacked = tables(ids), tables.stacked(ids)
        ((stacked[:, 0] * 2).sum() + rows["item"].sum()).backward()
        found.append((rows, stacked, dense_gradients(tables)))
    torch.testing.assert_close(found[0], found[1])
    with pytest.raises(BadInput, match="no table named 'itm'"):
        tables(Keyed(["itm"], torch.tensor([1]), [1]))


def test_batches_find_the_rows_of_other_hosts_in_them(tmp_path: Path) -> None:
    """By the batch's `ids`, or by what `ids=` returns."""
    tables = EmbeddingTables({"user": (20, 4), "item": (30, 4)}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path)
    model = nn.Linear(1, 1)
    expected = BatchKeys(tables, model, None, None).of([{"ids": BAGS}])
    for ids, batch in ((None, {"ids": KEYED}), (lambda batch: batch[0], (KEYED, None))):
        found = BatchKeys(tables, model, ids, None).of([batch])
        assert [keys.tolist() for keys in found] == [keys.tolist() for keys in expected]


class KeyedClicks(Clicks):
    def take(self, rows: np.ndarray) -> Any:
        batch = super().take(rows)
        values = torch.cat([batch.ids["user"], batch.ids["item"]])  # type: ignore[list-item]
        return gba_hvd.Batch(Keyed(["user", "item"], values, [1] * len(values)), batch.dense, batch.label)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile, after a graph break
@pytest.mark.parametrize("compile_", [False, True])
def test_a_job_trains_from_them(tmp_path: Path, compile_: bool) -> None:
    rows = []
    for number, dataset in enumerate((Clicks(32), KeyedClicks(32))):
        tables = EmbeddingTables(
            {"user": (20, 4), "item": (7, 3)}, gba_hvd.SGD(lr=0.5), n_shards=2, shard_dir=tmp_path / str(number)
        )
        torch.manual_seed(3)
        linear = nn.Linear(7, 1)

        def logits(ids: Any, tables: EmbeddingTables = tables, linear: nn.Linear = linear) -> Tensor:
            found = tables(ids)
            return linear(torch.cat([found["user"], found["item"]], 1)).squeeze(1)

        run: Any = torch.compile(logits, backend="aot_eager") if compile_ else logits
        optimizer = gba_hvd.DistributedOptimizer(
            torch.optim.SGD(linear.parameters(), lr=0.5), tables, global_batch=8, micro_batch=4
        )
        state = gba_hvd.elastic.TorchState(nn.ModuleList([tables, linear]), optimizer, epoch=0)
        for batch in gba_hvd.batches(dataset, state):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(run(batch.ids), batch.label).backward()
            optimizer.step()
        rows.append(tables.rows("user", np.arange(20)))
        state.close()
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-6)


@pytest.mark.slow
def test_tensors_and_collections_of_torchrec(
    tmp_path: Path, make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real ones: ids of the tables, and a converted `EmbeddingCollection`, whose results stay its own."""
    public_models.add_to_path(monkeypatch)
    torchrec: Any = public_models.load("torchrec")
    keyed = torchrec.KeyedJaggedTensor(
        keys=["user", "item"], values=KEYED.values(), lengths=torch.tensor([1, 0, 1, 0, 1, 2]), weights=WEIGHTS
    )
    tables = make_tables({"user": (20, 4), "item": (30, 4)})
    torch.testing.assert_close(tables(keyed), tables(BAGS))
    unpooled = make_tables({"item": (30, 4)}, features={"item": Feature("item", None)})
    jagged = torchrec.KeyedJaggedTensor(keys=["item"], values=torch.tensor([9, 1, 1]), lengths=torch.tensor([0, 1, 2]))
    rows: Any = unpooled(jagged)["item"]
    assert rows.offsets().tolist() == [0, 0, 1, 3]

    configs = [
        torchrec.EmbeddingConfig(name="user", embedding_dim=4, num_embeddings=20, feature_names=["user"]),
        torchrec.EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=30, feature_names=["item"]),
    ]
    collection = torchrec.EmbeddingCollection(tables=configs)
    plain = collection(keyed)
    converted = gba_hvd.convert(collection, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path / "converted")
    assert list(converted.tables) == ["embeddings.user", "embeddings.item"]
    (tmp_path / "converted").mkdir()
    model = nn.ModuleList([collection, nn.Linear(1, 1)])
    optimizer: Any = gba_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), converted, global_batch=4, micro_batch=4
    )
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.sync()
    ours = collection(keyed)
    for name, one in plain.items():
        torch.testing.assert_close(ours[name].values(), one.values().detach(), check_stride=False)
        assert ours[name].lengths().tolist() == one.lengths().tolist()
    state.close()
