"""`DistributedOptimizer`: the user's torch optimizer, stepping once per global batch.

Each call of `step()` takes in one micro-batch; what becomes of it is the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from gba_hvd.compression.spec import Compression, Spec, spec_of
from gba_hvd.engine import Engine
from gba_hvd.errors import BadInput
from gba_hvd.tables import EmbeddingTables

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class _Distributed(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds to the class of the user's optimizer."""

    engine: Engine

    def step(self, closure: Any = None, *, loss: Tensor | float | None = None) -> None:  # type: ignore[override]
        """Take in one micro-batch's gradients; update the model when the global batch is complete.

        loss: the micro-batch's mean loss; its mean over the global batch is then reported with the step, at no cost.
        """
        if closure is not None:
            raise BadInput(
                "DistributedOptimizer.step() takes no closure: optimizers that need one cannot accumulate micro-batches"
            )
        self.engine.add_micro_batch(loss)

    # Torch wraps the step of a class so that step hooks run, also when state is loaded. They belong to the global step,
    # whose own `step` is wrapped; this tells torch that there is nothing to wrap here.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the micro-batch (those of the step so far are kept elsewhere)."""
        self.engine.dense.zero_()
        self.engine.tables.zero_gradients()


def DistributedOptimizer(
    optimizer: AnyOptimizer,
    tables: EmbeddingTables,
    *,
    global_batch: int,
    micro_batch: int,
    named_parameters: Iterable[tuple[str, Tensor]] = (),
    row_average: str = "global",
    compression: Spec | str = Compression.none,
    row_compression: Spec | str = Compression.none,
) -> AnyOptimizer:
    """Make an optimizer step once per global batch of `global_batch` samples, over all workers and the tables.

    The same object comes back, with one more parameter group, the last: its `lr` is the row optimizer's, and schedulers
    made for the optimizer from here on drive it like any other.

    global_batch, micro_batch: samples, G = M x B; G is constant whatever the number of workers.
    named_parameters: names for error messages.
    row_average: a row's gradient is the sum over the step's micro-batches divided by all of them ("global": the
    gradient of the global batch's mean loss) or by those that contain the row ("contributors", as in the GBA paper).
    compression: how dense gradients travel between workers, such as `gba_hvd.Compression.dct(keep=0.01)`.
    row_compression: how rows and their gradients travel between hosts, such as `gba_hvd.Compression.int8`.
    Raises BadInput when G is no multiple of B, or the optimizer is of a kind that needs a closure.
    """
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
    names = {id(p): name for name, p in named_parameters}
    specs = spec_of(compression), spec_of(row_compression)
    engine = Engine(optimizer, tables, names, global_batch, micro_batch, row_average, *specs)
    group: dict[str, Any] = {
        "params": [torch.zeros(0, requires_grad=True)],
        "lr": tables.optimizer.lr,
        "gba_hvd": "tables",
    }
    if "param_names" in optimizer.param_groups[0]:
        group["params"] = [("gba_hvd.tables", group["params"][0])]
    optimizer.add_param_group(group)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {})
    cast(Any, optimizer).engine = engine
    engine.step_dense = cast(Any, super(_Distributed, optimizer)).step
    return optimizer
