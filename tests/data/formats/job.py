"""The job that `make.py` kills in the middle, and that a later version has to finish: one worker and its server.

    python job.py MODE

Where FORMATS_HOLD_AT names a step, the worker makes a file `holding` there, and stands still until it is killed. It
uses public names alone, so every version can run it. A job resumes from memory only where it saves to the same URL, so
that is the same everywhere: whoever runs this script makes PLACE a link to a folder of its own meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd
from recovery.callback import CheckpointCallback

N_SAMPLES, N_EPOCHS, PATIENCE_S = 960, 2, 120.0
PLACE = Path("/tmp/gba-hvd-formats")
_HOLD_AT = int(os.environ.get("FORMATS_HOLD_AT", "0"))


class Clicks:
    """Samples from a seed, in columns; a batch of them on request."""

    def __init__(self) -> None:
        generator = np.random.default_rng(11)
        self._users = generator.integers(0, 60, N_SAMPLES)
        self._items = generator.integers(0, 20, N_SAMPLES)
        taste = generator.normal(size=60)[self._users] + generator.normal(size=20)[self._items]
        self._labels = (taste > 0).astype(np.float32)

    def __len__(self) -> int:
        return N_SAMPLES

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        ids = {"user": torch.from_numpy(self._users[rows]), "item": torch.from_numpy(self._items[rows])}
        return gba_hvd.Batch(ids, torch.zeros(len(rows), 0), torch.from_numpy(self._labels[rows]))


class Clicked(torch.nn.Module):
    def __init__(self, tables: gba_hvd.EmbeddingTables) -> None:
        super().__init__()
        self.tables = tables
        self.head = torch.nn.Linear(8, 1)

    def forward(self, batch: gba_hvd.Batch) -> torch.Tensor:
        rows = self.tables(batch.ids)
        logits: torch.Tensor = self.head(torch.cat([rows["user"], rows["item"]], dim=1)).squeeze(1)
        return logits


class Events(gba_hvd.Callback):
    """Writes down what the job reports; a callback with a state of its own."""

    def __init__(self) -> None:
        self.n_steps, self.events = 0, list[dict[str, Any]]()

    def on_step(self, record: Any) -> None:
        self.n_steps += 1

    def on_event(self, event: Any) -> None:
        self.events.append({"kind": event.kind, "step": event.step, **event.data})

    def state_dict(self) -> dict[str, Any]:
        return {"n_steps": self.n_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_steps = state["n_steps"]


def main(mode: str) -> None:
    torch.manual_seed(1)
    tables = gba_hvd.EmbeddingTables({"user": (60, 4), "item": (20, 4)}, optimizer=gba_hvd.RowAdagrad(lr=0.05), seed=2)
    model = Clicked(tables)
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), tables, global_batch=64, micro_batch=16,
        named_parameters=model.named_parameters(),
    )  # fmt: skip
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0, losses=[])
    events = Events()
    state.register_callbacks([
        events,
        gba_hvd.GBACallback(mode=mode, wait_s=PATIENCE_S),
        CheckpointCallback(str(PLACE / "checkpoints"), every_steps=4, takeover=True, retain_state_share=1.0),
    ])  # fmt: skip
    train(state, model, optimizer, Clicks())
    answer = {"step": state.step, "losses": len(state.losses), "n_steps": events.n_steps, "events": events.events}
    answer |= {"samples": vars(state.samples), "users": tables.rows("user", np.arange(60)).tolist()}
    Path("result.json").write_text(json.dumps(answer))


@gba_hvd.elastic.run
def train(state: Any, model: Any, optimizer: Any, clicks: Clicks) -> None:
    for state.epoch in range(state.epoch, N_EPOCHS):
        for batch in gba_hvd.batches(clicks, state, seed=3):
            while _HOLD_AT and (state.step >= _HOLD_AT or not Path("server-is-up").exists()):
                if state.step >= _HOLD_AT:
                    Path("holding").touch()
                time.sleep(0.1)  # in the end until it is killed
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(model(batch), batch.label)
            loss.backward()
            optimizer.step(loss=loss)
            time.sleep(0.05)
        state.losses.append(float(loss.detach()))


if __name__ == "__main__":
    main(sys.argv[1])
