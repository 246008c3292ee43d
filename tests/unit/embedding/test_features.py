"""Features of tables against `nn.Embedding` and `nn.EmbeddingBag`: every form of ids, every pooling, padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gba_hvd
from gba_hvd import BadInput, Bag, EmbeddingTables, Feature, Table
from gba_hvd.embedding.joined_tables import keys_by_group
from gba_hvd.embedding.lookups import Source, look_up
from tests.unit.embedding.test_tables import dense_gradients, weights_of

MakeTables = Callable[..., EmbeddingTables]
PAD = 4
ITEMS: dict[str, Table | tuple[int, int]] = {"item": Table(30, 8, padding_idx=PAD), "user": (50, 8)}
SEQUENCE = torch.tensor([[1, 2, PAD], [PAD, PAD, PAD], [7, 7, 29], [0, PAD, 5]])
FEATURES = {
    "history": Feature("item", pooling=None),
    "clicked": Feature("item", pooling="mean"),
    "best": Feature("item", pooling="max"),
    "candidate": "item",
}


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tables: EmbeddingTables, weights: Tensor) -> None:
    """Same values, and the same gradient of the same function of all of them."""
    generator, total, expected = torch.Generator().manual_seed(5), torch.zeros(()), torch.zeros(())
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)
        factor = torch.randn(value.shape, generator=generator)
        total, expected = total + (ours[name] * factor).sum(), expected + (value * factor).sum()
    total.backward()
    expected.backward()
    torch.testing.assert_close(dense_gradients(tables)["item"], weights.grad)


def embedding(weights: Tensor, ids: Tensor) -> Tensor:
    """As `nn.Embedding` with a padding row of zeros."""
    zeroed = weights * (torch.arange(len(weights)) != PAD)[:, None]
    return nn.functional.embedding(ids.long(), zeroed, padding_idx=PAD)


def pooled(weights: Tensor, ids: Tensor, mode: str) -> Tensor:
    return nn.functional.embedding_bag(ids.long(), weights, mode=mode, padding_idx=PAD)


def test_several_features_of_one_table_give_one_gradient(make_tables: MakeTables) -> None:
    tables = make_tables(ITEMS, features=FEATURES)
    weights, one = weights_of(tables, "item"), torch.tensor([3, PAD, 7, 1])
    ids = {"history": SEQUENCE, "candidate": one, "clicked": SEQUENCE, "best": SEQUENCE}
    theirs = {
        "history": embedding(weights, SEQUENCE),
        "candidate": embedding(weights, one),
        "clicked": pooled(weights, SEQUENCE, "mean"),
        "best": pooled(weights, SEQUENCE, "max"),
    }
    ours = tables(ids)
    assert len(tables.captured) == 1
    same(ours, theirs, tables, weights)


def test_every_table_that_no_feature_names_has_one_of_its_own_name(make_tables: MakeTables) -> None:
    tables = make_tables(ITEMS, features={"history": Feature("item", pooling=None)})
    assert tables.features == {"history": Feature("item", None), "user": Feature("user", "sum")}
    assert tables({"user": torch.tensor([1, 2])})["user"].shape == (2, 8)
    with pytest.raises(BadInput, match="no feature named 'item'; the features are history, user"):
        tables({"item": torch.tensor([1])})


@pytest.mark.parametrize("shape", [(), (5,), (5, 3), (2, 3, 4), (0,), (0, 3), (3, 0), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_a_feature_that_is_not_pooled_takes_any_shape(
    make_tables: MakeTables, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tables = make_tables(ITEMS, features={"history": Feature("item", pooling=None)})
    weights = weights_of(tables, "item")
    ids = torch.randint(30, shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    ours = tables({"history": ids})
    assert ours["history"].shape == (*shape, 8)
    same(ours, {"history": embedding(weights, ids)}, tables, weights)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_padded_ids_of_a_table_without_features_are_pooled_as_its_mode_says(make_tables: MakeTables, mode: str) -> None:
    tables = make_tables(ITEMS, mode=mode)
    weights = weights_of(tables, "item")
    same(tables({"item": SEQUENCE}), {"item": pooled(weights, SEQUENCE, mode)}, tables, weights)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_leave_padding_out(make_tables: MakeTables, mode: str) -> None:
    tables = make_tables(ITEMS, mode=mode)
    weights, values, offsets = weights_of(tables, "item"), SEQUENCE.flatten(), torch.tensor([0, 0, 3, 7, 12])
    theirs = nn.functional.embedding_bag(values, weights, offsets, mode=mode, padding_idx=PAD)
    same(tables({"item": Bag(values.int(), offsets.int())}), {"item": theirs}, tables, weights)


def test_weights_of_padding_are_left_out_and_get_no_gradient(make_tables: MakeTables) -> None:
    tables = make_tables(ITEMS)
    weights, values, offsets = weights_of(tables, "item"), SEQUENCE.flatten(), torch.tensor([0, 0, 3, 7])
    ours, theirs = (torch.randn(12, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2))
    expected = nn.functional.embedding_bag(
        values, weights, offsets, mode="sum", per_sample_weights=theirs, padding_idx=PAD
    )
    same(tables({"item": Bag(values, offsets, ours)}), {"item": expected}, tables, weights)
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad * (values != PAD))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_jagged_ids(make_tables: MakeTables, dtype: torch.dtype) -> None:
    tables = make_tables(ITEMS, features=FEATURES)
    weights = weights_of(tables, "item")
    some = [torch.tensor(x, dtype=dtype) for x in ([1, 2], [], [7, PAD, 7, 29], [PAD])]
    ids = torch.nested.nested_tensor(some, layout=torch.jagged)
    ours = tables({"history": ids, "clicked": ids, "best": ids})
    padded = torch.tensor([[1, 2, PAD, PAD], [PAD] * 4, [7, PAD, 7, 29], [PAD] * 4])
    assert ours["history"].layout == torch.jagged
    assert [row.shape for row in ours["history"].unbind()] == [(2, 8), (0, 8), (4, 8), (1, 8)]
    flat = {"history": ours["history"].values(), "clicked": ours["clicked"], "best": ours["best"]}
    theirs = {
        "history": embedding(weights, torch.cat(some)),
        "clicked": pooled(weights, padded, "mean"),
        "best": pooled(weights, padded, "max"),
    }
    same(flat, theirs, tables, weights)


def test_the_rows_of_a_jagged_feature_combine_with_tensors_of_the_same_raggedness(make_tables: MakeTables) -> None:
    tables = make_tables(ITEMS, features=FEATURES)
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    other = torch.nested.nested_tensor_from_jagged(torch.ones(3, 8), ids.offsets())
    total = (tables({"history": ids})["history"] * other).sum()
    total.backward()
    assert dense_gradients(tables)["item"][1:4].tolist() == torch.ones(3, 8).tolist()


def test_a_bag_that_is_not_pooled_gives_its_rows_as_a_jagged_tensor(make_tables: MakeTables) -> None:
    tables = make_tables(ITEMS, features=FEATURES)
    weights, values = weights_of(tables, "item"), torch.tensor([1, PAD, 3, 3])
    rows: Any = tables({"history": Bag(values, torch.tensor([0, 0, 3]))})["history"]
    assert rows.offsets().tolist() == [0, 0, 3, 4]
    same({"history": rows.values()}, {"history": embedding(weights, values)}, tables, weights)


def test_the_maximum_of_equal_rows_gives_the_gradient_to_the_first(make_tables: MakeTables) -> None:
    tables = make_tables(ITEMS, mode="max")
    weights = weights_of(tables, "item")
    ids = torch.tensor([[5, 5, 5]])
    same(tables({"item": ids}), {"item": pooled(weights, ids, "max")}, tables, weights)


def test_a_row_that_is_not_a_number_is_the_maximum(make_tables: MakeTables) -> None:
    tables = make_tables(ITEMS, mode="max")
    assert tables.memory is not None
    key = tables.keys_of(0, [("item", torch.tensor([2]))])
    tables.memory.flat[int(tables.layout.record_starts(key, tables.layout.groups[0])[0])] = float("nan")
    for ids in ([[1, 2, 3]], [[2, 1, 3]], [[1, 3, 2]]):
        assert tables({"item": torch.tensor(ids)})["item"].isnan().tolist() == [[True] + [False] * 7]


def test_padding_is_neither_fetched_nor_counted(make_tables: MakeTables) -> None:
    tables = make_tables(ITEMS, features=FEATURES)
    tables.counts_accesses = True
    assert PAD not in np.concatenate(keys_by_group(tables, [{"history": SEQUENCE}])).tolist()
    tables({"history": SEQUENCE, "candidate": torch.tensor([PAD, PAD, 7, 1])})
    (captured,) = tables.captured
    assert captured.accesses is not None
    assert dict(zip(captured.keys.tolist(), captured.accesses.tolist(), strict=True)) == {
        1: 2, 2: 1, 7: 3, 29: 1, 0: 1, 5: 1
    }  # fmt: skip


def test_contributors_are_counted_by_sample_for_every_form_of_ids(make_tables: MakeTables) -> None:
    """Micro-batches of two samples: how many contain each row."""
    tables = make_tables(ITEMS, features=FEATURES)
    tables.notes_samples = True
    jagged = torch.nested.nested_tensor(
        [torch.tensor(x, dtype=torch.int64) for x in ([], [9], [9, 2], [2])], layout=torch.jagged
    )
    deep = torch.tensor([[[1, PAD], [1, 2]], [[3, 3], [3, 3]], [[PAD, PAD], [3, 1]], [[8, 8], [8, 8]]])
    for ids, expected in (
        ({"history": SEQUENCE}, {1: 1, 2: 1, 7: 1, 29: 1, 0: 1, 5: 1}),
        ({"clicked": jagged, "best": torch.tensor([[2], [2], [2], [PAD]])}, {9: 2, 2: 2}),
        ({"history": deep}, {1: 2, 2: 1, 3: 2, 8: 1}),
    ):
        out = tables(ids)
        sum(x.values().sum() if x.is_nested else x.sum() for x in out.values()).backward()
        counts = tables.contributors(2, 4)[0]
        assert dict(zip(counts.keys.tolist(), counts.values[:, 0].tolist(), strict=True)) == expected
        tables.drop_gradients()


@st.composite
def bags(draw: st.DrawFn) -> list[list[int]]:
    return draw(st.lists(st.lists(st.integers(0, 7), max_size=5), max_size=5))


@pytest.mark.slow
@given(bags(), st.sampled_from(["sum", "mean", "max", None]), st.sampled_from([None, 0, 3]))
def test_bags_jagged_and_padded_ids_are_the_same_lookup(
    samples: list[list[int]], pooling: str | None, padding: int | None
) -> None:
    source = Source("f", "t", 0, 40, 8, pooling, None if padding is None else 40 + padding)
    lengths = [len(one) for one in samples]
    values = torch.tensor([x for one in samples for x in one], dtype=torch.int64)
    cuts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    bag = look_up(source, Bag(values, cuts[:-1]))
    nested = look_up(source, torch.nested.nested_tensor_from_jagged(values, cuts))
    kept = [[40 + x for x in one if x != padding] for one in samples]
    assert bag.keys.tolist() == nested.keys.tolist() == [key for one in kept for key in one]
    assert np.diff(bag.by_sample).tolist() == np.diff(nested.by_sample).tolist() == [len(one) for one in kept]
    assert bag.offsets.tolist() == nested.offsets.tolist()
    assert bag.shape == nested.shape == (len(samples),)
    if pooling is None:
        assert np.diff(bag.offsets).tolist() == [int(x != padding) for one in samples for x in one]
    else:
        assert bag.offsets.tolist() == bag.by_sample.tolist()
    if padding is not None and samples:
        width = max(lengths)
        rows = torch.tensor([one + [padding] * (width - len(one)) for one in samples], dtype=torch.int64)
        padded = look_up(source, rows.view(len(samples), width))
        assert padded.keys.tolist() == bag.keys.tolist()
        assert padded.by_sample.tolist() == bag.by_sample.tolist()


def test_stacked_takes_features_of_one_table_and_leaves_padding_out(make_tables: MakeTables) -> None:
    tables = make_tables(ITEMS, features={"shown": "item", "clicked": Feature("item", "mean"), "user": "user"})
    ids = {"clicked": SEQUENCE, "user": torch.tensor([1, 2, 3, 4]), "shown": torch.tensor([5, PAD, 5, 6])}
    out, each = tables.stacked(ids), tables(ids)
    torch.testing.assert_close(out, torch.stack([each[name] for name in ids], dim=1))
    assert (out[1, 2] == 0).all()
    plain = make_tables({"item": (30, 8)}, features={"shown": "item", "clicked": "item"})
    both = plain.stacked({"shown": torch.tensor([5, 6]), "clicked": torch.tensor([6, 6], dtype=torch.int32)})
    assert torch.equal(both, torch.from_numpy(plain.rows("item", [5, 6, 6, 6]).reshape(2, 2, 8)))
    assert len(plain.captured) == 1 and len(plain.captured[0].keys) == 2


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"f": "itm"}, "feature 'f': no table named 'itm'; the tables are item, user"),
        ({"f": Feature("itm")}, "feature 'f': no table named 'itm'"),
        ({"f": Feature("item", "median")}, "feature 'f': pooling must be 'sum', 'mean', 'max', or None"),
        ({"f": ("item", "sum")}, "feature 'f': expected the name of a table or gba_hvd.Feature"),
        ({"user": "item"}, "feature 'user' is of table 'item', and has the name of another table"),
    ],
)
def test_features_that_do_not_fit_the_tables(tmp_path: Path, features: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        EmbeddingTables(ITEMS, gba_hvd.SGD(lr=0.1), features=features, shard_dir=tmp_path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (Table(5, 2, padding_idx=5), "table 't': padding_idx must be one of its rows, -5 to 4, got 5"),
        (Table(5, 2, padding_idx=-6), "table 't': padding_idx must be one of its rows"),
        (Table(5, 2, padding_idx=True), "table 't': padding_idx must be one of its rows"),
        (Table(5, 2, padding_idx=1.0), "table 't': padding_idx must be one of its rows"),  # type: ignore[arg-type]
        (Table(10.7, 4), "table 't': rows and dim must be whole numbers, got 10.7 and 4"),  # type: ignore[arg-type]
        ((5, True), "table 't': rows and dim must be whole numbers, got 5 and True"),
        ((5,), r"table 't': expected \(rows, dim\) or gba_hvd.Table"),
        (5, r"table 't': expected \(rows, dim\) or gba_hvd.Table"),
    ],
)
def test_tables_that_make_no_sense(tmp_path: Path, table: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        EmbeddingTables({"t": table}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path)


def test_a_mode_that_no_feature_would_use_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"features": {"f": Feature("item", "max")}, "shard_dir": tmp_path}
    with pytest.raises(BadInput, match="mode for table 'item': its features name their own pooling"):
        EmbeddingTables(ITEMS, gba_hvd.SGD(lr=0.1), mode={"item": "mean"}, **settings)
    with pytest.raises(BadInput, match="mode: no table named 'itm'"):
        EmbeddingTables(ITEMS, gba_hvd.SGD(lr=0.1), mode={"itm": "mean"}, **settings)


def test_a_negative_padding_idx_counts_from_the_end(tmp_path: Path) -> None:
    tables = EmbeddingTables({"t": Table(5, 2, padding_idx=-1)}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path)
    assert tables.tables["t"].padding_idx == 4


def test_numbers_of_a_table_may_be_those_of_numpy(tmp_path: Path) -> None:
    table: Any = Table(np.int64(5), np.int32(2), padding_idx=np.int64(0))
    tables = EmbeddingTables({"t": table}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path)
    assert tables.tables["t"] == Table(5, 2, padding_idx=0)


def test_no_optimizer_is_needed_where_every_table_names_its_own(tmp_path: Path) -> None:
    own = {"a": Table(5, 2, gba_hvd.Adam(lr=0.1)), "b": Table(5, 2, gba_hvd.SGD(lr=0.2))}
    tables = EmbeddingTables(own, shard_dir=tmp_path)
    assert tables.optimizer == gba_hvd.Adam(lr=0.1)
    assert tables.optimizers.own == (gba_hvd.SGD(lr=0.2),)
    with pytest.raises(BadInput, match="no optimizer for table 'c', 'd': pass EmbeddingTables"):
        EmbeddingTables({**own, "c": (5, 2), "d": (6, 2)}, shard_dir=tmp_path)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 2, 2, dtype=torch.int64), r"feature 'clicked' of 'item': pooled ids must be \[B\] or \[B, L\]"),
        (torch.tensor(3), r"pooled ids must be \[B\] or \[B, L\], got \[\]"),
        (torch.tensor([[1.0]]), "ids must be int64 or int32, got torch.float32"),
        ([1, 2], "ids must be a tensor of int64 or int32, or a gba_hvd.Bag, got list$"),
        (np.array([[1, 2]]), "or a gba_hvd.Bag, got ndarray$"),
        ([["a"], ["b", "c"]], r"got list; strings become ids of a hashed table .*hash_strings\(pyarrow.array"),
        (np.array([None, "b"]), "got ndarray; strings become ids"),
        (Bag(["a"], torch.tensor([0])), r"values of a Bag must be int64 \[n\], got list; strings become ids"),  # type: ignore[arg-type]
        (torch.nested.nested_tensor([torch.tensor([1.0])], layout=torch.jagged), "ids must be int64 or int32"),
        (torch.nested.nested_tensor([torch.ones(2, 2).long()], layout=torch.jagged), "and two dimensions"),
        (torch.zeros(2, dtype=torch.int64).to_sparse(), "ids must be int64 or int32"),
        (Bag(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([0])), r"values of a Bag must be int64 \[n\]"),
        (Bag(torch.tensor([1]), torch.tensor([[0]])), r"offsets must be int64 \[B\]"),
        (Bag(torch.tensor([1]), torch.empty(0, dtype=torch.int64)), "got none"),
        (torch.tensor([[1, 2], [3, 30]]), "got id 30 in feature 'clicked', in sample 1 of the batch"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "ids must be on the CPU"),
    ],
    ids=lambda x: "",
)
def test_ids_that_a_feature_cannot_take(make_tables: MakeTables, ids: Any, message: str) -> None:
    tables = make_tables(ITEMS, features=FEATURES)
    with pytest.raises(BadInput, match=message):
        tables({"clicked": ids})


@pytest.mark.parametrize(("feature", "how"), [("best", "is pooled by its maximum"), ("history", "is not pooled")])
def test_weights_that_would_be_ignored_are_refused(make_tables: MakeTables, feature: str, how: str) -> None:
    tables = make_tables(ITEMS, features=FEATURES)
    with pytest.raises(BadInput, match=f"{how}, so the weights of its Bag would be ignored"):
        tables({feature: Bag(torch.tensor([1, 2]), torch.tensor([0]), torch.ones(2))})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_ids_of_the_old_layout_are_refused(make_tables: MakeTables) -> None:
    with pytest.raises(BadInput, match=r"nested ids must have layout torch.jagged .* got torch.strided"):
        make_tables(ITEMS)({"item": torch.nested.nested_tensor([torch.tensor([1])], layout=torch.strided)})


def test_narrowed_nested_ids_are_refused(make_tables: MakeTables) -> None:
    whole = torch.arange(12).view(2, 6)
    ids = torch.nested.narrow(whole, 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged)
    with pytest.raises(BadInput, match=r"call \.contiguous\(\)"):
        make_tables(ITEMS)({"item": ids})
    assert make_tables(ITEMS)({"item": ids.contiguous()})["item"].shape == (2, 8)


def test_stacked_refuses_a_feature_that_is_not_pooled(make_tables: MakeTables) -> None:
    tables = make_tables(ITEMS, features=FEATURES)
    with pytest.raises(BadInput, match="feature 'history' is not pooled"):
        tables.stacked({"history": SEQUENCE, "candidate": torch.tensor([1, 2, 3, 4])})
