"""A plain PyTorch model's rows: where they lie, which of them a step changes, and the state beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recovery.checkpointer import Checkpointer
from recovery.config import Config
from recovery.errors import BadInput
from recovery.state_codec import decode, encode
from recovery.testing import RamStore, two_tables
from recovery.torch_rows.tensor_rows import RowParts, TensorRows, dense_state, load_dense_state, of_optimizer
from recovery.write.consistent_read import Busy, read

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad asks for them


class Model(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.user = nn.Embedding(20, 4, sparse=sparse)
        self.top = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.user(ids)).sum()


def counts(rows: TensorRows, table: int = 0) -> list[int]:
    return rows.slab(table, 0).counts.tolist()


def one_step(model: Model, optimizer: torch.optim.Optimizer, rows: TensorRows, ids: list[int]) -> None:
    optimizer.zero_grad()
    model(torch.tensor(ids)).backward()
    with rows.step():
        optimizer.step()


def test_a_shard_is_every_nth_row_and_writing_to_it_writes_the_tensor() -> None:
    rows = two_tables(n_shards=3, n_rows=10)
    slab = rows.slab(0, 1)
    assert len(slab) == 3
    assert [column.shape for column in slab.columns] == [(3, 4), (3, 4), (3, 1)]
    slab.columns[2][1] = 42.0
    assert rows.tables["user"].slots["sum"][4] == 42.0


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.zeros(4, 2, dtype=torch.float64), "float64"),
        (torch.zeros(2, 4).T, "contiguous"),
        (torch.zeros(5, 2), r"\[5, 2\]"),
        (torch.zeros(4, 2, device="meta"), "meta"),
    ],
)
def test_tensors_that_cannot_be_saved_in_place_are_refused(tensor: Tensor, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        TensorRows({"user": RowParts(torch.zeros(4, 2), {"sum": tensor})})


def test_a_row_counts_as_often_as_it_is_named() -> None:
    rows = two_tables(n_rows=5)
    rows.touched("user", torch.tensor([1, 1, 3]))
    rows.touched("user", np.array([3]))
    with rows.step():
        pass
    assert counts(rows) == [0, 2, 0, 2, 0]


def test_rows_named_before_the_step_count_when_it_begins() -> None:
    # A save between the two would read the new count with the old values, and never save the change.
    rows = two_tables(n_rows=5)
    rows.touched("user", torch.tensor([2]))
    assert counts(rows) == [0] * 5
    with rows.step():
        assert counts(rows) == [0, 0, 1, 0, 0]
        rows.touched("user", torch.tensor([4]))
        assert counts(rows) == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("ids", [[-1], [5], [0.5]])
def test_rows_that_a_table_has_not_are_refused(ids: list[float]) -> None:
    with pytest.raises(BadInput, match="rows 0 to 4"):
        two_tables(n_rows=5).touched("user", np.array(ids))


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(BadInput, match="'colour', 'user'"):
        two_tables().touched("shoe", np.array([0]))


@pytest.mark.parametrize(
    ("sparse", "make", "changed"),
    [
        (True, lambda p: torch.optim.SGD(p, lr=0.1), [2, 7]),
        (False, lambda p: torch.optim.SGD(p, lr=0.1), [2, 7]),
        (False, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), range(20)),
        (False, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), range(20)),
        (True, lambda p: torch.optim.Adagrad(p, lr=0.1), [2, 7]),
        (False, lambda p: torch.optim.Adagrad(p, lr=0.1), [2, 7]),
    ],
)
def test_untold_the_rows_with_a_gradient_count_or_all_that_the_optimizer_moves(
    sparse: bool, make: object, changed: list[int]
) -> None:
    model = Model(sparse)
    optimizer = make(model.parameters())  # type: ignore[operator]
    rows = of_optimizer(model, optimizer)
    for _ in range(2):
        before = model.user.weight.detach().clone()
        one_step(model, optimizer, rows, [2, 7, 7])
        moved = (model.user.weight.detach() != before).any(dim=1).nonzero().flatten().tolist()
        assert set(moved) <= set(changed)
    accesses = {row: 2 for row in changed} | ({7: 4} if sparse else {})  # a dense gradient does not say how many
    assert counts(rows) == [accesses.get(row, 0) for row in range(20)]


def test_slots_made_ahead_of_the_first_step_change_nothing_about_training() -> None:
    def trained(with_rows: bool, make: object) -> Tensor:
        model = Model()
        optimizer = make(model.user.parameters())  # type: ignore[operator]
        rows = of_optimizer(model, optimizer, ["user.weight"]) if with_rows else two_tables()
        for _ in range(3):
            one_step(model, optimizer, rows, [1, 5])
        return model.user.weight.detach()

    for make in (torch.optim.SparseAdam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
        assert torch.equal(trained(True, make), trained(False, make))


def test_the_slots_of_sparse_adam_are_found() -> None:
    model = Model()
    rows = of_optimizer(model, torch.optim.SparseAdam(model.user.parameters()))
    assert [column.name for column in rows.schema.tables[0].columns] == ["weight", "exp_avg", "exp_avg_sq"]
    assert rows.schema.tables[0].name == "user.weight"


def test_an_optimizer_without_state_yet_is_named() -> None:
    model = Model(sparse=False)
    with pytest.raises(BadInput, match=r"Adam has no state for 'user.weight' yet: take one step first"):
        of_optimizer(model, torch.optim.Adam(model.parameters()))


def test_a_tensor_that_was_replaced_is_noticed() -> None:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters())
    rows = of_optimizer(model, optimizer)
    optimizer.state[model.user.weight]["sum"] = torch.zeros(20, 4)
    with pytest.raises(BadInput, match="a tensor was replaced"), rows.step():
        pass


def test_a_step_that_raises_leaves_the_rows_unreadable_until_the_next_one() -> None:
    rows = two_tables(n_rows=5)
    with pytest.raises(ZeroDivisionError), rows.step():
        1 / 0  # noqa: B018
    records, seen = np.empty((5, 9), np.float32), np.empty(5, np.uint32)
    with pytest.raises(Busy, match="step 1 has begun, 0 was the last one finished"):
        read(rows, 0, 0, slice(0, 5), records, seen, timeout_s=0.0)
    with rows.step() as step:
        assert step == 1
    assert read(rows, 0, 0, slice(0, 5), records, seen).step == 1


def test_accesses_are_sampled_by_table_and_shard() -> None:
    rows = two_tables(n_shards=2, n_rows=10)
    lists = rows.sampled_accesses((5, 0), period=1)
    rows.touched("user", np.array([0, 3, 4, 4]))
    with rows.step():
        pass
    assert {part: listed.take().tolist() for part, listed in lists.items()} == {(0, 0): [0, 2], (0, 1): [1]}
    with pytest.raises(BadInput, match="build the rows again"):
        rows.sampled_accesses((4, 0), period=1)


def test_the_rest_of_a_model_goes_there_and_back_without_its_tables() -> None:
    model, other = Model(sparse=False), Model(sparse=False)
    optimizer, theirs = (torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (model, other))
    rows, other_rows = of_optimizer(model, optimizer), of_optimizer(other, theirs)
    for _ in range(3):
        one_step(model, optimizer, rows, [1, 2])
    state = encode(dense_state(model, optimizer, rows))
    assert len(state) < 20 * 4 * 4 + 2000
    load_dense_state(other, theirs, other_rows, decode(state))
    for tensor, wanted in zip(_row_tensors(other_rows), _row_tensors(rows), strict=True):
        tensor.data.copy_(wanted.data)  # what a restore does
    for one, its, its_rows in ((model, optimizer, rows), (other, theirs, other_rows)):
        one_step(one, its, its_rows, [2, 9])
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def _row_tensors(rows: TensorRows) -> list[Tensor]:
    return [t for parts in rows.tables.values() for t in (parts.weight, *parts.slots.values())]


def test_the_rest_of_another_model_is_refused() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = of_optimizer(model, optimizer)
    state = dense_state(model, optimizer, rows)
    del state["model"]["top.bias"]
    with pytest.raises(BadInput, match=r"lacks \['top.bias'\]"):
        load_dense_state(model, optimizer, rows, state)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "delta"])
@pytest.mark.parametrize("dies", [0, 3, 5, 6, 11])
def test_a_run_that_is_interrupted_and_resumed_ends_as_one_that_is_not(ram: RamStore, policy: str, dies: int) -> None:
    def run(until: int, store: RamStore) -> dict[str, Tensor]:
        model = Model()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        rows = of_optimizer(model, optimizer)
        with Checkpointer(store, rows, Config(job="j", policy=policy)) as checkpoints:
            report = checkpoints.restore()
            if report is not None:
                assert report.state is not None
                rows.continue_from(report.step)
                load_dense_state(model, optimizer, rows, decode(report.state))
            for step in range(rows.last_step + 1, until + 1):
                one_step(model, optimizer, rows, [step % 20, step * step % 20])
                if step % 3 == 0:
                    # Waited for: a save beside training has rows of later steps than the state.
                    checkpoints.save(step, 2 * step, dense_state(model, optimizer, rows)).result(60)
        return model.state_dict()

    run(dies, ram)
    for name, value in run(12, ram).items():
        assert torch.equal(value, run(12, RamStore())[name]), name
