"""Distributed evaluation: every worker scores its part of a dataset, all get the same AUC and log loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from gba_hvd.batches import Dataset, ids_of
from gba_hvd.elastic import TorchState
from gba_hvd.embedding.tables import Ids, keys_by_group
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.metrics import Scores
from gba_hvd.training.mode import EvaluationRun

Activation = Literal["sigmoid", "none"]


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    state: TorchState,
    *,
    batch: int | None = None,
    ids: Callable[[Any], Ids] | None = None,
    label: Callable[[Any], Tensor] = lambda b: b.label,
    activation: Activation | None = None,
    exact_limit: int = 5_000_000,
) -> Scores:
    """AUC and log loss of `model(batch)` (float [B]) over a dataset; the same result on every rank.

    activation: what makes probabilities of the model's outputs: "sigmoid", they are logits; "none", they are
    probabilities. When it is not given, they are taken for logits, and BadInput is raised on all workers if all outputs
    of the first batch lie in [0, 1].

    A collective in allreduce mode. In asynchronous modes the workers take parts of the dataset as they come; call it
    after an epoch's batches, where all workers have the same parameters.

    Buffers (batch norm statistics) are those of rank 0 on all workers, so that one model is evaluated; in asynchronous
    modes those of the first worker that asks. Above `exact_limit` samples the AUC comes from a
    histogram, and the result says so.
    """
    state.ensure_synced()
    engine = state.engine
    if engine.is_within_step:
        raise GbaError("evaluate() only between steps: workers with uneven shares would wait for each other")
    if activation not in (None, "sigmoid", "none"):
        raise BadInput(f'evaluate(): activation must be "sigmoid" or "none", got {activation!r}')
    assert engine.mode is not None
    tables, find_ids = engine.model.tables, ids or ids_of
    size = batch or engine.model.micro_batch
    job = EvaluationRun(
        model, dataset.take, len(dataset), size, lambda some: keys_by_group(tables, [find_ids(one) for one in some]),
        label, activation, exact_limit,
    )  # fmt: skip
    return engine.mode.evaluate(job)
