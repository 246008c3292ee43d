"""One run of `bench serving`: a fresh process loads one model as one system does, then answers requests."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .models import DIM, Plain, Shape, dense_of, logits_of, packed, request, shape_of

_MOST_REQUESTS, _SAMPLES = 1024, 262_144  # different requests of a size, cycled; rows of 64 samples on fit in no cache
_REMOTE = 20  # requests of rows in a store: each once with an empty cache, then again and again
_UNTIMED, _LEAST = 16, 20  # requests before the timed ones; timed ones of a size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    parser.add_argument("--folder", type=Path, required=True, help="what `ours.write` wrote")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--samples", type=int, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = shape_of(args.model, args.rows)
    load, input_of = SYSTEMS[args.system]()
    start = time.perf_counter()
    answer = load(args.folder, shape)
    found: dict[str, Any] = {"load_s": time.perf_counter() - start, "sizes": {}}
    with torch.inference_mode():
        for n in args.samples:
            inputs = [input_of(shape, n, seed) for seed in range(min(_MOST_REQUESTS, _SAMPLES // n))]
            if args.system == "ours_remote":
                inputs = inputs[:_REMOTE]
                cold = once(lambda: load(args.folder, shape), inputs)
                found["cold"] = found.get("cold", {}) | {str(n): cold}
            found["sizes"][str(n)] = timed(answer, inputs, n, args.seconds)
            if args.system != "dense":
                found["logits"] = np.asarray(answer(inputs[0])).reshape(-1)[:8].tolist()
    args.result.write_text(json.dumps(found))


def timed(answer: Callable[[Any], Any], inputs: Sequence[Any], n: int, seconds: float) -> dict[str, float]:
    """Milliseconds of a request, after some that are not timed; and samples/s."""
    for one in inputs[-_UNTIMED:]:
        answer(one)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < _LEAST or time.perf_counter() < end:
        start = time.perf_counter()
        answer(inputs[len(taken) % len(inputs)])
        taken.append(time.perf_counter() - start)
    p50, p99 = np.percentile(taken, [50, 99]) * 1000
    return {"p50_ms": float(p50), "p99_ms": float(p99), "samples_per_s": n * len(taken) / sum(taken)}


def once(load: Callable[[], Callable[[Any], Any]], inputs: Sequence[Any]) -> dict[str, float]:
    """Milliseconds of a request, each to a model that has just been loaded."""
    taken: list[float] = []
    for one in inputs:
        answer = load()
        start = time.perf_counter()
        answer(one)
        taken.append(time.perf_counter() - start)
    p50, p99 = np.percentile(taken, [50, 99]) * 1000
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


# --- systems: (load a model, what it then answers; make a request) --------------------------------------------------

Loader = Callable[[Path, Shape], Callable[[Any], Any]]
System = tuple[Loader, Callable[[Shape, int, int], Any]]


def _ours(tables: str) -> System:
    import gba_hvd

    from . import ours
    from .slow_store import url_of

    def load(folder: Path, shape: Shape) -> Callable[[Any], Any]:
        url = url_of(folder / "ours") if tables == "remote" else folder / "ours"
        return gba_hvd.load_for_inference(url, tables=tables)

    return load, ours.batch


def _torch() -> System:
    def load(folder: Path, shape: Shape) -> Callable[[Any], Any]:
        model = Plain(shape)
        model.load_state_dict(torch.load(folder / "torch.pt"), assign=True)
        model.eval().requires_grad_(False)
        return lambda one: model(*one)

    return load, request


def _dense() -> System:
    def load(folder: Path, shape: Shape) -> Callable[[Any], Any]:
        dense, saved = dense_of(shape.name), torch.load(folder / "torch.pt", mmap=True)
        dense.load_state_dict({k.removeprefix("dense."): v for k, v in saved.items() if k.startswith("dense.")})
        dense.eval().requires_grad_(False)
        return lambda one: logits_of(dense, *one)

    rows: dict[tuple[int, ...], torch.Tensor] = {}  # by shape: the same ones in all requests, so in a cache

    def input_of(shape: Shape, n: int, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ids, features = request(shape, n, seed)
        sizes = {name: (*column.shape, DIM) for name, column in ids.items()}
        for size in set(sizes.values()) - rows.keys():
            rows[size] = torch.rand(size)
        return features, {name: rows[size] for name, size in sizes.items()}

    return load, input_of


def _torchrec() -> System:
    from . import torchrec

    def load(folder: Path, shape: Shape) -> Callable[[Any], Any]:
        model = torchrec.load(folder, shape)
        return lambda one: model(*one)

    return load, torchrec.input_of


def _mlflow() -> System:
    import mlflow.pyfunc
    import mlflow.pytorch  # (that its import is no part of the loading)

    def load(folder: Path, shape: Shape) -> Callable[[Any], Any]:
        return mlflow.pyfunc.load_model(str(folder / "mlflow")).predict  # type: ignore[no-any-return]

    def input_of(shape: Shape, n: int, seed: int) -> np.ndarray:
        ids, features = request(shape, n, seed)
        return packed(ids.values(), features)

    return load, input_of


SYSTEMS: dict[str, Callable[[], System]] = {
    "ours": lambda: _ours("memory"),
    "ours_mmap": lambda: _ours("mmap"),
    "ours_remote": lambda: _ours("remote"),
    "torch": _torch,
    "torchrec": _torchrec,
    "mlflow": _mlflow,
    "dense": _dense,
}

if __name__ == "__main__":
    main()
