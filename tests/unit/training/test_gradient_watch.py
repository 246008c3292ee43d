"""What a script does with gradients between `backward()` and `step()` is seen, and what autograd does is no alarm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.training.gradient_watch import _MICRO_BATCHES, GradientWatch

Loop = Callable[["Scene"], None]


class Scene:
    """A model of which one head is unused, and what `optimizer.zero_grad` does."""

    def __init__(self) -> None:
        self.model = nn.ModuleDict({"used": nn.Linear(3, 2), "other": nn.Linear(2, 1)})
        self.parameters = list(self.model.parameters())
        self.dense = DenseGradients(self.parameters, 0)
        self.watch = GradientWatch(self.dense)

    def loss(self) -> Tensor:
        return self.model["used"](torch.ones(4, 3)).square().sum()

    def zero_grad(self) -> None:
        self.dense.zero_()
        self.watch.clear()

    def taken(self) -> bool:
        """As the engine takes a micro-batch in."""
        is_changed = self.watch.is_changed
        self.watch.next()
        self.dense.collect_()
        self.dense.add_micro_batch_(0.5)
        return is_changed


def by_tasks(scene: Scene) -> None:
    scene.loss().backward()
    first = [p.grad.clone() for p in scene.parameters if p.grad is not None]
    scene.zero_grad()
    scene.loss().backward()
    for p, gradient in zip(scene.parameters, first, strict=True):
        p.grad += gradient


def by_hand(scene: Scene) -> None:
    used = list(scene.model["used"].parameters())
    for p, gradient in zip(used, torch.autograd.grad(scene.loss(), used), strict=True):
        p.grad = gradient


def scaled(scene: Scene) -> None:
    scene.loss().backward()
    for p in scene.parameters:
        p.grad.mul_(0.1)  # type: ignore[union-attr]


def clipped(scene: Scene) -> None:
    scene.loss().backward()
    nn.utils.clip_grad_norm_(scene.parameters, 0.01)


def thrown_away(scene: Scene) -> None:
    scene.loss().backward(retain_graph=True)
    scene.model.zero_grad()
    scene.loss().backward()


def dropped(scene: Scene) -> None:
    scene.loss().backward()
    scene.model.zero_grad()


def dropped_in_place(scene: Scene) -> None:
    scene.loss().backward()
    scene.model.zero_grad(set_to_none=False)


def clipped_once_unscaled(scene: Scene) -> None:
    unscaled(scene)
    nn.utils.clip_grad_norm_(scene.parameters, 0.01)


def unscaled(scene: Scene) -> None:
    scene.loss().backward()
    is_changed = scene.watch.is_changed
    scene.dense.scale_(0.25)
    scene.watch.scaled(is_changed)


def plain(scene: Scene) -> None:
    scene.zero_grad()
    scene.loss().backward()


def twice(scene: Scene) -> None:
    loss = scene.loss()
    loss.backward(retain_graph=True)
    loss.backward()


def cleared_by_the_model(scene: Scene) -> None:
    scene.model.zero_grad()
    scene.loss().backward()


def cleared_in_place(scene: Scene) -> None:
    scene.model.zero_grad(set_to_none=False)
    scene.loss().backward()


def skipped(scene: Scene) -> None:
    scene.loss().backward()
    scene.zero_grad()


def skipped_by_the_model(scene: Scene) -> None:
    scene.model.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    "loop", [by_tasks, by_hand, scaled, clipped, thrown_away, dropped, dropped_in_place, clipped_once_unscaled]
)
def test_gradients_that_the_script_writes_are_seen(loop: Loop) -> None:
    scene = Scene()
    loop(scene)
    assert scene.taken()
    plain(scene)
    assert not scene.taken()


@pytest.mark.parametrize(
    "loop", [plain, twice, cleared_by_the_model, cleared_in_place, skipped, skipped_by_the_model, unscaled]
)
def test_what_backward_passes_write_is_no_change(loop: Loop) -> None:
    scene = Scene()
    for _ in range(3):
        loop(scene)
        assert not scene.taken()


def test_the_hooks_are_removed_after_the_first_micro_batches() -> None:
    scene = Scene()
    for _ in range(_MICRO_BATCHES):
        assert any(p._post_accumulate_grad_hooks for p in scene.parameters)
        plain(scene)
        scene.taken()
    assert not any(p._post_accumulate_grad_hooks for p in scene.parameters)
    scaled(scene)
    assert not scene.taken()
