"""Lookups under `torch.compile`: one operator with a fake implementation, so that the compiler need not look inside.

Rows are no tensors of the graph. What makes the compiler call the backward operator is the *anchor*, a scalar that asks
for a gradient and always gets zero. The gradients of rows go where those of an eager pass go, to its captured rows, and
when these go there: once the backward pass accumulates the gradient of its leaves. `torch.autograd.grad` of other
inputs runs the operator as well, since a compiled graph has one backward, and accumulates nothing.
Eager passes do not come here: autograd functions cost less than an operator.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gba_hvd.batch import Bag
from gba_hvd.embedding.lookups import Ids, Lookup
from gba_hvd.embedding.pooling import Pooling, of_bags
from gba_hvd.errors import GbaError

_TENSOR, _BAG, _WEIGHTED, _LEARNT, _JAGGED = "tbwgj"  # forms of ids; _LEARNT: weights that ask for a gradient
_numbers = itertools.count()


@dataclass(eq=False)
class CompiledPass:
    """What a backward operator needs of its forward pass: for each feature, in the order of the call, its lookup, its
    pooling, and the leaf that collects the gradient of its rows."""

    parts: list[tuple[Lookup, Pooling, Tensor]] = field(default_factory=list)
    _received: tuple[int, list[Tensor]] | None = None

    def receive(self, grads: list[Tensor], backward: int) -> None:
        """Store the gradients of what the pass returned until `accumulate`. backward: number of the backward pass"""
        self._received = backward, grads

    def accumulate(self, backward: int) -> None:
        """Add what this backward pass has brought to the gradients of the leaves."""
        received, self._received = self._received, None
        if received is None or received[0] != backward:
            return
        for (_, pooling, leaf), grad in zip(self.parts, received[1], strict=True):
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
            pooling.add_rows_gradient(of_bags(grad.reshape(-1, leaf.shape[1])), 0, leaf.grad.numpy())


class LooksUp(Protocol):
    """The tables, as the operators use them."""

    def compiled_pass(self, ids: Ids, train: bool, weights_train: bool) -> tuple[CompiledPass, list[Tensor]]:
        """One forward pass: what it leaves, and by feature the rows of the result.

        train: gradients of rows will follow; weights_train: and of weights of bags
        """

    def width_of(self, feature: str) -> tuple[int, bool]:
        """(dimension, whether it is pooled). Raises BadInput for an unknown feature."""

    def open_passes(self) -> Iterable[CompiledPass]:
        """This thread's, whose gradients were not taken or dropped."""


_tables: weakref.WeakValueDictionary[int, LooksUp] = weakref.WeakValueDictionary()
_passes: weakref.WeakValueDictionary[int, CompiledPass] = weakref.WeakValueDictionary()


def register(tables: LooksUp) -> tuple[int, Tensor]:
    """A number by which the operators find these tables while they live, and their anchor."""
    _define()
    number = next(_numbers)
    _tables[number] = tables
    anchor = torch.zeros((), requires_grad=True)
    anchor.register_post_accumulate_grad_hook(functools.partial(_accumulate, number))
    return number, anchor


def _accumulate(handle: int, anchor: Tensor) -> None:
    backward, tables = _backward_pass(), _tables.get(handle)
    for done in [] if tables is None else tables.open_passes():
        done.accumulate(backward)


def _backward_pass() -> int:
    """The number of the backward pass that runs."""
    return torch._C._current_graph_task_id()


def look_up(handle: int, anchor: Tensor, ids: Ids, not_pooled: tuple[str, ...], train: bool) -> dict[str, Tensor]:
    """The forward pass of the tables `handle`, as the compiler traces it. Raises GbaError when it exports.

    not_pooled: the features that give a row for every id. train: gradients of rows will follow
    """
    if torch.compiler.is_exporting():
        raise GbaError(
            "torch.export cannot export embedding tables: they are in memory that workers share, not in the model. "
            "Export the dense part by itself, with looked-up rows as its inputs, and the rows with "
            "`gba-hvd checkpoint export` or tables.rows(name, ids)"
        )
    forms: list[str] = []
    values: list[Tensor] = []
    offsets: list[Tensor] = []
    weights: list[Tensor] = []
    for value in ids.values():
        if isinstance(value, Bag):
            values.append(value.values)
            offsets.append(value.offsets)
            if value.weights is None:
                forms.append(_BAG)
            else:
                forms.append(_LEARNT if value.weights.requires_grad and torch.is_grad_enabled() else _WEIGHTED)
                weights.append(value.weights.float())
        elif value.is_nested:
            nested: Any = value
            forms.append(_JAGGED)
            values.append(nested.values())
            offsets.append(nested.offsets())
        else:
            forms.append(_TENSOR)
            values.append(value)
    found = torch.ops.gba_hvd.look_up(handle, "\n".join(ids), "".join(forms), anchor, values, offsets, weights, train)
    results: dict[str, Tensor] = {}
    n_cut = 0
    for i, name in enumerate(ids):
        rows = found[i + 1]
        if forms[i] != _TENSOR:
            cuts = offsets[n_cut]
            n_cut += 1
            if name in not_pooled:
                if forms[i] != _JAGGED:
                    cuts = torch.cat([cuts, torch.full((1,), rows.shape[0], dtype=cuts.dtype)])
                rows = torch.nested.nested_tensor_from_jagged(rows, cuts)
        results[name] = rows
    return results


def _ids_of(
    names: str, forms: str, values: list[Tensor], offsets: list[Tensor], weights: list[Tensor]
) -> Mapping[str, Tensor | Bag]:
    """The inverse of what `look_up` hands over; a jagged tensor as a bag of its ids."""
    cuts, factors, ids = iter(offsets), iter(weights), {}
    for name, form, value in zip(names.split("\n"), forms, values, strict=True):
        found: Tensor | Bag = value
        if form == _JAGGED:
            found = Bag(value, next(cuts)[:-1])
        elif form != _TENSOR:
            found = Bag(value, next(cuts), next(factors) if form in (_WEIGHTED, _LEARNT) else None)
        ids[name] = found
    return ids


@functools.cache
def _define() -> None:
    """The operators; once a process, not at import."""

    @torch.library.custom_op("gba_hvd::look_up", mutates_args=())
    def forward(
        handle: int, names: str, forms: str, anchor: Tensor, values: list[Tensor], offsets: list[Tensor],
        weights: list[Tensor], train: bool,
    ) -> list[Tensor]:  # fmt: skip
        ids = _ids_of(names, forms, values, offsets, weights)
        done, results = _tables[handle].compiled_pass(ids, train, _LEARNT in forms)
        number = next(_numbers)
        if train:
            _passes[number] = done
        return [torch.tensor([number]), *results]

    @forward.register_fake
    def _(
        handle: int, names: str, forms: str, anchor: Tensor, values: list[Tensor], offsets: list[Tensor],
        weights: list[Tensor], train: bool,
    ) -> list[Tensor]:  # fmt: skip
        found, cuts = [anchor.new_empty(1, dtype=torch.int64)], iter(offsets)
        for name, form, value in zip(names.split("\n"), forms, values, strict=True):
            dim, is_pooled = _tables[handle].width_of(name)
            shape = tuple(value.shape)
            if form != _TENSOR:
                n_cuts = next(cuts).shape[0]
                shape = (n_cuts - (form == _JAGGED),) if is_pooled else shape
            elif is_pooled:
                shape = shape[:1]
            found.append(anchor.new_empty((*shape, dim), dtype=torch.float32))
        return found

    @torch.library.custom_op("gba_hvd::look_up_backward", mutates_args=())
    def backward(
        number: Tensor, anchor: Tensor, grads: list[Tensor], weights: list[Tensor], forms: str
    ) -> list[Tensor]:
        done = _passes.get(int(number))
        if done is None:  # its gradients were taken or dropped meanwhile
            return [torch.zeros_like(anchor), *map(torch.zeros_like, weights)]
        done.receive(grads, _backward_pass())
        learnt = [i for i, form in enumerate(forms) if form == _LEARNT]
        of_weights = [_weights_gradient(*done.parts[i][:2], grads[i], w) for i, w in zip(learnt, weights, strict=True)]
        return [torch.zeros_like(anchor), *of_weights]

    @backward.register_fake
    def _(number: Tensor, anchor: Tensor, grads: list[Tensor], weights: list[Tensor], forms: str) -> list[Tensor]:
        return [torch.empty_like(anchor), *map(torch.empty_like, weights)]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        _, _, ctx.forms, anchor, values, offsets, weights, _ = inputs
        of_weights = [form for form in ctx.forms if form in (_WEIGHTED, _LEARNT)]
        learnt = [w for form, w in zip(of_weights, weights, strict=True) if form == _LEARNT]
        ctx.which, ctx.n = [form == _LEARNT for form in of_weights], (len(values), len(offsets))
        ctx.shapes = [out.shape for out in output[1:]]
        ctx.save_for_backward(output[0], anchor, *learnt)

    def derive(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
        number, anchor, *learnt = ctx.saved_tensors
        some = [
            anchor.new_zeros(shape) if grad is None else grad for grad, shape in zip(grads[1:], ctx.shapes, strict=True)
        ]
        of_anchor, *of_weights = torch.ops.gba_hvd.look_up_backward(number, anchor, some, learnt, ctx.forms)
        each = iter(of_weights)
        weights = [next(each) if is_learnt else None for is_learnt in ctx.which]
        return None, None, None, of_anchor, [None] * ctx.n[0], [None] * ctx.n[1], weights, None

    forward.register_autograd(derive, setup_context=setup)


def _weights_gradient(lookup: Lookup, pooling: Pooling, grad: Tensor, weights: Tensor) -> Tensor:
    found = pooling.weights_gradient(of_bags(grad), 0)
    if len(found) == len(weights):
        return found
    assert lookup.kept is not None  # padding gets none
    whole = torch.zeros_like(weights)
    whole[torch.from_numpy(lookup.kept)] = found
    return whole
