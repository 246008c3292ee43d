"""Epochs whose loop was left with steps to come: what of them was trained, and what was computed and is in no count.

Decided here: what is reported of them. A loop is left by `break`, `return`, `sys.exit` or an error, which look alike
while they happen: that is settled by what comes next, another epoch or the end of the job. No clock, no mode.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LeftEpoch:
    """segment: of the epoch, None: it has none. step: the job's at that time.

    steps_done, n_steps, n_trained, n_samples: of the epoch or segment. n_computed: samples of the next step that
    `n_workers` computed, and that was not applied. steps_together: as of the mode; where that is false, these wait at
    the servers, and the workers that stay may complete the step
    """

    epoch: int
    segment: int | None
    step: int
    steps_done: int
    n_steps: int
    n_trained: int
    n_samples: int
    n_computed: int
    n_workers: int
    steps_together: bool = True

    @property
    def name(self) -> str:
        return f"epoch {self.epoch}" + ("" if self.segment is None else f", segment {self.segment}")

    @property
    def is_within_step(self) -> bool:
        return self.n_computed > 0

    def words(self, *, at_end: bool) -> str:
        """at_end: of the training function; else another epoch begins."""
        text = (
            f"{self.name} was left after {self.steps_done:,} of {self.n_steps:,} steps: {self.n_trained:,} of "
            f"{self.n_samples:,} samples were trained"
        )
        if not self.steps_together:
            return f"{text}, and {self._waiting}"
        if self.is_within_step:
            if_alike = " (if all workers left at the same batch)" * (self.n_workers > 1)
            text += (
                f", and {self.n_computed:,} were computed for step {self.step + 1:,}, which was not applied: they are "
                f"in no count{if_alike}. A `break` belongs where `state.step` has changed"
            )
        rest = "is trained by a launch that asks for this epoch" if at_end else "is not trained"
        return f"{text}. The rest of the epoch {rest}"

    @property
    def _waiting(self) -> str:
        return (
            f"{self.n_computed:,} samples that were computed wait for step {self.step + 1:,}, which is not complete: "
            "they are in no count unless another worker trains the rest of the epoch"
        )

    @property
    def words_alone(self) -> str:
        """Of one of several workers, which does not know where the others are."""
        if not self.steps_together:
            return f"left the loop over batches of {self.name} after step {self.step:,}: {self._waiting}"
        where = f"within step {self.step + 1:,}" if self.is_within_step else f"after step {self.step:,}"
        return (
            f"left the loop over batches of {self.name} {where}, with steps to come: the others need it for these, so "
            "all workers leave the loop at the same step"
        )

    @property
    def facts(self) -> dict[str, int]:
        return {
            "epoch": self.epoch, "steps_done": self.steps_done, "steps": self.n_steps,
            "samples_trained": self.n_trained, "samples": self.n_samples, "samples_computed": self.n_computed,
        }  # fmt: skip


class LeftEpochs:
    """One worker's, in this launch. newest: what the loop that was left last has left, until that is settled."""

    def __init__(self) -> None:
        self.newest: LeftEpoch | None = None
        self._settled: list[LeftEpoch] = []

    def forget(self) -> None:
        """The loop was left for an error that the job survives: its epoch continues."""
        self.newest = None

    def settle(self, epoch: int | None = None) -> LeftEpoch | None:
        """What was left for good. epoch: the one that begins, None: the job ends."""
        left, self.newest = self.newest, None
        if left is None or left.epoch == epoch:
            return None
        self._settled.append(left)
        return left

    @property
    def words(self) -> str:
        """Of all, for the account at the end; empty: there were none."""
        if not self._settled:
            return ""
        shown = [f"{one.name} ({one.n_trained:,} of {one.n_samples:,} samples trained)" for one in self._settled[:4]]
        shown += ["..."] * (len(self._settled) > 4)
        n_computed = sum(one.n_computed for one in self._settled)
        lost = f"; {n_computed:,} samples were computed for steps that were not applied, and are in no count"
        return f"left early: {', '.join(shown)}{lost if n_computed else ''}"
