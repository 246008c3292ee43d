"""`gba-hvd bench rows`: what compressed rows cost in quality and how few bytes they take, in one process.

Two hosts are played by turns: half of the rows live on each, and what one needs of the other's goes through the codec
that real jobs use (`gba_hvd.compression.row_codec`). So bytes and AUC are those of a job in allreduce mode, and no time
says anything. Quality: the small tower of `bench compression`, trained over 300,000 samples once, and evaluated on
held-out ones. Bytes: rows, gradients and keys of batches of `bench allreduce`'s DLRM, with values and gradients drawn
at random.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from .harness import measure

if TYPE_CHECKING:
    from gba_hvd.compression.row_codec import RowCoder

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

HOSTS = 2
N_SAMPLES, BATCH = 300_000, 256  # of each host
DLRM_BATCH, DLRM_STEPS = 1024, 8
SPECS = {"none": {}, "int8": {"name": "int8"}} | {
    f"dct({keep}), int8": {"name": "dct", "keep": keep, "drift": 1.25, "then": "int8"} for keep in (0.02, 0.05, 0.1)
}


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("rows", help="bytes and AUC of compressed rows, in one process", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--contestants", nargs="+", default=list(SPECS), choices=SPECS, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, help="quality runs of each; 0 for none")
    parser.add_argument("--samples", type=int, default=N_SAMPLES)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .harness import clicks, small_ctr  # here, because they import torch

    measure.check_writable(args.out)
    aucs: dict[str, list[float]] = {name: [] for name in args.contestants}
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        small, dlrm = Path(scratch) / "small", Path(scratch) / "dlrm"
        clicks.write(dlrm, DLRM_BATCH, DLRM_STEPS, HOSTS)
        ratios = {name: bytes_ratio(name, dlrm) for name in args.contestants}
        if args.seeds:
            small_ctr.write(small, args.samples)
        for seed in range(args.seeds):
            for name in args.contestants:
                aucs[name].append(quality(name, small, args.samples, seed))
                print(f"{name:18s} seed {seed}  AUC {aucs[name][-1]:.5f}", flush=True)
    base = mean(aucs["none"]) if aucs.get("none") else None
    rows = [
        {
            "contestant": name,
            "bytes_ratio": ratios[name],
            "auc": aucs[name],
            "auc_delta": mean(aucs[name]) - base if base is not None else None,
        }
        for name in args.contestants
    ]
    measure.write_json(args.out, {"machine": measure.machine(), "samples": args.samples, "rows": rows})
    table = [
        (r["contestant"], f"{r['bytes_ratio']:.1f}", "" if r["auc_delta"] is None else f"{r['auc_delta']:+.5f}")
        for r in rows
    ]
    measure.print_table(
        "rows between two hosts", ("contestant", "bytes, none over this", "AUC, mean, minus none"), table
    )
    print(f"written to {args.out}")
    return 0


def coder_of(name: str, dim: int) -> RowCoder | None:
    from gba_hvd.compression import Compression
    from gba_hvd.compression.row_codec import RowCoder

    settings: dict[str, Any] = dict(SPECS[name])
    if not settings:
        return None
    then = settings.pop("then", None)
    spec = Compression.by_name(**settings)
    return RowCoder(spec if then is None else spec.then(Compression.by_name(then)), [dim])


def plain_bytes(n: int, dim: int) -> int:
    """Of n rows without compression: keys, rows, keys again, gradients."""
    return n * 2 * (8 + 4 * dim)


class Way:
    """From one host to the other and back, for the rows of one dimension."""

    def __init__(self, coder: RowCoder | None) -> None:
        self._coder = coder
        self.n_bytes = self.n_plain = 0

    def pull(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """rows float32 [n, dim] as the other host sees them."""
        from gba_hvd.compression import row_codec as coding

        self.n_plain += plain_bytes(*rows.shape)
        if self._coder is None:
            self.n_bytes += plain_bytes(*rows.shape)
            return rows
        sent = coding.encode_rows(rows, self._coder.spec)
        self.n_bytes += len(coding.write_keys(keys)) + len(sent)
        return coding.decode_rows(sent, *rows.shape)

    def push(self, keys: np.ndarray, grads: np.ndarray) -> np.ndarray:
        """Gradients float32 [n, dim] as the owner sees them."""
        from gba_hvd.compression import row_codec as coding
        from gba_hvd.embedding.row_gradients import RowGrad

        if self._coder is None:
            return grads
        self._coder.begin()
        sent = self._coder.give_back(0, keys, RowGrad(keys, grads))
        self._coder.settle()
        self.n_bytes += len(sent)
        return coding.decode_row_gradients(sent, keys, grads.shape[1]).values


def bytes_ratio(name: str, folder: Path) -> float:
    """Bytes without over bytes with, of DLRM's batches."""
    from .harness import dlrm, peer_worker

    rng, way = np.random.default_rng(0), Way(coder_of(name, dlrm.DIM))
    ids = peer_worker.Clicks.load(folder, 0).ids.numpy()
    first = np.arange(dlrm.N_TABLES)[:, None] * dlrm.N_ROWS
    for step in ids:
        keys = np.unique(step + first)
        keys = keys[keys % HOSTS == 1]
        way.pull(keys, rng.normal(size=(len(keys), dlrm.DIM)).astype(np.float32))
        way.push(keys, rng.normal(size=(len(keys), dlrm.DIM)).astype(np.float32))
    return way.n_plain / way.n_bytes


def quality(name: str, folder: Path, n_samples: int, seed: int) -> float:
    """AUC after one epoch on two hosts. Dense gradients are exact."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    from .compression import workload
    from .harness import small_ctr

    torch.set_num_threads(1)
    torch.manual_seed(1 + seed)
    tower = small_ctr.Tower(workload.HIDDEN["small"])
    optimizer = torch.optim.Adagrad(tower.parameters(), lr=small_ctr.LEARNING_RATE, eps=small_ctr.EPS)
    first, shape = small_ctr.first_rows().numpy(), (sum(small_ctr.TABLES.values()), small_ctr.DIM)
    rows = (small_ctr.INIT_STD * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)
    squares = np.zeros_like(rows)
    samples, ways = small_ctr.Samples.train(folder, n_samples), [Way(coder_of(name, shape[1])) for _ in range(HOSTS)]
    order = np.random.default_rng([seed, 0]).permutation(n_samples)
    for at in range(0, n_samples - HOSTS * BATCH + 1, HOSTS * BATCH):
        touched: list[tuple[np.ndarray, np.ndarray]] = []
        optimizer.zero_grad()
        for host, way in enumerate(ways):
            ids, dense, label = samples.tensors(order[at + host * BATCH : at + (host + 1) * BATCH])
            keys, inverse = np.unique(ids.numpy() + first, return_inverse=True)
            far, seen = keys % HOSTS != host, rows[keys]
            seen[far] = way.pull(keys[far], seen[far])
            leaf = torch.from_numpy(seen).requires_grad_()
            picked = leaf[torch.from_numpy(inverse.reshape(ids.shape))].transpose(0, 1)
            (binary_cross_entropy_with_logits(tower(dense, picked), label) / HOSTS).backward()
            assert leaf.grad is not None
            grads = leaf.grad.numpy()
            grads[far] = way.push(keys[far], grads[far])
            touched.append((keys, grads))
        optimizer.step()
        _adagrad_(rows, squares, touched, small_ctr.LEARNING_RATE, small_ctr.EPS)
    table = torch.from_numpy(rows)
    start = torch.from_numpy(first)
    return small_ctr.auc(
        lambda ids, dense: tower(dense, table[ids + start].transpose(0, 1)), small_ctr.Samples.held_out(folder)
    )


def _adagrad_(
    rows: np.ndarray, squares: np.ndarray, touched: Sequence[tuple[np.ndarray, np.ndarray]], lr: float, eps: float
) -> None:
    """One step of `gba_hvd.Adagrad` with the sum of all hosts' gradients."""
    keys, at = np.unique(np.concatenate([keys for keys, _ in touched]), return_inverse=True)
    grad = np.zeros((len(keys), rows.shape[1]), np.float32)
    np.add.at(grad, at, np.concatenate([grads for _, grads in touched]))
    squares[keys] += grad * grad
    rows[keys] -= lr * grad / (np.sqrt(squares[keys]) + eps)
