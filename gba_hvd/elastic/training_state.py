"""The training state: what a late joiner receives, and what a checkpoint has beside the rows.

Model, optimizer, position, the callbacks' state and the user's own values; it travels as JSON and raw tensors
(`recovery.state_codec`). When it is taken, and who gets it, is decided elsewhere.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import nn

from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.checkpoint.resumed_checkpoint import digest_of
from gba_hvd.checkpoint.state_check import refuse_foreign_state
from gba_hvd.comm.collectives import World
from gba_hvd.convert import padding_rows, set_padding_rows
from gba_hvd.elastic import rng_state
from gba_hvd.elastic.learning_rates import Rates, ReplacedRates, of_wire, rates_of, to_wire
from gba_hvd.elastic.resume_fit import refuse_other_optimizer, refuse_other_tensors
from gba_hvd.embedding.module_placement import FollowsModule
from gba_hvd.ps.messages import JobPosition
from gba_hvd.switching.callback import GBACallback
from gba_hvd.torch_optimizers import user_class
from gba_hvd.training.engine import Engine
from recovery import state_codec


@dataclass
class Restored:
    """What a job took over of one that is no more, beside rows. On the rank that read it.

    values: of the script, by name. not_saved: of the script, which the saved state does not have; not_used: the other
    way round. random: whether the streams of random numbers continue, once that is known
    """

    rates: ReplacedRates
    values: Mapping[str, Any]
    not_saved: tuple[str, ...]
    not_used: tuple[str, ...]
    random: bool = False


class TrainingState:
    """One worker's. Belongs to the training thread; the thread that meets late joiners reads `snapshot`.

    owner, names: the object whose attributes of these names are the user's values.
    snapshot: encoded, as of where the asynchronous mode began to hand out the epoch's batches; empty where no worker
    would ask for it. values_in_snapshot: digest of the user's values there. residuals_missing: in the checkpoint that
    this job resumes from: of so many workers. restored: from it, or from memory; None: nothing was, or by another rank.
    """

    def __init__(self, engine: Engine, model: nn.Module, owner: object, names: list[str]) -> None:
        self._engine, self._model, self._owner, self.names = engine, model, owner, names
        self.snapshot = self.values_in_snapshot = b""
        self.residuals_missing = 0
        self.restored: Restored | None = None
        self._script_rates: Rates = {}
        self._pauses_in_snapshot: dict[str, Any] | None = None  # None: another worker took it
        self._random_left: dict[str, Any] | None = None  # by the job that this one resumes from, until all have it

    def note_script_rates(self) -> None:
        """Learning rates as the script has them: before the world forms, and the saved ones come."""
        self._script_rates = rates_of(self._engine.model.optimizer)

    # --- given -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As another worker takes it over."""
        engine = self._engine
        return {
            "model": dict(self._model.state_dict()),
            "padding_rows": padding_rows(self._model),
            "parameter_names": self._parameter_names(),
            "row_parameters": self._row_parameters(),
            "optimizer": engine.model.optimizer.state_dict(),
            "script_rates": to_wire(self._script_rates),
            "optimizer_class": user_class(engine.model.optimizer).__qualname__,
            "values": self._values(),
            "position": engine.progress.state_dict(),
            "callbacks": [(type(callback).__name__, callback.state_dict()) for callback in engine.callbacks],
            "pauses": engine.reports.pauses.state_dict(),
        }

    def to_save(self) -> dict[str, Any]:
        """As a checkpoint has it: without what `resume` takes from the script."""
        state = self.state_dict()
        return {**state, "callbacks": _without_modes(state["callbacks"])}

    def _values(self) -> dict[str, Any]:
        found = {name: getattr(self._owner, name) for name in self.names}
        return {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in found.items()}

    def digest_of_values(self) -> bytes:
        """Of the user's values, as they are now."""
        return digest_of(state_codec.encode(self._values()))

    def _parameter_names(self) -> dict[str, str]:
        """What servers call each dense parameter -> its name in the model, where these differ."""
        trained = self._engine.model
        own = {id(parameter): name for name, parameter in self._model.named_parameters()}
        pairs = zip(trained.names, trained.dense.parameters, strict=True)
        return {name: own[id(one)] for name, one in pairs if own.get(id(one), name) != name}

    def _row_parameters(self) -> dict[str, str]:
        """Weights that `convert` moved into tables, by their names in the `state_dict` of the plain model -> table."""
        modules = self._model.named_modules(remove_duplicate=False)
        found = {path: one.weight_table for path, one in modules if isinstance(one, FollowsModule) and one.weight_table}
        return {f"{path}.weight" if path else "weight": table for path, table in found.items()}

    def encoded(self) -> bytes:
        """What late joiners receive; a checkpoint has no use for the claim it was saved under."""
        checkpoints = checkpoints_of(self._engine)
        return state_codec.encode({
            **self.state_dict(),
            "checkpoints": None if checkpoints is None else checkpoints.state(),
            "random": [rng_state.capture()],
            "random_left": self._random_left,
            "rollback": self._engine.rollback.shared(),
            "n_reported": self._engine.progress.n_reported,
        })  # fmt: skip

    def take_snapshot(self) -> None:
        """Store what a late joiner starts from, where one may join, or a checkpoint be made.

        A late joiner runs the user's loop from here: it finds what remains of the epoch, then the evaluations after it,
        finished ones with their results.
        """
        if os.environ.get("HOROVOD_ELASTIC") == "1" or checkpoints_of(self._engine) is not None:
            self.snapshot, self._pauses_in_snapshot = self.encoded(), self._engine.reports.pauses.state_dict()
            self.values_in_snapshot = self.digest_of_values()

    def snapshot_to_save(self) -> bytes:
        """`snapshot`, with the pauses, and the buffers of this worker's model, as they are now.

        Servers have parameters only. The user's values stay as of the start of the epoch: what resumes trains the rest
        of it, and then comes to what changed them.
        """
        buffers, pauses = dict(self._model.named_buffers()), self._engine.reports.pauses.state_dict()
        if not buffers and pauses == self._pauses_in_snapshot:
            return self.snapshot
        state = {**state_codec.decode(self.snapshot), "pauses": pauses}
        state["model"] |= {name: value for name, value in self._model.state_dict().items() if name in buffers}
        state["buffers_step"] = self._engine.progress.step
        return state_codec.encode(state)

    # --- taken over --------------------------------------------------------------------------------------------------

    def share(self, source: int) -> None:
        """All ranks take over that of rank `source`. A collective."""
        world, checkpoints, data = self._engine.world, checkpoints_of(self._engine), None
        left = self._random_left
        if world.rank == source:
            data = self.encoded()
        if world.size > 1:
            received = world.broadcast("state", data, source)
            ahead_s, launched_unix_s = self.meet_clocks(world, source)
            if world.rank != source:
                state = state_codec.decode(received, f"what rank {source} sent")
                self.load_state_dict(state)
                left = state["random_left"]
                self._engine.reports.pauses.meet(state["pauses"], ahead_s)
                self._engine.progress.launched_unix_s = launched_unix_s
                self._engine.rollback.load(state["rollback"])
                if checkpoints is not None:
                    checkpoints.load_state(state["checkpoints"])
        self._random_left, self._engine.progress.n_reported = None, 0
        if left is not None:
            step = self._engine.progress.step
            continues = rng_state.restore(left["states"], step, world, same_step=left["same_step"])
            if self.restored is not None:
                self.restored.random = continues

    def meet_clocks(self, world: World, source: int) -> tuple[float, float | None]:
        """What this host's clock is ahead of that of rank `source`, and when the launch began, by this host's clock.

        A collective, right after another one.
        """
        mine = [time.time(), self._engine.progress.launched_unix_s] if world.rank == source else None
        sent = world.broadcast("clock", None if mine is None else json.dumps(mine).encode(), source)
        theirs_unix_s, launched_unix_s = json.loads(sent)
        is_here = world.rank == source or source in self._engine.host.neighbours
        ahead_s = 0.0 if is_here else time.time() - theirs_unix_s
        return ahead_s, None if launched_unix_s is None else launched_unix_s + ahead_s

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        engine = self._engine
        engine.model.parameter_watch.forget()
        self._model.load_state_dict(state["model"])
        if "padding_rows" in state:  # (a checkpoint of an earlier version has none)
            set_padding_rows(self._model, state["padding_rows"])
        engine.model.optimizer.load_state_dict(state["optimizer"])
        engine.model.put_row_settings()
        for name, value in state["values"].items():
            if name not in self.names:
                continue  # of a checkpoint; this script has it no more
            if hasattr(getattr(self._owner, name), "load_state_dict"):
                getattr(self._owner, name).load_state_dict(value)
            else:
                setattr(self._owner, name, value)
        engine.progress.load_state_dict(state["position"])
        saved = list(state["callbacks"])
        for callback in engine.callbacks:  # by kind: a job that resumes from a checkpoint may have other callbacks
            mine = next((entry for entry in saved if entry[0] == type(callback).__name__), None)
            if mine is not None:
                saved.remove(mine)
                callback.load_state_dict(mine[1])

    def resume(self, state: Mapping[str, Any], where: str = "the checkpoint") -> None:
        """Take over that of a checkpoint. One of an asynchronous mode has three: see
        `ps.partition.checkpoint_state`. where: it was read from.

        Raises BadInput where it is of another dense model or optimizer, Damaged where it is no training state.
        """
        refuse_foreign_state(where, state)
        engine, first = self._engine, state.get("snapshot", state)
        refuse_other_optimizer(where, first, engine.model.optimizer)
        script = rates_of(engine.model.optimizer)
        before = None if "script_rates" not in first else of_wire(first["script_rates"])
        self._script_rates = before or script  # those that the saved ones come from: later launches compare, too
        try:
            self.load_state_dict({**first, "callbacks": _without_modes(first["callbacks"])})
        except RuntimeError:  # (a model may load what has other names, by hooks of its own)
            refuse_other_tensors(where, first, self._model)
            raise
        saved = first["values"]
        self.restored = Restored(
            ReplacedRates(script, rates_of(engine.model.optimizer), before),
            {name: getattr(self._owner, name) for name in self.names if name in saved},
            tuple(name for name in self.names if name not in saved),
            tuple(name for name in saved if name not in self.names),
        )
        engine.reports.pauses.resume(first.get("pauses"))
        if "random" in first:
            self._random_left = {"states": first["random"], "same_step": first is state}
        if engine.model.compression is not None:
            self.residuals_missing = engine.model.compression.load_state(state)
        if "snapshot" not in state:
            return
        engine.model.load_dense(state["dense"])
        engine.progress.load_wire(msgspec.convert(state["position"], JobPosition))

    def take_replaced_rates(self) -> ReplacedRates | None:
        """Once, on the rank that resumed: what the script's learning rates were replaced by."""
        restored, self.restored = self.restored, None
        return None if restored is None else restored.rates


def _without_modes(callbacks: Sequence[Any]) -> list[Any]:
    """The script says which mode it wants, not the job that was lost."""
    return [entry for entry in callbacks if entry[0] != GBACallback.__name__]
