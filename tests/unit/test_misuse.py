"""Things people do that cannot work say so."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd
from gba_hvd.errors import BadInput, GbaError
from recovery import CheckpointCallback


class Bias(torch.nn.Module):
    def __init__(self, tables: gba_hvd.EmbeddingTables) -> None:
        super().__init__()
        self.tables, self.bias = tables, torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch: gba_hvd.Batch) -> torch.Tensor:
        logits: torch.Tensor = self.tables.stacked(batch.ids).sum((1, 2)) + self.bias
        return logits


class Numbers:
    """Sample i has id i."""

    def __len__(self) -> int:
        return 32

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        return gba_hvd.Batch(
            {"a": torch.from_numpy(rows)}, torch.zeros(len(rows), 0), torch.from_numpy(rows % 2).float()
        )


@pytest.fixture
def job(tmp_path: Any) -> Any:
    tables = gba_hvd.EmbeddingTables({"a": (32, 4)}, optimizer=gba_hvd.SGD(lr=0.1), shard_dir=tmp_path)
    model = Bias(tables)
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), tables, global_batch=16, micro_batch=8
    )
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    yield model, optimizer, state
    state.close()


def train(model: Any, optimizer: Any, state: Any, factor: float = 1.0) -> int:
    steps = 0
    for batch in gba_hvd.batches(Numbers(), state):
        (factor * binary_cross_entropy_with_logits(model(batch), batch.label)).backward()
        optimizer.step()
        steps += 1
    return steps


def test_an_epoch_asked_for_again_has_no_batches_and_it_is_said(job: Any) -> None:
    assert train(*job) == 4
    with pytest.warns(UserWarning, match=r"epoch 0 is done.*advance state\.epoch"):
        assert train(*job) == 0


def test_of_two_optimizers_for_the_same_tables_the_older_one_is_refused(job: Any) -> None:
    """The newer one replaces it, as where a cell of a notebook runs again; so does one whose successor is gone."""
    model, optimizer, state = job

    def another() -> Any:
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        return gba_hvd.DistributedOptimizer(dense, model.tables, global_batch=16, micro_batch=8)

    newer = another()
    refused = "two optimizers .* for the same EmbeddingTables, and this is the older one; the newer one, a SGD,"
    for act in (lambda: gba_hvd.elastic.TorchState(model, optimizer, epoch=0), lambda: train(model, optimizer, state)):
        with pytest.raises(BadInput, match=refused):
            act()
    gba_hvd.elastic.TorchState(model, newer, epoch=0)
    del newer
    gc.collect()
    assert train(model, optimizer, state) == 4


def test_a_feature_that_is_missing_in_the_ids_is_named_beside_the_key_error(tmp_path: Any) -> None:
    tables = gba_hvd.EmbeddingTables({"a": (32, 4), "b": (8, 4)}, optimizer=gba_hvd.SGD(lr=0.1), shard_dir=tmp_path)

    class Reads(Bias):
        def forward(self, batch: gba_hvd.Batch) -> torch.Tensor:
            rows: torch.Tensor = self.tables(batch.ids)["b"]
            return rows.sum(1)

    model, out = Reads(tables), io.StringIO()
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), tables, global_batch=16, micro_batch=8
    )
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.register_callbacks([gba_hvd.ProgressLine(stream=out)])
    with pytest.raises(KeyError) as refused:
        gba_hvd.elastic.run(lambda state: train(model, optimizer, state))(state)
    (note,) = refused.value.__notes__
    assert note == (
        "'b' is a feature of the EmbeddingTables, which give rows for the features that their ids have: a so far, of "
        "a, b. Is it missing in the batch's ids?"
    )
    assert f"error: KeyError: 'b'\n  {note}\n" in out.getvalue()


def test_a_loop_that_swallows_a_bad_step_is_stopped(job: Any) -> None:
    model, optimizer, state = job
    batches = gba_hvd.batches(Numbers(), state)
    for _ in range(2):  # the two micro-batches of step 1
        (float("nan") * model(next(batches)).sum()).backward()
        with contextlib.suppress(gba_hvd.NonFiniteGradient):
            optimizer.step()
    with pytest.raises(GbaError, match="step 1 was not applied"):
        next(batches)
    assert train(model, optimizer, state) == 4  # nothing was lost
    assert state.samples.applied == 32


def test_a_model_with_shared_tables_is_not_copied(job: Any) -> None:
    train(*job)
    with pytest.raises(GbaError, match=r"keep model\.state_dict\(\)"):
        copy.deepcopy(job[0])


def test_a_model_whose_tables_an_optimizer_has_is_not_copied(job: Any) -> None:
    with pytest.raises(GbaError, match=r"AveragedModel.* is one of the dense modules"):
        torch.optim.swa_utils.AveragedModel(job[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"dense": np.zeros((4, 2))},
            r"Batch: dense must be float32 \[B, n_dense\], got torch.float64 \[4, 2\]; convert",
        ),
        (
            {"label": np.array([True, False, True, True])},
            r"label must be float32 .* torch.bool \[4\]; .* label.float()",
        ),
        ({"label": np.arange(4)}, r"got torch.int64 \[4\]"),
    ],
)
def test_dense_inputs_and_labels_of_another_dtype_are_refused_where_the_batch_is_made(
    change: dict[str, np.ndarray], message: str
) -> None:
    values = {"dense": torch.zeros(4, 2), "label": torch.zeros(4)}
    values |= {name: torch.from_numpy(array) for name, array in change.items()}
    with pytest.raises(BadInput, match=message):
        gba_hvd.Batch({"a": torch.arange(4)}, **values)
    with pytest.raises(BadInput, match=r"dense must be float32 .* got a ndarray; make it a tensor"):
        gba_hvd.Batch({"a": torch.arange(4)}, np.zeros((4, 2), np.float32), torch.zeros(4))  # type: ignore[arg-type]


def test_rows_are_checked_when_looked_at(job: Any) -> None:
    train(*job)
    with pytest.raises(BadInput, match=r"table 'a' has rows 0 to 31, got id 32"):
        job[0].tables.rows("a", [1, 32])


def test_ids_that_are_no_tensor_are_refused(job: Any) -> None:
    train(*job)
    with pytest.raises(BadInput, match=r"ids must be a tensor of int64 or int32, or a gba_hvd\.Bag, got list"):
        job[0].tables({"a": [1, 2]})


def test_a_state_of_horovod_or_of_nobody_is_refused_with_what_is_needed() -> None:
    def loop(state: Any) -> None:
        raise AssertionError

    with pytest.raises(BadInput, match=r"elastic\.run needs a gba_hvd\.elastic\.TorchState, got builtins\.dict"):
        gba_hvd.elastic.run(loop)({"epoch": 0})
    other: Any = Numbers()
    with pytest.raises(
        BadInput, match=r"batches\(\) needs a .*, got tests.*Numbers: pass gba_hvd\.elastic\.TorchState"
    ):
        next(gba_hvd.batches(Numbers(), other))
    with pytest.raises(BadInput, match=r"evaluate\(\) needs a gba_hvd\.elastic\.TorchState, got"):
        gba_hvd.evaluate(torch.nn.Identity(), Numbers(), other)


@pytest.mark.parametrize(
    ("optimizer", "got"),
    [
        (torch.optim.Adagrad, "the class Adagrad"),
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), r"one of <class .torch\.optim\.sgd\.SGD"),
    ],
)
def test_an_optimizer_of_torch_does_not_train_rows(optimizer: Any, got: str) -> None:
    with pytest.raises(BadInput, match=rf"EmbeddingTables: optimizer must be a row optimizer, .* got {got}"):
        gba_hvd.EmbeddingTables({"a": (8, 4)}, optimizer=optimizer)
    with pytest.raises(BadInput, match=f"table 'a': .* got {got}"):
        gba_hvd.EmbeddingTables({"a": gba_hvd.Table(8, 4, optimizer=optimizer)})


def test_an_unknown_setting_of_checkpoints_gets_the_nearest_known_one() -> None:
    with pytest.raises(
        BadInput, match=r"CheckpointCallback: setting 'every' is not known: did you mean 'every_s' or 'every_steps'\?"
    ):
        CheckpointCallback("ck", every=10)


def test_an_evaluation_says_how_to_tell_it_how_the_model_is_called(job: Any) -> None:
    _, _, state = job
    asks = torch.nn.EmbeddingBag(4, 2)  # gets a batch, and wants a tensor
    with pytest.raises(BadInput, match=r"batch of type Batch, failed \(.*forward=lambda batch: model"):
        gba_hvd.evaluate(asks, Numbers(), state)


def test_a_step_without_a_backward_pass_is_warned_of_once(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, state = job
    for number, batch in enumerate(gba_hvd.batches(Numbers(), state)):
        optimizer.zero_grad()
        loss = model(batch).mean()
        if number not in (1, 2):
            (loss * 0).backward()  # zeros, and meant
        optimizer.step(loss=loss)
    (warning,) = [record.getMessage() for record in caplog.records if "no gradient" in record.getMessage()]
    assert "micro-batch 1 has no gradient" in warning and "Call loss.backward()" in warning


def test_a_hash_in_a_plain_table_is_pointed_to_a_hashed_one(job: Any) -> None:
    train(*job)
    with pytest.raises(BadInput, match=r"got id 1099511627776 .* such as hashes, with gba_hvd\.Table\(keys='hash64'\)"):
        job[0].tables({"a": torch.tensor([2**40])})
    with pytest.raises(BadInput, match=r"got id 32 .*data prepare does\)$"):
        job[0].tables({"a": torch.tensor([32])})
