"""Parameters that the distributed optimizer does not train, and values that other code writes between its steps.

Decided here: who is named, and that our optimizer trains nothing on each worker by itself. Torch counts the in-place
changes of every tensor, so nothing is read. A change is no alarm by itself: weights are loaded. Only a parameter that
changes between our steps several times in a row has another writer, such as a second optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from gba_hvd.errors import BadInput

_IN_A_ROW = 3
_NAMED = 5


def untrained(model: nn.Module, trained: Iterable[Tensor]) -> list[str]:
    """Parameters of the model that want a gradient and are not among those that are trained; each tensor once."""
    known = {id(p) for p in trained}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]


def refuse_not_exchanged(model: nn.Module, grouped: Iterable[Tensor], exchanged: Iterable[Tensor]) -> None:
    """Raises BadInput for a parameter that the optimizer would step, and whose gradient workers do not exchange.

    grouped: parameters of the optimizer's groups
    """
    known, names = {id(p) for p in exchanged}, {id(p): name for name, p in model.named_parameters()}
    others = [p for p in grouped if p.requires_grad and id(p) not in known]
    if others:
        of_others = [names.get(id(p), f"a parameter {tuple(p.shape)}") for p in others]
        raise BadInput(
            f"{names_in_words(of_others)}: in a group of the optimizer, and workers do not exchange the gradient, "
            "since it came there by no add_param_group, or wants a gradient only since then: their models would "
            "drift apart. Set requires_grad before gba_hvd.DistributedOptimizer, or before add_param_group, and freeze "
            "it for a while by lr 0 of the group"
        )


def names_in_words(names: Sequence[str]) -> str:
    """`a, b and 3 more`."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class ParameterWatch:
    """One worker's. Call `written_by_others` before each change of ours, `note` after it. Not thread-safe."""

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        self._parameters, self._names = list(parameters), list(names)
        self._seen: list[int] | None = None
        self._in_a_row = [0] * len(self._names)
        self._is_reported = False

    def name_as_in(self, model: nn.Module) -> None:
        """Call parameters what the model calls them, where it has them."""
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = [names.get(id(p), name) for p, name in zip(self._parameters, self._names, strict=True)]

    def note(self) -> None:
        """Our own change is done."""
        self._seen = None if self._is_reported else [p._version for p in self._parameters]

    def forget(self) -> None:
        """What changes until the next `note` is ours."""
        self._seen = None

    def written_by_others(self) -> list[str]:
        """Names of parameters that changed between our last steps, each time; once, then never again."""
        if self._seen is None:
            return []
        for number, (p, seen) in enumerate(zip(self._parameters, self._seen, strict=True)):
            self._in_a_row[number] = self._in_a_row[number] + 1 if p._version != seen else 0
        found = [name for name, n in zip(self._names, self._in_a_row, strict=True) if n >= _IN_A_ROW]
        self._is_reported = bool(found)
        return found
