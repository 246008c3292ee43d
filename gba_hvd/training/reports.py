"""Reports to callbacks, the log and the host's board: the training's steps, and warnings beside them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gba_hvd.callbacks import OWN_POINT, Callback, Event, StepRecord
from gba_hvd.comm import traffic
from gba_hvd.comm.collectives import World
from gba_hvd.comm.traffic import Traffic
from gba_hvd.comm.wait_notices import LATE_S, Patience, missing
from gba_hvd.embedding.accesses import were_changed
from gba_hvd.trace import TRACE
from gba_hvd.training.commit_fields import StepParticipant
from gba_hvd.training.job_state import LocalHost, Passed, Progress
from gba_hvd.training.model import TrainedModel
from gba_hvd.training.parameter_watch import names_in_words
from gba_hvd.training.pauses import JOINED, LEFT, LOSS, Pause, Pauses
from gba_hvd.training.settings_watch import changes
from gba_hvd.training.vocabulary_watch import VocabularyWatch, in_words

log = logging.getLogger("gba_hvd")

# Of level "info", and logged on rank 0 where no callback shows them: what a person looks for when a job is slow to
# start, or is started again.
_LOGGED = frozenset({
    "started", "continued", "resumed", "memory_not_kept", "server_missing", "server_awaited", "workers_awaited",
    "device_rows",
    "faults_lasting", "checkpoint_unchanged", "checkpoint_awaited", "server_restarted", "auto_stayed",
    "training_continues", "learning_rates_set", "switch", "worker_works",
})  # fmt: skip


_AFTER = {LOSS: "the loss of a worker", JOINED: "workers were let in", LEFT: "workers left"}


class Reports:
    """One worker's. Belongs to the training thread.

    world: the present one. participants: those of the job, which say what waits for servers
    """

    def __init__(
        self,
        model: TrainedModel,
        progress: Progress,
        host: LocalHost,
        world: Callable[[], World],
        participants: Iterable[StepParticipant],
        traffic: Traffic,
    ) -> None:
        self.callbacks: list[Callback] = []
        self._model, self._progress, self._host, self._world = model, progress, host, world
        self._participants, self._traffic = participants, traffic
        self._server_patience = Patience(again_s=LATE_S)
        self._vocabularies = VocabularyWatch(model.tables)
        self._vocabularies_at: int | None = None  # step of the newest point of their own
        self._n_refused = 0
        self._reported: set[str] = set()  # kinds of events, and modes, see `once`
        self._full: set[str] = set()  # tables of which it was reported
        self._looked_for_unused = False
        self._ended_s = time.perf_counter()
        self._has_stepped = False
        self._rates: tuple[int, list[float]] | None = None  # before the newest micro-batch, and the step
        self.n_working: int | None = None  # in an asynchronous mode, while the next world forms
        self.pauses = Pauses()

    def emit(self, event: Event, only_here: bool = False, after_end: bool = False) -> None:
        """Report an event to all callbacks; rank 0 also logs warnings, and of others those that nothing shows.

        only_here: no other worker has this event, so it is logged on any rank. after_end: of the job, so it is
        logged alone.
        """
        if TRACE is not None:
            TRACE.write("event", kind=event.kind, step=event.step, message=event.message, level=event.level)
        if event.kind == "resumed":
            self._full.clear()  # the warning is over: the table may have room now
            self._vocabularies_at = None  # its step may come again
        for callback in () if after_end else self.callbacks:
            callback.on_event(event)
        rank = self._world().rank
        is_shown = rank == 0 and any(getattr(one, "shows_events", False) for one in self.callbacks)
        if (only_here or rank == 0) and (event.level == "warning" or (event.kind in _LOGGED and not is_shown)):
            level = logging.WARNING if event.level == "warning" else logging.INFO
            log.log(level, "[%s] step %d: %s", event.kind.replace("_", " "), event.step, event.message)

    def once(self, event: Event, only_here: bool = False, of: str = "") -> None:
        """Report an event unless one of its kind was reported with this before.

        of: a mode, or words, if it is once for each
        """
        what = f"{event.kind} {of}".rstrip()
        if what not in self._reported:
            self._reported.add(what)
            self.emit(event, only_here)

    @property
    def seconds_since_step(self) -> float:
        """Since this worker saw a step end."""
        return time.perf_counter() - self._ended_s

    def worker_lost(self) -> None:
        """The next step ends the pause that the loss costs."""
        self.pauses.begin(LOSS)

    def world_forms(self, before: int | None) -> None:
        """In allreduce mode, between two steps, before the workers share a state, by which late joiners know the pause.

        before: workers in the world that this worker was in, if it was in one
        """
        if before is not None:
            self.pauses.begin(LEFT if self._world().size < before else JOINED)

    def after_world_forms(self, before: int | None) -> None:
        """In allreduce mode: training can continue, and the next step ends the pause."""
        self.n_working = None
        self.pauses.world_formed()
        if before is not None:
            self._ended_s = time.perf_counter()  # no part of the next step's time

    def count_workers(self, n_workers: int, is_forming: bool) -> None:
        """In an asynchronous mode: the servers hear so many workers.

        is_forming: the next world is, so that the one there was has workers that are gone
        """
        self.n_working = n_workers if is_forming else None

    # --- steps -------------------------------------------------------------------------------------------------------

    def loop_begins(self) -> None:
        """The script asks for batches. What came before its first step (a start, an evaluation) is not time of it."""
        if not self._has_stepped:
            self._ended_s = time.perf_counter()
        self._progress.hooks.loop_begins(self._model.optimizer, self._progress.step)

    def step(
        self,
        n_samples: int,
        loss: float | None,
        mode: str,
        grad_norm: float | None,
        norms: tuple[float, ...] = (),
        lrs: tuple[float, ...] = (),
    ) -> None:
        """One step ended, or several that servers made.

        norms: of each of them, as far as they are known. lrs: dense learning rates before the functions of `on_step`
        """
        progress = self._progress
        for name in progress.hooks.too_fast(progress.step):
            text = (
                f"the scheduler {name!r} stepped more often than global steps were made, so its schedule depends on "
                "the number of workers; call state.on_step(scheduler.step) instead of scheduler.step() in the loop"
            )
            self.emit(Event("scheduler_too_fast", progress.step, text, {"scheduler": name}, level="warning"))
        now, applied = time.perf_counter(), progress.account.applied
        at = (progress.step, progress.cursor.epoch)
        seconds, workers = now - self._ended_s, self.n_working or self._world().size
        record = StepRecord(*at, n_samples, applied, seconds, workers, mode, loss, grad_norm, norms, lrs)
        self._ended_s, self._has_stepped = now, True
        if (pause := self.pauses.stepped(progress.step)) is not None:
            self._pause_ended(pause, mode, workers)
        if self._host.board is not None:
            asked = next(filter(None, (one.missing_mode(mode) for one in self._participants)), "")
            waits = any(one.waits_to_enter for one in self._participants)
            self._host.board.show(*at, progress.cursor.steps_done, progress.n_steps, applied, loss, mode, asked, waits)
        for callback in self.callbacks:
            callback.on_step(record)
        self.vocabularies()
        self.device_rows()

    def _pause_ended(self, pause: Pause, mode: str, workers: int) -> None:
        so_far_s, step = self.pauses.total_s, self._progress.step
        text = (
            f"training continues after {_AFTER[pause.cause]}: it stood still for {pause.seconds:.1f} s, and step "
            f"{step} is done, by {workers} worker{'s' * (workers > 1)} in mode {mode}; it has stood still for "
            f"{so_far_s:.1f} s so far"
        )
        data = {"seconds": pause.seconds, "workers": workers, "cause": pause.cause, "so_far_s": round(so_far_s, 3)}
        self.emit(Event("training_continues", step, text, data))

    def job_ends(self, *, finished: bool) -> None:
        """Report a pause that no step ended."""
        if (pause := self.pauses.job_ends(finished=finished)) is None:
            return
        text = f"training had stood still for {pause.seconds:.1f} s, after {_AFTER[pause.cause]}, when the job ended"
        data = {"seconds": pause.seconds, "cause": pause.cause, "so_far_s": round(self.pauses.total_s, 3)}
        self.emit(Event("ended_in_pause", self._progress.step, text, data))

    def device_rows(self) -> None:
        """What was decided about a device that looks rows up, since this was called last."""
        decisions = self._model.tables.on_device.decisions
        while decisions:
            decision = decisions.pop(0)
            level: Literal["info", "warning"] = "warning" if decision.is_warning else "info"
            event = Event("device_rows", self._progress.step, decision.text, level=level)
            self.emit(event, only_here=not decision.by_device)

    def not_compared(self, words: str) -> None:
        """words: of `reading.trained_vocabularies.not_compared`; empty: there is nothing to report."""
        if words:
            self.once(Event("vocabulary_not_compared", self._progress.step, words, level="warning"))

    def scaling_differs(self, words: str) -> None:
        """Once for each pair of scalings. words: of `reading.trained_scaling.other_scaling`; empty: nothing differs."""
        if words:
            text = (
                f"{words}. Prepare the log with the means of the store that was trained (gba-hvd data prepare ... "
                "--like STORE). `log.dense_scaling = None` leaves the comparison out"
            )
            self.once(Event("scaling_differs", self._progress.step, text, level="warning"), of=words)

    def vocabularies(self, now: bool = False) -> None:
        """Every few seconds, or now: on the board of each host, and from the chief as gauges; once, of a full table.

        now: as after the newest step, and a point of its own where this launch has made steps since the one before
        """
        if self._host.board is None and self._world().rank != 0:
            return
        if not (found := self._vocabularies.look(self._progress.step if now else None)):
            return
        if self._host.board is not None:
            self._host.board.show_vocabulary(found)
        if self._world().rank != 0:
            return
        own_point = now and self._has_stepped_since_point
        if own_point:
            self._vocabularies_at = self._progress.step
        data = {"vocabulary": found, **({OWN_POINT: True} if own_point else {})}
        self.emit(Event("rates", self._progress.step, in_words(found), data))
        for name, text in self._vocabularies.full():
            if name not in self._full:
                self._full.add(name)
                data = {"table": name, "no_room": found[name]["no_room"]}
                self.emit(Event("table_full", self._progress.step, text, data, level="warning"))

    def last_vocabularies(self) -> None:
        """At the end of the launch, where it ends within an epoch."""
        if self._has_stepped_since_point:
            self.vocabularies(now=True)

    @property
    def _has_stepped_since_point(self) -> bool:
        return self._progress.step not in (self._vocabularies_at, self._progress.launched_at)

    def unused_tables(self) -> None:
        """At the end of an epoch, once in a process: on rank 0, warn of tables of which no row was looked up."""
        tables, memory = self._model.tables, self._model.tables.memory
        if self._looked_for_unused or self._world().rank != 0 or memory is None or not tables.looked_up:
            return
        self._looked_for_unused = True
        never = set(tables.tables) - tables.looked_up
        found = [
            table for table in tables.layout.tables if table.name in never and not were_changed(memory, table.name)
        ]
        if not found:
            return
        names = ", ".join(f"{table.name!r} ({table.n_rows:,} rows of {table.dim})" for table in found)
        text = (
            f"{names}: the first epoch has looked up no row here, so nothing trains them, and they take memory and "
            "room in checkpoints. Do the ids reach the model, under the name of the table or of one of its features? "
            "Otherwise leave the table out"
        )
        data = {"tables": [table.name for table in found]}
        self.emit(Event("table_unused", self._progress.step, text, data, level="warning"))

    def passed(
        self,
        passed: Passed | None,
        loss: float | None,
        mode: str,
        grad_norm: float | None,
        norms: tuple[float, ...] = (),
        lrs: tuple[float, ...] = (),
    ) -> None:
        """What servers did since their last report to this worker: functions of the script run for it first."""
        if passed is None:
            return
        try:
            self._progress.hooks.run(self._progress.n_applied)
        finally:  # it is counted
            if passed.skipped > 0 and passed.scale:
                self.overflow(passed.skipped, passed.scale)
            if passed.steps:
                self.step(passed.samples, loss, mode, grad_norm, norms, lrs)

    def overflow(self, n_steps: int, before: float) -> None:
        """So many steps up to this one were skipped. before: the scale until then."""
        loss_scale, step = self._progress.loss_scale, self._progress.step
        assert loss_scale is not None
        now, so_far = loss_scale.scale, self._progress.account.steps_skipped
        which = f"step {step}" if n_steps == 1 else f"{n_steps} of the steps up to {step}"
        text = (
            f"{which} overflowed at loss scale {before:g}: skipped on all workers, its samples count as dropped. "
            f"The scale is {now:g} now; skipped so far: {so_far}"
        )
        if now < 1.0:
            text += ". A scale below 1 means that gradients are too large without it: lower the learning rate"
        data = {"scale": now, "so_far": so_far}
        self.emit(Event("overflow", step, text, data, level="warning" if now < 1.0 else "info"))

    # --- beside them -------------------------------------------------------------------------------------------------

    def reported_by_some(self) -> None:
        """Warn where some workers have reported scores and others none; once. A collective.

        Workers that report beside each micro-batch have different numbers of them.
        """
        world, step = self._world(), self._progress.step
        if world.size == 1:
            return
        counts = [int(n) for n in world.gather("reports", np.array([self._progress.n_reported], dtype=np.int64))[:, 0]]
        if not min(counts) == 0 < max(counts):
            return
        by_rank = ", ".join(f"{n} by rank {rank}" for rank, n in enumerate(counts[:8])) + ", ..." * (len(counts) > 8)
        text = (
            f"state.report(...) was called with scores on some workers only ({by_rank}): call it on all of them. What "
            "rank 0 does not report is shown nowhere, and what it alone reports is lost with it, if it dies"
        )
        self.once(Event("reported_by_some", step, text, {"reports": counts}, level="warning"))

    def gradient(self, micro: int) -> None:
        """Before a micro-batch is taken in: warn where it has none, and of what the script did to gradients and to
        learning rates; once in a process."""
        self._changed_gradients()
        self._rates_within_step()
        if self._model.has_gradient:
            return
        text = (
            f"micro-batch {micro} has no gradient: no row and no dense parameter got one before optimizer.step(), so "
            "it counts as zeros. Call loss.backward() before; where a batch is meant to have none, nothing is wrong"
        )
        self.once(Event("no_gradient", self._progress.step, text, {"micro_batch": micro}, level="warning"), True)

    def refused(self, micro: int, what: str) -> None:
        """The gradient of a micro-batch was not sent, since `what` is not finite."""
        self._n_refused += 1
        if self._n_refused > 10 and self._n_refused.bit_count() > 1:
            return  # after ten, the 16th, 32nd, ... are reported
        epoch = self._progress.cursor.epoch
        text = f"micro-batch {micro} of epoch {epoch}: {what} is not finite; its gradient is dropped"
        data = {"micro_batch": micro, "what": what, "so_far": self._n_refused}
        self.emit(Event("refused", self._progress.step, text, data, level="warning"), only_here=True)

    def missing_servers(self) -> None:
        """After a commit, on rank 0 and on leaders of hosts whose servers are late, or cannot start: what waits."""
        waiting = [one for participant in self._participants for one in participant.waiting]
        waited_s = self._server_patience.word(bool(waiting), time.monotonic())
        if waited_s is None:
            return
        server = self._host.server
        if waited_s < LATE_S and (server is None or not server.why_not_started()):
            return
        to_enter = any(one.waits_to_enter for one in self._participants)
        own = "" if server is None else server.why_not_ready(to_enter=to_enter)
        if own or self._world().rank == 0:
            self.emit(missing(self._progress.step, waiting, waited_s, own), only_here=True)

    def other_writers(self) -> None:
        """Name parameters that change between the optimizer's steps; once in a process."""
        if found := self._model.parameter_watch.written_by_others():
            text = (
                f"{names_in_words(found)}: the values change between the steps of the DistributedOptimizer, step after "
                "step, so another optimizer or the script writes them. Workers do not exchange such changes, and in "
                "asynchronous modes the servers' values overwrite them. Give each parameter to the "
                "DistributedOptimizer alone (groups can have settings of their own); a change that is the same on "
                "every worker, such as a clamp, is kept in allreduce mode only"
            )
            event = Event("parameters_written", self._progress.step, text, {"parameters": found}, level="warning")
            self.emit(event)

    def _changed_gradients(self) -> None:
        """The script has changed gradients of dense parameters since `backward()`."""
        watch = self._model.gradient_watch
        is_changed = self._model.tables.n_trained > 0 and watch.is_changed
        watch.next()
        if not is_changed:
            return
        watch.stop()
        text = (
            "the gradients of dense parameters were changed, replaced or dropped between backward() and step(), and "
            "those of rows were not: rows train with what all backward() calls of the micro-batch gave. Clip with "
            "max_norm= and max_row_norm= of DistributedOptimizer; scale losses in place of gradients, and add those "
            "of several tasks before one backward(); optimizer.zero_grad() drops the gradients of rows, too. Where "
            "the dense part alone is meant, nothing is wrong"
        )
        self.emit(Event("gradients_changed", self._progress.step, text, {}, level="warning"))

    def _rates_within_step(self) -> None:
        """The script has set learning rates between two micro-batches of a step, without a scheduler."""
        optimizer = self._model.optimizer
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        before, self._rates = self._rates, (self._progress.step, rates)
        if before is None or before[0] != self._progress.step or before[1] == rates:
            return
        if "step" in vars(optimizer) or "rates" in self._reported:  # the former: a scheduler was made for it
            return
        self._reported.add("rates")
        text = (
            "a learning rate of the optimizer changed between two micro-batches of one step. The loop runs once per "
            "micro-batch of this worker, so the schedule depends on the number of workers: set rates in a function "
            "given to state.on_step(), which runs once per global step, or before the loop over an epoch's batches"
        )
        self.emit(Event("rate_changed_within_step", self._progress.step, text, {}, level="warning"))

    def rows_not_loaded(self, after_end: bool) -> None:
        """The script has loaded a `state_dict` of the model, after the first step; once in a process."""
        step = self._progress.step
        if not step or "rows_not_loaded" in self._reported:
            return
        self._reported.add("rows_not_loaded")
        text = (
            f"model.load_state_dict() sets the dense part alone; the rows are in shared tables and stay those of step "
            f"{step:,}, so the model may be of two different steps. CheckpointCallback(URL, keep_best='valid_auc') "
            "keeps both of the best epoch, and gba-hvd model export --best, or LogModel(of='best'), uses them. Where "
            "the dense part alone is meant, as of averaged weights for an evaluation, nothing is wrong"
        )
        self.emit(Event("rows_not_loaded", step, text, {}, level="warning"), after_end=after_end)

    def row_settings(self) -> None:
        """Name settings of the tables' group that were changed, and that rows do not follow; once in a process."""
        if "row_settings_not_followed" not in self._reported and (found := self._model.changed_row_settings):
            text = (
                f"the optimizer's group of the tables: {found}. Rows follow the group's lr, and have all else from "
                f"{type(self._model.tables.optimizer).__name__}(...), which was given to the tables: change it there. "
                "A scheduler that moves betas or momentum as well can leave them, as "
                "OneCycleLR(cycle_momentum=False) does"
            )
            self.once(Event("row_settings_not_followed", self._progress.step, text, {}, level="warning"))

    def dense_settings(self, mode: str, in_use: Sequence[Mapping[str, Any]]) -> None:
        """Name settings of dense groups that were changed, and that servers do not follow; once in a process.

        in_use: of each group, as the servers have them, those that they do not follow
        """
        if "dense_settings_not_followed" in self._reported:
            return
        groups = enumerate(zip(self._model.dense_settings, in_use, strict=False))
        if found := [f"group {i}: {words}" for i, (now, used) in groups if (words := changes(now, used))]:
            text = (
                f"mode {mode!r}, {'; '.join(found)}. Servers follow numbers and tuples of numbers, and under a rule "
                "that takes over the optimizer's momentum (dana_zero, dana_slim, dana_dc, delayed_nesterov) the lr "
                "alone; they have all else as it was when the mode began. It is followed in allreduce mode, and taken "
                "over when a mode begins: stay in allreduce mode, train with another rule, or use a scheduler that "
                "moves lr alone, such as OneCycleLR(cycle_momentum=False)"
            )
            self.once(Event("dense_settings_not_followed", self._progress.step, text, {"mode": mode}, level="warning"))

    def compression(self) -> None:
        """What was decided about compressing since this was called last."""
        for compressor in (self._model.compression, self._model.row_coder):
            if compressor is None:
                continue
            while compressor.decisions:  # other threads add to them
                d = compressor.decisions.pop(0)
                data = {"compressor": str(compressor.spec), "compress": d.compress, "bypassed": d.bypassed}
                self.emit(Event("compression", self._progress.step, d.reason, data))

    def traffic(self) -> None:
        """At the end of an epoch: bytes on this worker's wires since the last one, and what compression left behind.

        Also the bytes of all workers, so far in the job.
        """
        model, step = self._model, self._progress.step
        self.device_rows()
        n_bytes = self._traffic.since_last()
        data: dict[str, Any] = {"bytes": n_bytes, "all_workers": traffic.by_name(self._progress.traffic)}
        if model.compression is not None:
            density = model.compression.feedback.thresholds.density
            data["density"] = {n: d for n, d in zip(model.names, density, strict=True) if d}
            data["residual"] = model.compression.feedback.residual_size
        if model.row_coder is not None:
            data |= {"row_density": model.row_coder.density, "row_residual_lost": model.row_coder.lost}
        if (share := model.tables.on_device.hit_share) is not None:
            for callback in self.callbacks:
                callback.on_metrics(step, {"hot_rows_hit_share": share})
        if n_bytes or data["all_workers"]:
            sent, received = traffic.sent_received(self._progress.traffic)
            here = traffic.words(n_bytes) or "this worker has sent nothing over the network since the last line"
            text = f"{here}; {traffic.words_of_all(sent, received)}"
            self.emit(Event("traffic", step, text, data))
            metrics = {f"bytes_{name}": float(n) for name, n in n_bytes.items()}
            metrics |= {"job/bytes_sent": float(sent), "job/bytes_received": float(received)}
            for callback in self.callbacks:
                callback.on_metrics(step, metrics)
