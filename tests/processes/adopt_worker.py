"""Trains models of `nn.Embedding` modules in shared tables, one job after the other, each in each mode of the plan.

A model is a module, or an object in one, with `make_model`, `make_samples`, `loss_of` and `outputs` as the scripts of
`examples/adopt` have them, and their `TASKS` if it has several. Each worker writes what it has at the end: dense
parameters, and the rows of its host.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

PLAN: dict[str, Any] = json.loads(Path(os.environ["TEST_PLAN"]).read_text())
OUT = Path(PLAN["out"])
host = os.environ.get("HOROVOD_HOSTNAME", "alone") if PLAN.get("own_memory_per_name") else ""
os.environ["GBA_HVD_SHARD_DIR"] = str(Path(PLAN["shard_dir"]) / host)  # two names of one machine count as two hosts
Path(os.environ["GBA_HVD_SHARD_DIR"]).mkdir(parents=True, exist_ok=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(OUT / "compiled")
sys.path[:0] = PLAN["path"]

if PLAN.get("horovod", True):
    import horovod.torch as hvd

    hvd.init()

from adoptable import spread_weights  # noqa: E402

import gba_hvd  # noqa: E402


def load(name: str) -> Any:
    """`module`, or `module:object`."""
    module, _, of_module = name.partition(":")
    found = importlib.import_module(module)
    return getattr(found, of_module) if of_module else found


def spoil_padding_rows(model: torch.nn.Module) -> None:
    """Those of a host's first worker count: what others make of theirs changes nothing."""
    if not PLAN.get("horovod", True) or hvd.local_rank() == 0:
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] += 1.0


def train(name: str, mode: str) -> None:
    """One epoch in the order of the samples."""
    adopted = load(name)
    torch.manual_seed(PLAN["seed"])
    model, samples = adopted.make_model(), adopted.make_samples(PLAN["samples"], 1)
    if PLAN["spread_weights"]:
        spread_weights(model)
    spoil_padding_rows(model)
    tables = gba_hvd.convert(model, gba_hvd.Adagrad(lr=0.05, eps=1e-2), n_shards=3)
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1) if [*model.parameters()] else None,
        tables,
        global_batch=PLAN["global_batch"],
        micro_batch=PLAN["micro_batch"],
    )
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    if mode == "gba":
        state.register_callbacks([gba_hvd.GBACallback(mode="gba", lookahead=0, wait_s=180.0)])
    run = torch.compile(model, backend=PLAN["compile"], fullgraph=True) if PLAN.get("compile") else model
    modes = set()
    for batch in gba_hvd.batches(samples, state, shuffle=False, forward=lambda batch: adopted.outputs(run, batch)):
        optimizer.zero_grad()
        loss = adopted.loss_of(run, batch)
        loss.backward()
        optimizer.step(loss=loss)
        modes.add(state.engine.mode.name)
    assert modes <= {mode}, modes
    scores = gba_hvd.evaluate(
        model, samples, state, batch=50, forward=lambda batch: adopted.outputs(model, batch),
        tasks=getattr(adopted, "TASKS", {"click": gba_hvd.Task(label=lambda batch: batch[1])}), activation="none",
    )  # fmt: skip
    arrays = {f"dense.{name}": p.detach().numpy() for name, p in model.named_parameters()}
    for table in tables.layout.tables:
        ids, first_key = np.arange(table.n_rows), tables.layout.place_of_table[table.name][1]
        here = np.ones(len(ids), bool) if tables.local is None else tables.local[(first_key + ids) % 3]
        rows = np.full((table.n_rows, table.dim), np.nan, np.float32)
        rows[here] = tables.rows(table.name, ids[here])
        arrays[f"rows.{table.name}"] = rows
    arrays["auc"], arrays["step"] = np.array([found["auc"] for found in scores.values()]), np.array(state.step)
    np.savez(OUT / f"{name.replace(':', '.')}-{mode}-{state.world.rank}.npz", **arrays)
    state.close()


for model_name in PLAN["models"]:
    for mode_name in ("allreduce", "gba"):
        train(model_name, mode_name)
