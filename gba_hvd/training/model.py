"""What one worker trains: the optimizer, the tables, the dense gradients, and what compresses them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gba_hvd.compression import Compression, Spec
from gba_hvd.compression.dense_exchange import DenseExchange
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.embedding.on_device.host_view import NumberOnItsWay
from gba_hvd.embedding.on_device.row_gradients import DeviceRowGrad, RowGrads
from gba_hvd.embedding.row_gradients import ROW_AVERAGES, RowGrad
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.epoch import EpochPlan, micro_batches_together
from gba_hvd.errors import BadInput, refuse_unknown
from gba_hvd.gradients.clipping import Clip
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.gradients.loss_scale import LossScale
from gba_hvd.ps.worker.session import DenseState
from gba_hvd.torch_optimizers import put_state
from gba_hvd.training.gradient_watch import GradientWatch
from gba_hvd.training.parameter_watch import ParameterWatch
from gba_hvd.training.settings_watch import changes, own_settings, settings_of

# By tables, the optimizer that was made for them last.
_NEWEST: weakref.WeakKeyDictionary[EmbeddingTables, weakref.ref[torch.optim.Optimizer]] = weakref.WeakKeyDictionary()


class TrainedModel:
    """names: of the dense parameters. step_dense: the user's optimizer on them, set by `DistributedOptimizer`.

    compression, row_coder: None where nothing is compressed. together: micro-batches of a batch in allreduce mode.
    untrained: parameters of the user's module that are in no group of the optimizer
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tables: EmbeddingTables,
        names: Mapping[int, str],
        global_batch: int,
        micro_batch: int,
        row_average: str = "global",
        compression: Spec = Compression.none,
        row_compression: Spec = Compression.none,
        clip: Clip = Clip(),  # noqa: B008  # a value
        loss_scale: LossScale | None = None,
        sync_micro_batch: int | None = None,
    ) -> None:
        EpochPlan(1, global_batch, micro_batch)  # refuses a bad pair now
        refuse_unknown("row_average", row_average, tuple(ROW_AVERAGES))
        self.sync_micro_batch = sync_micro_batch
        self.together = micro_batches_together(sync_micro_batch, global_batch, micro_batch)
        tables.notes_samples = self.together > 1 and row_average != "global"
        if tables.notes_samples and row_compression.pools:
            raise BadInput(
                "sync_micro_batch with row_compression=dct_mp and rows averaged over contributors: bags that other "
                "hosts pool do not say which micro-batch a row is of. Leave sync_micro_batch out, or use "
                "row_average='global'"
            )
        self.optimizer, self.tables = optimizer, tables
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.row_average, self.clip, self.loss_scale = row_average, clip, loss_scale
        self._given_names, self._compression = names, compression
        self._gradient_watch: GradientWatch | None = None
        self.take_parameters()
        _NEWEST[tables] = weakref.ref(optimizer)
        tables.is_trained = True
        self.row_compression = row_compression
        dims = [group.dim for group in tables.layout.groups]
        tables.pools_bags = row_compression.pools
        self.row_coder = None if row_compression.is_none else RowCoder(row_compression, dims)
        self.step_dense: Callable[[], None] = lambda: None
        self.untrained: list[str] = []

    def take_parameters(self) -> None:
        """Train those that the optimizer's groups have now and that want a gradient. Before the world forms.

        Raises BadInput for a group that `convert` has left without parameters, unless there are none in any group.
        """
        self._refuse_empty_groups()
        parameters = [p for p in self.grouped if p.requires_grad]
        given, compression = self._given_names, self._compression
        self.dense = DenseGradients(parameters, 0)
        self.names = [given.get(id(p), f"parameter {i} {tuple(p.shape)}") for i, p in enumerate(parameters)]
        self.compression = None if compression.is_none else DenseExchange(compression, self.names, self.dense)
        self.parameter_watch = ParameterWatch(self.dense.parameters, self.names)
        if self._gradient_watch is not None:
            self._gradient_watch.stop()
        self._gradient_watch = GradientWatch(self.dense)

    @property
    def gradient_watch(self) -> GradientWatch:
        assert self._gradient_watch is not None
        return self._gradient_watch

    def _refuse_empty_groups(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            if self.tables.looks_up_inside and self.grouped and not group["params"]:
                raise BadInput(
                    f"parameter group {number} of the optimizer (lr {float(group['lr']):g}) is empty, so nothing would "
                    "use its settings. Converted modules have no parameters: their rows are trained by the row "
                    "optimizer. Leave the group out, and give a table its learning rate and weight decay in "
                    "gba_hvd.convert(..., optimizers={TABLE: gba_hvd.Adam(lr=..., weight_decay=...)}). To train other "
                    "parameters, too, give DistributedOptimizer an optimizer of theirs, not None"
                )

    @property
    def grouped(self) -> list[Tensor]:
        """Dense parameters that the optimizer's groups have, whether they want a gradient or not."""
        groups = self.optimizer.param_groups
        return [p for group in groups if group.get("gba_hvd") != "tables" for p in group["params"]]

    def refuse_if_replaced(self) -> None:
        """Raises BadInput where another optimizer was made for the tables after this one, and both are there."""
        newest = _NEWEST[self.tables]()
        if newest is not None and newest is not self.optimizer:
            raise BadInput(
                "two optimizers of gba_hvd.DistributedOptimizer are there for the same EmbeddingTables, and this is "
                f"the older one; the newer one, a {type(newest).__name__}, would never step. One optimizer trains a "
                "model and its tables: give it all dense parameters, in parameter groups where they differ. Where the "
                "newer one is to be used (a cell of a notebook that ran again), make the TorchState again with that"
            )

    @property
    def row_lr(self) -> float:
        return float(self._tables_group["lr"])

    @property
    def group_lrs(self) -> list[float]:
        """Of each dense group, as servers number them."""
        return [float(group["lr"]) for group in self.optimizer.param_groups if group is not self._tables_group]

    @property
    def dense_lrs(self) -> list[float]:
        """Of the dense groups that have parameters."""
        groups = [group for group in self.optimizer.param_groups if group["params"]]
        return [float(group["lr"]) for group in groups if group is not self._tables_group]

    @property
    def dense_settings(self) -> list[dict[str, Any]]:
        """Of each dense group, all but the learning rate."""
        groups, names = self.optimizer.param_groups, self.optimizer.defaults
        return [settings_of(group, names) for group in groups if group is not self._tables_group]

    def put_row_settings(self) -> None:
        """Into the tables' group: the optimizer's state has it as it was saved."""
        self._tables_group.update(own_settings(self.tables.optimizer, self.optimizer.defaults))

    @property
    def changed_row_settings(self) -> str:
        """Of the tables' group, in words: what is not what the row optimizer uses; may be empty."""
        names = self.optimizer.defaults
        return changes(settings_of(self._tables_group, names), own_settings(self.tables.optimizer, names))

    @property
    def _tables_group(self) -> dict[str, Any]:
        return next(g for g in self.optimizer.param_groups if g.get("gba_hvd") == "tables")

    def unscale_(self, factor: float) -> None:
        """Multiply the gradients of this micro-batch, of dense parameters and rows."""
        is_changed = self.gradient_watch.is_changed
        self.dense.scale_(factor)
        self.gradient_watch.scaled(is_changed)
        self.tables.scale_gradients_(factor)

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass has reached a row, or a dense parameter has a gradient."""
        return any(one.rows.grad is not None for one in self.tables.captured) or not self.dense.is_zero

    def not_finite(
        self,
        loss: Callable[[], float | None],
        rows: RowGrads,
        dense: DenseGradients,
        meanwhile: Callable[[RowGrads], None] | None = None,
    ) -> str:
        """What of a micro-batch is not finite; empty if all is.

        loss: may wait for the device. meanwhile: asks more of the device, before its answers are waited for
        """
        there = [grad.total for some in rows for grad in some if isinstance(grad, DeviceRowGrad)]
        total = NumberOnItsWay(sum(there, dense.flat.sum())) if there else None  # one answer, as a rule
        if meanwhile is not None:
            meanwhile(rows)
        value = loss()
        if value is not None and not math.isfinite(value):
            return f"loss {value}"
        if total is not None and math.isfinite(total.get()):
            rows = [[grad for grad in some if isinstance(grad, RowGrad)] for some in rows]
        elif not math.isfinite(float(dense.flat.sum())) and (name := dense.non_finite(self.names)):
            return f"gradient of {name}"
        for group, grads in enumerate(rows):
            for grad in grads:
                if (key := grad.non_finite()) is not None:
                    layout = self.tables.layout
                    if key >= layout.key_limit(layout.groups[group]):
                        return "gradient of values that another host has pooled"
                    table, row = layout.locate(key, group)
                    return f"gradient of row {row} of table {table!r}"
        return ""

    def load_dense(self, tensors: Mapping[str, Any]) -> None:
        """Dense values and their optimizer state by name, from a checkpoint."""
        numbers = {name: number for number, name in enumerate(self.names)}
        of_servers = {
            numbers[name]: DenseState(tensor["values"], tensor["state"])
            for name, tensor in tensors.items()
            if name in numbers
        }
        self.put_dense(of_servers)

    def put_dense(self, tensors: Mapping[int, DenseState]) -> None:
        """Dense values and their optimizer state by the parameter's number, from servers."""
        self.parameter_watch.forget()
        for number, tensor in tensors.items():
            self.dense.set_parameters_([number], torch.from_numpy(tensor.values.copy()))
            if tensor.state:
                put_state(self.optimizer, self.dense.parameters[number], tensor.state)
