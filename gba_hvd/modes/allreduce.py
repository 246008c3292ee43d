"""The allreduce mode: all workers make a global step together, each from its share of the micro-batches. Decided here:
which share, by rank.

One step, on every worker: what is due between steps (`EpochRun.between_steps`), a change of mode if all agreed on one,
the share's micro-batches, then the step is closed: exchange, commit, apply (see `allreduce_exchange` for what a crash
at each point leaves behind). Workers without a share close steps, too: each of these is a collective.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from gba_hvd.embedding.on_device.row_gradients import RowGrads
from gba_hvd.embedding.row_gradients import merge, with_contributors
from gba_hvd.epoch import EpochPlan, shares
from gba_hvd.errors import GbaError, NonFiniteGradient, StateMismatch
from gba_hvd.gradients.clipping import Factors, squares
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.gradients.loss_scale import SKIPPED
from gba_hvd.modes import evaluation, retrieval
from gba_hvd.modes.allreduce_exchange import AllreduceExchange, Part
from gba_hvd.trace import TRACE
from gba_hvd.training.engine import Engine
from gba_hvd.training.job_state import Cursor
from gba_hvd.training.mode import (
    CountRun,
    EpochRun,
    EvaluationRun,
    MicroBatch,
    MicroGradients,
    RankFacts,
    Rejoin,
    RetrievalRun,
)
from gba_hvd.training.step_times import StepTimes
from gba_hvd.training.uninterrupted import uninterrupted

_MEASURED_EVERY, _MEASURED_FIRST = 20, 4  # which steps are of single micro-batches in any case
_OVERFLOWS = 100  # so many steps in a row are skipped for an overflow; then training ends


class AllreduceMode:
    """One worker in allreduce mode. Owns what is of the step in flight.

    exchange: carries the gradients; of one world, as this is. together: micro-batches of one batch in this step
    """

    name = "allreduce"
    steps_together = True
    servers = None
    survives_world = False

    def __init__(self, engine: Engine, exchange: AllreduceExchange) -> None:
        self._engine, self.exchange = engine, exchange
        self.rejoin: Rejoin | None = None
        self.together, self._is_measured = 1, False
        self._cut, self._step_of_epoch, self._began_s = EpochPlan(1, 1, 1), 0, 0.0
        self._rows: list[list[Part]] = []
        self._not_finite, self._bad_micro = "", -1
        self._times = StepTimes()
        self._seconds: list[float] = []  # of this worker's micro-batches in the step
        self._traced: list[int] = []  # their indices, where they are traced

    # --- the epoch ---------------------------------------------------------------------------------------------------

    def micro_batches(self, epoch: EpochRun) -> Generator[Any, None, bool]:
        """See `Mode.micro_batches`. The order of what is done between two steps is the same on all workers."""
        self.exchange.is_in_epoch = True
        try:
            return (yield from self._steps(epoch))
        finally:
            self.exchange.is_in_epoch = False

    def _steps(self, epoch: EpochRun) -> Generator[Any, None, bool]:
        engine, progress, cut = self._engine, self._engine.progress, epoch.cut
        at = epoch.epoch, epoch.segment
        first = progress.cursor.steps_done if progress.cursor.is_in(*at) else 0
        for step in range(first, cut.n_steps):
            epoch.between_steps()
            if engine.signals.requested_mode is not None:
                if not progress.cursor.is_in(*at):
                    progress.cursor = Cursor(epoch.epoch, step, segment=epoch.segment)
                if epoch.change_mode():
                    return False
            self.together = self._together_in(progress.step)
            epoch.expect(self._coming(cut, step))
            share = self._share(cut, step, self.together)
            self._begin_step(cut, at, step)
            read = self._times.reading(epoch.read(micros[0], len(micros)) for micros in share)
            if self.exchange.several_hosts:
                read = iter(loaded := list(read))
                with self._times.part("rows"):
                    self.exchange.pull(epoch.keys(loaded), bags=epoch.bags(loaded))
            for micros, batch in zip(share, read, strict=True):
                n_samples = sum(cut.samples_of_micro(index) for index in micros)
                engine.begin_micro_batch(micros[0], n_samples, is_last=micros == share[-1], n_micro=len(micros))
                yield batch
                engine.check_stepped()
            if not share:
                self._close_step()
            if progress.cursor.steps_done != step + 1:
                raise GbaError(
                    f"step {progress.step + 1} was not applied: leave the loop over batches when a step raises"
                )
        epoch.steps_done()
        return True

    def _coming(self, cut: EpochPlan, first: int) -> Iterator[range]:
        """This worker's batches from a step of the epoch on, if neither the world nor the mode changes."""
        ahead_by = self._engine.progress.step - first
        for step in range(first, cut.n_steps):
            yield from self._share(cut, step, self._together_in(step + ahead_by))

    def _share(self, cut: EpochPlan, step: int, together: int) -> list[range]:
        """This worker's batches of a step of the epoch, of so many micro-batches each.

        Single ones are those of its usual batches, whose lanes it has decoded, unless some workers would have none.
        """
        world, usual = self._engine.world, self._engine.model.together
        batches = cut.batches_of_step(step, usual)
        if together == usual or len(batches) < world.size:
            return cut.batches_of_step(step, together)[world.rank :: world.size]
        return [range(micro, micro + 1) for micros in batches[world.rank :: world.size] for micro in micros]

    def _together_in(self, step: int) -> int:
        """Micro-batches that are one batch in the step after `step`; the same on all workers.

        Where the pace of single ones counts, some steps are computed in these, to measure it. Commits say whether it
        does: a new world, in which a worker may have seen none, begins without.
        """
        engine = self._engine
        if self._is_measured and step % _MEASURED_EVERY == _MEASURED_FIRST:
            return 1
        return engine.model.together

    def submit(self, micro: MicroBatch, loss: Tensor | float | None) -> None:
        engine, model = self._engine, self._engine.model
        if TRACE is not None:
            self._traced += range(micro.index, micro.index + micro.n_micro)
        grads = engine.take_gradients(micro, loss, meanwhile=partial(self._apply_ahead, micro))
        value, fields, weight = grads.loss, engine.fields, micro.n_samples / model.micro_batch
        if grads.not_finite:
            self._not_finite, self._bad_micro = grads.not_finite, micro.index
        self._seconds += [grads.seconds / micro.n_micro] * micro.n_micro
        fields.add("samples", micro.n_samples)
        if (
            grads.not_finite and model.loss_scale is not None
        ):  # the step is skipped: nothing of this is to reach anybody
            model.dense.zero_()
            value = None
        else:
            model.dense.add_micro_batch_(weight)
            if model.row_average == "global":
                for group, there in enumerate(grads.rows):
                    self._rows[group] += [(grad, weight) for grad in there]
            else:
                self._add_contributors(grads, weight)
        if value is not None:
            fields.add("loss", value * micro.n_samples)
            fields.add("loss_weight", micro.n_samples)
        if micro.is_last:
            self._close_step()

    def _apply_ahead(self, micro: MicroBatch, rows: RowGrads) -> None:
        """Of the step's only micro-batch, where nothing that is not known yet changes its gradients."""
        model, progress = self._engine.model, self._engine.progress
        is_all = micro.is_last and not self._seconds and micro.n_samples == model.micro_batch
        if is_all and model.clip.is_none and model.loss_scale is None and model.row_average == "global":
            scale = model.micro_batch / self._cut.samples_of_step(self._step_of_epoch)
            n_skipped = progress.account.steps_skipped
            self.exchange.apply_ahead(rows, progress.step + 1, scale, model.row_lr, n_skipped)

    def _add_contributors(self, grads: MicroGradients, weight: float) -> None:
        """A micro-batch contributes once to a row, however many forward passes it has."""
        for group, some in enumerate(grads.rows_on_host):
            if some:
                whole = merge([(grad, 1.0) for grad in some])
                counts = None if grads.contributors is None else grads.contributors[group]
                self._rows[group].append((with_contributors(whole, weight, counts), 1.0))

    @property
    def is_within_step(self) -> bool:
        return float(self._engine.fields["samples"]) > 0

    @property
    def batches_in_step(self) -> int:
        return len(self._cut.batches_of_step(self._step_of_epoch, self.together))

    @property
    def computed_in_step(self) -> int:
        if not self.is_within_step:
            return 0
        n_samples = len(self._seconds) * self._engine.world.size * self._cut.micro_batch
        return min(n_samples, self._cut.samples_of_step(self._step_of_epoch))

    def evaluate(self, job: EvaluationRun) -> list[dict[str, Any]]:
        self._engine.reports.reported_by_some()
        return evaluation.together(job, self._engine.world, self.exchange, self._engine.progress.step)

    def others_wait(self) -> AbstractContextManager[None]:
        return nullcontext()  # they do at the next collective

    def count(self, job: CountRun) -> list[int]:
        world = self._engine.world
        mine = [job.count(one) if job.rank_of(one, world.size) == world.rank else 0 for one in range(job.n)]
        return [int(n) for n in world.gather("counts", np.array(mine, dtype=np.int64)).sum(axis=0)]

    def retrieve(self, job: RetrievalRun) -> list[float]:
        return retrieval.together(job, self._engine.world, self.exchange, self._engine.progress.step)

    # --- a step ------------------------------------------------------------------------------------------------------

    def _begin_step(self, cut: EpochPlan, at: tuple[int, int], step_of_epoch: int) -> None:
        """at: the epoch and its segment."""
        model, progress = self._engine.model, self._engine.progress
        if not progress.cursor.is_in(*at):
            progress.cursor = Cursor(at[0], 0, segment=at[1])
        self._cut, self._step_of_epoch = cut, step_of_epoch
        progress.n_steps = progress.cursor.n_steps = cut.n_steps
        self._rows = [[] for _ in model.tables.layout.groups]
        self._not_finite, self._seconds, self._traced = "", [], []
        self._times.begin_step()
        self._began_s = time.perf_counter() - self._engine.loop_time.pending_s
        self._engine.forget_micro_batch()
        model.dense.clear_total_()
        model.tables.drop_gradients()
        self.exchange.await_rows(progress.step)

    def _close_step(self) -> None:
        """Exchange, commit and apply the global step. A collective; workers without a micro-batch run it too."""
        engine, model, progress = self._engine, self._engine.model, self._engine.progress
        fields, dense, exchange = engine.fields, model.dense, self.exchange
        n_samples = self._cut.samples_of_step(self._step_of_epoch)
        scale = model.micro_batch / n_samples
        fields["hosts_updated"] = float(engine.signals.hosts_updated)
        rates, lrs = sum(float(group["lr"]) for group in model.optimizer.param_groups), tuple(model.dense_lrs)
        fields["rates"], fields["rows_trained"] = rates, float(model.tables.n_trained)
        if self._not_finite:
            fields["n_bad"], fields["bad_micro"] = 1.0, self._bad_micro
        if self._seconds:
            fields["micro_batch_s"][engine.world.rank] = sum(self._seconds) / len(self._seconds)
        fields["reading_s"][engine.world.rank] = self._times.reading_s
        for participant in engine.participants:
            participant.before_commit(fields[participant.name])
        if TRACE is not None:
            facts = {"step": progress.step + 1, "world": progress.restarts, "epoch": progress.cursor.epoch}
            facts["segment"] = progress.cursor.segment
            TRACE.write("attempt", **facts, micros=self._traced)
        n_micro = len(self._cut.micro_of_step(self._step_of_epoch))
        row_scale = scale if model.row_average == "global" else scale * n_micro
        with self._times.part("rows") if exchange.several_hosts else nullcontext():
            exchange.exchange(progress.step + 1, self._rows, row_scale, model.row_lr, progress.account.steps_skipped)
        with self._times.part("sum"):
            if not model.clip.is_none:
                fields["row_squares"] = exchange.row_squares()
            exchange.commit(dense, fields)
        if TRACE is not None:
            TRACE.write("commit", **facts, lrs=model.group_lrs, row_lr=model.row_lr, order=self._step_of_epoch)
        agreed = fields.read()
        overflowed = bool(agreed["n_bad"][0]) or not self._is_finite(dense)
        if overflowed and (model.loss_scale is None or model.loss_scale.overflows >= _OVERFLOWS):
            exchange.discard_held()
            dense.clear_total_()
            raise self._non_finite(agreed)
        self._refuse_disagreement(agreed, n_samples, rates)
        dense.make_step_(scale)
        engine.reports.other_writers()
        engine.reports.row_settings()
        factors = Factors(rows=SKIPPED) if overflowed else Factors()
        if not model.clip.is_none and not overflowed:
            factors = model.clip.factors(squares([dense.flat.detach().cpu().numpy()]), agreed["row_squares"][0])
            if factors.dense != 1.0:
                dense.flat.mul_(factors.dense)
        with ExitStack() as at_last, uninterrupted():
            if overflowed:
                exchange.skip_held()
            else:
                model.step_dense()
                exchange.apply_held(factors.rows)
            model.parameter_watch.note()
            dense.zero_()
            dense.clear_total_()
            self._count(n_samples, agreed, overflowed, factors)
            at_last.callback(self._report, n_samples, agreed, factors, lrs)  # also where such a function raises
            progress.hooks.run(progress.n_applied)

    def _is_finite(self, dense: DenseGradients) -> bool:
        """Of the step's dense gradient; that of a single micro-batch was looked at when it was computed."""
        engine, n_micro = self._engine, len(self._cut.micro_of_step(self._step_of_epoch))
        is_known = n_micro == engine.world.size == 1 and engine.model.compression is None
        return is_known or math.isfinite(float(dense.total.sum()))

    def _refuse_disagreement(self, agreed: dict[str, list[float]], n_samples: int, rates: float) -> None:
        step, size = self._engine.progress.step + 1, self._engine.world.size
        samples, all_rates, n_trained = agreed["samples"][0], agreed["rates"][0], agreed["rows_trained"][0]
        if round(samples) != n_samples:
            raise StateMismatch(
                f"step {step}: the workers computed {samples:.0f} samples, the plan has {n_samples}; "
                "do all workers use the same dataset, global_batch and micro_batch?"
            )
        if n_trained != size * self._engine.model.tables.n_trained:
            raise StateMismatch(
                f"step {step}: some workers have tables.requires_grad_(False) and others have not, so gradients of "
                "rows are missing: set it on all workers at the same step, also on one that comes later, such as "
                "tables.requires_grad_(state.epoch >= 2) as each epoch begins"
            )
        if abs(all_rates - rates * size) > 1e-5 * abs(all_rates):
            raise StateMismatch(
                f"step {step}: this worker's learning rates add up to {rates}, the mean of all workers is "
                f"{all_rates / size}: step the scheduler once per epoch or "
                "global step, on all workers, and give it to TorchState"
            )

    def _count(self, n_samples: int, agreed: dict[str, list[float]], overflowed: bool, factors: Factors) -> None:
        """The step is applied, or skipped."""
        engine, progress, loss_scale = self._engine, self._engine.progress, self._engine.model.loss_scale
        progress.step, progress.factors = progress.step + 1, factors
        progress.cursor.steps_done = self._step_of_epoch + 1
        progress.account.total += n_samples  # by the plan
        if overflowed:
            progress.account.dropped += n_samples
            progress.account.overflowed += n_samples
            progress.account.steps_skipped += 1
        else:
            progress.account.applied += round(agreed["samples"][0])  # by the workers' own count
        if loss_scale is not None:
            before = loss_scale.scale
            loss_scale.step(overflowed)
            if overflowed:
                engine.reports.overflow(1, before)
        signals = engine.signals
        signals.interrupt_due = signals.interrupt_due or agreed["hosts_updated"][0] > 0
        for participant in engine.participants:
            participant.after_commit(agreed[participant.name])
        self._is_measured = any(one.measures_micro_batches for one in engine.participants)

    def _report(self, n_samples: int, agreed: dict[str, list[float]], factors: Factors, lrs: tuple[float, ...]) -> None:
        engine, reports = self._engine, self._engine.reports
        reports.missing_servers()
        reports.compression()
        weight = agreed["loss_weight"][0]
        loss = agreed["loss"][0] / weight if weight else None
        seconds = time.perf_counter() - self._began_s
        self._show_times(n_samples, agreed, seconds)
        reports.step(n_samples, loss, self.name, factors.norm, () if factors.norm is None else (factors.norm,), lrs)
        for participant in engine.participants:
            participant.after_step(agreed["micro_batch_s"], seconds, self._cut.n_micro, self.together)

    def _show_times(self, n_samples: int, agreed: dict[str, list[float]], seconds: float) -> None:
        """On each host's board. Not of steps that measure the pace of single micro-batches."""
        engine, n_micro = self._engine, len(self._cut.micro_of_step(self._step_of_epoch))
        if engine.host.board is None or self.together != engine.model.together:
            return
        of_each = shares(n_micro, engine.world.size, self.together)
        times = agreed["micro_batch_s"], agreed["reading_s"]
        if (found := self._times.ended(engine.world.rank, seconds, n_samples, of_each, *times)) is not None:
            pids = {**engine.host.neighbours, engine.world.rank: os.getpid()}
            board_facts = {"pids": pids, "workers": engine.world.size, "unix_s": time.time()}
            engine.host.board.show_times({**found, **board_facts})

    def _non_finite(self, agreed: dict[str, list[float]]) -> NonFiniteGradient:
        progress, compression = self._engine.progress, self._engine.model.compression
        n_bad, micro = agreed["n_bad"][0], agreed["bad_micro"][0]
        if self._not_finite:
            where = f"micro-batch {self._bad_micro}: {self._not_finite} is not finite"
        elif n_bad == 1:
            where = f"micro-batch {micro:.0f}, on another worker (its log has more)"
        elif n_bad:
            where = f"on {n_bad:.0f} other workers (their logs have more)"
        elif compression is not None and compression.not_finite:
            where = compression.not_finite
        else:
            where = "every micro-batch's gradient is finite, but their sum is not"
        return NonFiniteGradient(
            f"step {progress.step + 1} (epoch {progress.cursor.epoch}, step {self._step_of_epoch} of it), {where}. "
            f"The step was not applied: the model is as after step {progress.step}. "
            "Lower the learning rate, or look at that batch"
        )

    # --- the world ---------------------------------------------------------------------------------------------------

    def rank_facts(self) -> RankFacts:
        held = self.exchange.held
        return RankFacts(-1 if held is None else held.step)

    def settle(self, catches_up: bool, row_factor: float, step: int) -> bool:
        """A rank that missed the newest step's result applies the row gradients it holds; all others discard theirs."""
        exchange, progress = self.exchange, self._engine.progress
        was_left = progress.step < step and not catches_up
        if exchange.held is not None and catches_up:
            if row_factor == SKIPPED:
                exchange.skip_held()
            else:
                exchange.apply_held(row_factor)
            progress.factors = Factors(rows=row_factor)
        elif exchange.held is not None:
            exchange.discard_held()
        return was_left

    def on_hosts_updated(self) -> None:
        self._engine.signals.hosts_updated = True

    def recover(self) -> None:
        self.exchange.release_waiters()

    def take_over_from_servers(self) -> None:
        """All is here."""

    def leave_together(self, patience_s: float) -> None:
        """The last commit was a collective."""

    def close(self, finished: bool = True) -> None:
        self.exchange.close()
