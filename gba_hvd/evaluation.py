"""Distributed evaluation: every worker evaluates its part of a dataset, all get the same metrics.

Decided here: which output and which label belong to a task, and what is measured of them. How the work is divided is
the task of the mode (`modes.evaluation`), the arithmetic that of `metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd.batch_keys import BatchKeys, FindIds
from gba_hvd.callbacks import Event
from gba_hvd.elastic import TorchState
from gba_hvd.errors import BadInput, refuse_unknown
from gba_hvd.evaluation_reader import naming, open_reader, read_settings, ready_engine
from gba_hvd.metrics.accumulators import Frames, Part
from gba_hvd.metrics.scores import N_ERROR_SUMS, Scores, TaskScores, error_sums, errors_from, logits_of
from gba_hvd.reading.datasets import Dataset, MapDataset
from gba_hvd.reading.settings import Collate
from gba_hvd.training.mode import EvaluationRun

Activation = Literal["sigmoid", "none"]
Metric = Literal["auc", "logloss", "gauc", "mse", "rmse", "mae"]
Column = Callable[[Any], Tensor]
Where = Callable[[int], str]  # a sample of the batch, in words

CLICK_METRICS = ("auc", "logloss", "gauc")
RATING_METRICS = ("mse", "rmse", "mae")


@dataclass(frozen=True)
class Task:
    """One thing that a model predicts, for `evaluate`.

    label: of a batch, its labels [B]: 0 or 1, or any finite numbers for "mse", "rmse" and "mae". Default:
    `batch.label`: of a mapping the entry of the task's name; of a tensor [B, T] of T tasks the column at the task's
    position among them; a tensor [B] where there is one task.
    output: which of the model's outputs is the task's: a number, of a tuple, a list or the columns of a tensor [B, T];
    a name, of a mapping or an attribute; or a function of the outputs that returns a float tensor [B]. Default: found
    as the default label is.
    where: of a batch, a mask [B], bool or 0 and 1: only samples where it is true count, such as the clicked ones for a
    conversion rate after clicks.
    metrics: any of "auc", "logloss" and "gauc" (clicks), or of "mse", "rmse" and "mae" (ratings, of the outputs as they
    are).
    group: of a batch, whole numbers [B], such as user ids, for "gauc": AUC within each group, averaged with the groups'
    samples as weights. Groups with one class only are left out and counted.
    activation: as in `evaluate`, whose argument is the default; for clicks only.
    """

    label: Column | None = None
    output: int | str | Callable[[Any], Tensor] | None = None
    where: Column | None = None
    metrics: Sequence[Metric] = ("auc", "logloss")
    group: Column | None = None
    activation: Activation | None = None

    def __post_init__(self) -> None:
        if isinstance(self.metrics, str) or not self.metrics:
            raise BadInput(f"metrics must be a sequence of names such as ['auc', 'logloss'], got {self.metrics!r}")
        for metric in self.metrics:
            refuse_unknown("metric", metric, (*CLICK_METRICS, *RATING_METRICS))
        if len(set(self.metrics)) < len(self.metrics):
            raise BadInput(f"a metric is asked for twice: {list(self.metrics)}")
        ratings = [metric for metric in self.metrics if metric in RATING_METRICS]
        if ratings and len(ratings) < len(self.metrics):
            raise BadInput(
                f"metrics={list(self.metrics)}: {', '.join(CLICK_METRICS)} are of clicks and "
                f"{', '.join(RATING_METRICS)} of ratings, with other labels. Make two tasks of them"
            )
        if self.activation not in (None, "sigmoid", "none"):
            raise BadInput(f'evaluate(): activation must be "sigmoid" or "none", got {self.activation!r}')
        if ratings and self.activation is not None:
            raise BadInput(
                f"activation={self.activation!r} has no effect on {', '.join(ratings)}: outputs are compared with the "
                "labels as they are. Leave it out, or give output= a function that applies it"
            )
        if ("gauc" in self.metrics) != (self.group is not None):
            raise BadInput(
                "metric 'gauc' needs group=, a function that returns whole numbers [B] of a batch, such as user ids"
                if self.group is None
                else f"group= is for metric 'gauc', which is not in metrics={list(self.metrics)}"
            )

    @property
    def rates(self) -> bool:
        """Its metrics are of ratings."""
        return self.metrics[0] in RATING_METRICS


@overload
def evaluate(
    model: nn.Module,
    dataset: Dataset | MapDataset,
    state: TorchState,
    *,
    batch: int | None = None,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    prefetch: int | None = None,
    ids: FindIds | None = None,
    forward: Callable[[Any], Any] | None = None,
    label: Column | None = None,
    activation: Activation | None = None,
    exact_limit: int = 5_000_000,
) -> Scores: ...
@overload
def evaluate(
    model: nn.Module,
    dataset: Dataset | MapDataset,
    state: TorchState,
    *,
    batch: int | None = None,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    prefetch: int | None = None,
    ids: FindIds | None = None,
    forward: Callable[[Any], Any] | None = None,
    label: Column | None = None,
    activation: Activation | None = None,
    exact_limit: int = 5_000_000,
    metrics: Sequence[Metric],
    group: Column | None = None,
) -> TaskScores: ...
@overload
def evaluate(
    model: nn.Module, dataset: Dataset | MapDataset, state: TorchState, *, batch: int | None = None,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    prefetch: int | None = None,
    ids: FindIds | None = None, forward: Callable[[Any], Any] | None = None,
    activation: Activation | None = None, exact_limit: int = 5_000_000, tasks: Mapping[str, Task],
) -> dict[str, TaskScores]: ...  # fmt: skip
def evaluate(
    model: nn.Module,
    dataset: Dataset | MapDataset,
    state: TorchState,
    *,
    batch: int | None = None,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    prefetch: int | None = None,
    ids: FindIds | None = None,
    forward: Callable[[Any], Any] | None = None,
    label: Column | None = None,
    activation: Activation | None = None,
    exact_limit: int = 5_000_000,
    metrics: Sequence[Metric] | None = None,
    group: Column | None = None,
    tasks: Mapping[str, Task] | None = None,
) -> Scores | TaskScores | dict[str, TaskScores]:
    """AUC and log loss of `model(batch)` (float [B]) over a dataset, or other metrics; the same result on every rank.

    Without `metrics` and `tasks` it returns `Scores`; with `metrics` the `TaskScores` of these; with `tasks`, for a
    model with several outputs (a tensor [B, T], a tuple or a mapping), the `TaskScores` of each by its name:

        scores = gba_hvd.evaluate(model, valid, state, activation="sigmoid", tasks={
            "ctr": gba_hvd.Task(label=lambda b: b.click),
            "cvr": gba_hvd.Task(label=lambda b: b.bought, where=lambda b: b.click),
        })
        state.report(valid_ctr_auc=scores["ctr"]["auc"], valid_cvr_auc=scores["cvr"]["auc"])

    forward: a batch's outputs, where they are not `model(batch)`: `lambda batch: model(batch[0])`. With several hosts
    it also finds a batch's ids, as in `batches`, unless `ids` is given.
    dataset, collate_fn, num_workers: as `batches` takes them. prefetch: batches read ahead of the evaluation by each
    of the processes (2 when left out), or by one thread (num_workers=0; none when left out).
    label: of a batch, its labels [B]; default: its attribute `label`, or entry "label".
    activation: what makes probabilities of the model's outputs: "sigmoid", they are logits; "none", they are
    probabilities. When it is not given, they are taken for logits, and BadInput is raised on all workers if all outputs
    of a task in the first batch lie in [0, 1].
    metrics, group: of one task, see `Task`.

    The error of a label that is not 0 or 1, or of an id, names the sample, and where that is stored if the dataset says
    it: by `place_of(row)`, or its file by `files_of(rows)`.

    A collective in allreduce mode. In asynchronous modes the workers take parts of the dataset as they come; call it
    after an epoch's batches, where all workers have the same parameters.

    Buffers (batch norm statistics) are those of rank 0 on all workers, so that one model is evaluated; in asynchronous
    modes those of the first worker that asks. Above `exact_limit` samples the AUC comes from a
    histogram, and the result says so. "gauc" is exact for any number of samples, and takes 13 bytes a sample in the
    process that computes it: rank 0, or in asynchronous modes the first server.
    """
    engine = ready_engine(state, "evaluate()")
    if activation not in (None, "sigmoid", "none"):
        raise BadInput(f'evaluate(): activation must be "sigmoid" or "none", got {activation!r}')
    if tasks is None:
        one = Task(label, metrics=("auc", "logloss") if metrics is None else metrics, group=group)
        chosen = {"": one}
    else:
        chosen = _checked(tasks, label=label, metrics=metrics, group=group)
    if activation is not None and all(task.rates or task.activation is not None for task in chosen.values()):
        text = (  # not refused: the epoch before is trained, and the scores are those that were asked for
            f"evaluate(): activation={activation!r} has no effect: every task has its own, or metrics of ratings. "
            "Leave it out"
        )
        engine.reports.once(Event("activation_idle", engine.progress.step, text, {}, level="warning"))
    parts = tuple(_part(name, task, activation, exact_limit) for name, task in chosen.items())

    def measure(where: Where, loaded: Any) -> list[Frames]:
        outputs = forward(loaded) if forward is not None else _called(model, loaded)
        frames = [
            _frames(task, _output(outputs, task, at), loaded, at, task.activation or activation, where)
            for task, at in zip(chosen.values(), _positions(chosen), strict=True)
        ]
        engine.reports.pauses.evaluated()
        return frames

    assert engine.mode is not None
    engine.reports.pauses.evaluation_begins()
    keys = BatchKeys(engine.model.tables, model, ids, forward).of
    settings = read_settings(num_workers, prefetch, collate_fn)
    with engine.loop_time.apart(), open_reader(engine, dataset, batch, keys, settings) as samples:
        where = naming(dataset, samples)
        with engine.model.tables.naming_samples(where):
            found = engine.mode.evaluate(EvaluationRun(model, samples, parts, partial(measure, where)))
    engine.reports.pauses.evaluated()
    if tasks is None and metrics is None:
        return Scores(**found[0])
    scores = {name: _task_scores(task, plain) for (name, task), plain in zip(chosen.items(), found, strict=True)}
    return scores if tasks is not None else scores[""]


def _called(model: nn.Module, loaded: Any) -> Any:
    try:
        return model(loaded)
    except (TypeError, AttributeError, LookupError) as error:  # what a model raises that gets a batch of another form
        raise BadInput(
            f"evaluate(): model(batch), with a batch of type {type(loaded).__name__}, failed ({type(error).__name__}: "
            f"{error}). If your loop calls the model in another way, say how, with forward=lambda batch: model(...)"
        ) from error


def _checked(tasks: Mapping[str, Task], **of_one_task: Any) -> dict[str, Task]:
    given = [name for name, value in of_one_task.items() if value is not None]
    if given:
        raise BadInput(f"evaluate(): {' and '.join(given)} with tasks= would have no effect: give it to each Task")
    if not tasks:
        raise BadInput("evaluate(): tasks= is empty; leave it out for a model with one output")
    wrong = [repr(name) for name, task in tasks.items() if not isinstance(task, Task) or not isinstance(name, str)]
    if wrong:
        raise BadInput(f"evaluate(): tasks= maps names to gba_hvd.Task, which {', '.join(wrong)} is not")
    return dict(tasks)


def _part(name: str, task: Task, activation: Activation | None, exact_limit: int) -> Part:
    if task.rates:
        return Part("sums", name, n_sums=N_ERROR_SUMS)
    not_specified = (task.activation or activation) is None
    kind: Literal["scores", "grouped scores"] = "scores" if task.group is None else "grouped scores"
    return Part(kind, name, 0, exact_limit, task.where is not None, not_specified)


# --- the columns of a task -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Position:
    """The part of one task. name: "" where there is one that has none."""

    name: str
    index: int
    n_tasks: int

    @property
    def of_task(self) -> str:
        return f" of task {self.name!r}" if self.name else ""


def _positions(tasks: Mapping[str, Task]) -> list[_Position]:
    return [_Position(name, index, len(tasks)) for index, name in enumerate(tasks)]


def _output(outputs: Any, task: Task, at: _Position) -> Tensor:
    """float32 [B]: the task's among the model's outputs."""
    pick = task.output
    if callable(pick):
        found = pick(outputs)
    elif pick is None:
        found = _by_default(outputs, at, "output", "output= of gba_hvd.Task")
    else:
        found = _picked(outputs, pick, at)
    return _one_column(found, f"the output{at.of_task}").float()


def _picked(outputs: Any, pick: int | str, at: _Position) -> Any:
    try:
        if isinstance(pick, str):
            return outputs[pick] if isinstance(outputs, Mapping) else getattr(outputs, pick)
        return outputs[:, pick] if isinstance(outputs, Tensor) else outputs[pick]
    except (LookupError, AttributeError, TypeError) as error:
        raise BadInput(
            f"evaluate(): output={pick!r}{at.of_task}, but the model returned {_described(outputs)}"
        ) from error


def _by_default(value: Any, at: _Position, what: str, instead: str) -> Any:
    """The task's of several: by its name in a mapping, by its position in a tuple, a list or columns."""
    if isinstance(value, Mapping) and at.name in value:
        return value[at.name]
    if isinstance(value, tuple | list) and len(value) == at.n_tasks:
        return value[at.index]
    if isinstance(value, Tensor):
        if value.ndim == 2 and value.shape[1] == at.n_tasks:
            return value[:, at.index]
        if value.ndim == 1 and at.n_tasks == 1:
            return value
    tasks = f"{at.n_tasks} tasks" if at.name else "one task; name several with tasks={...}"
    raise BadInput(
        f"evaluate(): which {what} is that{at.of_task}? Got {_described(value)}, for {tasks}. Say it with {instead}"
    )


def _default_label(loaded: Any, at: _Position) -> Any:
    how = "label= of gba_hvd.Task" if at.name else "label=lambda batch: ..."
    label = loaded.get("label") if isinstance(loaded, Mapping) else getattr(loaded, "label", None)
    if label is None:
        raise BadInput(f"a batch of type {type(loaded).__name__} has no `label`: say where labels are, with {how}")
    return _by_default(label, at, "label", how)


def _one_column(value: Any, what: str) -> Tensor:
    """[B] of a tensor [B] or [B, 1]."""
    if not isinstance(value, Tensor):
        raise BadInput(f"evaluate(): {what} must be a tensor [B], got {_described(value)}")
    column = value[:, 0] if value.ndim == 2 and value.shape[1] == 1 else value
    if column.ndim != 1:
        raise BadInput(f"evaluate(): {what} must be a tensor [B], got {_described(value)}")
    column = column.float() if column.dtype in (torch.float16, torch.bfloat16) else column  # numpy has not both
    return column.detach().cpu()


def _frames(
    task: Task, output: Tensor, loaded: Any, at: _Position, activation: Activation | None, where: Where
) -> Frames:
    """What is measured of one batch, see `accumulators.DTYPES`."""
    label = task.label(loaded) if task.label is not None else _default_label(loaded, at)
    columns = [output, _one_column(label, f"the label{at.of_task}")]
    if task.group is not None:
        groups = _one_column(task.group(loaded), f"the group{at.of_task}")
        if groups.is_floating_point() or groups.is_complex():
            raise BadInput(f"evaluate(): a group{at.of_task} must be a whole number, got {groups.dtype}")
        columns.append(groups)
    numbers = torch.arange(len(output))
    if task.where is not None:
        mask = _mask(task.where(loaded), len(output), at)
        columns, numbers = [column[mask] for column in columns], numbers[mask]
    sizes = [len(column) for column in columns]
    if len(set(sizes)) > 1:
        names = ("outputs", "labels", "groups")
        text = ", ".join(f"{size} {name}" for size, name in zip(sizes, names, strict=False))
        raise BadInput(f"evaluate(): a batch{at.of_task} must have one of each for every sample, got {text}")
    if task.rates:
        return [error_sums(columns[0].numpy(), columns[1].numpy())]
    labels = columns[1].numpy()
    if len(wrong := np.flatnonzero((labels != 0) & (labels != 1))):
        raise BadInput(
            f"a label{at.of_task} must be 0 or 1, got {_shortest(labels[wrong[0]])}{where(int(numbers[wrong[0]]))} "
            f"in {len(wrong)} of {labels.size} samples of a batch"
        )
    logits = logits_of(columns[0].numpy(), activation)
    more = [column.numpy().astype(np.int64) for column in columns[2:]]
    return [logits, labels.astype(np.float32), *more]


def _shortest(value: np.generic) -> str:
    """With all its decimals; 2.0 as 2."""
    return str(value).removesuffix(".0")


def _mask(where: Any, n: int, at: _Position) -> Tensor:
    mask = _one_column(where, f"the mask (where=){at.of_task}")
    if len(mask) != n:
        raise BadInput(f"evaluate(): the mask (where=){at.of_task} has {len(mask)} values for {n} samples")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise BadInput(f"evaluate(): the mask (where=){at.of_task} must be true or false, or 0 or 1, for each sample")
    return mask.bool()


def _described(value: Any) -> str:
    """A value that was passed, in words."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(repr, value))}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


def _task_scores(task: Task, plain: Mapping[str, Any]) -> TaskScores:
    if task.rates:
        values, n, note = errors_from(plain["sums"])
        return TaskScores({metric: values[metric] for metric in task.metrics}, n, note=note)
    values = {metric: plain[metric] for metric in task.metrics}
    if "gauc" in values and math.isnan(plain["logloss"]):  # some logits are NaN: the other metrics are, too
        values["gauc"] = math.nan
    note = plain["note"] if any(map(math.isnan, values.values())) else ""
    if not note and math.isnan(values.get("gauc", 0.0)):
        note = f"GAUC needs a group with both classes; each of these {plain['n_groups_left_out']} has one"
    exact = plain["exact"] or "auc" not in task.metrics
    groups = () if task.group is None else (plain["n_groups"], plain["n_groups_left_out"])
    return TaskScores(values, plain["n"], exact, note, *groups)
