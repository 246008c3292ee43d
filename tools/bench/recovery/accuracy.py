"""The accuracy side of CPR's experiment: real training in which servers are lost and their rows come back old.

A click model trains in this process; its rows are spread over 8 emulated servers (row r at server r mod 8), saved and
restored by `recovery` itself. The training stands for 56 hours: as many failures as that many hours have at the given
mean time, at random moments and servers, the same for all strategies of a seed. What a lost server held is overwritten
before it is restored, so nothing can come back that was not saved. All else (data, order, first values) is equal, so
a difference in AUC is what was lost.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd.data import ClickLog, SplitFiles, SyntheticClickLog, prepare
from gba_hvd.data.presets import PRESETS
from gba_hvd.data.synthetic import DEFAULT_TABLES
from gba_hvd.epoch import EpochOrder
from gba_hvd.errors import BadInput
from gba_hvd.metrics.scores import exact_auc
from recovery import Checkpointer, Config, dense_state, load_dense_state, of_optimizer
from recovery.restore import TrainingPoint
from recovery.schedule.formulas import best_full_interval_s, interval_for_pls_s
from recovery.state_codec import decode
from recovery.torch_rows.tensor_rows import TensorRows

from ..harness import dlrm
from . import emulation

STRATEGIES = ("none", *(name for name in emulation.CONTESTANTS if name not in ("naive", "planned")))
PRIORITY = ("cpr_scar", "cpr_mfu", "cpr_ssu")  # every r of the interval they save the share r of the rows
TARGET_LOSS = 0.0005
R = 0.125
_EVALUATED = 1 << 15  # samples at once


@dataclass(frozen=True)
class AccuracyData:
    """How a data set is trained. Adagrad on everything, as with DLRM."""

    epochs: int
    global_batch: int
    lr: float
    dim: int
    hidden: tuple[int, ...]
    needs_files: bool = False


DATASETS = {
    "frappe": AccuracyData(epochs=12, global_batch=1024, lr=0.05, dim=10, hidden=(128, 64), needs_files=True),
    "synthetic": AccuracyData(epochs=1, global_batch=1024, lr=0.05, dim=8, hidden=(64, 32)),
}
SYNTHETIC_TRAIN, _SYNTHETIC_TEST = 1_000_000, 100_000  # a second epoch would overfit


@dataclass(frozen=True)
class Samples:
    """ids: int64 [fields, n]; dense: float32 [n, d]; label: float32 [n]"""

    ids: Tensor
    dense: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class Log:
    """tables: rows of each field."""

    tables: Mapping[str, int]
    train: Samples
    test: Samples


@dataclass(frozen=True)
class AccuracyRun:
    """One training to be done.

    mean_h:  hours between failures of any server; 0: there is none
    r, servers, target_pls: of CPR's strategies; what does not matter to a strategy has its default
    samples: of a synthetic log; 0 for files
    """

    dataset: str
    epochs: int
    mean_h: float
    strategy: str
    seed: int
    r: float = R
    servers: int = emulation.SERVERS
    target_pls: float = emulation.TARGET_PLS
    samples: int = 0

    def __str__(self) -> str:
        title = titled(self.dataset, self.epochs, self.samples)
        setting = f"r = {self.r:g}, {self.servers} servers, target PLS {self.target_pls:g}"
        return f"{title}, {self.mean_h:g} h between failures, {self.strategy}, {setting}, seed {self.seed}"


KEY = tuple(AccuracyRun.__dataclass_fields__)  # what distinguishes one row of results from another


def titled(dataset: str, epochs: int, samples: int) -> str:
    size = "" if samples in (0, SYNTHETIC_TRAIN) else f"{samples:,} samples, "
    return f"{dataset}, {size}{epochs} epoch{'s' * (epochs != 1)}"


class Model(nn.Module):
    """Embeddings of all fields and the dense features into an MLP."""

    def __init__(self, tables: Mapping[str, int], n_dense: int, of: AccuracyData) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, of.dim, sparse=True) for rows in tables.values())
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.01)  # type: ignore[arg-type]
        self.top = dlrm.mlp((len(tables) * of.dim + n_dense, *of.hidden, 1), last_relu=False)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Logits [B] of ids int64 [fields, B] and dense features float32 [B, d]."""
        vectors = [table(some) for table, some in zip(self.tables, ids, strict=True)]
        logits: Tensor = self.top(torch.cat([*vectors, dense], dim=1))
        return logits.squeeze(1)


def planned(
    datasets: Sequence[str],
    seeds: Sequence[int],
    epochs: int | None = None,
    samples: int | None = None,
    settings: Sequence[AccuracySetting] | None = None,
) -> list[AccuracyRun]:
    """Seed by seed, so that what is there when time is over can be compared. settings: `comparison` by default."""
    runs = []
    for seed in seeds:
        for dataset in datasets:
            of, size = DATASETS[dataset], 0 if DATASETS[dataset].needs_files else samples or SYNTHETIC_TRAIN
            for one in settings or comparison():
                runs.append(
                    AccuracyRun(
                        dataset, epochs or of.epochs, one.mean_h, one.strategy, seed, one.r, one.servers,
                        one.target_pls, size,
                    )
                )  # fmt: skip
    return list(dict.fromkeys(runs))


@dataclass(frozen=True)
class AccuracySetting:
    """As of `AccuracyRun`."""

    strategy: str
    mean_h: float = 0.0
    r: float = R
    servers: int = emulation.SERVERS
    target_pls: float = emulation.TARGET_PLS


def comparison(r: float = R) -> list[AccuracySetting]:
    """All strategies, at each mean time. r is nothing to those that save all rows."""
    found = [AccuracySetting("none")]
    for mean_h in emulation.MEANS_H:
        found += [AccuracySetting(name, mean_h, r if name in PRIORITY else R) for name in STRATEGIES if name != "none"]
    return found


def failures(mean_h: float, n_steps: int, seed: int, servers: int = emulation.SERVERS) -> list[tuple[int, int]]:
    """(step after which, server), ascending: as many as are expected in the job, at random moments."""
    rng = np.random.default_rng([seed, round(mean_h)])
    n = max(1, round(emulation.HOURS / mean_h))
    steps = np.sort(rng.integers(1, n_steps, n))
    return list(zip(steps.tolist(), rng.integers(servers, size=n).tolist(), strict=True))


def save_every(run: AccuracyRun, n_steps: int) -> int:
    """Steps between two saves: what CPR's formulas say, with the job's steps for its hours."""
    mean_s = run.mean_h * 3600.0
    if run.strategy == "full":
        round_s = best_full_interval_s(emulation.PRODUCTION.save_s, mean_s)
    else:
        round_s = interval_for_pls_s(run.target_pls, run.servers, mean_s)
        round_s *= run.r if run.strategy in PRIORITY else 1.0
    return max(1, round(round_s / (emulation.HOURS * 3600.0) * n_steps))


def train(run: AccuracyRun, log: Log) -> dict[str, Any]:
    """One training, with its failures; a row of results."""
    of, started = DATASETS[run.dataset], time.monotonic()
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, but then it warns
    torch.manual_seed(run.seed)
    model = Model(log.tables, log.train.dense.shape[1], of)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=of.lr)
    rows = of_optimizer(model, optimizer, n_shards=run.servers)
    per_epoch = -(-len(log.train) // of.global_batch)
    n_steps = run.epochs * per_epoch
    policy = "full" if run.strategy in ("none", "full") else run.strategy.removeprefix("cpr_")
    todo = [] if run.strategy == "none" else failures(run.mean_h, n_steps, run.seed, run.servers)
    every = 0 if run.strategy == "none" else save_every(run, n_steps)
    pls, again, written, n_failures = 0.0, 0, 0, 0
    saved: set[int] = set()  # steps; one that is done again is not saved again
    share = run.r if run.strategy in PRIORITY else Config.row_fraction
    config, rng = Config(job="cpr", policy=policy, row_fraction=share), np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory(prefix="gba-hvd-cpr-") as place,
        Checkpointer(place, rows, config, rng=rng) as saving,
    ):
        step = 0
        while step < n_steps:
            if run.strategy != "none" and step % every == 0 and step not in saved:
                state = dense_state(model, optimizer, rows)
                written += saving.save(step, step * of.global_batch, state).result(300).manifest.n_bytes
                saved.add(step)
            _step(model, optimizer, rows, log.train, of, step, per_epoch, run.seed)
            step += 1
            while todo and todo[0][0] == step:
                _, server = todo.pop(0)
                n_failures += 1
                if run.strategy == "full":
                    before, step = step, _everything_back(model, optimizer, rows, saving, run.servers)
                    again += before - step
                else:
                    pls += _rows_back(rows, saving, server, step, n_steps, of.global_batch)
    logits = _logits(model, log.test)
    return {
        **{name: getattr(run, name) for name in KEY},
        "auc": exact_auc(logits, log.test.label.numpy()),
        "pls": pls,
        "failures": n_failures,
        "steps": n_steps,
        "steps_again": again,
        "save_every_steps": None if run.strategy == "none" else every,
        "written_bytes": written,
        "seconds": round(time.monotonic() - started, 1),
    }


def _step(
    model: Model, optimizer: torch.optim.Optimizer, rows: TensorRows, samples: Samples, of: AccuracyData, step: int,
    per_epoch: int, seed: int,
) -> None:  # fmt: skip
    epoch, at = divmod(step, per_epoch)
    first = at * of.global_batch
    count = min(of.global_batch, len(samples) - first)
    chosen = torch.from_numpy(EpochOrder(len(samples), seed, epoch).rows(first, count))
    optimizer.zero_grad()
    logits = model(samples.ids[:, chosen], samples.dense[chosen])
    nn.functional.binary_cross_entropy_with_logits(logits, samples.label[chosen]).backward()
    with rows.step():
        optimizer.step()


def _overwrite(rows: TensorRows, server: int) -> None:
    for table in range(len(rows.schema.tables)):
        for column in rows.slab(table, server).columns:
            column[...] = np.nan


def _rows_back(rows: TensorRows, saving: Checkpointer, server: int, step: int, n_steps: int, batch: int) -> float:
    """Partial recovery: the lost server's rows from the newest checkpoint. Returns what it adds to the PLS."""
    _overwrite(rows, server)
    report = saving.restore([server], now=TrainingPoint(step, step * batch, n_steps * batch))
    assert report is not None and report.n_lost == 0 and report.pls is not None
    return report.pls


def _everything_back(
    model: Model, optimizer: torch.optim.Optimizer, rows: TensorRows, saving: Checkpointer, servers: int
) -> int:
    """Full recovery. Returns the step that training resumes from."""
    for server in range(servers):
        _overwrite(rows, server)
    report = saving.restore()
    assert report is not None and report.state is not None
    rows.continue_from(report.step)
    load_dense_state(model, optimizer, rows, decode(report.state))
    return report.step


def _logits(model: Model, samples: Samples) -> np.ndarray:
    found = []
    with torch.no_grad():
        for at in range(0, len(samples), _EVALUATED):
            found.append(model(samples.ids[:, at : at + _EVALUATED], samples.dense[at : at + _EVALUATED]).numpy())
    return np.concatenate(found)


# --- data ------------------------------------------------------------------------------------------------------------


def opened(name: str, folder: Path | None, samples: int | None = None) -> Log:
    """Completely in memory. samples: of a synthetic log. Raises BadInput when files are missing or wrong."""
    return _frappe(folder) if DATASETS[name].needs_files else _synthetic(samples or SYNTHETIC_TRAIN)


def _synthetic(samples: int) -> Log:
    train = SyntheticClickLog(samples, DEFAULT_TABLES, n_dense=4, seed=0)
    test = SyntheticClickLog(_SYNTHETIC_TEST, DEFAULT_TABLES, n_dense=4, seed=0, start=samples)
    return Log(DEFAULT_TABLES, _taken(train), _taken(test))


def _frappe(folder: Path | None) -> Log:
    if folder is None or not folder.is_dir():
        raise BadInput(f"frappe needs its files train, valid and test: --data DIR, got {folder}")
    files = {split: sorted(folder.glob(f"{split}.*")) for split in ("train", "valid", "test")}
    preset = PRESETS["frappe"]
    with tempfile.TemporaryDirectory(prefix="gba-hvd-frappe-") as scratch:
        prepare(preset.recipe(preset.encoding), SplitFiles(files), Path(scratch) / "store")
        train, test = (ClickLog.open(Path(scratch) / "store", split) for split in ("train", "test"))
        return Log(train.tables, _taken(train), _taken(test))


def _taken(log: Any) -> Samples:
    parts = [log.take(np.arange(at, min(at + _EVALUATED, len(log)))) for at in range(0, len(log), _EVALUATED)]
    columns = [torch.cat([part.ids[name] for part in parts]) for name in log.tables]
    return Samples(
        torch.stack(columns).long(),
        torch.cat([part.dense for part in parts]).float(),
        torch.cat([part.label for part in parts]).float(),
    )


# --- what it shows ---------------------------------------------------------------------------------------------------


def by_log(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each data set and length."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(titled(row["dataset"], row["epochs"], row["samples"]), []).append(row)
    return found


def _setting_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["strategy"], row["mean_h"], row["r"], row["servers"], row["target_pls"]


def headline(rows: Sequence[Mapping[str, Any]], r: float = R) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """data set -> hours between failures -> strategy -> means over the seeds; `vs_none` of seeds that have both.

    Of the comparison of strategies: r as it was asked for, 8 servers, the paper's target.
    """
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for title, of_log in by_log(rows).items():
        whole = {row["seed"]: row["auc"] for row in of_log if row["strategy"] == "none"}
        wanted = {(one.strategy, one.mean_h, one.r, one.servers, one.target_pls) for one in comparison(r)}
        same = [row for row in of_log if _setting_of(row) in wanted]
        means_h = dict.fromkeys(row["mean_h"] for row in same if row["strategy"] != "none")
        found[title] = {
            f"{mean_h:g}h": {
                strategy: means_of(some, whole)
                for strategy in STRATEGIES
                if (some := [o for o in same if o["strategy"] == strategy and o["mean_h"] in (0, mean_h)])
            }
            for mean_h in means_h
        }
    return found


def means_of(some: Sequence[Mapping[str, Any]], whole: Mapping[int, float]) -> dict[str, Any]:
    apart = [row["auc"] - whole[row["seed"]] for row in some if row["seed"] in whole]
    return {
        "seeds": len(some),
        "auc": mean(row["auc"] for row in some),
        "vs_none": mean(apart) if apart else None,
        "vs_none_worst": min(apart) if apart else None,
        "pls": mean(row["pls"] for row in some),
        "failures": mean(row["failures"] for row in some),
    }


def verdict(found: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> list[str]:
    """Whether MFU and SSU stay within the target of no failure, in the mean over the seeds."""
    lines = []
    for title, by_mean in found.items():
        for mean_h, of in by_mean.items():
            for strategy in ("cpr_mfu", "cpr_ssu"):
                apart = of.get(strategy, {}).get("vs_none")
                if apart is not None:
                    meets = "meets" if apart >= -TARGET_LOSS else "misses"
                    text = f"{title}, {mean_h}: {strategy} {apart:+.5f} AUC against no failure"
                    lines.append(f"{text}, {meets} the target of {TARGET_LOSS}")
    return lines
