"""The user's `torch.amp.GradScaler` in a `DistributedOptimizer`: it scales losses, the engine moves its scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gba_hvd.errors import BadInput
from gba_hvd.gradients.loss_scale import LossScale

if TYPE_CHECKING:
    from gba_hvd.training.engine import Engine


class _DistributedScaler(torch.amp.GradScaler):
    """What `DistributedOptimizer` adds to the class of the user's scaler. Belongs to the training thread.

    The torch part scales losses and holds what `state_dict` says; when and how the scale moves is the engine's.
    """

    engine: Engine
    optimizer: torch.optim.Optimizer
    _of: int  # the micro-batch that what follows is about
    _losses: list[Tensor]  # scaled
    _is_unscaled: bool
    is_stepping: bool  # within `step`

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or several, by the scale."""
        self._follow()
        scaled = super().scale(outputs)
        if isinstance(scaled, Tensor):
            self._losses.append(scaled.detach())
            return scaled
        scaled = scaled if isinstance(scaled, (list, tuple)) else list(cast(Iterable[Any], scaled))
        self._losses += [loss.detach() for loss in scaled if isinstance(loss, Tensor)]
        return scaled

    @property
    def has_scaled(self) -> bool:
        """A loss of this micro-batch was scaled."""
        self._follow()
        return bool(self._losses)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of this micro-batch, dense ones and rows, by the scale."""
        self._check(optimizer, "unscale_")
        if self._is_unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer for this micro-batch.")
        self._is_unscaled = True
        self.engine.model.unscale_(1.0 / self.get_scale())

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Take in one micro-batch: as `optimizer.step`, with gradients without the scale. loss: the loss without it."""
        self._check(optimizer, "step")
        self._refuse_scaled(kwargs.get("loss"))
        if not self._is_unscaled:
            self.unscale_(optimizer)
        self.is_stepping = True
        try:
            optimizer.step(*args, **kwargs)
        finally:
            self.is_stepping = False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """The scale moves when a global step ends; here it is only looked at."""
        if new_scale is not None:
            raise BadInput(
                "all workers agree on the loss scale: leave new_scale out, and give init_scale to GradScaler"
            )
        self._follow()

    def get_scale(self) -> float:
        self._follow()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        self._follow()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        scale = self._scale_of_engine()
        for name in ("scale", "growth_factor", "backoff_factor", "growth_interval"):
            setattr(scale, name, state_dict[name])
        scale.growth_tracker = state_dict["_growth_tracker"]

    def set_growth_factor(self, new_factor: float) -> None:
        self._refuse_setting("growth_factor")

    def set_backoff_factor(self, new_factor: float) -> None:
        self._refuse_setting("backoff_factor")

    def set_growth_interval(self, new_interval: int) -> None:
        self._refuse_setting("growth_interval")

    # -----------------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Follow the engine's scale; discard what was about another micro-batch."""
        if self._of != self.engine.n_begun:
            self._of, self._losses, self._is_unscaled = self.engine.n_begun, [], False
        scale = self._scale_of_engine()
        if (super().get_scale(), super()._get_growth_tracker()) != scale.now[:2]:
            super().load_state_dict(scale.describe() | {"_growth_tracker": scale.growth_tracker})

    def _scale_of_engine(self) -> LossScale:
        assert self.engine.model.loss_scale is not None
        return self.engine.model.loss_scale

    def _check(self, optimizer: torch.optim.Optimizer, what: str) -> None:
        if optimizer is not self.optimizer:
            raise BadInput(
                f"{what}: this scaler belongs to the optimizer of DistributedOptimizer; others need one of their own"
            )
        if not self.has_scaled:
            raise BadInput(f"{what}: no loss of this micro-batch was scaled: call scaler.scale(loss).backward() before")

    def _refuse_scaled(self, loss: Any) -> None:
        """Raises BadInput when `loss` is what `scale` returned: what is reported is the loss."""
        if loss is None or self.get_scale() == 1.0:
            return
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        scaled = [float(one) for one in self._losses if one.numel() == 1]
        if value and math.isfinite(value) and value in scaled:
            raise BadInput(
                f"scaler.step(optimizer, loss=...) takes the loss itself, got it times the scale ({value:g}, scale "
                f"{self.get_scale():g}): pass what scaler.scale() was given"
            )

    def _refuse_setting(self, name: str) -> None:
        raise BadInput(f"{name} is fixed once DistributedOptimizer has the scaler: give it to GradScaler")


def scale_of(scaler: torch.amp.GradScaler | None) -> LossScale | None:
    """What an enabled scaler begins with; None for none, and for one that is off. Raises BadInput for other types."""
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise BadInput(f"grad_scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    if isinstance(scaler, _DistributedScaler):
        raise BadInput("this GradScaler belongs to another DistributedOptimizer already")
    if not scaler.is_enabled():
        return None
    state = scaler.state_dict()
    return LossScale(growth_tracker=state.pop("_growth_tracker"), **state)


def distribute(scaler: torch.amp.GradScaler, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Make the user's scaler the optimizer's: the same object, by another class."""
    kind = type(scaler)
    scaler.__class__ = type(kind.__name__, (_DistributedScaler, kind), {})
    ours = cast(_DistributedScaler, scaler)
    ours.engine, ours.optimizer = engine, optimizer
    ours._of, ours._losses, ours._is_unscaled, ours.is_stepping = -1, [], False, False
