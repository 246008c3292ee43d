"""One measurement of `bench checkpoint`, in a process of its own: a save during training, or a restore.

Also runs in torchsnapshot's environment.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..harness.process_memory import forget_peak, status_bytes
from .analysis import UNTRAINED, stall
from .model import SavedModelClicks, Training, hot_rows, made
from .savers import saver_of

WARM_UP_S, COLD_ROWS = 1.0, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant")
    parser.add_argument("--bytes", type=int, required=True, help="of tables and slots")
    parser.add_argument("--changed", type=float, required=True, help="share of rows")
    parser.add_argument("--trained", type=float, required=True, help="share of rows that training continues to change")
    parser.add_argument("--quiet-s", type=float, required=True, help="training that is timed before the save")
    parser.add_argument("--restore", help="how; else a save is measured")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint")
    parser.add_argument("--result", type=Path, required=True, metavar="FILE.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    row = restored(args) if args.restore else saved(args)
    args.result.write_text(json.dumps(row))


def saved(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a save, and keep what a restore has to bring back."""
    model, optimizer = made(args.bytes)
    hot = hot_rows(model, args.trained)
    with saver_of(args.contestant, model, optimizer, args.folder) as saver:
        training = Training(model, optimizer, hot, saver.changing)
        trains = args.contestant not in UNTRAINED
        if trains:
            training.steps(WARM_UP_S)
        level = status_bytes("VmRSS")
        saver.prepare(hot_rows(model, args.changed))
        quiet = training.steps(args.quiet_s) if trains else [0.0]
        gc.collect()
        before = size(args.folder)
        forget_peak()

        started, durable = time.perf_counter(), [0.0]
        wait = saver.save()
        blocked_s = time.perf_counter() - started

        def until_durable() -> None:
            wait()
            durable[0] = time.perf_counter() - started

        waiting = threading.Thread(target=until_durable, name="until-durable")
        waiting.start()
        during = []
        while trains and waiting.is_alive():
            during.append(training.step())
        waiting.join()
        if not durable[0]:
            raise SystemExit("the save failed; why is above")
        peak = status_bytes("VmHWM") + (of_its_own(saver.pid) if saver.pid is not None else 0)
        np.savez(expected(args), *(of_cold(model, optimizer, number, args.trained) for number in range(len(hot))))
    return {
        "table_bytes": table_bytes(model, optimizer),
        **stall(quiet, during, blocked_s),
        "durable_s": durable[0],
        "bytes": size(args.folder) - before,
        "peak_extra_bytes": peak - level + saver.kept_bytes,
    }


def restored(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a restore into a model that is there already, from files that are not in memory."""
    model, optimizer = made(args.bytes, trained=False)
    with saver_of(args.contestant, model, optimizer, args.folder) as saver:
        for path in args.folder.rglob("*"):
            if path.is_file():
                drop(path)
        forget_peak()
        level, started = status_bytes("VmRSS"), time.perf_counter()
        saver.restore(args.restore)
        seconds = time.perf_counter() - started
        peak = status_bytes("VmHWM")
        with np.load(expected(args)) as wanted:
            for number, name in enumerate(wanted):
                found = of_cold(model, optimizer, number, args.trained)
                assert found.tobytes() == wanted[name].tobytes(), f"table {number} is not what was saved"
    return {"how": args.restore, "restore_s": seconds, "restore_peak_extra_bytes": peak - level}


def expected(args: argparse.Namespace) -> Path:
    folder: Path = args.folder
    return folder.with_name(folder.name + ".expected.npz")


def of_cold(model: SavedModelClicks, optimizer: torch.optim.Adagrad, number: int, trained: float) -> np.ndarray:
    """Weights and slots of some rows of a table that training never changes: float32 [n, 2 * DIM]."""
    weight = model.weights[number]
    n = len(weight)
    cold = np.setdiff1d(np.linspace(0, n - 1, 3 * COLD_ROWS, dtype=np.int64), hot_rows(model, trained)[number])
    at = torch.from_numpy(cold[:: max(1, len(cold) // COLD_ROWS)])
    parts = weight.detach()[at], optimizer.state[weight]["sum"][at]
    return torch.cat(parts, dim=1).numpy()


def of_its_own(pid: int) -> int:
    """Peak memory of the process that saves, without the tables, which the other one has, and without code."""
    return max(0, status_bytes("VmHWM", pid) - status_bytes("RssShmem", pid) - status_bytes("RssFile", pid))


def table_bytes(model: SavedModelClicks, optimizer: torch.optim.Adagrad) -> int:
    return sum(weight.nbytes + optimizer.state[weight]["sum"].nbytes for weight in model.weights)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def drop(path: Path) -> None:
    """From the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


if __name__ == "__main__":
    main()
