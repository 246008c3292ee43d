"""Embedding tables against `nn.Embedding` and `nn.EmbeddingBag`, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gba_hvd
from gba_hvd import BadInput, Bag, EmbeddingTables, GbaError

MakeTables = Callable[..., EmbeddingTables]
SIZES = {"user": (50, 8), "item": (9, 3), "ad": (30, 8), "site": (1, 1)}


def weights_of(tables: EmbeddingTables, name: str) -> Tensor:
    n_rows = next(t.n_rows for t in tables.layout.tables if t.name == name)
    return torch.from_numpy(tables.rows(name, np.arange(n_rows))).requires_grad_()


def dense_gradients(tables: EmbeddingTables) -> dict[str, Tensor]:
    """What the tables have captured, as one dense gradient for each table; the rows of one capture must be distinct."""
    found = {t.name: torch.zeros(t.n_rows, t.dim) for t in tables.layout.tables}
    for group, grads in enumerate(tables.take_gradients()):
        for grad in grads:
            assert len(set(grad.keys)) == len(grad.keys)
            for key, value in zip(grad.keys, grad.values, strict=True):
                table, row = tables.layout.locate(int(key), group)
                found[table][row] += torch.from_numpy(value)
    return found


def ids_for(name: str, n: int, seed: int = 0) -> Tensor:
    return torch.randint(SIZES[name][0], (n,), generator=torch.Generator().manual_seed(seed))


def a_bag(name: str, weighted: bool = False) -> Bag:
    """5 samples, the first, third and last without values."""
    values = ids_for(name, 12, seed=len(name))
    weights = torch.randn(12, generator=torch.Generator().manual_seed(9)).requires_grad_() if weighted else None
    return Bag(values, torch.tensor([0, 0, 7, 7, 12]), weights)


def check(
    tables: EmbeddingTables, ours: dict[str, Tensor], theirs: dict[str, Tensor], weights: dict[str, Tensor]
) -> None:
    """Same values, and the same gradient of the same function of them."""
    generator = torch.Generator().manual_seed(5)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)
        factor = torch.randn(value.shape, generator=generator)
        (ours[name] * factor).sum().backward(retain_graph=True)
        (value * factor).sum().backward(retain_graph=True)
    found = dense_gradients(tables)
    for name in theirs:
        torch.testing.assert_close(found[name], weights[name].grad)


def test_single_values_are_as_from_embedding(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    ids = {name: ids_for(name, 40) for name in SIZES}
    weights = {name: weights_of(tables, name) for name in SIZES}
    check(tables, tables(ids), {n: nn.functional.embedding(ids[n], weights[n]) for n in SIZES}, weights)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_as_from_embedding_bag(make_tables: MakeTables, mode: str) -> None:
    tables = make_tables(SIZES, mode=mode)
    bags = {name: a_bag(name) for name in SIZES}
    weights = {name: weights_of(tables, name) for name in SIZES}
    theirs = {
        name: nn.functional.embedding_bag(bag.values, weights[name], bag.offsets, mode=mode)
        for name, bag in bags.items()
    }
    check(tables, tables(bags), theirs, weights)


def test_weighted_bags_and_the_gradient_of_their_weights(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    bag = a_bag("user", weighted=True)
    assert bag.weights is not None
    w, same = weights_of(tables, "user"), bag.weights.detach().clone().requires_grad_()
    theirs = nn.functional.embedding_bag(bag.values, w, bag.offsets, mode="sum", per_sample_weights=same)
    check(tables, tables({"user": bag}), {"user": theirs}, {"user": w})
    torch.testing.assert_close(bag.weights.grad, same.grad)


def test_a_weighted_mean_divides_by_the_number_of_values(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES, mode={"user": "mean"})
    assert tables.mode == {"user": "mean", "item": "sum", "ad": "sum", "site": "sum"}
    weights = torch.tensor([2.0, 4.0, 1.0], requires_grad=True)
    out = tables({"user": Bag(torch.tensor([3, 4, 3]), torch.tensor([0, 2]), weights)})["user"]
    rows = torch.from_numpy(tables.rows("user", [3, 4]))
    torch.testing.assert_close(out, torch.stack([(2 * rows[0] + 4 * rows[1]) / 2, rows[0]]))
    out.sum().backward()
    torch.testing.assert_close(weights.grad, torch.stack([rows[0].sum() / 2, rows[1].sum() / 2, rows[0].sum()]))


def test_single_values_and_bags_of_one_dimension_in_one_call(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    ids: dict[str, Tensor | Bag] = {"ad": a_bag("ad"), "user": ids_for("user", 5)}
    weights = {name: weights_of(tables, name) for name in ("user", "ad")}
    bag = a_bag("ad")
    theirs = {
        "ad": nn.functional.embedding_bag(bag.values, weights["ad"], bag.offsets, mode="sum"),
        "user": weights["user"][ids_for("user", 5)],
    }
    ours = tables(ids)
    assert list(ours) == ["ad", "user"]
    check(tables, ours, theirs, weights)


def test_stacked_is_the_same_as_one_by_one(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    ids = {"ad": ids_for("ad", 40), "user": ids_for("user", 40)}
    weights = {name: weights_of(tables, name) for name in ids}
    out = tables.stacked(ids)
    assert out.shape == (40, 2, 8)
    check(tables, {"ad": out[:, 0], "user": out[:, 1]}, {n: weights[n][ids[n]] for n in ids}, weights)


def test_columns_may_be_views_of_one_matrix(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    matrix = torch.stack([ids_for("user", 6), ids_for("ad", 6)], dim=1)
    out = tables({"user": matrix[:, 0], "ad": matrix[:, 1]})
    torch.testing.assert_close(out["ad"], torch.from_numpy(tables.rows("ad", matrix[:, 1].numpy())))


def test_one_forward_pass_leaves_one_gradient_per_distinct_row(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    tables({"user": torch.tensor([7, 7, 3, 7])})["user"].sum().backward()
    (grad,) = tables.take_gradients()[0]
    base = tables.layout.place_of_table["user"][1]
    assert (grad.keys - base).tolist() == [7, 3]
    assert grad.values[:, 0].tolist() == [3.0, 1.0]
    assert tables.take_gradients() == [[], [], []]


def test_two_forward_passes_add_up(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    first, second = tables({"user": torch.tensor([1, 2])}), tables({"user": torch.tensor([2])})
    (first["user"].sum() + 2 * second["user"].sum()).backward()
    assert dense_gradients(tables)["user"][:3, 0].tolist() == [0.0, 1.0, 3.0]


def test_nothing_is_captured_without_gradients(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    with torch.no_grad():
        assert not tables({"user": ids_for("user", 5)})["user"].requires_grad
    assert tables.take_gradients() == [[], [], []]


def test_gradients_can_be_cleared_between_forward_and_backward(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    tables({"user": torch.tensor([4])})["user"].sum().backward()
    loss = tables({"user": torch.tensor([4])})["user"].sum()
    tables.zero_gradients()
    loss.backward()
    assert dense_gradients(tables)["user"][4, 0] == 1.0


def test_a_batch_without_samples(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    none = torch.empty(0, dtype=torch.int64)
    assert tables({"user": none, "item": Bag(none, none)})["item"].shape == (0, 3)
    assert tables({"item": Bag(none, torch.zeros(4, dtype=torch.int64))})["item"].tolist() == [[0.0] * 3] * 4
    assert tables({}) == {}


@pytest.mark.parametrize("n_shards", [1, 2, 5, 64])
def test_initial_rows_do_not_depend_on_the_number_of_shards(make_tables: MakeTables, n_shards: int) -> None:
    expected, tables = make_tables(SIZES, n_shards=3), make_tables(SIZES, n_shards=n_shards)
    for name, (n_rows, _) in SIZES.items():
        assert np.array_equal(tables.rows(name, np.arange(n_rows)), expected.rows(name, np.arange(n_rows)))


def test_initial_rows_do_not_depend_on_the_other_tables(make_tables: MakeTables) -> None:
    alone, together = make_tables({"ad": (30, 8)}), make_tables(SIZES)
    assert np.array_equal(alone.rows("ad", np.arange(30)), together.rows("ad", np.arange(30)))


@pytest.mark.parametrize("dim", [1, 7, 16])
def test_initial_rows_are_normal(make_tables: MakeTables, dim: int) -> None:
    rows = make_tables({"t": (20_000, dim)}, init_std=0.25).rows("t", np.arange(20_000)).ravel() / 0.25
    assert abs(rows.mean()) < 4 / len(rows) ** 0.5
    assert abs(rows.std() - 1) < 4 / len(rows) ** 0.5
    assert abs(np.mean(np.abs(rows) < 1) - 0.6827) < 0.01
    assert len(np.unique(rows)) > 0.99 * len(rows)


def test_tables_and_seeds_have_rows_of_their_own(make_tables: MakeTables) -> None:
    one, other = make_tables({"a": (9, 4), "b": (9, 4)}), make_tables({"a": (9, 4)}, seed=2)
    a = one.rows("a", np.arange(9))
    assert not np.isin(a, one.rows("b", np.arange(9))).any()
    assert not np.isin(a, other.rows("a", np.arange(9))).any()


def test_optimizer_slots_can_be_looked_at(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES, gba_hvd.RowAdagrad(lr=0.1))
    assert tables.rows("item", [1, 2], "sum").tolist() == [0.0, 0.0]
    assert make_tables(SIZES, gba_hvd.Adam(lr=0.1)).rows("item", [1], "exp_avg").tolist() == [[0.0] * 3]


def test_tables_are_no_parameters(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    assert list(tables.parameters()) == []
    assert tables.state_dict() == {}
    assert "user: 50 x 8" in repr(tables)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [50, -1, 2**40])
@pytest.mark.parametrize("how", ["forward", "stacked", "bag"])
def test_an_id_outside_its_table_is_named(make_tables: MakeTables, bad: int, how: str) -> None:
    tables, ids = make_tables(SIZES), torch.tensor([3, 49, bad, 0])
    message = f"table 'user' has rows 0 to 49, got id {bad} in sample {1 if how == 'bag' else 2} of the batch"
    call = tables.stacked if how == "stacked" else tables
    with pytest.raises(BadInput, match=message):
        call({"user": Bag(ids, torch.tensor([0, 2])) if how == "bag" else ids})


@pytest.mark.parametrize("how", ["forward", "stacked"])
def test_an_id_outside_its_table_is_named_with_what_its_sample_is(make_tables: MakeTables, how: str) -> None:
    tables, ids = make_tables(SIZES), torch.tensor([3, 49, 50, 0])
    call = tables.stacked if how == "stacked" else tables
    with tables.naming_samples(lambda sample: f" (the one called {sample})"):
        with pytest.raises(BadInput, match=r"in sample 2 of the batch \(the one called 2\); make the table larger"):
            call({"user": ids})
        with tables.apart(), pytest.raises(BadInput, match=r"in sample 2 of the batch; make"):
            call({"user": ids})
    with pytest.raises(BadInput, match=r"in sample 2 of the batch; make"):
        call({"user": ids})


@pytest.mark.parametrize("call", ["forward", "stacked"])
def test_an_unknown_table_is_named_with_those_there_are(make_tables: MakeTables, call: str) -> None:
    tables = make_tables(SIZES)
    with pytest.raises(BadInput, match="no table named 'usr'; the tables are user, item, ad, site"):
        getattr(tables, call)({"user": ids_for("user", 2), "usr": ids_for("user", 2)})


@pytest.mark.parametrize(
    "ids", [torch.tensor([1.0]), torch.tensor([1], dtype=torch.int16), torch.tensor([True])], ids=str
)
def test_ids_of_another_type_are_refused(make_tables: MakeTables, ids: Tensor) -> None:
    with pytest.raises(BadInput, match=r"table 'user': ids must be int64 or int32, got torch"):
        make_tables(SIZES)({"user": ids})


@pytest.mark.parametrize("offsets", [[1, 2], [0, 4], [0, 3, 2], [-1, 2]], ids=str)
def test_offsets_that_do_not_cut_the_values_are_refused(make_tables: MakeTables, offsets: list[int]) -> None:
    with pytest.raises(BadInput, match="table 'user': offsets must start at 0, never fall, and end at 3"):
        make_tables(SIZES)({"user": Bag(torch.tensor([1, 2, 3]), torch.tensor(offsets))})


def test_offsets_and_weights_of_another_type_are_refused(make_tables: MakeTables) -> None:
    tables, values = make_tables(SIZES), torch.tensor([1, 2, 3])
    with pytest.raises(BadInput, match=r"offsets must be int64 \[B\], got torch.float32"):
        tables({"user": Bag(values, torch.tensor([0.0]))})
    for weights in (torch.ones(2), torch.ones(3, dtype=torch.float64)):
        with pytest.raises(BadInput, match=r"table 'user': weights must be float32 \[3\]"):
            tables({"user": Bag(values, torch.tensor([0]), weights)})


def test_stacked_takes_fields_of_one_dimension(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    for ids in ({"user": ids_for("user", 2), "item": ids_for("item", 2)}, {}):
        with pytest.raises(BadInput, match="fields of tables of one dimension"):
            tables.stacked(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_stacked_pools_multi_valued_fields(make_tables: MakeTables, mode: str) -> None:
    tables = make_tables(SIZES, mode=mode)
    ids = {"user": a_bag("user"), "ad": ids_for("ad", 5)}
    out = tables.stacked(ids)
    bag, weights = ids["user"], {name: weights_of(tables, name) for name in ids}
    assert isinstance(bag, Bag)
    pooled = nn.functional.embedding_bag(bag.values, weights["user"], bag.offsets, mode=mode)
    theirs = torch.stack([pooled, weights["ad"][ids["ad"]]], dim=1)
    torch.testing.assert_close(out, theirs)
    factor = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * factor).sum().backward()
    (theirs * factor).sum().backward()
    found = dense_gradients(tables)
    for name in ids:
        torch.testing.assert_close(found[name], weights[name].grad)


def test_a_feature_that_the_loss_does_not_use_adds_nothing(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    bags = {name: a_bag(name) for name in ("user", "ad")}
    weights = weights_of(tables, "ad")
    theirs = nn.functional.embedding_bag(bags["ad"].values, weights, bags["ad"].offsets, mode="sum")
    tables(bags)["ad"].square().sum().backward()
    theirs.square().sum().backward()
    found = dense_gradients(tables)
    torch.testing.assert_close(found["ad"], weights.grad)
    assert not found["user"].any()


def test_features_of_one_call_may_go_into_losses_of_their_own(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    ids = {name: ids_for(name, 20) for name in ("user", "ad")}
    weights = {name: weights_of(tables, name) for name in ids}
    ours = tables(ids)
    for name in ids:
        ours[name].square().sum().backward()
        weights[name][ids[name]].square().sum().backward()
    found = dense_gradients(tables)
    for name in ids:
        torch.testing.assert_close(found[name], weights[name].grad)


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_stacked_features_of_tables_in_any_order(make_tables: MakeTables, mode: str) -> None:
    tables = make_tables(
        {"user": (50, 8), "ad": (30, 8)},
        features={name: gba_hvd.Feature(name[:-1], mode) for name in ("user1", "ad1", "user2", "ad2")},
    )
    weights = {name: weights_of(tables, name) for name in ("user", "ad")}
    for width in ((), (3,)):
        ids = {f"{name}{n}": ids_for(name, 30, seed=n)[:15].view(5, *width or (3,)) for n in (1, 2) for name in weights}
        if not width:
            ids = {name: some[:, 0].contiguous() for name, some in ids.items()}
        ours = tables.stacked(ids)
        theirs = torch.stack(
            [
                nn.functional.embedding_bag(some.view(len(some), -1), weights[name[:-1]], mode=mode)
                for name, some in ids.items()
            ],
            dim=1,
        )
        torch.testing.assert_close(ours, theirs)
        factor = torch.randn(ours.shape, generator=torch.Generator().manual_seed(5))
        (ours * factor).sum().backward()
        (theirs * factor).sum().backward()
        found = dense_gradients(tables)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight.grad)
            weight.grad = None


def test_stacked_needs_as_many_samples_in_every_field(make_tables: MakeTables) -> None:
    with pytest.raises(BadInput, match=r"all fields need 5 samples, got \[5, 4\]"):
        make_tables(SIZES).stacked({"user": a_bag("user"), "ad": ids_for("ad", 4)})


@pytest.mark.parametrize("lengths", [(4, 6), (5, 5 + 1)])
def test_stacked_needs_as_many_ids_in_every_field(make_tables: MakeTables, lengths: tuple[int, int]) -> None:
    tables = make_tables({"a": (30, 8), "b": (30, 8), "c": (30, 8)})
    ids = {"a": torch.zeros(5, dtype=torch.int64)}
    ids |= {n: torch.zeros(k, dtype=torch.int64) for n, k in zip("bc", lengths, strict=True)}
    with pytest.raises(BadInput, match="all fields need 5 ids"):
        tables.stacked(ids)


def test_tables_without_memory_say_how_to_get_it(tmp_path: Path) -> None:
    tables = EmbeddingTables(SIZES, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path)
    with pytest.raises(GbaError, match=r"no memory yet: iterate gba_hvd.batches"):
        tables({"user": ids_for("user", 2)})


def test_an_unknown_pooling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="table 'user': mode must be 'sum', 'mean' or 'max', got 'min'"):
        EmbeddingTables(SIZES, gba_hvd.SGD(lr=0.1), mode="min", shard_dir=tmp_path)
    settings: dict[str, Any] = {"mode": {"item": "median"}, "shard_dir": tmp_path}
    with pytest.raises(BadInput, match="table 'item'"):
        EmbeddingTables(SIZES, gba_hvd.SGD(lr=0.1), **settings)


def test_tracing_is_refused_because_rows_would_become_constants(make_tables: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = make_tables({"user": (20, 4)})

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tables({"user": ids})["user"]

    with (
        pytest.warns(DeprecationWarning, match="torch.jit.trace"),
        pytest.raises(GbaError, match=r"torch\.jit\.trace would bake the rows"),
    ):
        torch.jit.trace(Model(), torch.arange(3))


def test_a_row_of_another_host_that_was_not_fetched_says_what_to_do_after_the_loop(training: Any, clicks: Any) -> None:
    job = training()
    job.epoch(clicks())
    job.tables.local = np.zeros(job.tables.layout.n_shards, bool)
    group, out = job.tables.layout.groups[0], np.empty((1, job.tables.layout.groups[0].dim), np.float32)
    with pytest.raises(
        GbaError,
        match=r"lives on another host .* a generator of one's own .*collate_fn.* Outside gba_hvd\.batches.* use "
        r"gba_hvd\.evaluate",
    ):
        job.tables._read_rows(group, 0, np.array([0]), out)


def test_rows_and_admissions_of_other_hosts_are_refused_not_given_as_zeros(make_tables: Any) -> None:
    tables = make_tables({"user": (20, 4), "tag": gba_hvd.Table(dim=4, keys="hash64", capacity=50)})
    tables.local = np.arange(tables.layout.n_shards) == 0
    keys = tables.keys_of(tables.layout.place_of_table["user"][0], [("user", torch.arange(20))])
    here = np.flatnonzero(tables.local[keys % tables.layout.n_shards])
    assert tables.rows("user", here).any()
    elsewhere = np.setdiff1d(np.arange(20), here)
    asked = np.append(here[:1], elsewhere)
    why = f"{len(elsewhere)} of {len(asked)} rows of table 'user' are on other hosts, the first is of id {elsewhere[0]}"
    with pytest.raises(BadInput, match=rf"{why}: .*recovery\.open_checkpoint.*checkpoint export"):
        tables.rows("user", asked)
    tables.local[:] = False
    for look in (tables.rows, tables.admitted):
        with pytest.raises(BadInput, match="1 of 1 rows of table 'tag' are on other hosts, the first is of id 7"):
            look("tag", [7])
