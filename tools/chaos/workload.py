"""The training script of a chaos job: a linear click model on two small tables, through the public interface.

`GBA_HVD_CHAOS` names the plan's file. Each process appends what it saw to `OUT/<host>-<pid>.jsonl`; the chief writes
`result.json` and `result.npz` at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

PLAN: dict[str, Any] = json.loads(Path(os.environ["GBA_HVD_CHAOS"]).read_text())
OUT = Path(PLAN["out"])
if PLAN["apart"]:
    os.environ["GBA_HVD_SHARD_DIR"] = f"{PLAN['shard_dir']}/{os.environ.get('HOROVOD_HOSTNAME', 'alone')}"

import horovod.torch as hvd  # noqa: E402

hvd.init()

import gba_hvd  # noqa: E402
import recovery  # noqa: E402
from gba_hvd.compression import Spec  # noqa: E402
from gba_hvd.faults import Fault, _continue_later  # noqa: E402
from gba_hvd.ps import launch  # noqa: E402
from gba_hvd.switching import enter_ps, leave_ps  # noqa: E402

from .data import ChaosClicks, files_of, raw_ids, shards_of  # noqa: E402

_notes = os.open(OUT / f"{socket.gethostname()}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(**facts: Any) -> None:
    os.write(_notes, json.dumps({"time": time.time(), **facts}, default=str).encode() + b"\n")


class Notes(gba_hvd.Callback):
    """Steps, events and the end, as this worker sees them."""

    def on_job(self, job: gba_hvd.Job) -> None:
        note(job=job.job_id, rank=job.rank, size=job.size, folder=str(state.engine.folder))

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        note(step=record.step, mode=record.mode, workers=record.workers)

    def on_event(self, event: gba_hvd.Event) -> None:
        note(event=event.kind, at_step=event.step, level=event.level, message=event.message)

    def on_end(self, status: str, error: BaseException | None) -> None:
        note(end=status, error=None if error is None else f"{type(error).__name__}: {error}")


def stop_the_server_in(module: ModuleType, name: str) -> None:
    """Wrap a change of mode: the first one from the planned step on finds its server stopped in the middle."""
    change: Callable[..., Any] = getattr(module, name)
    (fault,) = [fault for fault in PLAN["outside"] if fault["kind"] == "stop_server_in_switch"]

    def stop(ended: threading.Event) -> None:
        time.sleep(fault["after_s"])
        while (pid := launch.pid_of(state.engine.folder, 0)) is None and not ended.wait(0.01):
            pass  # it is being started
        if pid is None or ended.is_set():
            return
        with contextlib.suppress(FileExistsError):
            os.close(os.open(OUT / "fired-stop_server_in_switch", os.O_CREAT | os.O_EXCL))
            _continue_later(pid, fault["seconds"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            note(fired="stop_server_in_switch", at_step=state.step, pid=pid)

    def changing(engine: Any, *args: Any) -> Any:
        ended = threading.Event()
        if engine.progress.step >= fault["at_step"] and not (OUT / "fired-stop_server_in_switch").exists():
            threading.Thread(target=stop, args=(ended,), daemon=True).start()
        try:
            return change(engine, *args)
        finally:
            ended.set()

    setattr(module, name, changing)


def go_through_the_proxy() -> None:
    """Others reach this host's server at the proxy's ports."""
    ports = PLAN["proxy"].get(os.environ.get("HOROVOD_HOSTNAME", ""))
    endpoint = launch.endpoint

    def proxied(*args: Any) -> Any:
        here = endpoint(*args)
        return here if ports is None else type(here)(here.host, here.index, here.address, *ports)

    launch.endpoint = proxied  # type: ignore[assignment]


torch.manual_seed(3)
clicks = ChaosClicks(PLAN["samples"], PLAN["features"], raw=PLAN["hashed"])
dataset: Any = clicks
how: dict[str, Any] = {"seed": PLAN["seed"], "num_workers": PLAN["readers"]}
if PLAN["data"] == "parquet":
    dataset = files_of(clicks, OUT.parent / "clicks")
elif PLAN["data"] == "shards":
    dataset, how["collate_fn"] = shards_of(clicks), lambda rows: clicks.take(np.array(rows))
ROW_LRS = {"SGD": 4.0 if PLAN["row_average"] == "global" else 1.0, "Adam": 0.02}
# Room for nearly all of the 300: some are turned away or evicted.
users = gba_hvd.Table(dim=8, keys="hash64", capacity=288, evict="lfu") if PLAN["hashed"] else gba_hvd.Table(300, 8)
tables = gba_hvd.EmbeddingTables(
    {"user": users, "item": (40, 6)},
    optimizer=getattr(gba_hvd, PLAN["row_optimizer"])(lr=ROW_LRS.get(PLAN["row_optimizer"], 0.1)),
    features={"user": "user", "item": "item", "seen": gba_hvd.Feature("item", "mean")} if PLAN["features"] else None,
    seed=5,
    n_shards=PLAN["n_shards"],
)


class ChaosModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables, self.linear = tables, torch.nn.Linear(8 + 6 + 6 * PLAN["features"] + 2, 1)

    def forward(self, batch: gba_hvd.Batch) -> torch.Tensor:
        out = self.tables(batch.ids)
        parts = [*(out[name] for name in tables.features), batch.dense]
        logits: torch.Tensor = self.linear(torch.cat(parts, dim=1)).squeeze(1)
        return logits


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}


def compressor(name: str) -> Spec:
    sends_dense = {PLAN["mode"], *PLAN["switch_at"].values()} != {"shadow"}  # else it is refused
    if not PLAN["compressed"] or (name == "dct" and not sends_dense):
        return gba_hvd.Compression.none
    return gba_hvd.Compression.by_name(name, keep=0.3).then(gba_hvd.Compression.int8).always()


model = ChaosModel()
optimizer: Any = gba_hvd.DistributedOptimizer(
    OPTIMIZERS[PLAN["optimizer"]](model.parameters()), tables, global_batch=PLAN["global_batch"],
    micro_batch=PLAN["micro_batch"], named_parameters=model.named_parameters(), compression=compressor("dct"),
    row_compression=compressor("ternary_ef"), row_average=PLAN["row_average"],
)  # fmt: skip
state: Any = gba_hvd.elastic.TorchState(model, optimizer, epoch=0, aucs=[])
switch_at = {int(step): mode for step, mode in PLAN["switch_at"].items()}
of_replicas = {"sync": PLAN["sync"]} if "shadow" in {PLAN["mode"], *switch_at.values()} else {}
callbacks: list[Any] = [
    Notes(),
    gba_hvd.GBACallback(mode=PLAN["mode"], switch_at=switch_at, rule=PLAN["rule"], wait_s=180, **of_replicas),
    gba_hvd.FaultSchedule(map(Fault.of, PLAN["inside"]), OUT / "inside"),
]
if PLAN["checkpoint_url"]:
    callbacks.append(recovery.CheckpointCallback(PLAN["checkpoint_url"], every_s=PLAN["checkpoint_s"]))
if PLAN["tracking"]:
    flush_s = 20.0 if PLAN["tracking"] == "good" else 2.0
    tracked = {"tracking_uri": PLAN["tracking_uri"], "spool_dir": OUT / "spool"}
    callbacks.append(gba_hvd.MLflowCallback("chaos", **tracked, system_metrics=False, flush_timeout_s=flush_s))
state.register_callbacks(callbacks)
if any(fault["kind"] == "stop_server_in_switch" for fault in PLAN["outside"]):
    stop_the_server_in(enter_ps, "enter")
    stop_the_server_in(leave_ps, "leave")
if PLAN["proxy"]:
    go_through_the_proxy()


@gba_hvd.elastic.run
def train(state: Any) -> None:
    for state.epoch in range(state.epoch, PLAN["epochs"]):
        for batch in gba_hvd.batches(dataset, state, **how):
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
            loss.backward()
            optimizer.step(loss=loss)
        scores = gba_hvd.evaluate(model, clicks, state, batch=64)
        state.aucs = [*state.aucs, scores.auc]
        note(evaluated=state.epoch, auc=scores.auc)
    if state.world.rank == 0:
        write_result()


def write_result() -> None:
    """What the job ended with; rows only where one host has them all."""
    dense = np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
    arrays = {"dense": dense}
    if tables.local is None:
        ids = {"user": raw_ids(np.arange(300)) if PLAN["hashed"] else np.arange(300), "item": np.arange(40)}
        arrays |= {name: tables.rows(name, some) for name, some in ids.items()}
    with open(OUT / "result.npz", "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    facts = {"step": state.step, "aucs": state.aucs, **vars(state.samples), "reissued": state.engine.progress.reissued}
    facts["doubtful_ids"] = doubtful_ids() if PLAN["hashed"] else []
    facts["finite"] = all(bool(np.isfinite(values).all()) for values in arrays.values())
    (OUT / "result.json").write_text(json.dumps(facts))


def doubtful_ids() -> list[int]:
    """Ids of the vocabulary of this host that have two rows, or that no sample has."""
    found = tables.vocabulary("user")
    ids, n = np.unique(found, return_counts=True)
    return [*ids[n > 1].tolist(), *np.setdiff1d(ids, raw_ids(np.arange(300))).tolist()]


if __name__ == "__main__":
    train(state)
