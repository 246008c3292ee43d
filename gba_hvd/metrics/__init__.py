"""Metrics of evaluations: AUC, log loss, errors of ratings, AUC per group, rankings; the states that workers send."""

from __future__ import annotations

from gba_hvd.metrics.scores import Scores, TaskScores, exact_auc

__all__ = ["Scores", "TaskScores", "exact_auc"]
