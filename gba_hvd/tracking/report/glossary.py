"""What the words of the report mean, for readers who do not know the project: those that a page uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gba_hvd.tracking.gauges import ELP

if TYPE_CHECKING:
    from gba_hvd.tracking.run_history import RunHistory


def words_of(story: RunHistory) -> dict[str, str]:
    """By word; in the order in which they build on each other."""
    modes = {span.mode for span in story.spans}
    words = {
        "step": "one update of the model, made from one global batch of samples, however many workers there are",
        "worker": "a process that computes gradients",
        "row": "what an embedding table holds for one id",
        "mode": "how gradients reach the model",
    }
    if "allreduce" in modes:
        words["allreduce"] = "the mode in which all workers wait for each other in every step"
    if "gba" in modes:
        words["gba"] = "the mode in which no worker waits: a step is made of the gradients that have arrived"
    if story.staleness:
        words["staleness"] = "how many steps late a gradient was when it became part of one"
    if story.account:
        words["dropped samples"] = "they were left out on purpose: too stale, or without a finite gradient"
        words["lost samples"] = "they were gone with a failure"
    if story.checkpoints:
        words["checkpoint"] = "the state of the job, or a part of it, in a store: what a failure can go back to"
    if story.recoveries:
        words["PLS"] = "portion of lost samples: the share of all training that the rows which were lost have no longer"
    if story.last(ELP) is not None:
        words["ELP"] = "example-level parallelism: samples that all workers together compute on at a time"
    return words
