"""Tables with an optimizer, initial rows or pretrained rows of their own, and several EmbeddingTables in one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput, EmbeddingTables, GbaError, StateMismatch, Table
from gba_hvd.embedding.row_optimizers import TableOptimizers
from gba_hvd.ps.launch import describe_optimizer
from gba_hvd.shm.checkpoint_rows import ShardRows, schema_of
from gba_hvd.shm.layout import Layout
from tests.unit.conftest import Clicks
from tests.unit.thread_world import Workers

MakeTables = Callable[..., EmbeddingTables]


class Job:
    """`user` and `item` under optimizers of their own, and a linear layer, in a world of one."""

    def __init__(self, folder: Path, tables: Any, *, rows: Any = None, features: Any = None, **settings: Any) -> None:
        rows = rows or gba_hvd.SGD(lr=0.5)
        parts = tables if isinstance(tables, list) else [tables]
        self.parts = [
            EmbeddingTables(one, rows, features=features, seed=2, n_shards=3, shard_dir=folder, **settings)
            for one in parts
        ]
        torch.manual_seed(4)
        self.linear = nn.Linear(4 + 3 + 2, 1)
        self.model = nn.ModuleList([*self.parts, self.linear])
        given: Any = self.parts if isinstance(tables, list) else self.parts[0]
        self.optimizer = gba_hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.5), given, global_batch=16, micro_batch=4
        )
        self.tables = self.optimizer.engine.model.tables  # type: ignore[attr-defined]
        self.state = gba_hvd.elastic.TorchState(self.model, self.optimizer, epoch=0)

    def epoch(self, dataset: Clicks) -> None:
        for batch in gba_hvd.batches(dataset, self.state, shuffle=False):
            self.optimizer.zero_grad()
            out: dict[str, Any] = {}
            for part in self.parts:
                out |= part({name: batch.ids[name] for name in part.features})
            logits = self.linear(torch.cat([out["user"], out["item"], batch.dense], 1)).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
            loss.backward()
            self.optimizer.step(loss=loss)

    def rows(self, what: str = "weights") -> dict[str, np.ndarray]:
        tables = self.tables
        return {name: tables.rows(name, np.arange(table.n_rows), what) for name, table in tables.tables.items()}


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made: list[Job] = []

    def make(tables: Any, **settings: Any) -> Job:
        made.append(Job(tmp_path / f"job-{len(made)}", tables, **settings))
        return made[-1]

    yield make
    for one in made:
        one.state.close()


def train_with_torch(start: dict[str, np.ndarray], dataset: Clicks, factors: list[float]) -> dict[str, np.ndarray]:
    """One epoch of plain torch: user by Adagrad(0.02), item by SGD(0.5), both times the factor of the step."""
    torch.manual_seed(4)
    linear = nn.Linear(9, 1)
    tables = {
        name: nn.Embedding.from_pretrained(torch.from_numpy(rows.copy()), freeze=False) for name, rows in start.items()
    }
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (torch.optim.Adagrad(tables["user"].parameters(), lr=0.02), 0.02),
        (torch.optim.SGD(tables["item"].parameters(), lr=0.5), 0.5),
        (torch.optim.SGD(linear.parameters(), lr=0.5), 0.5),
    ]
    for step, factor in enumerate(factors):
        batch = dataset.take(np.arange(step * 16, min(step * 16 + 16, len(dataset))))
        rows = [tables[name](batch.ids[name]) for name in ("user", "item")]
        logits = linear(torch.cat([*rows, batch.dense], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        for optimizer, lr in optimizers:
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = lr * factor
        loss.backward()
        for optimizer, _ in optimizers:
            optimizer.step()
    return {name: table.weight.detach().numpy() for name, table in tables.items()}


def test_tables_with_optimizers_of_their_own_train_as_in_torch_under_one_scheduler(job: Any) -> None:
    one = job({"user": Table(20, 4, optimizer=gba_hvd.Adagrad(lr=0.02)), "item": (7, 3)})
    dataset = Clicks(64)
    for group in one.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, step_size=2, gamma=0.5)
    one.state.scheduler = scheduler
    one.state.engine.step_hooks.functions.append(scheduler.step)
    one.state.sync()
    start = one.rows()
    one.epoch(dataset)
    expected = train_with_torch(start, dataset, [1.0, 1.0, 0.5, 0.5])
    for name, rows in one.rows().items():
        np.testing.assert_allclose(rows, expected[name], atol=1e-5, rtol=1e-4, err_msg=name)
    assert one.tables.rows("user", [0], "sum").shape == (1, 4)


def test_an_optimizer_equal_to_the_default_is_the_default(make_tables: MakeTables) -> None:
    tables = make_tables({"a": Table(9, 4, optimizer=gba_hvd.SGD(0.1)), "b": (5, 4)}, gba_hvd.SGD(lr=0.1))
    assert len(tables.layout.groups) == 1 and tables.optimizers.own == ()
    assert "optimizers" not in tables.layout.describe()


def test_tables_of_one_dimension_and_two_optimizers_are_two_groups_with_slots_of_their_own(
    make_tables: MakeTables,
) -> None:
    adam = gba_hvd.Adam(lr=0.02)
    tables = make_tables(
        {"a": (9, 4), "b": Table(5, 4, optimizer=adam), "c": Table(6, 4, optimizer=gba_hvd.Adam(lr=0.02))},
        gba_hvd.RowAdagrad(lr=0.1),
    )
    layout = tables.layout
    assert [[t.name for t in group.tables] for group in layout.groups] == [["a"], ["b", "c"]]
    assert [group.record for group in layout.groups] == [4 + 1 + 1, 4 + 8 + 1]
    assert Layout.of_description(layout.describe()) == layout
    columns = {t.name: [column.name for column in t.columns] for t in schema_of(layout).tables}
    assert columns == {"a": ["weights", "sum"], **{key: ["weights", "exp_avg", "exp_avg_sq"] for key in "bc"}}
    assert tables.memory is not None
    slab = ShardRows(tables.memory).slab(1, 1)
    np.testing.assert_array_equal(slab.columns[0][:, :4], tables.rows("b", [1, 4]))
    assert tables.rows("a", [1], "sum").tolist() == [0.0]
    out = tables.stacked({"a": torch.tensor([1, 2]), "c": torch.tensor([3, 3])})
    assert torch.equal(out[:, 1], torch.from_numpy(tables.rows("c", [3, 3])))


def test_what_servers_are_sent_describes_every_optimizer(make_tables: MakeTables) -> None:
    tables = make_tables({"a": (9, 4), "b": Table(5, 4, optimizer=gba_hvd.Adam(lr=0.02))})
    assert [describe_optimizer(one)["class"] for one in tables.optimizers.own] == ["gba_hvd:Adam"]


def test_rates_of_other_optimizers_need_one_to_be_in_proportion_to(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"lr 0\.0, and tables have optimizers of their own"):
        EmbeddingTables({"a": Table(9, 4, optimizer=gba_hvd.Adam(0.1))}, gba_hvd.SGD(lr=0.0), shard_dir=tmp_path)
    assert TableOptimizers(gba_hvd.SGD(lr=0.0)).own == ()
    with pytest.raises(BadInput, match="table 'a': optimizer must be a row optimizer"):
        EmbeddingTables({"a": Table(9, 4, optimizer="adam")}, gba_hvd.SGD(0.1), shard_dir=tmp_path)  # type: ignore[arg-type]


# --- initial rows ----------------------------------------------------------------------------------------------------


def by_ids(ids: np.ndarray) -> np.ndarray:
    return (ids[:, None] + np.arange(4) / 10).astype(np.float32)


@pytest.mark.parametrize("n_shards", [1, 3, 16])
def test_rows_start_as_their_table_says(make_tables: MakeTables, n_shards: int) -> None:
    tables = make_tables(
        {"wide": Table(5000, 4, init=2.0), "same": (50, 4), "own": Table(10, 4, init=by_ids, padding_idx=-1)},
        n_shards=n_shards,
    )
    plain = make_tables({"same": (50, 4)}, n_shards=2)
    assert abs(tables.rows("wide", np.arange(5000)).std() / 2.0 - 1) < 0.05
    assert np.array_equal(tables.rows("same", np.arange(50)), plain.rows("same", np.arange(50)))
    assert np.array_equal(tables.rows("own", np.arange(9)), by_ids(np.arange(9)))
    assert not tables.rows("own", [9]).any()


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (lambda ids: np.random.default_rng().normal(size=(len(ids), 4)), "must depend on the ids only"),
        (lambda ids: np.zeros((len(ids), 3), np.float32), r"init of table 't': expected float32 \[3, 4\], got float32"),
        (lambda ids: torch.full((len(ids), 4), float("nan")), "some values are not finite"),
    ],
)
def test_functions_that_make_no_rows_are_refused(make_tables: MakeTables, init: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make_tables({"t": Table(9, 4, init=init)})


@pytest.mark.parametrize("init", [-0.1, float("inf"), True, "zeros"])
def test_deviations_that_make_no_sense_are_refused(tmp_path: Path, init: Any) -> None:
    with pytest.raises(BadInput, match="table 't': init must be a standard deviation"):
        EmbeddingTables({"t": Table(9, 4, init=init)}, gba_hvd.SGD(0.1), shard_dir=tmp_path)


def test_rows_assigned_before_the_first_sync_are_there_after_it(job: Any) -> None:
    one = job(
        {"user": (20, 4), "item": Table(7, 3, init=0.0)}, features={"user": "user", "item": "item", "seen": "item"}
    )
    one.tables.assign("user", torch.tensor([3, 9]), torch.ones(2, 4, dtype=torch.float64))
    one.tables.assign("seen", np.arange(7), np.full((7, 3), 2.0))
    one.tables.assign("item", [5], [[1.0, 2.0, 3.0]])
    one.state.sync()
    assert one.tables.rows("user", [3, 9]).tolist() == [[1.0] * 4] * 2
    assert one.tables.rows("seen", [4, 5]).tolist() == [[2.0] * 3, [1.0, 2.0, 3.0]]


def test_rows_are_assigned_between_epochs_and_not_within(job: Any) -> None:
    one = job({"user": (20, 4), "item": (7, 3)})
    one.epoch(Clicks(32))
    assert one.tables.memory is not None
    before = [ShardRows(one.tables.memory).slab(0, shard).counts.copy() for shard in range(3)]
    one.tables.assign("user", [3], np.ones((1, 4)))
    assert one.tables.rows("user", [3]).tolist() == [[1.0] * 4]
    grown = [ShardRows(one.tables.memory).slab(0, shard).counts - before[shard] for shard in range(3)]
    assert [changes.sum() for changes in grown] == [1, 0, 0], "checkpoints of what changed see it"
    one.state.epoch = 1
    for _ in gba_hvd.batches(Clicks(32), one.state):
        with pytest.raises(GbaError, match="outside the loop over batches"):
            one.tables.assign("user", [3], np.ones((1, 4)))
        break


@pytest.mark.parametrize("kind", ["npy", "npz", "npz without ids", "parquet"])
def test_rows_are_read_from_files(job: Any, tmp_path: Path, kind: str) -> None:
    values, ids = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32), np.array([7, 2, 11])
    path = tmp_path / f"rows.{kind.split()[0]}"
    if kind == "npy":
        ids = np.arange(3)
        np.save(path, values)
    elif kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({"ids": ids, "values": [row.tolist() for row in values]}), path)
    elif kind == "npz":
        np.savez(path, ids=ids, values=values)
    else:
        ids = np.arange(3)
        np.savez(path, values=values)
    one = job({"user": (20, 4), "item": (7, 3)})
    one.tables.assign_from("user", f"file://{path}")
    one.state.sync()
    np.testing.assert_allclose(one.tables.rows("user", ids), values, rtol=1e-6)
    other = job({"user": (20, 4), "item": (7, 3)})
    other.state.sync()
    other.tables.assign_from("user", str(path))
    np.testing.assert_allclose(other.tables.rows("user", ids), values, rtol=1e-6)


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([20], np.ones((1, 4)), "table 'user' has rows 0 to 19, got id 20 at position 0 of the rows to assign"),
        ([1, 1], np.ones((2, 4)), "some of the rows to assign come twice"),
        ([1], np.ones((1, 3)), r"rows to assign: expected float32 \[1, 4\], got float64 \[1, 3\]"),
        ([1], np.ones((1, 4), np.int64), r"expected float32 \[1, 4\], got int64"),
        ([1.5], np.ones((1, 4)), r"ids must be whole numbers \[n\], got float64"),
        ([1], np.full((1, 4), np.inf), "some values are not finite"),
    ],
)
def test_rows_that_do_not_fit_their_table_are_refused(tmp_path: Path, ids: Any, values: Any, message: str) -> None:
    tables = EmbeddingTables({"user": (20, 4)}, gba_hvd.SGD(0.1), shard_dir=tmp_path)
    with pytest.raises(BadInput, match=message):
        tables.assign("user", ids, values)


def test_files_that_cannot_be_read_are_refused(job: Any, tmp_path: Path) -> None:
    one = job({"user": (20, 4), "item": (7, 3)})
    with pytest.raises(BadInput, match="no table or feature named 'usr'"):
        one.tables.assign_from("usr", "rows.npy")
    with pytest.raises(BadInput, match=r"rows are read from files \.npy, \.npz, \.parquet"):
        one.tables.assign_from("user", "rows.csv")
    with pytest.raises(BadInput, match="there is no file"):
        one.tables.assign_from("user", str(tmp_path / "none.npy"))
    (tmp_path / "bad.npz").write_bytes(b"not an archive")
    one.tables.assign_from("user", str(tmp_path / "bad.npz"))
    with pytest.raises(BadInput, match=r"bad\.npz cannot be read"):
        one.state.sync()


def test_hosts_that_were_given_other_rows_are_told_to_seed_the_script(workers: Workers, on_host: Any) -> None:
    jobs = [on_host(host) for host in "ab"]
    for number, one in enumerate(jobs):
        one.tables.assign("user", [1], np.full((1, 4), float(number)))
    with pytest.raises(StateMismatch, match=r"rows assigned to tables \['user'\] differ.*Seed the script"):
        workers.together(jobs, lambda one: one.state.sync())


@pytest.mark.slow
def test_on_one_host_the_rows_of_its_first_worker_count(workers: Workers, on_host: Any) -> None:
    jobs = [on_host(host) for host in "aab"]
    for one, value in zip(jobs, (1.0, 5.0, 1.0), strict=True):
        one.tables.assign("user", np.arange(20), np.full((20, 4), value))
    workers.together(jobs, lambda one: one.state.sync())
    for one in jobs:
        held = [row for row in range(20) if one.tables.memory.marks().ready[row % 5]]
        assert len(held) and (one.tables.rows("user", held) == 1.0).all()


# --- several EmbeddingTables -----------------------------------------------------------------------------------------


def test_several_embedding_tables_train_as_one(job: Any) -> None:
    together, apart = job({"user": (20, 4), "item": (7, 3)}), job([{"user": (20, 4)}, {"item": (7, 3)}])
    apart.parts[1].assign("item", [3], [[1.0, 1.0, 1.0]])
    together.tables.assign("item", [3], [[1.0, 1.0, 1.0]])
    for one in (together, apart):
        one.epoch(Clicks(64))
    for name, rows in together.rows().items():
        assert np.array_equal(rows, apart.rows()[name]), name
        part = apart.parts[0 if name == "user" else 1]
        assert np.array_equal(part.rows(name, np.arange(len(rows))), rows)
    with pytest.raises(BadInput, match="no table named 'item'; the tables are user"):
        apart.parts[0]({"item": torch.tensor([1])})
    with torch.no_grad():
        assert torch.equal(
            apart.parts[0].stacked({"user": torch.tensor([1])})[:, 0], torch.from_numpy(apart.rows()["user"][1:2])
        )


def parts_of(tmp_path: Path, *more: dict[str, Any]) -> list[EmbeddingTables]:
    found = []
    for name, settings in zip("abc", more, strict=False):
        about: dict[str, Any] = {"tables": {name: (9, 4)}, "optimizer": gba_hvd.SGD(0.1), "shard_dir": tmp_path}
        found.append(EmbeddingTables(**{**about, **settings}))
    return found


def join(parts: Any) -> Any:
    linear = nn.Linear(1, 1)
    return gba_hvd.DistributedOptimizer(
        torch.optim.SGD(linear.parameters(), lr=0.1), parts, global_batch=4, micro_batch=4
    )


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"tables": {"a": (9, 4)}}, "two EmbeddingTables have a table named 'a'"),
        ({"features": {"a": "b"}}, "two EmbeddingTables have a feature named 'a'"),
        ({"seed": 3}, "need one seed: got 0 and 3"),
        ({"n_shards": 3}, "need one n_shards"),
    ],
)
def test_embedding_tables_that_cannot_be_one_are_refused(tmp_path: Path, second: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        join(parts_of(tmp_path, {}, second))


def test_embedding_tables_belong_to_one_optimizer(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, {}, {"optimizer": gba_hvd.Adam(0.2), "init_std": 0.5})
    whole = join(parts).engine.model.tables
    assert whole.tables == {
        "a": replace(Table(9, 4), optimizer=gba_hvd.SGD(0.1), init=0.01),
        "b": replace(Table(9, 4), optimizer=gba_hvd.Adam(0.2), init=0.5),
    }
    assert whole.optimizers.own == (gba_hvd.Adam(0.2),)
    with pytest.raises(BadInput, match="belong to an optimizer already"):
        join(parts)
    for nothing in ([], [3], 3):
        with pytest.raises(BadInput, match="expected EmbeddingTables, or a list of them"):
            join(nothing)
