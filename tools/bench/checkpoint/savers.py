"""Ways to save and restore one model, behind one interface: ours, torch's, torchsnapshot's, and plain writes.

Each is used as its documentation says, with its defaults, in one process without a process group. The peers' files are
synced after they were written, so that durable means the same for all; that is not counted as a stall.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from recovery.storage.local_store import sync

from .model import SavedModelClicks

_PLAIN_BYTES = 16 << 20  # of one write


class ContestantSaver(Protocol):
    """One contestant with its model."""

    def prepare(self, hot: list[np.ndarray]) -> None:
        """All that comes before the save that is measured: what is loaded lazily, the base of a partial save."""

    def changing(self) -> AbstractContextManager[object]:
        """The context in which a step changes rows."""

    def save(self) -> Callable[[], object]:
        """Returns when training may resume, with what to call to wait until all is durable."""

    def restore(self, how: str) -> None:
        """Fill the model. how: one of RESTORES[contestant]."""

    @property
    def pid(self) -> int | None:
        """Process id of a child that saves."""

    @property
    def kept_bytes(self) -> int:
        """Memory of this process that saves keep, made before the first one."""


def saver_of(
    contestant: str, model: SavedModelClicks, optimizer: torch.optim.Adagrad, folder: Path
) -> AbstractContextManager[ContestantSaver]:
    if contestant.startswith("ours"):
        return _ours(contestant.removeprefix("ours_"), model, optimizer, folder)
    return contextlib.nullcontext(PEERS[contestant](model, optimizer, folder))


# --- ours ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ours(
    policy: str, model: SavedModelClicks, optimizer: torch.optim.Adagrad, folder: Path
) -> Iterator[ContestantSaver]:
    from recovery import Checkpointer, Config, ProcessCheckpointer, of_optimizer

    apart = policy.startswith("process_")
    policy = policy.removeprefix("process_").removeprefix("alone_")
    rows = of_optimizer(model, optimizer, shared=apart)
    kind: Callable[..., Any] = ProcessCheckpointer if apart else Checkpointer
    with kind(folder, rows, Config.from_env(job="bench", policy=policy)) as checkpoints:
        yield OurSaver(policy, model, optimizer, rows, checkpoints)


class OurSaver:
    """Defaults, but for the policy and what RECOVERY_... variables say.

    Policies other than full are measured on top of a full checkpoint.
    """

    def __init__(self, policy: str, model: SavedModelClicks, optimizer: Any, rows: Any, checkpoints: Any) -> None:
        self._policy, self._model, self._optimizer = policy, model, optimizer
        self._rows, self._checkpoints = rows, checkpoints

    @property
    def pid(self) -> int | None:
        return getattr(self._checkpoints, "pid", None)

    @property
    def kept_bytes(self) -> int:
        return getattr(self._checkpoints, "kept_bytes", 0)  # of a process of its own, its peak has them

    def prepare(self, hot: list[np.ndarray]) -> None:
        if self._policy == "full":
            return
        self.save()()
        for name, ids in zip(self._rows.tables, hot, strict=True):
            self._rows.touched(name, ids)
        with self._rows.step():
            pass  # counted as changed; the values may stay

    def changing(self) -> AbstractContextManager[object]:
        step: AbstractContextManager[object] = self._rows.step()
        return step

    def save(self) -> Callable[[], object]:
        from recovery import dense_state

        step = self._rows.last_step
        handle = self._checkpoints.save(step, step, dense_state(self._model, self._optimizer, self._rows))
        wait: Callable[[], object] = handle.result
        return wait

    def restore(self, how: str) -> None:
        from recovery import load_dense_state
        from recovery.state_codec import decode

        report = self._checkpoints.restore()
        assert report is not None and not report.n_lost and not report.skipped
        load_dense_state(self._model, self._optimizer, self._rows, decode(report.state))


# --- peers -----------------------------------------------------------------------------------------------------------


class _Peer:
    pid = None
    kept_bytes = 0

    def __init__(self, model: SavedModelClicks, optimizer: torch.optim.Adagrad, folder: Path) -> None:
        self._model, self._optimizer, self._folder = model, optimizer, folder

    def prepare(self, hot: list[np.ndarray]) -> None:
        pass

    def changing(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def restore(self, how: str) -> None:
        raise NotImplementedError(f"{type(self).__name__} is not restored")

    @property
    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}


class PlainSaver(_Peer):
    """The tables' bytes as they lie in memory, one after the other, into one file."""

    def save(self) -> Callable[[], object]:
        tensors = [tensor for weight in self._model.weights for tensor in (weight, self._slots(weight))]
        with open(self._folder / "plain", "wb", buffering=0) as file:
            for tensor in tensors:
                data = tensor.detach().view(torch.uint8).numpy().reshape(-1).data
                for start in range(0, len(data), _PLAIN_BYTES):
                    part = data[start : start + _PLAIN_BYTES]
                    while part:
                        part = part[file.write(part) :]
            os.fsync(file.fileno())
        return lambda: sync_all(self._folder)

    def _slots(self, weight: torch.Tensor) -> torch.Tensor:
        slots: torch.Tensor = self._optimizer.state[weight]["sum"]
        return slots


class TorchSave(_Peer):
    def save(self) -> Callable[[], object]:
        torch.save(self._state, self._folder / "state.pt")
        return lambda: sync_all(self._folder)

    def restore(self, how: str) -> None:
        state = torch.load(self._folder / "state.pt", mmap=how == "torch_load_mmap")
        self._model.load_state_dict(state["model"])
        if how == "torch_load_mmap":  # else the slots would stay in the file, unread
            slots = state["optimizer"]["state"].values()
            state["optimizer"]["state"] = {i: {k: v.clone() for k, v in one.items()} for i, one in enumerate(slots)}
        self._optimizer.load_state_dict(state["optimizer"])


class Distributed(_Peer):
    def prepare(self, hot: list[np.ndarray]) -> None:
        save({"warm": torch.zeros(1)}, checkpoint_id=self._folder / "warm", no_dist=True)

    def save(self) -> Callable[[], object]:
        save(self._state, checkpoint_id=self._folder / "state", no_dist=True)
        return lambda: sync_all(self._folder)

    def restore(self, how: str) -> None:
        state = self._state
        load(state, checkpoint_id=self._folder / "state", no_dist=True)  # into the tensors where they are
        self._optimizer.load_state_dict(state["optimizer"])


class DistributedAsync(Distributed):
    _stager: DefaultStager | None = None

    def prepare(self, hot: list[np.ndarray]) -> None:
        self._wait(self._begin({"warm": torch.zeros(1)}, "warm"))

    def save(self) -> Callable[[], object]:
        in_flight = self._begin(self._state, "state")
        return lambda: self._wait(in_flight)

    def _begin(self, state: dict[str, Any], name: str) -> Any:
        return async_save(state, checkpoint_id=self._folder / name, async_stager=self._stager, no_dist=True)

    def _wait(self, in_flight: Any) -> None:
        in_flight.result()
        sync_all(self._folder)


class DistributedAsyncKept(DistributedAsync):
    """Copies into the memory of the save before, which therefore stays between saves."""

    def prepare(self, hot: list[np.ndarray]) -> None:
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._wait(self._begin(self._state, "before"))


class TorchSnapshot(_Peer):
    def prepare(self, hot: list[np.ndarray]) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(self._folder / "warm"), {"warm": StateDict(warm=torch.zeros(1))})

    def save(self) -> Callable[[], object]:
        from torchsnapshot import Snapshot

        Snapshot.take(str(self._folder / "state"), self._app_state)
        return lambda: sync_all(self._folder)

    def restore(self, how: str) -> None:
        from torchsnapshot import Snapshot

        Snapshot(str(self._folder / "state")).restore(self._app_state)

    @property
    def _app_state(self) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._optimizer}


class TorchSnapshotAsync(TorchSnapshot):
    def save(self) -> Callable[[], object]:
        from torchsnapshot import Snapshot

        pending = Snapshot.async_take(str(self._folder / "state"), self._app_state)

        def wait() -> None:
            pending.wait()
            sync_all(self._folder)

        return wait


PEERS: dict[str, Callable[..., ContestantSaver]] = {
    "plain": PlainSaver,
    "torch_save": TorchSave,
    "dcp": Distributed,
    "dcp_async": DistributedAsync,
    "dcp_async_kept": DistributedAsyncKept,
    "torchsnapshot": TorchSnapshot,
    "torchsnapshot_async": TorchSnapshotAsync,
}


def sync_all(folder: Path) -> None:
    """Every file, then every folder, innermost first."""
    for at, _, files in os.walk(folder, topdown=False):
        for name in (*files, ""):
            sync(Path(at) / name)
