"""The settings of a training job: one frozen tree, read from YAML, checked before anything starts.

Decided here: names, defaults and what is a sensible value. A key that does not exist is an error that names the
nearest right one. Command line beats file beats default: `load("frappe_deepfm.yaml", ["embedding.lr=2e-3"])`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from gba_hvd import GBACallback
from gba_hvd.averaging.algorithms import Averaging
from gba_hvd.compression import Compression, Spec
from gba_hvd.compression.spec import dense_spec_of, row_spec_of
from gba_hvd.data import SyntheticBehaviourLog
from gba_hvd.epoch import micro_batches_together
from gba_hvd.errors import BadInput
from gba_hvd.gradients.clipping import Clip
from gba_hvd.mode_names import REPLICA_MODES, SETTINGS, any_of
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.reading.settings import ReadSettings
from gba_hvd.switching.policy import Options
from recovery.callback import CheckpointCallback
from recovery.config import Config as Saving

Section = TypeVar("Section")
T = TypeVar("T")


def setting(
    default: T,
    meaning: str = "",
    *,
    off: str | None = None,
    must: Literal["be positive", "not be negative"] | None = None,
) -> T:
    """A setting with its meaning, for `train_ctr.py --settings`; off: the value, as YAML, that switches it off."""
    return field(default=default, metadata={**documented(meaning, off), "must": must})


def documented(meaning: str, off: str | None = None) -> dict[str, str | None]:
    return {"meaning": meaning, "off": off}


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Errors begin with the place of the setting."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{place}{error}") from error


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadInput(message)


@dataclass(frozen=True)
class Synthetic:
    """A click log computed from a hash, whose best possible AUC is known."""

    train: int = setting(1_000_000, "samples")
    valid: int = setting(50_000, "samples")
    test: int = setting(100_000, "samples")
    tables: dict[str, int] = field(
        default_factory=lambda: {"user": 20_000, "item": 5_000, "category": 100, "hour": 24},
        metadata=documented("rows of each table"),
    )
    n_dense: int = setting(4, "numeric inputs")
    zipf: float = setting(1.05, "how uneven the use of rows is")
    seed: int = setting(0, "of the log")
    by_day: bool = setting(
        False, "each epoch trains and validates on a new day's samples, and is tested on those of the day after"
    )
    drift: float = setting(0.0, "by_day: share of the variance of the true effects that is new each day", off="0")
    new_ids: float = setting(0.0, "by_day: share of the ids in use that are replaced by new ones each day", off="0")

    def __post_init__(self) -> None:
        shares = {"drift": self.drift, "new_ids": self.new_ids}
        for name, share in shares.items():
            _require(0 <= share <= 1, f"data.synthetic.{name}: must be in [0, 1], got {share}")
        _require(
            self.by_day == any(shares.values()),
            f"data.synthetic: by_day is {str(self.by_day).lower()} with drift {self.drift} and new_ids {self.new_ids}: "
            "a log by day needs one of them, and a log without days has neither",
        )
        _require(min(self.train, self.valid, self.test) > 0, "data.synthetic: train, valid and test must be positive")
        _require(len(self.tables) > 0, "data.synthetic.tables: at least one table is needed, as `name: rows`")


@dataclass(frozen=True)
class Behaviour:
    """A behaviour log computed from a hash: users with their clicks and a candidate, for models of sequences."""

    train: int = setting(200_000, "samples")
    valid: int = setting(10_000, "samples")
    test: int = setting(50_000, "samples")
    users: int = setting(2000)
    items: int = setting(1000, "a multiple of categories")
    categories: int = setting(20)
    max_length: int = setting(20, "clicks of the longest history")
    zipf: float = setting(1.05, "how uneven the use of users and items is")
    decay: float = setting(0.8, "weight of a click against the one after it; 1: their order has no effect", off="1")
    target: Literal["click", "next_item"] = setting("click", "click: on a candidate; next_item: for youtube_dnn")
    negatives: bool = setting(False, "an item that was not clicked for each that was: for dien", off="false")
    seed: int = setting(0, "of the log")

    def __post_init__(self) -> None:
        _require(min(self.train, self.valid, self.test) > 0, "data.behaviour: train, valid and test must be positive")
        with _at("data.behaviour: "):
            self.log(1, 0)

    def log(self, n_samples: int, start: int) -> SyntheticBehaviourLog:
        return SyntheticBehaviourLog(
            n_samples, self.users, self.items, self.categories, self.max_length, self.seed, self.zipf, start,
            target=self.target, negatives=self.negatives, decay=self.decay,
        )  # fmt: skip


@dataclass(frozen=True)
class Data:
    """Where the samples come from."""

    preset: str = setting(
        "", "how to read raw files, a preset of `gba-hvd data prepare`; or synthetic, behaviour. A store needs none"
    )
    dir: str = setting("", "a prepared store, or the folder of raw files; --data on the command line")
    cache: str = setting("~/.cache/gba_hvd/stores", "where stores made from raw files are kept")
    shares: dict[str, float] = field(
        default_factory=lambda: {"train": 0.8, "valid": 0.1, "test": 0.1},
        metadata=documented("of raw files that come in one piece"),
    )
    min_count: int = setting(0, "rarer values share a row; 0: as the preset has it", must="not be negative")
    hash_rows: int = setting(0, "hash every field into so many rows; 0: as the preset has it", must="not be negative")
    max_history: int = setting(
        50, "clicks that din and dien read of a history in a store, the newest", must="be positive"
    )
    num_workers: int = setting(0, "processes of each worker that read batches, of training and evaluation", off="0")
    prefetch: int | None = setting(
        None,
        "batches that each of these, or a thread, reads ahead; null: as `gba_hvd.batches` and `evaluate` do",
        off="0",
    )
    synthetic: Synthetic = field(default_factory=Synthetic)
    behaviour: Behaviour = field(default_factory=Behaviour)

    def __post_init__(self) -> None:
        _require(
            set(self.shares) == {"train", "valid", "test"}, "data.shares: needs train, valid and test, nothing else"
        )
        _require(
            min(self.shares.values()) > 0 and abs(sum(self.shares.values()) - 1) < 1e-6,
            f"data.shares: must be positive and sum to 1, got {self.shares}",
        )
        _require(
            not (self.hash_rows and self.min_count),
            "data.hash_rows and data.min_count: choose one, a hash has no vocabulary",
        )
        with _at("data."):
            ReadSettings(**self.reading)

    @property
    def reading(self) -> dict[str, Any]:
        """How batches are read, as `gba_hvd.batches` and `evaluate` take it."""
        return {"num_workers": self.num_workers, "prefetch": self.prefetch}

    def changed(self, name: str) -> bool:
        """Whether a setting differs from its default."""
        one = Data.__dataclass_fields__[name]
        default = one.default_factory() if callable(one.default_factory) else one.default
        return bool(getattr(self, name) != default)


OF_SEQUENCES = ("din", "dien", "youtube_dnn")  # models that read a history of clicks
# Settings of one model only.
_OF_KIND = {
    "bottom": "dlrm", "interaction": "dlrm", "cross_layers": "dcn", "structure": "dcn", "attention": "din",
    "activation": "din", "auxiliary": "dien", "temperature": "youtube_dnn",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """Which network, and its widths."""

    kind: Literal["deepfm", "dlrm", "dcn", "din", "dien", "youtube_dnn"] = setting("deepfm", "the network")
    hidden: tuple[int, ...] = setting((400, 400, 400), "widths of the layers")
    batch_norm: bool = setting(False, "after each hidden layer", off="false")
    dropout: float = setting(0.0, "share of hidden units", off="0")
    bottom: tuple[int, ...] = setting((64, 32), "dlrm: widths of the layers for numeric inputs")
    interaction: Literal["dot", "cat"] = setting("dot", "dlrm")
    cross_layers: int = setting(3, "dcn", must="be positive")
    structure: Literal["parallel", "stacked"] = setting("parallel", "dcn")
    attention: tuple[int, ...] = setting((36,), "din: widths of the activation unit")
    activation: Literal["dice", "prelu"] = setting("dice", "din")
    auxiliary: float = setting(1.0, "dien: weight of the auxiliary loss; 0: none", must="not be negative")
    temperature: float = setting(1.0, "youtube_dnn: products of vectors are divided by this", must="be positive")

    def __post_init__(self) -> None:
        _require(
            len(self.hidden) > 0 and min(self.hidden) > 0, f"model.hidden: widths must be positive, got {self.hidden}"
        )
        _require(0 <= self.dropout < 1, f"model.dropout: must be in [0, 1), got {self.dropout}")
        _require(
            len(self.attention) > 0 and min(self.attention) > 0,
            f"model.attention: widths must be positive, got {self.attention}",
        )
        _require(
            not (self.batch_norm and self.kind == "din"),
            "model.batch_norm: din has none; model.activation=dice normalises, and prelu does not",
        )
        for name, kind in _OF_KIND.items():
            changed = getattr(self, name) != Model.__dataclass_fields__[name].default
            _require(
                not changed or self.kind == kind, f"model.{name}: belongs to {kind}, but model.kind is {self.kind}"
            )


@dataclass(frozen=True)
class Embedding:
    """The tables and the optimizer of their rows. `weight_decay` is L2 on the rows a batch touches."""

    dim: int = setting(16, "columns of each table", must="be positive")
    optimizer: Literal["sgd", "row_adagrad", "adagrad", "adam"] = setting("adam", "of the rows")
    lr: float = setting(1e-3, "learning rate of the rows", must="be positive")
    weight_decay: float = setting(0.0, "L2 on the rows a batch touches", off="0", must="not be negative")
    init_std: float = setting(0.01, "standard deviation of new rows", must="not be negative")
    pooling: Literal["mean", "sum"] = setting("mean", "how the values of a multi-valued field become one vector")


@dataclass(frozen=True)
class Dense:
    """The optimizer of everything that is not an embedding row."""

    optimizer: Literal["adam", "sgd"] = setting("adam", "of all but the rows")
    momentum: float = setting(0.0, "sgd: of torch.optim.SGD", off="0")
    lr: float = setting(1e-3, "learning rate of all but the rows", must="be positive")
    weight_decay: float = setting(0.0, "L2", off="0", must="not be negative")

    def __post_init__(self) -> None:
        _require(0 <= self.momentum < 1, f"dense.momentum: must be in [0, 1), got {self.momentum}")
        _require(
            not self.momentum or self.optimizer == "sgd",
            f"dense.momentum: belongs to sgd, but dense.optimizer is {self.optimizer}",
        )


@dataclass(frozen=True)
class Train:
    """One step is always `global_batch` samples: that many / `micro_batch` micro-batches over all workers."""

    global_batch: int = setting(
        4096, "samples in a step, for any number of workers; a multiple of micro_batch", must="be positive"
    )
    micro_batch: int = setting(2048, "samples that a worker takes at a time", must="be positive")
    sync_micro_batch: int | None = setting(
        None, "samples that a worker takes at a time in allreduce mode: a multiple of micro_batch", off="null"
    )
    row_average: Literal["global", "contributors", "kept_contributors"] = setting(
        "global", "a row's gradient: divided by all micro-batches of the step, those with it, those not dropped"
    )
    max_norm: float | None = setting(
        None, "clips each step's gradient, rows included; see DistributedOptimizer", off="null"
    )
    max_row_norm: float | None = setting(None, "clips that of the rows apart, and max_norm the dense one", off="null")
    threads: int = setting(
        1, "of a worker on its replica (gba_hvd.hogwild), in shadow, easgd, ma and bmuf", must="be positive"
    )
    device: str = setting(
        "cpu", "of the dense part: cpu, cuda:N, or cuda, where workers of a host have a GPU each: docs/GPU.md"
    )
    epochs: int = setting(10, "at most; see early_stop", must="be positive")
    plateau_factor: float = setting(
        0.1, "learning rates are multiplied by this when validation AUC stops improving", off="0"
    )
    plateau_patience: int = setting(0, "epochs without improvement that are still forgiven", must="not be negative")
    min_lr: float = setting(1e-6, "the lowest that plateau_factor makes of a learning rate")
    early_stop: int = setting(
        2, "epochs in a row without improvement of validation AUC that end training", off="0", must="not be negative"
    )

    def __post_init__(self) -> None:
        _require(
            self.global_batch % self.micro_batch == 0,
            f"train.global_batch: must be a multiple of micro_batch ({self.micro_batch}), got {self.global_batch}",
        )
        with _at("train."):
            micro_batches_together(self.sync_micro_batch, self.global_batch, self.micro_batch)
            Clip(self.max_norm, self.max_row_norm)
        _require(
            re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None,
            f"train.device: must be cpu, cuda or cuda:N, got {self.device!r}",
        )
        _require(
            0 <= self.plateau_factor < 1,
            f"train.plateau_factor: must be in (0, 1), or 0 for constant learning rates, got {self.plateau_factor}",
        )

    @property
    def micro_batches(self) -> int:
        """M: micro-batches in a step."""
        return self.global_batch // self.micro_batch


@dataclass(frozen=True)
class Switching:
    """In which mode the job trains: see `gba_hvd.GBACallback`. A job without this section stays in allreduce."""

    mode: str = setting("allreduce", any_of(SETTINGS))
    switch_at: dict[int, str] = field(
        default_factory=dict, metadata=documented("global step: the mode to change to", off="{}")
    )
    rule: str | None = setting(
        None,
        "how servers apply gradients that come late: see docs/DELAY.md; null: look_ahead in gba with momentum or Adam",
        off="none",
    )
    rule_settings: dict[str, float | bool] = field(
        default_factory=dict,
        metadata=documented(
            "of dc and dana_dc: lambda, adaptive, mean_square_decay; of dana_dc: to_look_ahead; of look_ahead: steps",
            off="{}",
        ),
    )
    staleness: str = setting(Discipline.staleness, "gba: name of the weighting")
    tolerance: int = setting(Discipline.tolerance, "gba: steps, for the weightings that have one")
    staleness_of: Literal["token", "values"] = setting(
        Discipline.staleness_of, "gba: what is weighed, how late the data is (token), or how old the dense values were"
    )
    lookahead: int | None = setting(
        Discipline.lookahead, "gba, bsp: micro-batches of at most so many steps ahead; 0: lock-step", off="null"
    )
    slack: int = setting(Discipline.slack, "hop_bs: micro-batches a worker may be ahead of the slowest")
    backups: int = setting(Discipline.backups, "hop_bw: workers a round does not wait for")
    enter_gain: float = setting(Options.enter_gain, "auto: to gba when it is so many times as fast as allreduce")
    leave_gain: float = setting(Options.leave_gain, "auto: back when it is less than so many times as fast")
    patience: int = setting(Options.patience, "auto: global steps for which this must hold")
    min_stay: int = setting(Options.min_stay, "auto: global steps in a mode before it is left")
    warm_up_steps: int = setting(Options.warm_up_steps, "auto: global steps of the job before gba is entered", off="0")
    trial_budget: float = setting(
        Options.trial_budget, "auto: share of the work that trials of the other mode may cost; 0: none"
    )
    sync: str = setting(Averaging.algorithm, "what shadow runs in the background: easgd, ma, bmuf or none", off="none")
    elasticity: float | None = setting(
        None, "share of the target that a replica takes on in a round; null: 1 in ma and bmuf, else 0.5", off="1.0"
    )
    block_rate: float = setting(Averaging.block_rate, "bmuf: how far the global copy goes towards the mean")
    mixing: str = setting(Averaging.mixing, "interpolate, or difference: what was learned during a round is kept whole")
    every: int = setting(30, "local steps between the rounds of easgd, ma and bmuf")
    pause_s: float = setting(Averaging.pause_s, "shadow: least time between two rounds")
    wire: Literal["curve", "tls", "plain"] = setting(
        "curve",
        "between hosts: encrypted, also by tls; plain: neither secret nor safe from changes, for closed networks",
    )
    wait_s: float | None = setting(
        None,
        "how long training stands for servers that are not up; 0: allreduce continues; null: 60 if required, else 0",
        off="0",
    )
    required: bool = setting(False, "a mode that cannot be entered fails the job", off="false")

    def __post_init__(self) -> None:
        with _at("switching: "):
            self.callback()

    def callback(self) -> GBACallback:
        return GBACallback(**dataclasses.asdict(self))


@dataclass(frozen=True)
class Compressor:
    """How gradients or rows travel: see docs/COMPRESSION.md. `compression: int8` is short for `{name: int8}`."""

    name: str = setting("none", "none, fp16, bf16, int8, topk, dct; of rows ternary_ef and dct_mp, not dct", off="none")
    keep: float | None = setting(None, "a selector's share of elements that is sent; null: its own")
    eta: float | None = setting(None, "the paper's for 1 - keep: the share that is not sent; in place of keep")
    refresh_every: int | None = setting(None, "steps for which a threshold is used, the paper's L; null: its own")
    drift: float | None = setting(
        None, "a threshold is refreshed early beyond keep / drift to keep * drift; .inf: never; null: its own"
    )
    per_table: bool | None = setting(None, "dct_mp: a threshold for each table, not one for all of a dimension")
    values: str = setting("none", "after a selector: none, fp16, bf16 or int8", off="none")

    def spec(self) -> Spec:
        """Raises BadInput when there is no such compressor, or a setting is another one's."""
        names = ("keep", "eta", "refresh_every", "drift", "per_table")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        spec = Compression.by_name(self.name, **given)
        return spec if self.values == "none" else spec.then(Compression.by_name(self.values))


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often the job is saved: see `recovery.callback.CheckpointCallback`. Without this section: never."""

    url: str = setting("", "a folder, or what fsspec knows, such as s3://bucket/job; one for each job")
    every_s: float | None = setting(
        None, "whichever comes first; without both: planned from what is measured", off="null"
    )
    every_steps: int | None = setting(None, "the same in global steps", off="null")
    mtbf_h: float | None = setting(None, "of a plan: mean time between failures of any host, hours")
    target_pls: float = setting(0.1, "of a plan: tolerable portion of lost samples")
    longest_s: float = setting(3600.0, "of a plan: at most so long between two saves")
    recovery: str = setting(
        "auto", "when a host is lost: full (all roll back), partial (its rows come back), auto (by the estimate)"
    )
    resume: bool = setting(True, "resume from the newest checkpoint there", off="false")
    takeover: bool = setting(False, "write there although another job does", off="false")
    policy: str | None = setting(
        None,
        "which rows a save takes once there is a base: full, delta, mfu, ssu, scar; null: mfu where the interval is "
        "planned and there are several hosts, else delta",
        off="full",
    )
    row_fraction: float = setting(Saving.row_fraction, "share of a table's rows that mfu, ssu and scar take")
    bits: int | None = setting(Saving.bits, "8 or 4: partial saves are quantised", off="null")
    keep_last: int = setting(Saving.keep_last, "checkpoints that are kept")
    keep_epochs: int | None = setting(
        None, "the last one of each of so many epochs, the newest, stays, too", off="null"
    )
    keep_best: str | None = setting(
        None, "a metric, such as valid_auc, or -valid_logloss: the checkpoint of the best model stays, too", off="null"
    )
    rate_bytes_s: float | None = setting(Saving.rate_bytes_s, "most bytes written per second", off="null")

    def __post_init__(self) -> None:
        _require(bool(self.url), "checkpoint.url: needed, a folder or an address such as s3://bucket/job")
        with _at("checkpoint: "):
            self.callback()

    def callback(self, total_samples: int | None = None) -> CheckpointCallback:
        """total_samples: of the whole planned training."""
        return CheckpointCallback(**dataclasses.asdict(self), total_samples=total_samples)


@dataclass(frozen=True)
class LoggedModel:
    """The trained model in MLflow: see `gba_hvd.LogModel`. Without this section no model is logged."""

    name: str = setting("ctr", "of the logged model")
    registered_model_name: str | None = setting(None, "a model of the registry, which gets a new version", off="null")
    alias: str | None = setting(None, "of that version", off="null")
    tables: Literal["all", "touched"] = setting("all", "rows: all, or those that training has changed")
    activation: Literal["none", "sigmoid"] = setting("sigmoid", "of predictions; sigmoid: probabilities", off="none")
    raw_values: bool = setting(
        True,
        "of a prepared log: store its vocabularies with the model, whose requests then hold raw values",
        off="false",
    )


@dataclass(frozen=True)
class JobConfig:
    """All settings of `train_ctr.py`."""

    name: str
    seed: int = setting(2021, "of weights, order of samples and dropout")
    mlflow: bool = setting(True, "write the run to MLflow", off="false")
    log_model: LoggedModel | None = field(
        default=None, metadata=documented("the trained model in MLflow: docs/SERVING.md", off="null")
    )
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    embedding: Embedding = field(default_factory=Embedding)
    dense: Dense = field(default_factory=Dense)
    train: Train = field(default_factory=Train)
    compression: Compressor = field(default_factory=Compressor, metadata=documented("of dense gradients", off="none"))
    row_compression: Compressor = field(
        default_factory=Compressor, metadata=documented("of rows and their gradients, between hosts", off="none")
    )
    switching: Switching | None = field(
        default=None, metadata=documented("modes other than allreduce: docs/MODES.md", off="null")
    )
    checkpoint: Checkpoint | None = field(
        default=None, metadata=documented("saves, and resumes from there: docs/RECOVERY.md", off="null")
    )

    def __post_init__(self) -> None:
        self._check_sequences()
        _require(
            self.log_model is None or self.mlflow, "log_model: the model is logged with the run, and mlflow is off"
        )
        _require(
            self.log_model is None or self.model.kind != "youtube_dnn",
            "log_model: a youtube_dnn is built with its training data, so nothing can open it elsewhere; leave it out",
        )
        for name, compressor, check in (
            ("compression", self.compression, dense_spec_of),
            ("row_compression", self.row_compression, row_spec_of),
        ):
            with _at(f"{name}: "):
                check(compressor.spec())
        modes = set() if self.switching is None else {self.switching.mode, *self.switching.switch_at.values()}
        _require(
            self.train.threads == 1 or bool(modes & set(REPLICA_MODES)),
            f"train.threads: {self.train.threads} threads share a replica, which only {', '.join(REPLICA_MODES)} have; "
            "set switching.mode to one of these, or leave it at 1",
        )

    @property
    def reads_sequences(self) -> bool:
        """Whether the model reads histories of clicks."""
        return self.model.kind in OF_SEQUENCES and not (
            self.model.kind == "youtube_dnn" and self.data.preset == "frappe"
        )

    def _check_sequences(self) -> None:
        """Models of sequences read the behaviour log, which no others do; din and dien also stores with histories,
        youtube_dnn also Frappe, without histories."""
        kind, made, reads = self.model.kind, self.data.behaviour, self.data.preset == "behaviour"
        reads_store = kind in ("din", "dien") and not self.data.preset and bool(self.data.dir)
        _require(
            reads_store or not self.data.changed("max_history"),
            "data.max_history: only din and dien on a prepared store (data.dir, without data.preset) read it; leave it "
            "out",
        )
        if kind not in OF_SEQUENCES:
            _require(
                not reads,
                f"data.preset: behaviour has a history of clicks, which {', '.join(OF_SEQUENCES)} read, but model.kind "
                f"is {kind}; for {kind} set data.preset=synthetic or another log",
            )
            return
        _require(
            self.embedding.pooling == "mean",
            f"embedding.pooling: {kind} has a pooling of its own, got {self.embedding.pooling}; leave it out",
        )
        if reads_store:
            _require(
                kind == "din" or not self.model.auxiliary,
                "model.auxiliary: the auxiliary loss needs an item that was not clicked for each that was, which a "
                "store does not have; set model.auxiliary=0",
            )
            return
        if not self.reads_sequences:
            return
        found = f"data.preset is {self.data.preset!r}" + f" and data.dir {self.data.dir}" * bool(self.data.dir)
        _require(
            reads,
            f"model.kind: {kind} reads a history of clicks, which data.preset=behaviour has (din and dien also read "
            f"prepared stores: data.dir alone), but {found}; Frappe and Criteo have no sequences: use deepfm, dlrm or "
            "dcn for them (youtube_dnn finds the app of a user and a moment with data.preset=frappe)",
        )
        target = "next_item" if kind == "youtube_dnn" else "click"
        _require(
            made.target == target,
            f"data.behaviour.target: {kind} learns {target}, got {made.target}; set it to {target}",
        )
        negatives = kind == "dien" and self.model.auxiliary > 0
        _require(
            made.negatives == negatives,
            f"data.behaviour.negatives: {'the auxiliary loss needs them' if negatives else 'nothing reads them'}, got "
            f"{str(made.negatives).lower()} with model.kind {kind}; set it to {str(negatives).lower()}"
            + ", or model.auxiliary=0"
            * negatives,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for MLflow and the summary."""
        return dataclasses.asdict(self)


def load(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a YAML file, put `key.path=value` overrides on top, and check the lot."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such configuration; the ready ones are in examples/configs") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise BadInput(f"{path}: expected `key: value` lines at the top, got {type(tree).__name__}")
    tree.setdefault("name", os.environ.get("GBA_HVD_JOB_NAME") or Path(path).stem)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise BadInput(f"override {override!r}: expected key.path=value, such as train.epochs=3")
        *sections, last = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
            if not isinstance(branch, dict):
                raise BadInput(f"override {override!r}: {section} is a value, not a section")
        branch[last] = yaml.safe_load(value)
    return section_from(JobConfig, tree)


def section_from(section: type[Section], values: Mapping[str, Any], where: str = "") -> Section:
    """Build one settings dataclass from plain values; unknown keys and wrong types are errors that name their place."""
    hints = get_type_hints(section)
    given: dict[str, Any] = {}
    known = {one.name: one for one in dataclasses.fields(section)}  # type: ignore[arg-type]  # they are dataclasses
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            advice = f"did you mean {where}{near[0]}?" if near else f"known here: {', '.join(hints)}"
            raise BadInput(f"{where}{key}: no such setting; {advice}")
        given[key] = _value_from(hints[key], value, f"{where}{key}")
        must = known[key].metadata.get("must")
        is_good = must is None or given[key] > 0 or (must == "not be negative" and given[key] == 0)
        _require(is_good, f"{where}{key}: must {must}, got {given[key]}")
    return section(**given)


def _value_from(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin is types.UnionType:  # X | None
        return None if value is None else _value_from(get_args(kind)[0], value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if kind is Compressor and isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            raise BadInput(f"{where}: expected a section with {', '.join(get_type_hints(kind))}, got {value!r}")
        return section_from(kind, value, where + ".")
    if origin is Literal:
        if value not in get_args(kind):
            raise BadInput(f"{where}: expected one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_value_from(get_args(kind)[0], item, where) for item in value)
    if origin is dict and isinstance(value, Mapping):
        names, items = get_args(kind)
        return {
            _key_from(names, name, where): _value_from(items, item, f"{where}.{name}") for name, item in value.items()
        }
    if kind is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as a string
        except (TypeError, ValueError):
            pass
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise BadInput(f"{where}: expected {kind_name(kind)}, got {value!r}")


def _key_from(kind: Any, key: Any, where: str) -> Any:
    try:
        return kind(key)  # whole numbers come as text from the command line, and names as numbers from YAML
    except ValueError as error:
        raise BadInput(f"{where}: expected {kind_name(kind)} before the colon, got {key!r}") from error


def kind_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if get_origin(kind) is tuple:
        return f"a list, each {kind_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"`name: value` lines, each {kind_name(get_args(kind)[1])}"
    return names.get(kind, str(kind))
