"""A process that serves a model of `workload` while the job trains, for the process tests.

Arguments: the URL of the checkpoints, a folder, and a point to be killed at, or "". It exports a model from the first
checkpoint, unless there is one, follows the job, predicts all the time, and writes a line to FOLDER/updates.jsonl for
each update. When FOLDER/end is there, and the newest checkpoint is applied, it writes FOLDER/predictions.npy.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from workload import Clicks, served_model

import gba_hvd
from gba_hvd.serving import follower as followed
from gba_hvd.serving.followed_rows import Change
from recovery.errors import BadInput, Damaged, NotFound

JOB, OUT, POINT = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
N_BEFORE = 1  # updates of this process before it is killed


class Serving:
    def __init__(self, raw: bool) -> None:
        self.n_updates = 0
        everything = Clicks(300, raw=raw)
        self.batch = everything.take(np.arange(300))

    def updated(self, update: gba_hvd.Update) -> None:
        self.n_updates += 1
        with open(OUT / "updates.jsonl", "a") as file:
            file.write(json.dumps({**asdict(update), "pid": os.getpid()}) + "\n")

    def die(self, point: str) -> None:
        if point == POINT and self.n_updates >= N_BEFORE:
            (OUT / "killed").write_text(point)
            os.kill(os.getpid(), signal.SIGKILL)


def export(arguments: dict[str, Any]) -> None:
    """Of the first checkpoint, when there is one. The job may delete what is read."""
    while not list((OUT / "model").glob("versions/*")):
        try:
            gba_hvd.export_model(
                JOB, OUT / "model", build=f"{served_model.__module__}:{served_model.__name__}", arguments=arguments
            )
        except (BadInput, NotFound, Damaged):
            time.sleep(0.1)


def main() -> None:
    arguments = json.loads((OUT / "arguments.json").read_text())
    export(arguments)
    serving = Serving(raw="hashed" in arguments)
    apply, stage = Change.apply, followed.staged

    def dies_while_applying(self: Change) -> None:
        apply(self)
        serving.die("apply")

    def dies_while_staging(schema: Any, rows: Any, saved: Any) -> Any:
        def until_it_dies() -> Any:
            for section in saved:
                yield section
                serving.die("stage")

        return stage(schema, rows, until_it_dies())

    Change.apply, followed.staged = dies_while_applying, dies_while_staging  # type: ignore[method-assign]
    model = gba_hvd.load_for_inference(OUT / "model")
    stop = threading.Event()

    def predict() -> None:
        while not stop.wait(0.005):
            model(serving.batch)

    follower = gba_hvd.Follower(model, JOB, on_update=serving.updated)
    requests = threading.Thread(target=predict, daemon=True)
    requests.start()
    while True:
        is_over = (OUT / "end").exists()
        if follower.poll() is None and is_over:
            break
        serving.die("poll")
        time.sleep(0.05)
    stop.set()
    requests.join()
    predictions: torch.Tensor = model(serving.batch)
    np.save(OUT / "predictions.npy", predictions.numpy())
    print(f"step {follower.step}, flaws: {dict(follower.flaws)}", flush=True)


main()
