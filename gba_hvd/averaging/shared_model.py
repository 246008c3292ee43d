"""A model that one more thread can train: same parameters in memory, gradients and buffers of its own.

What is shared, and how, is decided here; who computes what with it is `hogwild`'s business. As in torch's own Hogwild
example the parameters of the copy are other tensors on the same storage: what one thread's optimizer step writes, all
threads compute with from then on, also between a forward and its backward pass. Autograd does not object, since each
copy counts its own versions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput
from gba_hvd.gradients.dense_gradients import DenseGradients


class SharedModel:
    """A copy of `model` whose trained parameters share their storage with the model's.

    module: the copy; frozen parameters and the tables are the model's own, buffers and everything else are copied
    dense:  the gradients of the copy's trained parameters, in the order of `trained`

    Belongs to one thread at a time. Raises BadInput when the model cannot be copied, or does not have all of `trained`,
    or these have hooks.
    """

    def __init__(self, model: nn.Module, trained: Sequence[Tensor], tables: EmbeddingTables) -> None:
        wanted = {id(p) for p in trained}
        memo: dict[int, object] = {id(tables): tables}
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(p.data) if id(p) in wanted else p
        missing = [tuple(p.shape) for p in trained if id(p) not in memo]
        if missing:
            raise BadInput(
                f"the optimizer has {len(missing)} parameters that the state's model does not have, the first of shape "
                f"{missing[0]}: threads train copies of the model, so make what they belong to a part of it"
            )
        if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in trained):
            raise BadInput(
                "a parameter of the model has hooks on its gradient, which the copy that each thread trains would not "
                "have: do what they do after backward() in compute(), or use n_threads=1"
            )
        own = [memo[id(p)] for p in trained]
        try:
            self.module: nn.Module = copy.deepcopy(model, memo)
        except Exception as error:  # of any value in the model
            raise BadInput(
                "each thread needs a copy of the model, and this one cannot be copied "
                f"({type(error).__name__}: {error}): keep what is no module, parameter or buffer outside of it, or use "
                "n_threads=1"
            ) from error
        self.dense = DenseGradients([p for p in own if isinstance(p, Tensor)], 0)

    def clear(self) -> None:
        """Before a micro-batch: no gradient yet, so that `has_gradient` is right."""
        for p in self.dense.parameters:
            p.grad = None

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass has reached some trained parameter since `clear`, or there is none to reach."""
        return not self.dense.n or any(p.grad is not None for p in self.dense.parameters)

    def bring_buffers_to(self, model: nn.Module) -> list[str]:
        """Overwrite the model's buffers with this copy's; returns the names of those that were other ones."""
        changed = []
        with torch.no_grad():
            theirs = dict(model.named_buffers())
            for name, mine in self.module.named_buffers():
                if not torch.equal(theirs[name], mine):
                    theirs[name].copy_(mine)
                    changed.append(name)
        return changed
