"""`gba-hvd bench rows`: what DCT and other compressed rows cost in quality and how few bytes they take, in one process.

Two hosts are played by turns: half of the rows live on each, and what one needs of the other's goes through the codecs
that real jobs use. So bytes and AUC are those of a job, and no time says anything. `sync`: both compute with the same
values and their gradients are applied together. `async`: a gradient is applied alone, and is one gradient old then.
Quality: a synthetic log, 300,000 samples once, and Frappe, twelve epochs. `of the DLRM`: rows, gradients and keys of
batches of `bench allreduce`'s DLRM, with values and gradients drawn at random.

A rule is `none`, a value coder, or NAME:KEEP:L of dct_mp, ternary_ef (rows) and dct_dp (dense gradients); L is the
number of steps between refreshes. Behind it there may be, in any order: `:inf`, no refresh before L (so it is with
dct_mp); `:float32`, values as they are, not int8; `:per_table`, of dct_mp, a threshold for each table.
--sweep has all of KEEP .001, .01, .05 and L 100, 1000, 5000, for dct_mp and dct_dp. The result file is written after
each run, and runs that it has are not repeated: an interrupted command resumes. Of rules that differ only in an L that
is longer than the run (in its steps, which the table shows) one is trained, and counts for the others: in all of them
the first threshold is in force to the end.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from gba_hvd.errors import BadInput, refuse_unknown

from .harness import measure, resumable
from .harness.measure import Subparsers

if TYPE_CHECKING:
    from gba_hvd.compression import Spec
    from gba_hvd.compression.error_feedback import Feedback
    from gba_hvd.embedding.bags import Borrowed

HOSTS = 2
N_SAMPLES, EPOCHS = 300_000, 12
DLRM_BATCH, DLRM_STEPS = 1024, 8
OPTIONS = ("inf", "float32", "per_table")
RULES = ("none", "int8", "ternary_ef:0.02:1000", "dct_mp:0.05:1000")
KEEPS, REFRESHES = (0.001, 0.01, 0.05), (100, 1000, 5000)
SWEEP = ("none", *(f"{name}:{keep}:{every}" for name, keep, every in product(("dct_mp", "dct_dp"), KEEPS, REFRESHES)))
MODES = ("sync", "async")
KEY = ("dataset", "mode", "rule", "seed")


@dataclass(frozen=True)
class CompressionRun:
    """One training to be done."""

    seed: int
    dataset: str
    mode: str
    rule: str

    def __str__(self) -> str:
        return f"{self.dataset:9s} {self.mode:5s} {self.rule:28s} seed {self.seed}"


def add_parser(subparsers: Subparsers) -> None:
    does = "bytes and AUC of DCT and of compressed rows, in one process"
    parser = measure.add_benchmark(subparsers, "rows", does, __doc__, run)
    parser.add_argument("--rules", nargs="+", metavar="RULE", help=f"default: {' '.join(RULES)}")
    parser.add_argument("--sweep", action="store_true", help="the rules of the sweep, instead")
    parser.add_argument("--datasets", nargs="+", default=["synthetic"], choices=("synthetic", "frappe"))
    parser.add_argument("--data", type=Path, metavar="DIR", help="frappe: the folder of its files")
    parser.add_argument("--modes", nargs="+", default=["sync"], choices=MODES)
    parser.add_argument("--seeds", type=int, default=3, help="quality runs of each; 0 for none")
    parser.add_argument("--samples", type=int, default=N_SAMPLES, help="of the synthetic log")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of Frappe")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    if args.sweep and args.rules:
        raise BadInput("--sweep has rules of its own: leave out --rules")
    rules = SWEEP if args.sweep else tuple(args.rules or RULES)
    for rule in rules:
        specs_of(rule)  # refused before hours of work
    if "frappe" in args.datasets and args.data is None:
        raise BadInput("frappe needs its files train, valid and test: --data DIR")
    settings = {"samples": args.samples, "epochs": args.epochs}
    ratios: dict[str, float] = {}
    results = resumable.Results(args.out, KEY, settings, lambda rows: {"bytes_dlrm": ratios})
    ratios |= results.before.get("bytes_dlrm", {})
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        _dlrm_ratios(rules, ratios, Path(scratch))
    results.write()

    def train_one(run: CompressionRun) -> None:
        problem = problem_of(run.dataset, args.data, args.samples, args.epochs)
        equal = same_run(results.rows, run.dataset, run.mode, run.rule, run.seed, problem.n_steps)
        got = equal or train(problem, run.rule, run.mode, run.seed)
        results.rows.append({**got, **asdict(run)})
        if equal is None:
            print(f"{run}  AUC {got['auc']:.5f}  1/{got['bytes_ratio']:.1f} of the bytes", flush=True)

    runs = [CompressionRun(*of) for of in product(range(args.seeds), args.datasets, args.modes, rules)]
    results.run_each(results.waiting(runs), train_one)
    show(results.rows, ratios)
    return results.end()


def show(rows: Sequence[measure.Row], ratios: dict[str, float]) -> None:
    """A table for each data set and mode: means over the seeds, against `none` of the same seeds."""
    columns = ("rule", "seeds", "AUC", "minus none", "bytes, none over this", "of the DLRM", "density at the end")
    for dataset, mode in dict.fromkeys((row["dataset"], row["mode"]) for row in rows):
        same = [row for row in rows if (row["dataset"], row["mode"]) == (dataset, mode)]
        plain = {row["seed"]: row["auc"] for row in same if row["rule"] == "none"}
        table = []
        for rule in dict.fromkeys(row["rule"] for row in same):
            mine = [row for row in same if row["rule"] == rule]
            apart = [row["auc"] - plain[row["seed"]] for row in mine if row["seed"] in plain]
            cells = [rule, str(len(mine)), f"{mean(row['auc'] for row in mine):.5f}"]
            cells += [f"{mean(apart):+.5f} ({min(apart):+.5f} to {max(apart):+.5f})" if apart else ""]
            cells += [
                f"{mean(row['bytes_ratio'] for row in mine):.1f}",
                f"{ratios[rule]:.1f}" if rule in ratios else "",
            ]
            table.append((*cells, f"{mean(row['density'] for row in mine):.4f}"))
        steps = {row["steps"] for row in same if "steps" in row}
        length = f", {' or '.join(map(str, sorted(steps)))} steps" if steps else ""
        measure.print_table(f"{dataset}, {mode}, {HOSTS} hosts{length}", columns, table)


def same_run(
    rows: Sequence[measure.Row], dataset: str, mode: str, rule: str, seed: int, n_steps: int
) -> measure.Row | None:
    """A run that is this one to the bit, because neither refreshes its first threshold."""
    mine = _within(rule, n_steps)
    for row in rows:
        of_row = row["dataset"], row["mode"], row["seed"]
        if of_row == (dataset, mode, seed) and _within(row["rule"], n_steps) == mine:
            return row
    return None


def _within(rule: str, n_steps: int) -> str:
    """The rule with L, if it has one, no longer than the run."""
    name, *numbers = rule.split(":")
    if len(numbers) < 2:
        return rule
    return ":".join([name, numbers[0], str(min(int(numbers[1]), n_steps)), *numbers[2:]])


def specs_of(rule: str) -> tuple[Spec, Spec]:
    """(of dense gradients, of rows). Raises BadInput for what is no rule."""
    from gba_hvd.compression import Compression

    name, *numbers = rule.split(":")
    drifts = {"dct_mp": math.inf, "dct_dp": 2.0, "ternary_ef": 1.25}
    if not numbers and name not in drifts:
        return Compression.none, Compression.by_name(name)
    try:
        settings = {"keep": float(numbers[0]), "refresh_every": int(numbers[1]), "drift": drifts[name]}
    except (ValueError, IndexError, KeyError) as error:
        raise BadInput(f"{rule!r}: expected a value coder or NAME:KEEP:L, such as dct_mp:0.05:1000") from error
    for option in numbers[2:]:
        refuse_unknown(f"option of {rule!r}", option, OPTIONS)
    if "inf" in numbers:
        settings["drift"] = math.inf
    if "per_table" in numbers:
        settings["per_table"] = True  # refused by rules that have none
    made = Compression.by_name("dct" if name == "dct_dp" else name, **settings)
    if "float32" not in numbers:
        made = made.then(Compression.int8)
    return (made, Compression.none) if name == "dct_dp" else (Compression.none, made)


def plain_bytes(n: int, dim: int) -> int:
    """Bytes of n rows without compression: keys, rows, keys again, gradients."""
    return n * 2 * (8 + 4 * dim)


class Way:
    """From one host to the other and back, for the rows of one dimension. is_async: a push repeats its keys.

    sizes: rows of each table; keys number them one table after the other
    """

    def __init__(self, spec: Spec, sizes: Sequence[int], dim: int, is_async: bool = False) -> None:
        from gba_hvd.compression.activation_codec import ActivationThresholds
        from gba_hvd.compression.row_codec import RowCoder
        from gba_hvd.shm.layout import Layout

        self._spec, self._is_async = spec, is_async
        self._coder, self._thresholds = RowCoder(spec, [dim]), ActivationThresholds(spec, len(sizes))
        self._layout = Layout.of({f"t{i}": (n, dim) for i, n in enumerate(sizes)}, (), 1, 0, 0.0)
        self._borrowed: Borrowed | None = None
        self.n_bytes = self.n_plain = 0

    @property
    def density(self) -> float:
        """The share of elements that was sent last."""
        return self._coder.density[0] if self._spec.selects else 1.0

    def pull(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """rows float32 [n, dim] as the other host sees them."""
        from gba_hvd.compression import activation_codec, row_codec
        from gba_hvd.embedding.bags import NOTHING, Borrowed

        self.n_plain += plain_bytes(*rows.shape)
        if self._spec.is_none:
            self.n_bytes += plain_bytes(*rows.shape)
            return rows
        if not self._spec.pools:
            sent = row_codec.encode_rows(rows, self._spec)
            self.n_bytes += len(row_codec.write_keys(keys)) + len(sent)
            return row_codec.decode_rows(sent, *rows.shape)
        (indices,) = self._thresholds.masks_of(self._layout, 0, [(keys, NOTHING)], [rows])
        sent = activation_codec.encode(rows, indices, self._spec)
        self.n_bytes += len(activation_codec.write_request(keys, NOTHING)) + len(sent)
        seen, indices = activation_codec.decode(sent, *rows.shape)
        self._borrowed = Borrowed(keys, NOTHING, indices)
        self._coder.received(0, len(indices), rows.size)
        return seen

    def push(self, keys: np.ndarray, grads: np.ndarray) -> np.ndarray:
        """Gradients float32 [n, dim] of the rows that were pulled last, as the owner sees them."""
        from gba_hvd.compression import activation_codec, row_codec
        from gba_hvd.embedding.row_gradients import RowGrad

        if self._spec.is_none:
            return grads
        grad, dim, borrowed = RowGrad(keys, grads), grads.shape[1], self._borrowed
        if borrowed is not None:
            sent = activation_codec.write_back(borrowed, grad, self._spec, dim)
            pushed = activation_codec.pack([grad], [borrowed], self._spec, [dim]) if self._is_async else sent
            self.n_bytes += len(pushed)
            return activation_codec.read_back(sent, borrowed, dim, 0).values
        self._coder.begin()
        sent = self._coder.give_back(0, keys, grad)
        self._coder.settle()
        self.n_bytes += len(sent) + (len(row_codec.write_keys(keys)) if self._is_async else 0)
        return row_codec.decode_row_gradients(sent, keys, dim).values


def _dlrm_ratios(rules: Sequence[str], ratios: dict[str, float], scratch: Path) -> None:
    """Bytes without over bytes with, of DLRM's batches; for rules of rows that are not in `ratios` yet."""
    from .allreduce import batches  # here, because they import torch
    from .allreduce.shape import SHAPES
    from .harness import dlrm

    missing = [rule for rule in rules if rule not in ratios and not rule.startswith("dct_dp")]
    if not missing:
        return
    batches.write(scratch / "dlrm", SHAPES["dlrm"], DLRM_BATCH, DLRM_STEPS, HOSTS)
    prepared = batches.load(scratch / "dlrm", SHAPES["dlrm"], 0)
    for rule in missing:
        rng, way = np.random.default_rng(0), Way(specs_of(rule)[1], [dlrm.N_ROWS] * dlrm.N_TABLES, dlrm.DIM)
        for step in prepared:
            keys = np.unique(np.concatenate([ids + i * dlrm.N_ROWS for i, ids in enumerate(step.ids.values())]))
            keys = keys[keys % HOSTS == 1]
            way.pull(keys, rng.normal(size=(len(keys), dlrm.DIM)).astype(np.float32))
            way.push(keys, rng.normal(size=(len(keys), dlrm.DIM)).astype(np.float32))
        ratios[rule] = way.n_plain / way.n_bytes


# --- quality ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A data set and how it is trained, with Adagrad.

    ids: int64 [fields, n], rows of one table that has those of all fields; dense: float32 [n, d]; label: float32 [n];
    the last `held_out` samples are for the AUC. sizes: rows of each field; batch: samples of each host
    """

    ids: np.ndarray
    dense: np.ndarray
    label: np.ndarray
    held_out: int
    sizes: tuple[int, ...]
    dim: int
    hidden: tuple[int, ...]
    batch: int
    epochs: int
    lr: float

    @property
    def n_steps(self) -> int:
        """How often each host asks for a threshold."""
        return self.epochs * ((len(self.label) - self.held_out) // self.batch // HOSTS)


@cache
def problem_of(dataset: str, folder: Path | None, n_samples: int, epochs: int) -> Problem:
    """synthetic: n_samples beside those for the AUC. frappe: the folder of its files, and how often it is seen."""
    import torch

    from .harness import small_ctr
    from .recovery import accuracy

    if dataset == "synthetic":
        with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
            small_ctr.write(Path(scratch), n_samples)
            samples = small_ctr.Samples.train(Path(scratch), n_samples + small_ctr.N_HELD_OUT)
            ids, dense, label = samples.tensors(np.arange(len(samples)))
        sizes, held_out = list(small_ctr.TABLES.values()), small_ctr.N_HELD_OUT
        settings: tuple[Any, ...] = (small_ctr.DIM, small_ctr.HIDDEN, 256, 1, small_ctr.LEARNING_RATE)
    else:
        log, made = accuracy.opened("frappe", folder), accuracy.DATASETS["frappe"]
        ids = torch.cat([log.train.ids, log.test.ids], dim=1)
        dense, label = torch.cat([log.train.dense, log.test.dense]), torch.cat([log.train.label, log.test.label])
        sizes, held_out = list(log.tables.values()), len(log.test)
        settings = (made.dim, made.hidden, made.global_batch // HOSTS, epochs, made.lr)
    ends = np.cumsum(sizes)
    numbered = ids.numpy() + (ends - sizes)[:, None]
    return Problem(numbered, dense.numpy(), label.numpy(), held_out, tuple(sizes), *settings)


def train(problem: Problem, rule: str, mode: str, seed: int) -> dict[str, float]:
    """AUC on what was held out, bytes of `none` over those of the rule, and the density at the end."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1 + seed)
    dense_spec, row_spec = specs_of(rule)
    trained = Trained.fresh(problem, seed)
    ways = [Way(row_spec, problem.sizes, problem.dim, mode == "async") for _ in range(HOSTS)]
    channels = [DenseChannel(dense_spec, trained.tower) for _ in range(HOSTS)]
    n, rng = len(problem.label) - problem.held_out, np.random.default_rng([seed, 0])
    waiting: list[Gradient] = []
    for _ in range(problem.epochs):
        order = rng.permutation(n)
        for number, at in enumerate(range(0, n - HOSTS * problem.batch + 1, problem.batch)):
            host = number % HOSTS
            chosen = order[at : at + problem.batch]
            waiting.append(trained.gradient(chosen, host, ways[host], channels[host]))
            if mode == "sync" and len(waiting) == HOSTS:
                trained.apply(waiting)
                waiting = []
            elif mode == "async" and len(waiting) > 1:
                trained.apply([waiting.pop(0)])
    parts: Sequence[Way | DenseChannel] = ways if dense_spec.is_none else channels
    ratio = sum(one.n_plain for one in parts) / sum(one.n_bytes for one in parts)
    return {"auc": trained.auc(), "bytes_ratio": ratio, "density": parts[0].density, "steps": problem.n_steps}


@dataclass(frozen=True)
class Gradient:
    """Gradient of one host's batch, as it arrives: dense float32 [n]; of distinct rows, keys int64 [m], float32 [m,
    dim].
    """

    dense: np.ndarray
    keys: np.ndarray
    rows: np.ndarray


class DenseChannel:
    """One host's dense gradients, as the others see them."""

    def __init__(self, spec: Spec, tower: Any) -> None:
        from gba_hvd.compression.error_feedback import Feedback

        named = list(tower.named_parameters())
        self._sizes = [p.numel() for _, p in named]
        self._feedback: Feedback | None = None
        if not spec.is_none:
            self._feedback = Feedback(spec, [name for name, _ in named], self._sizes, np.dtype(np.float32))
        self.n_bytes = self.n_plain = 0

    @property
    def density(self) -> float:
        """Mean of the tensors that are compressed: the share of elements that was sent last."""
        from gba_hvd.compression.spec import MIN_ELEMENTS

        shares = [] if self._feedback is None else self._feedback.thresholds.density
        return mean(share for share, size in zip(shares, self._sizes, strict=True) if size >= MIN_ELEMENTS)

    def send(self, flat: np.ndarray) -> np.ndarray:
        from gba_hvd.compression import dense_push
        from gba_hvd.compression.error_feedback import plain_of, spans_of

        self.n_plain += flat.nbytes
        if self._feedback is None:
            self.n_bytes += flat.nbytes
            return flat
        tensors = range(len(self._sizes))
        spans, n = spans_of(self._sizes, tensors)
        plain = np.concatenate([flat[:0], *(flat[at] for at in plain_of(self._sizes, tensors))])
        self._feedback.begin()
        sent = self._feedback.encode(flat, spans, n, plain)
        self._feedback.settle()
        self.n_bytes += len(sent)
        return dense_push.read(sent, self._sizes)


@dataclass
class Trained:
    """The model of both hosts. rows, squares: float32 [n_rows, dim]"""

    problem: Problem
    tower: Any
    optimizer: Any
    rows: np.ndarray
    squares: np.ndarray

    @classmethod
    def fresh(cls, problem: Problem, seed: int) -> Trained:
        import torch

        from .harness import dlrm

        n_in = len(problem.ids) * problem.dim + problem.dense.shape[1]
        tower = dlrm.mlp((n_in, *problem.hidden, 1), last_relu=False)
        optimizer = torch.optim.Adagrad(tower.parameters(), lr=problem.lr, eps=1e-8)
        rows = 0.01 * np.random.default_rng(seed).normal(size=(sum(problem.sizes), problem.dim)).astype(np.float32)
        return cls(problem, tower, optimizer, rows.astype(np.float32), np.zeros_like(rows, np.float32))

    def gradient(self, chosen: np.ndarray, host: int, way: Way, channel: DenseChannel) -> Gradient:
        import torch
        from torch.nn.functional import binary_cross_entropy_with_logits

        problem = self.problem
        keys, inverse = np.unique(problem.ids[:, chosen], return_inverse=True)
        is_remote, seen = keys % HOSTS != host, self.rows[keys]
        seen[is_remote] = way.pull(keys[is_remote], seen[is_remote])
        leaf = torch.from_numpy(seen).requires_grad_()
        picked = leaf[torch.from_numpy(inverse.reshape(len(problem.ids), -1))].transpose(0, 1).flatten(1)
        self.optimizer.zero_grad()
        logits = self.tower(torch.cat([picked, torch.from_numpy(problem.dense[chosen])], dim=1)).squeeze(1)
        binary_cross_entropy_with_logits(logits, torch.from_numpy(problem.label[chosen])).backward()
        assert leaf.grad is not None
        grads = leaf.grad.numpy()
        grads[is_remote] = way.push(keys[is_remote], grads[is_remote])
        flat = np.concatenate([p.grad.numpy().ravel() for p in self.tower.parameters()])
        return Gradient(channel.send(flat), keys, grads)

    def apply(self, gradients: Sequence[Gradient]) -> None:
        """One step of Adagrad with their mean."""
        import torch

        flat = (np.sum([one.dense for one in gradients], axis=0) / len(gradients)).astype(np.float32)
        at = 0
        for parameter in self.tower.parameters():
            parameter.grad = torch.from_numpy(flat[at : at + parameter.numel()].reshape(parameter.shape))
            at += parameter.numel()
        self.optimizer.step()
        keys, place = np.unique(np.concatenate([one.keys for one in gradients]), return_inverse=True)
        grad = np.zeros((len(keys), self.problem.dim), np.float32)
        np.add.at(grad, place, np.concatenate([one.rows for one in gradients]) / np.float32(len(gradients)))
        self.squares[keys] += grad * grad
        self.rows[keys] -= self.problem.lr * grad / (np.sqrt(self.squares[keys]) + 1e-8)

    def auc(self) -> float:
        import torch

        from .harness import small_ctr

        problem, table = self.problem, torch.from_numpy(self.rows)
        first = len(problem.label) - problem.held_out
        samples = small_ctr.Samples(problem.ids.T, problem.dense, problem.label, first, problem.held_out)
        return small_ctr.auc(
            lambda ids, dense: self.tower(torch.cat([table[ids].transpose(0, 1).flatten(1), dense], dim=1)).squeeze(1),
            samples,
        )
