"""OUT/summary.json: what a job was, how well it did and how it ended; there from the first step on.

Two times, in seconds: `seconds` is of training, from the first epoch's start to the last evaluation, restarts included;
`seconds_in_all` is of the process that wrote the file, with the preparations, the last checkpoint and the end.

Written when the world forms, after each epoch, with each warning and at the end, by the chief, in one rename: a program
that reads it finds a whole one. What each ending leaves behind:

- finished, failed, interrupted (Ctrl-C, SIGTERM): `status` FINISHED, FAILED or KILLED, and `error`
- killed outright (SIGKILL, a lost host): what was written last, with `status` RUNNING and `written`, the time of it
- stopped before training (no data, wrong settings): `status` FAILED, `error`, no figures
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, time
from typing import Any

from ctr.config import JobConfig
from ctr.datasets import Splits
from ctr.measures import selects, title_of
from ctr.norm_log import NormLog
from ctr.recovery_log import RecoveryLog, recovery_summary
from ctr.switch_log import SwitchLog, staleness_summary
from gba_hvd.callbacks import Callback, Event, Job
from gba_hvd.tracking.open_warnings import ends, is_over_at_once

_MOST_WARNINGS = 200
log = logging.getLogger("gba_hvd")


class JobSummary(Callback):
    """Writes the file. `attach` sets the job, once there is one.

    warnings: every event of level "warning", each {"kind", "step", "message", "data", "over_at_step"}, up to 200; the
        rest is counted. over_at_step: since then it does not hold any more; null: it does, or reports what happened
    stopped_early: why training ended before its last epoch; null: it did not
    """

    def __init__(self, out: Path, config: JobConfig) -> None:
        self.file = out / "summary.json"
        self.config = config
        self.switch_log, self.recovery_log, self.norm_log = SwitchLog(), RecoveryLog(out), NormLog()
        self.warnings: list[dict[str, Any]] = []
        self.warnings_left_out = 0
        self.stopped_early: str | None = None
        self._state: Any = None
        self._splits: Splits | None = None
        self._chief = os.environ.get("HOROVOD_RANK", "0") == "0"  # until the world is known
        self._ended, self._began_s = False, monotonic()

    def attach(self, state: Any, splits: Splits) -> None:
        """state: a TorchState with `best`, `last`, `epochs_done`, `epochs`, `started_unix_s`"""
        self._state, self._splits = state, splits

    def on_job(self, job: Job) -> None:
        self._chief = job.is_chief
        self.write()

    def on_event(self, event: Event) -> None:
        over = [
            one
            for one in self.warnings
            if one["over_at_step"] is None and ends(one["kind"], one["data"], event.kind, event.data)
        ]
        for one in over:
            one["over_at_step"] = event.step
        if event.kind == "stopped_early":
            self.stopped_early = event.message
        if event.level == "warning":
            self._warned(event)
        if over or event.level == "warning":
            self.write()

    def _warned(self, event: Event) -> None:
        over = event.step if is_over_at_once(event.kind, event.data) else None
        if len(self.warnings) < _MOST_WARNINGS:
            words = {"kind": event.kind, "step": event.step, "message": event.message}
            self.warnings.append({**words, "data": dict(event.data), "over_at_step": over})
        else:
            self.warnings_left_out += 1

    def on_end(self, status: str, error: BaseException | None) -> None:
        self._ended = True
        self.write(status, error)

    def failed_before_training(self, error: BaseException) -> None:
        """The job ends and no callback was called."""
        if not self._ended:
            self.on_end("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED", error)

    def state_dict(self) -> dict[str, Any]:
        return {"warnings": self.warnings, "warnings_left_out": self.warnings_left_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.warnings, self.warnings_left_out = list(state["warnings"]), int(state["warnings_left_out"])

    def write(self, status: str = "RUNNING", error: BaseException | None = None) -> None:
        """On the chief. A file that cannot be written is logged, and stops no training."""
        if not self._chief:
            return
        text = json.dumps(self.values(status, error), indent=2) + "\n"
        fresh = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self.file)
        except OSError as problem:
            log.warning("%s is not up to date: %s; name another folder with --out", self.file, problem)

    def values(self, status: str, error: BaseException | None) -> dict[str, Any]:
        """`auc`, `logloss`, `valid_auc` and `valid_logloss` are those of `best_epoch`, the best by validation AUC.

        Of a retrieval these are `recall_at_50` and `ndcg_at_50`, and the best epoch is the best by recall.
        """
        config, splits, state = self.config, self._splits, self._state
        head = {
            "name": config.name,
            "status": status,
            "error": None if error is None else f"{type(error).__name__}: {error}".rstrip(": "),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "seed": config.seed,
            "model": config.model.kind,
            "data": config.data.dir or config.data.preset or "synthetic",
            "stopped_early": self.stopped_early,
            "warnings": self.warnings,
            "warnings_left_out": self.warnings_left_out,
        }
        if state is None or splits is None:
            return head
        finished, by = state.epochs_done == config.train.epochs, selects(config)
        return {
            **head,
            **({"auc": None, "logloss": None} if by == "auc" else {by: None}),
            "best_epoch": None,
            **state.best,
            f"{by}_last": state.last if finished else None,
            f"{by}_bayes": splits.auc_bayes if by == "auc" else splits.recall_bayes,
            "by_epoch": state.by_epoch,
            "samples_total": state.samples.total,
            "samples_applied": state.samples.applied,
            "samples_dropped": state.samples.dropped,
            "samples_lost": state.samples.lost,
            "samples_redone": state.samples.redone,
            "refused": state.engine.progress.refused,
            "reissued": state.engine.progress.reissued,
            "staleness": staleness_summary(state.engine.progress.staleness),
            "dense_age": staleness_summary(state.engine.progress.dense_ages),
            "gap": {
                str(rank): {"mean": gap / n, "mean_in_steps": in_steps / n}
                for rank, (n, gap, in_steps, _) in sorted(state.engine.progress.gaps.items())
            },
            "grad_norms": self.norm_log.norms,
            "switches": self.switch_log.switches,
            **recovery_summary(self.recovery_log.events()),
            "restarts": state.engine.progress.changes,
            "workers": state.world.size,
            "steps": state.step,
            "epochs": state.epochs_done,
            "seconds": round(state.seconds or time() - state.started_unix_s, 2),
            "seconds_in_all": round(monotonic() - self._began_s, 2),
        }

    def closing_line(self) -> str:
        """One sentence for a person."""
        state = self._state
        if not state.best:
            by = title_of(selects(self.config))
            return f"{self.config.name}: no best epoch, as validation {by} was never defined; {self.file}"
        best, by = state.best, selects(self.config)
        second = "logloss" if by == "auc" else by.replace("recall", "ndcg")
        found = {f"valid {title_of(by)}": best[f"valid_{by}"]} | {f"test {title_of(n)}": best[n] for n in (by, second)}
        values = ", ".join(f"{name} {value:.5f}" for name, value in found.items())
        return (
            f"{self.config.name}: best epoch {best['best_epoch']} (of 0 to {state.epochs_done - 1}, by validation): "
            f"{values}; {self.file}"
        )


def stopped_early(state: Any, config: JobConfig) -> Event:
    """Training ends before its last epoch, because the last ones were no better."""
    n, epochs = state.epochs_without_gain, f"{state.epochs_done} of {config.train.epochs} epochs"
    limit = f"{n} epoch{'s' * (n != 1)} (train.early_stop={config.train.early_stop})"
    by = title_of(selects(config))
    text = f"stopped early: no gain in valid {by} for {limit}, after {epochs}; train.early_stop=0 trains them all"
    return Event("stopped_early", state.step, text, {"epochs": state.epochs_done, "epochs_without_gain": n})
