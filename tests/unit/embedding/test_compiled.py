"""Lookups under `torch.compile`: no graph break, the same values and gradients; export; other dtypes of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gba_hvd
from gba_hvd import Bag, EmbeddingTables, Feature, GbaError, Table
from gba_hvd.embedding.joined_tables import join_tables
from tests.unit.conftest import Clicks
from tests.unit.embedding.test_tables import dense_gradients

MakeTables = Callable[..., EmbeddingTables]
SIZES: dict[str, Table | tuple[int, int]] = {"item": Table(30, 8, padding_idx=4), "user": (50, 8), "ad": (20, 3)}
FEATURES = {
    "history": Feature("item", None),
    "best": Feature("item", "max"),
    "shown": "item",
    "words": Feature("ad", "mean"),
}
IDS: dict[str, Tensor | Bag] = {
    "history": torch.tensor([[1, 2, 4], [7, 7, 29]]),
    "best": torch.tensor([[1, 2, 4], [4, 4, 4]]),
    "shown": torch.tensor([3, 1], dtype=torch.int32),
    "words": Bag(torch.tensor([1, 2, 2]), torch.tensor([0, 2])),
    "user": torch.tensor([9, 9]),
}


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self, tables: EmbeddingTables) -> None:
        super().__init__()
        self.tables, self.linear = tables, nn.Linear(8 * 4 + 3, 1)

    def forward(self, ids: dict[str, Tensor | Bag]) -> Tensor:
        rows = self.tables(ids)
        parts = [rows["history"].sum(1), rows["best"], rows["shown"], rows["words"], rows["user"]]
        return self.linear(torch.cat(parts, 1)).squeeze(1)


@pytest.mark.slow
def test_a_compiled_model_has_no_graph_break_and_trains_as_the_eager_one(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES, features=FEATURES)
    tables.counts_accesses = True
    model = Model(tables)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found: list[Any] = []
    for run in (model, compiled, compiled):
        model.linear.zero_grad()
        out = run(IDS)
        (out * torch.tensor([1.0, -2.0])).sum().backward()
        captured = [(c.keys.tolist(), c.accesses.tolist()) for c in tables.captured if c.accesses is not None]
        found.append((out.detach(), model.linear.weight.grad, dense_gradients(tables), captured))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.slow
def test_passes_of_a_compiled_model_add_up_and_can_be_cleared(make_tables: MakeTables) -> None:
    tables = make_tables({"user": (50, 8)})
    compiled = torch.compile(lambda ids: tables({"user": ids})["user"].sum(), backend="aot_eager", fullgraph=True)
    first, second = compiled(torch.tensor([1, 2])), compiled(torch.tensor([2, 3]))
    (first + 2 * second).backward()
    assert dense_gradients(tables)["user"][1:4, 0].tolist() == [1.0, 3.0, 2.0]
    compiled(torch.tensor([1, 2])).backward()
    late = compiled(torch.tensor([1, 2]))
    tables.zero_gradients()
    late.backward()
    assert dense_gradients(tables)["user"][1, 0] == 1.0
    with torch.no_grad():
        compiled(torch.tensor([5, 6]))
    assert tables.take_gradients() == [[]]


@pytest.mark.slow
def test_gradients_that_are_asked_for_by_name_train_no_rows_of_a_compiled_model(make_tables: MakeTables) -> None:
    """As GradNorm and PCGrad do: `torch.autograd.grad` for some parameters, `backward()` for the step."""
    tables, linear = make_tables({"user": (50, 8), "ad": (20, 3)}), nn.Linear(11, 2)

    def losses(ids: dict[str, Tensor]) -> Tensor:
        rows = tables(ids)
        return linear(torch.cat([rows["user"], rows["ad"]], 1)).square().mean(0)

    found: list[Any] = []
    ids = {"user": torch.tensor([1, 2, 2]), "ad": torch.tensor([3, 3, 0])}
    for run in (losses, torch.compile(losses, backend="aot_eager", fullgraph=True)):
        first, second = run(ids)
        for loss in (first, second):
            torch.autograd.grad(loss, linear.weight, retain_graph=True)
        assert all(captured.rows.grad is None for captured in tables.captured)
        second.backward(retain_graph=True, inputs=[linear.bias])
        assert all(captured.rows.grad is None for captured in tables.captured)
        (first + 3 * second).backward(retain_graph=True)
        first.backward()
        found.append(dense_gradients(tables))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.slow
@pytest.mark.parametrize("padding", [None, 4])
def test_weights_of_bags_get_their_gradient_from_a_compiled_model(make_tables: MakeTables, padding: int | None) -> None:
    tables = make_tables({"item": Table(30, 8, padding_idx=padding)})

    def score(weights: Tensor) -> Tensor:
        return (tables({"item": Bag(torch.tensor([1, 4, 3]), torch.tensor([0, 2]), weights)})["item"] ** 2).sum()

    weights = [torch.tensor([1.0, 2.0, 3.0], requires_grad=True) for _ in range(2)]
    score(weights[0]).backward()
    eager = dense_gradients(tables)
    torch.compile(score, backend="aot_eager", fullgraph=True)(weights[1]).backward()
    torch.testing.assert_close(dense_gradients(tables), eager)
    torch.testing.assert_close(weights[1].grad, weights[0].grad)


@pytest.mark.slow
def test_ragged_features_of_a_compiled_model(make_tables: MakeTables) -> None:
    tables = make_tables(SIZES, features=FEATURES)
    jagged = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([4, 3, 3])], layout=torch.jagged)

    def score(values: Tensor, offsets: Tensor) -> Tensor:
        rows: Any = tables({"history": Bag(values, offsets[:-1]), "best": Bag(values, offsets[:-1])})
        return (rows["history"].values() ** 2).sum() + rows["best"].sum()

    def of_nested(ids: Tensor) -> Tensor:
        rows: Any = tables({"history": ids, "best": ids})
        return (rows["history"].values() ** 2).sum() + rows["best"].sum()

    of: Any = jagged
    eager = score(of.values(), of.offsets())
    eager.backward()
    expected = dense_gradients(tables)
    for call, ids in ((score, (of.values(), of.offsets())), (of_nested, (jagged,))):
        out = torch.compile(call, backend="aot_eager", fullgraph=True)(*ids)
        torch.testing.assert_close(out, eager)
        out.backward()
        torch.testing.assert_close(dense_gradients(tables), expected)


@pytest.mark.slow
def test_stacked_compiles(make_tables: MakeTables) -> None:
    tables = make_tables({"user": (50, 8), "ad": (20, 8)})
    ids = {"user": torch.tensor([1, 2]), "ad": torch.tensor([3, 3])}
    expected = tables.stacked(ids)
    out = torch.compile(tables.stacked, backend="aot_eager", fullgraph=True)(ids)
    torch.testing.assert_close(out, expected)


@pytest.mark.slow
def test_a_batch_of_another_size_is_looked_up_as_well(make_tables: MakeTables) -> None:
    tables = make_tables({"user": (50, 8)})
    compiled = torch.compile(lambda ids: tables({"user": ids})["user"] * 2, backend="aot_eager", fullgraph=True)
    for n in (4, 7, 3):
        ids = torch.arange(n)
        torch.testing.assert_close(compiled(ids), 2 * torch.from_numpy(tables.rows("user", ids)))


@pytest.mark.slow
def test_a_bad_id_is_named_by_a_compiled_model(make_tables: MakeTables) -> None:
    tables = make_tables({"user": (50, 8)})
    compiled = torch.compile(lambda ids: tables({"user": ids})["user"], backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="table 'user' has rows 0 to 49, got id 50 in sample 1"):
        compiled(torch.tensor([1, 50]))
    unknown = torch.compile(lambda ids: tables({"usr": ids})["usr"], backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="no table named 'usr'"):
        unknown(torch.tensor([1]))


def test_a_copy_of_the_tables_is_looked_up_as_a_copy(tmp_path: Any) -> None:
    tables = EmbeddingTables({"user": (50, 8)}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path)
    assert copy.deepcopy(tables)._handle != tables._handle


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_exporting_a_model_with_tables_is_refused_and_says_what_to_export(
    make_tables: MakeTables, strict: bool
) -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.dense = make_tables({"user": (50, 8)}), nn.Linear(8, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.dense(self.tables({"user": ids})["user"])

    model = Tower()
    with pytest.raises(Exception, match="Export the dense part by itself") as caught:
        torch.export.export(model, (torch.tensor([1, 2]),), strict=strict)
    assert strict or isinstance(caught.value, GbaError)
    exported = torch.export.export(model.dense, (torch.ones(2, 8),), strict=strict)
    assert exported.module()(torch.ones(2, 8)).shape == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compile_", [False, True])
def test_rows_stay_float32_under_autocast(make_tables: MakeTables, dtype: torch.dtype, compile_: bool) -> None:
    tables = make_tables(SIZES, features=FEATURES)
    model: Any = Model(tables)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_ else model
    with torch.autocast("cpu", dtype=dtype):
        assert {rows.dtype for rows in tables(IDS).values()} == {torch.float32}
        tables.drop_gradients()
        out = run(IDS)
        assert out.dtype == dtype
        loss = out.float().sum()
    loss.backward()
    gradient = dense_gradients(tables)["user"]
    torch.testing.assert_close(gradient[9], 2 * model.linear.weight.detach()[0, -8:], atol=1e-2, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compile_", [False, True])
def test_a_model_in_another_dtype_gets_its_rows_in_that(
    make_tables: MakeTables, dtype: torch.dtype, compile_: bool
) -> None:
    tables = make_tables(SIZES, features=FEATURES)
    model = Model(tables)
    whole = model(IDS)
    whole.sum().backward()
    expected = dense_gradients(tables)
    model.to(dtype)
    assert {rows.dtype for rows in tables(IDS).values()} == {dtype}
    assert tables.stacked({"shown": IDS["shown"], "user": IDS["user"]}).dtype == dtype
    tables.drop_gradients()
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_ else model
    out = run(IDS)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), whole, atol=1e-2, rtol=1e-2)
    out.sum().backward()
    torch.testing.assert_close(dense_gradients(tables), expected, atol=1e-2, rtol=1e-2)  # float32
    model.float()
    assert tables(IDS)["user"].dtype == torch.float32


def test_jagged_rows_weights_of_bags_and_joined_tables_of_a_model_in_bfloat16(
    make_tables: MakeTables, tmp_path: Path
) -> None:
    tables = make_tables(SIZES, features=FEATURES).bfloat16()
    rows: Any = tables({"history": Bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))})["history"]
    assert rows.is_nested and rows.dtype == torch.bfloat16
    (rows.values() * 2).sum().backward()
    assert dense_gradients(tables)["item"][2].tolist() == [2.0] * 8
    weights = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    tables({"words": Bag(torch.tensor([1, 2]), torch.tensor([0]), weights)})["words"].sum().backward()
    assert weights.grad is not None and weights.grad.dtype == torch.bfloat16

    parts = [EmbeddingTables({name: (5, 2)}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path) for name in "ab"]
    whole = join_tables(parts)
    parts[1].half()
    with whole.recording():
        assert [part({name: torch.tensor([1])})[name].dtype for part, name in zip(parts, "ab", strict=True)] == [
            torch.float32, torch.float16,
        ]  # fmt: skip


# --- in a job --------------------------------------------------------------------------------------------------------


def trained(folder: Path, dtype: torch.dtype, compile_: bool = False) -> tuple[Tensor, np.ndarray]:
    """A job of one worker: its linear layer, and the rows of users."""
    tables = EmbeddingTables(
        {"user": (20, 4), "item": (7, 3)}, gba_hvd.SGD(lr=0.5), seed=2, n_shards=2, shard_dir=folder
    )
    torch.manual_seed(3)
    linear = nn.Linear(9, 1)
    model = nn.ModuleList([tables, linear]).to(dtype)

    def logits(ids: dict[str, Tensor | Bag], dense: Tensor) -> Tensor:
        rows = tables(ids)
        return linear(torch.cat([rows["user"], rows["item"], dense.to(dtype)], 1)).float().squeeze(1)

    run: Any = torch.compile(logits, backend="aot_eager", fullgraph=True) if compile_ else logits
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), tables, global_batch=16, micro_batch=4
    )
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    for batch in gba_hvd.batches(Clicks(64), state):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(run(batch.ids, batch.dense), batch.label)
        loss.backward()
        optimizer.step(loss=loss)
    rows = tables.rows("user", np.arange(20))
    state.close()
    return linear.weight.detach().float(), rows


@pytest.mark.slow
def test_a_job_with_a_compiled_model_trains_the_same_model(tmp_path: Path) -> None:
    eager, compiled = (trained(tmp_path / str(flag), torch.float32, flag) for flag in (False, True))
    torch.testing.assert_close(compiled[0], eager[0])
    np.testing.assert_allclose(compiled[1], eager[1], atol=1e-6)


@pytest.mark.slow
def test_a_job_trains_a_model_in_bfloat16(tmp_path: Path) -> None:
    whole, half = trained(tmp_path / "whole", torch.float32), trained(tmp_path / "half", torch.bfloat16)
    assert half[1].dtype == np.float32
    torch.testing.assert_close(half[0], whole[0], atol=0.02, rtol=0.1)
    np.testing.assert_allclose(half[1], whole[1], atol=0.02)
