"""Reports to callbacks on the world and the end: which job they are in, who joined or left, and what that cost.

Nothing is decided here; texts and numbers are made of what `membership` found.
"""

from gba_hvd.elastic.job_events.end import ended, left_early
from gba_hvd.elastic.job_events.not_restored import residuals_lost
from gba_hvd.elastic.job_events.start import parameters_changed, training_begins
from gba_hvd.elastic.job_events.world import pauses_for_workers, worker_gone, world_formed, world_was_late

__all__ = [
    "ended",
    "left_early",
    "parameters_changed",
    "pauses_for_workers",
    "residuals_lost",
    "training_begins",
    "worker_gone",
    "world_formed",
    "world_was_late",
]
