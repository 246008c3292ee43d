"""The process of `bench follower` that serves: it follows the job, and answers requests.

Files in --folder: `updates`, a JSON line for each update; `answers`, a line for each request with the digest of its
answer; both of all processes that were started there. Once `end` has the name of the checkpoint that it has applied,
it answers once more and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch

import gba_hvd

from ..serving.ours import Served
from . import workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of the job's checkpoints")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True, help="of all tables")
    parser.add_argument("--look-s", type=float, required=True, help="between two looks for updates")
    parser.add_argument("--requests-per-s", type=float, required=True)
    parser.add_argument("--digests", action="store_true", help="of the state after each update")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape, parent, pause = workload.shape(args.rows), os.getppid(), threading.Event()
    model = cast(Served, gba_hvd.load_for_inference(args.model))
    request, applied = workload.request(shape), ""
    updates, answers = ((args.folder / name).open("a", buffering=1) for name in ("updates", "answers"))

    def updated(update: gba_hvd.Update) -> None:
        nonlocal applied
        at, applied = time.monotonic(), update.name
        state = workload.digest_of_model(model, shape) if args.digests else None
        updates.write(json.dumps({**asdict(update), "at": at, "state": state, "pid": os.getpid()}) + "\n")

    def answer() -> None:
        answers.write(workload.digest_of_answer(model(request)) + "\n")

    with gba_hvd.Follower(model, args.url, every_s=args.look_s, on_update=updated):
        while last_of(args.folder) != applied and os.getppid() == parent:
            answer()
            pause.wait(1 / args.requests_per_s)
        answer()


def last_of(folder: Path) -> str | None:
    """Which checkpoint is the job's last one; None: it is not known yet."""
    try:
        return (folder / "end").read_text()
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    main()
