"""Optimizers of embedding rows: one pass over the rows a step touched, in place in shard memory.

The same objects serve every mode. A row that a step does not touch does not change (Adam is lazy: its moments decay
only when its row is touched, as in `torch.optim.SparseAdam`). `weight_decay` is L2, on touched rows only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Protocol, cast

import numpy as np

from gba_hvd import kernels
from gba_hvd.embedding.row_gradients import RowGrad, RowSum
from gba_hvd.errors import BadInput
from gba_hvd.extras import module_of
from gba_hvd.shm.layout import Group, Layout, SlotSpec
from recovery.registry import Registry, why_not_constructed


class RowOptimizer(Protocol):
    """Hyper-parameters of the rows' update, and the update itself.

    A class that a distribution registers in `gba_hvd.row_optimizers` is a dataclass of plain numbers: another process
    builds it again from its fields.

    slots: what is stored beside the weights of a row, zeros at first
    """

    slots: ClassVar[tuple[SlotSpec, ...]]

    @property
    def lr(self) -> float: ...

    def update_(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad, scale: float, lr: float, step: int
    ) -> None:
        """Apply scale * grad to the rows, in place.

        flat:   float32, the host's memory; records start at layout.record_starts(grad.keys, group)
        group:  where the numbers stand in a record: its weights in the first `dim`, each slot from group.slots[j] on,
                and its last word, record - 1, counts updates as a uint32, to be raised by 1 when the others are written
        lr:     the scheduled learning rate
        step:   of the job, counts from 1
        """


_NO_TERMS = np.empty((0, 2), np.int32)


@dataclass(frozen=True)
class _Rule:
    lr: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr >= 0 or not self.weight_decay >= 0:
            raise BadInput(
                f"{type(self).__name__}: lr and weight_decay must not be negative, "
                f"got {self.lr} and {self.weight_decay}"
            )

    def update_(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad, scale: float, lr: float, step: int
    ) -> None:
        whole = RowSum(grad.keys, grad.values, grad.values, _NO_TERMS)
        self.update_sum_(flat, layout, group, whole, scale, lr, step)

    def update_sum_(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowSum, scale: float, lr: float, step: int
    ) -> None:
        """As `update_`, of a gradient that is added up in the same pass."""
        kernel, own = self._kernel(step)
        rows = (flat, flat.view(np.uint32), layout.record_starts(grad.keys, group))
        numbers = map(np.float32, (lr, self.weight_decay, *own))
        kernel(*rows, grad.first, grad.second, grad.terms, np.float32(scale), group.record, *numbers)

    @property
    def adds_up(self) -> bool:
        """Whether `update_sum_` is this optimizer's update: one that derives from it may have its own `update_`."""
        return type(self).update_ is _Rule.update_

    def _kernel(self, step: int) -> tuple[Callable[..., None], tuple[float, ...]]:
        """The kernel, and the numbers that it takes beside what all take."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(_Rule):
    """w -= lr * g, for the rows that a step touches (`torch.optim.SGD` without momentum). No slots: 4 bytes a weight.

    lr: learning rate, 0 or more. weight_decay: its share of w is added to g (L2), of these rows alone.
    """

    slots: ClassVar[tuple[SlotSpec, ...]] = ()

    def _kernel(self, step: int) -> tuple[Callable[..., None], tuple[float, ...]]:
        return kernels.apply_sgd, ()


@dataclass(frozen=True)
class Adagrad(_Rule):
    """s += g^2; w -= lr * g / (sqrt(s) + eps), element-wise (`torch.optim.Adagrad`)."""

    eps: float = 1e-10
    slots: ClassVar[tuple[SlotSpec, ...]] = (SlotSpec("sum"),)

    def _kernel(self, step: int) -> tuple[Callable[..., None], tuple[float, ...]]:
        return kernels.apply_adagrad, (self.eps,)


@dataclass(frozen=True)
class RowAdagrad(_Rule):
    """Adagrad with one sum per row: s += mean(g^2) (row-wise Adagrad of FBGEMM and DLRM)."""

    eps: float = 1e-8
    slots: ClassVar[tuple[SlotSpec, ...]] = (SlotSpec("sum", per_row=True),)

    def _kernel(self, step: int) -> tuple[Callable[..., None], tuple[float, ...]]:
        return kernels.apply_row_adagrad, (self.eps,)


@dataclass(frozen=True)
class Adam(_Rule):
    """Lazy Adam: `torch.optim.Adam` on the touched rows; the bias correction counts the job's steps."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    slots: ClassVar[tuple[SlotSpec, ...]] = (SlotSpec("exp_avg"), SlotSpec("exp_avg_sq"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise BadInput(f"Adam: betas must be in [0, 1), got {self.betas}")

    def _kernel(self, step: int) -> tuple[Callable[..., None], tuple[float, ...]]:
        beta1, beta2 = self.betas
        return kernels.apply_adam, (self.eps, beta1, beta2, 1 - beta1**step, 1 - beta2**step)


@dataclass(frozen=True)
class TableOptimizers:
    """The optimizers of all tables: the one of tables that name none, and those of others, by number from 1 on."""

    default: RowOptimizer
    own: tuple[RowOptimizer, ...] = ()

    def update_(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad | RowSum, scale: float, lr: float, step: int
    ) -> None:
        """As `RowOptimizer.update_`. lr: of the default optimizer, now; see `rate`."""
        optimizer = self.of(group.optimizer)
        update_(optimizer, flat, layout, group, grad, scale, self.rate(group.optimizer, lr), step)

    def rate(self, number: int, lr: float) -> float:
        """The learning rate of an optimizer by number, in proportion to that of the default one, lr."""
        return self.of(number).lr * (lr / self.default.lr) if number else lr

    def of(self, number: int) -> RowOptimizer:
        return self.own[number - 1] if number else self.default

    def __post_init__(self) -> None:
        if self.own and not self.default.lr > 0:
            raise BadInput(
                f"EmbeddingTables(optimizer=) has lr {self.default.lr}, and tables have optimizers of their own, whose "
                "rates are scheduled in proportion to it: give it a positive lr"
            )


def update_(
    optimizer: RowOptimizer | TableOptimizers, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad | RowSum,
    scale: float, lr: float, step: int,
) -> None:  # fmt: skip
    """`optimizer.update_`, of a gradient that is added up before, where it cannot be in the same pass."""
    if isinstance(grad, RowGrad):
        optimizer.update_(flat, layout, group, grad, scale, lr, step)
    elif isinstance(optimizer, _Rule) and optimizer.adds_up:
        optimizer.update_sum_(flat, layout, group, grad, scale, lr, step)
    elif isinstance(optimizer, TableOptimizers):
        optimizer.update_(flat, layout, group, grad, scale, lr, step)
    else:
        optimizer.update_(flat, layout, group, grad.added_up(), scale, lr, step)


# The module under which the optimizers of this file are stored, on disk and in messages: a name that outlives the
# layout of the package, the one that earlier versions wrote, and today's.
PUBLIC_MODULE = "gba_hvd"
_HERE = (PUBLIC_MODULE, "gba_hvd.row_optimizers", __name__)


def why_no_row_optimizer(found: Any) -> str:
    """What is missing in a class; empty: nothing."""
    slots = getattr(found, "slots", None)
    if not is_dataclass(found):
        return f"{found!r}, which is no dataclass"
    if not (isinstance(slots, tuple) and all(isinstance(slot, SlotSpec) for slot in slots)):
        return f"{found!r}, whose `slots` is no tuple of SlotSpec"
    # A server is sent the values of all fields, and makes the optimizer of them.
    return why_not_constructed(cast(type, found), (), tuple(field.name for field in fields(found)))


REGISTERED: Registry[RowOptimizer] = Registry(
    "gba_hvd.row_optimizers", "row optimizer", RowOptimizer, {}, why_no_row_optimizer
)


def build(spec: Mapping[str, Any]) -> RowOptimizer:
    """A row optimizer from its description: {"class": name, "fields": {name: value}}, for the name see `resolve`.

    Raises BadInput for a class that is no row optimizer, and for values that it does not take.
    """
    kind, values = resolve(str(spec.get("class"))), spec.get("fields")
    known = [field.name for field in fields(cast(Any, kind))]
    if not isinstance(values, Mapping) or not set(values) <= set(known):
        raise BadInput(f"the row optimizer {spec['class']} takes {known}, got {values!r}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return kind(**values)


def resolve(name: str) -> type[RowOptimizer]:
    """The row optimizer that is registered under this name, or called `module:Class`. Raises BadInput for others.

    Of `module:Class`, only a class counts that is defined at the top level of that module, is a dataclass, and says
    `slots` and `update_`. It is not called before all this is known, and no module of Python itself is imported for it.
    """
    if ":" not in name:
        return cast(type[RowOptimizer], REGISTERED.get(name))
    module_name, _, kind_name = name.partition(":")
    if module_name in _HERE:
        found: Any = globals().get(kind_name)
    elif module_name.partition(".")[0] in sys.stdlib_module_names:
        raise BadInput(f"{name} belongs to Python, it is no row optimizer")
    else:
        found = getattr(module_of("row optimizer", name, module_name), kind_name, None)
    if not (
        isinstance(found, type)
        and found.__module__ == (__name__ if module_name in _HERE else module_name)
        and not why_no_row_optimizer(found)
        and callable(getattr(found, "update_", None))
    ):
        raise BadInput(
            f"{name} is no row optimizer: expected a dataclass at the top level of that module with `slots`, a tuple "
            "of SlotSpec, and `update_`, as gba_hvd.embedding.row_optimizers.RowOptimizer says"
        )
    return cast(type[RowOptimizer], found)
