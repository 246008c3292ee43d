"""`DistributedOptimizer`: the user's torch optimizer, stepping once per global batch.

Each call of `step()` takes in one micro-batch; the engine and its mode make global steps of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gba_hvd import kernels
from gba_hvd.compression import kernels as compression_kernels
from gba_hvd.compression.spec import Compression, Spec, dense_spec_of, row_spec_of
from gba_hvd.embedding.joined_tables import join_tables, refuse_unused_hot_rows
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput
from gba_hvd.gradients.clipping import Clip
from gba_hvd.shm import vocabulary_kernels
from gba_hvd.switching.mode_limits import check_modes, check_optimizer
from gba_hvd.switching.requests import switching_of
from gba_hvd.training.engine import Engine
from gba_hvd.training.grad_scaler import distribute, scale_of
from gba_hvd.training.model import TrainedModel
from gba_hvd.training.settings_watch import own_settings

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class _Distributed(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds to the class of the user's optimizer."""

    engine: Engine
    grad_scaler: torch.amp.GradScaler | None = None

    # So that a scaler that `DistributedOptimizer` does not know calls `step` in any case, and is refused there.
    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, loss: Tensor | float | None = None) -> None:  # type: ignore[override]
        """Take in one micro-batch's gradients; update the model when the global batch is complete.

        loss: the micro-batch's mean loss; its mean over the global batch is then reported with the step, at no cost.
        """
        if isinstance(closure, Tensor | float):
            raise BadInput("DistributedOptimizer.step(): give the loss by name, as step(loss=loss)")
        if closure is not None:
            raise BadInput(
                "DistributedOptimizer.step() takes no closure: optimizers that need one cannot accumulate micro-batches"
            )
        if hasattr(self, "found_inf"):
            raise BadInput(
                "a GradScaler that DistributedOptimizer does not know called optimizer.step(): rows would be trained "
                "with gradients times its scale. Give it to DistributedOptimizer, as grad_scaler=scaler"
            )
        scaler = cast(Any, self.grad_scaler)
        if scaler is not None and scaler.has_scaled and not scaler.is_stepping:
            raise BadInput("the loss was scaled: call scaler.step(optimizer), not optimizer.step()")
        self.engine.add_micro_batch(loss)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Run `hook` before each global step. Raises BadInput where that would not happen, see `mode_limits`."""
        return self._checked(super().register_step_pre_hook(hook))

    def register_step_post_hook(self, hook: Any) -> Any:
        """The same, after each global step."""
        return self._checked(super().register_step_post_hook(hook))

    def _checked(self, hook: RemovableHandle) -> RemovableHandle:
        try:
            check_modes(self.engine)
        except BadInput:
            hook.remove()
            raise
        return hook

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters. The tables' group stays the last.

        Raises BadInput after the first `state.sync()`, which `elastic.run` calls before the training function: workers
        have agreed on what they exchange, and one that joins later runs the script alone. And for an optimizer that has
        a scheduler, whose groups have numbers, or that no longer goes with the rule of its `GBACallback`.
        """
        engine = self.engine
        if "step" in vars(self):
            raise BadInput(
                "add_param_group: a learning-rate scheduler was made for this optimizer already, which knows its "
                "groups by their numbers: make it after the last add_param_group"
            )
        if engine.model.tables.memory is not None:
            raise BadInput(
                "add_param_group: training has begun, and workers exchange the gradients of the parameters that the "
                "optimizer had by then. Add parameters before state.sync(), which elastic.run calls before the "
                "training function, and before the first batch. To train on with another model, close the state and "
                'make new tables, optimizer and state, as docs/YOUR_MODEL.md, "Fine-tune", shows'
            )
        super().add_param_group(param_group)
        groups = self.param_groups
        groups[-2:] = groups[-1], groups[-2]
        try:
            self._take_groups()
        except BaseException:
            del groups[-2]
            self._take_groups()
            raise
        engine.lay_out()

    def _take_groups(self) -> None:
        self.engine.model.take_parameters()
        if (callback := switching_of(self.engine)) is not None:
            check_optimizer(self.engine, callback)
            check_modes(self.engine)

    # Torch wraps the step of a class so that step hooks run, also when state is loaded. They belong to the global step,
    # whose own `step` is wrapped; this marks that there is nothing to wrap here.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the micro-batch (those of the step so far are stored elsewhere)."""
        model = self.engine.model
        model.dense.zero_()
        model.tables.zero_gradients()
        model.gradient_watch.clear()


def DistributedOptimizer(
    optimizer: AnyOptimizer | None,
    tables: EmbeddingTables | Sequence[EmbeddingTables],
    *,
    global_batch: int,
    micro_batch: int,
    sync_micro_batch: int | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] = (),
    row_average: str = "global",
    compression: Spec | str = Compression.none,
    row_compression: Spec | str = Compression.none,
    max_norm: float | None = None,
    max_row_norm: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> AnyOptimizer:
    """Make an optimizer step once per global batch of `global_batch` samples, over all workers and the tables.

    The same object comes back (for None, of a model that has tables only, an SGD whose first group is empty: its `lr`
    has no effect), with one more parameter group, the last: its `lr` is the row optimizer's, and schedulers made for
    the optimizer from here on drive it like any other. Tables with an optimizer of their own (`Table(optimizer=)`)
    follow it in proportion: lr of the table x `lr` of the group / lr of the row optimizer.

    tables: one, or a list of several, which then share one memory; the first one's optimizer is that of the group.

    global_batch, micro_batch: samples, G = M x B; G is constant for any number of workers.
    sync_micro_batch: samples that a worker computes at once in allreduce mode, a multiple of B that divides G; default
    B. Steps, positions and accounts stay those of micro-batches of B samples, which asynchronous modes compute. What a
    model computes over a batch (batch norm) is then over so many samples. While a `GBACallback` decides by measurements
    (mode "auto"), one step in 20 is computed in micro-batches of B, to measure what they take; one that asks for
    asynchronous modes only refuses it.
    named_parameters: names for error messages.
    row_average: what the sum of a row's gradients over the step's micro-batches is divided by. "global": all of them,
    which gives the gradient of the global batch's mean loss. "contributors", as in the GBA paper: those that contain
    the row, each counted once; weights by staleness apply to the gradients and not to the count, and a gradient that
    is dropped as stale counts. "kept_contributors": the same, and a dropped one does not count. See docs/MODES.md.
    compression: how dense gradients travel between workers, such as `gba_hvd.Compression.dct(keep=0.01)`.
    row_compression: how rows and their gradients travel between hosts, such as `gba_hvd.Compression.int8` or
    `gba_hvd.Compression.dct_mp(keep=0.05)`.
    max_norm, max_row_norm: clip the gradient of each global step by its 2-norm. With g the gradient of all dense
    parameters and r that of all rows, as the optimizers get them (averaged as `row_average` says; in asynchronous modes
    the weighted sum over the decided step's micro-batches, after the damping of an update rule):

        max_norm alone        g and r are multiplied by min(1, max_norm / (sqrt(|g|^2 + |r|^2) + 1e-6))
        max_row_norm given    r is multiplied by min(1, max_row_norm / (|r| + 1e-6)), and where there is a max_norm,
                              g is multiplied by min(1, max_norm / (|g| + 1e-6))

    That is what `torch.nn.utils.clip_grad_norm_` does to the gradient of the global batch. Called before `step()`, that
    function clips this worker's micro-batch instead, by its dense part alone, which cannot be seen from here: use these
    arguments in its place. Modes with replicas (`shadow`, `easgd`, `ma`, `bmuf`) and rule `dana_slim` refuse them.

    grad_scaler: the scaler of mixed precision, for which the loop calls `scaler.scale(loss).backward()`,
    `scaler.step(optimizer, loss=loss)` and `scaler.update()` for each micro-batch, with `scaler.unscale_(optimizer)`
    before `step` where it likes. Rows are unscaled with the dense part. An overflow on any worker skips the whole
    global step on all (in `async`, `hop_bs`, `hop_bw` and with replicas a step is what these modes call one), and its
    samples count as dropped. The scale is one for all workers, and moves when a global step ends, not at `update()`;
    see `loss_scale`. Threads of `hogwild` refuse it.

    Hooks registered with `register_step_pre_hook` and `register_step_post_hook` run around the global step in allreduce
    mode; a job that is to be in an asynchronous mode, where servers step, refuses them.
    Raises BadInput when G is no multiple of B, `sync_micro_batch` does not fit, the optimizer is of a kind that needs a
    closure, or a norm is not a positive, finite number, or the scaler is of another type or another optimizer's.
    """
    if is_of_rows := optimizer is None:
        optimizer = cast(AnyOptimizer, torch.optim.SGD([{"params": []}]))
    if isinstance(optimizer, _Distributed):
        raise BadInput("this optimizer is distributed already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadInput(
            "LBFGS needs a closure and cannot accumulate micro-batches: "
            "use SGD, Adagrad, Adam or another one-pass optimizer"
        )
    if "step" in vars(optimizer):
        raise BadInput(
            "a learning-rate scheduler was made for this optimizer already: make it after DistributedOptimizer, "
            "so that it drives the tables too"
        )
    tables = tables if isinstance(tables, EmbeddingTables) else join_tables(tables)
    refuse_unused_hot_rows(tables)
    names = {id(p): name for name, p in named_parameters}
    specs = dense_spec_of(compression), row_spec_of(row_compression)
    if is_of_rows and not specs[0].is_none:
        raise BadInput(
            f"compression={specs[0].exactly} is for dense gradients, and DistributedOptimizer(None, ...) has none: "
            "leave it out; row_compression is for those of rows"
        )
    clip = Clip(max_norm, max_row_norm)
    loss_scale = scale_of(grad_scaler)
    kernels.load()
    if not all(spec.is_none for spec in specs):
        compression_kernels.load()
    if hashed := [name for name, table in tables.tables.items() if table.keys]:
        if specs[1].pools:
            raise BadInput(
                f"row_compression=dct_mp names what is pooled on other hosts by numbers above those of all rows, and "
                f"table {hashed[0]!r} has keys='hash64', whose ids take all numbers: use another row_compression"
            )
        vocabulary_kernels.load()
    model = TrainedModel(
        optimizer, tables, names, global_batch, micro_batch, row_average, *specs, clip, loss_scale,
        sync_micro_batch,
    )  # fmt: skip
    engine = Engine(model)
    group: dict[str, Any] = {
        "params": [torch.zeros(0, requires_grad=True)],
        "lr": tables.optimizer.lr,
        "gba_hvd": "tables",
        **own_settings(tables.optimizer, optimizer.defaults),
    }
    if "param_names" in optimizer.param_groups[0]:
        group["params"] = [("gba_hvd.embedding.tables", group["params"][0])]
    optimizer.add_param_group(group)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"user_class": kind})
    cast(Any, optimizer).engine = engine
    if grad_scaler is not None and loss_scale is not None:
        distribute(grad_scaler, engine, optimizer)
        cast(Any, optimizer).grad_scaler = grad_scaler
    model.step_dense = cast(Any, super(_Distributed, optimizer)).step
    return optimizer
