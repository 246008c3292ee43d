"""Rule "staleness_lr": the older the values that gradients were computed with, the shorter the step.

    learning rate of the step = lr / max(1, mean staleness of its pushes)

Staleness is in steps: those applied since the dense values that a push was computed with; the mean is weighted by what
the pushes count. Fresh pushes, and those one step old, step as without the rule. Any optimizer. Nothing is kept.
"""

from __future__ import annotations

from gba_hvd.update_rules.rule import ByOptimizer, NewValues, Plain, Step


class StalenessLr(Plain):
    def act(self, step: Step) -> ByOptimizer | NewValues:
        total = sum(push.share for push in step.pushes)
        mean = sum(push.share * push.staleness for push in step.pushes) / total if total else 0.0
        return ByOptimizer([lr / max(1.0, mean) for lr in step.lrs])
