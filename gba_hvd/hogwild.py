"""`hogwild`: several threads of a worker train its replica together (ShadowSync's Hogwild threads).

    calling thread   batches: lease -> rows -> begin -> hand to a thread that is free; events, checkpoints, switches
    n threads        compute(model, batch): forward, backward -> push rows -> step the replica

Who owns what. Each thread has a copy of the model on the replica's own storage (`shared_model`), its own gradients, and
its own record of the rows it used (`tables.apart`). It reads parameters without any lock while others write them. The
step itself, by the one optimizer with its one state, is made under the replica's lock: no update is lost, and Adam's
counters count all steps. Everything else of the engine stays with the calling thread, which alone asks for leases; so
every micro-batch is leased once and the account is what it is with one thread.

`quiesce` returns when no thread computes. The mode calls it before anybody looks at the complete replica:
evaluations, the hand-over at an epoch's end, checkpoints. What a failure leaves behind:

    compute raises         the other threads end their micro-batches, then the loop ends with the error; what was
                           learned is submitted, and leases are given back, as if the loop had been left
    the engine raises      the loop ends with the error, but nothing is submitted: servers or world are lost, and what
                           follows is what follows in a loop of one thread
    the process dies       as with one thread, but up to n micro-batches are computed again

Buffers that a forward pass writes (batch norm's running statistics) are each thread's own, as they are each worker's
own; the model keeps those of the first thread, and one log line says so.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gba_hvd.averaging.shared_model import SharedModel
from gba_hvd.batches import Dataset, batches
from gba_hvd.callbacks import Event
from gba_hvd.elastic import TorchState
from gba_hvd.embedding.passes import PulledRows
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.mode_names import REPLICA_MODES
from gba_hvd.switching.requests import switching_of
from gba_hvd.training.engine import Engine
from gba_hvd.training.mode import MicroBatch, SharesReplica

Compute = Callable[[nn.Module, Any], Tensor | float | None]


def hogwild(dataset: Dataset, state: TorchState, compute: Compute, *, n_threads: int = 1, **how: Any) -> None:
    """Train on the micro-batches of this epoch that this worker gets, in `n_threads` threads at once.

        def compute(model, batch):
            loss = loss_fn(model(batch), batch.label)
            loss.backward()
            return loss

        for state.epoch in range(state.epoch, 3):
            gba_hvd.hogwild(dataset, state, compute, n_threads=4)

    The same as `for batch in batches(...)` with `zero_grad`, `compute` and `optimizer.step(loss=...)` for each; bit for
    bit with one thread. There are threads only while the job is in a mode with replicas (`shadow`, `easgd`, `ma`,
    `bmuf`); in any other mode, also if it changes live, the calling thread computes.

    compute: forward and backward pass of one micro-batch on the model that it is given, which is a copy where there are
    several threads; returns the mean loss, or None. It is called in several threads at once.
    how: as `batches` takes it.

    Returns when the epoch is over. Raises what `compute` raised, when the other threads have ended their micro-batches;
    BadInput where the model cannot be copied, the optimizer has a GradScaler, or `compute` uses another model than the
    one it is given.
    """
    if isinstance(n_threads, bool) or not isinstance(n_threads, int) or n_threads < 1:
        raise BadInput(f"n_threads must be a whole number, 1 or more, got {n_threads!r}")
    engine, optimizer = state.engine, cast(Any, state.optimizer)
    if engine.model.loss_scale is not None:
        raise BadInput(
            "hogwild cannot scale losses: its threads step without a GradScaler. Leave grad_scaler out of "
            "DistributedOptimizer, or loop over gba_hvd.batches"
        )
    threads = _Threads(state, compute, n_threads)
    micro_batches = batches(dataset, state, **how)
    try:
        for batch in micro_batches:
            if n_threads > 1 and (shared := _shared_replica(engine)) is not None:
                threads.hand(batch, shared)
                continue
            threads.end()
            if n_threads > 1:
                _say_that_threads_are_idle(engine, n_threads)
            optimizer.zero_grad()
            loss = threads.compute_here(batch)
            optimizer.step(loss=loss)
        threads.end()
    except BaseException:
        threads.end(suppress=True)
        if threads.compute_failed:
            micro_batches.close()
            threads.leave_the_loop()
        raise


def _shared_replica(engine: Engine) -> SharesReplica | None:
    """The mode, if threads may share its replica."""
    return engine.mode if isinstance(engine.mode, SharesReplica) else None


def _say_that_threads_are_idle(engine: Engine, n_threads: int) -> None:
    """Warn, once, in a job that asks for no mode with replicas: the calling thread computes."""
    callback, mode = switching_of(engine), "allreduce" if engine.mode is None else engine.mode.name
    if callback is not None and {*callback.modes_to_come} & {*REPLICA_MODES}:
        return
    text = (
        f"hogwild(n_threads={n_threads}) has no effect in mode {mode!r}: threads share a replica of the model, and "
        f"there is one in modes {', '.join(map(repr, REPLICA_MODES))} only, so one thread computes. Choose such a mode "
        "(GBACallback(mode='shadow')), or leave n_threads out"
    )
    data = {"n_threads": n_threads, "mode": mode}
    engine.reports.once(Event("threads_idle", engine.progress.step, text, data, level="warning"))


@dataclass(frozen=True)
class _MicroBatchWork:
    """One micro-batch for one thread."""

    micro: MicroBatch
    batch: Any
    remote: list[PulledRows | None]


class _Threads:
    """Started by the first `hand`, ended by `end`, and started again by the next `hand` after that.

    compute_failed: the user's function raised, nothing of ours.
    Belongs to the calling thread, all but `_run` and what it calls.
    """

    def __init__(self, state: TorchState, compute: Compute, n: int) -> None:
        self._state, self._engine, self._compute, self._n = state, state.engine, compute, n
        self._changed = threading.Condition()
        self._mode: SharesReplica | None = None  # that the threads train in
        self._threads: list[threading.Thread] = []
        self._models: list[SharedModel] = []
        self._jobs: deque[_MicroBatchWork] = deque()
        self._busy: set[int] = set()  # threads that compute
        self._ending = self._warned = self.compute_failed = False
        self._error: BaseException | None = None
        self._refused: list[tuple[int, str]] = []  # to be reported by the calling thread

    def hand(self, batch: Any, mode: SharesReplica) -> None:
        """Give the micro-batch that was begun to a thread; return when another is free. Raises what one raised."""
        if not self._threads:
            try:
                self._start()
            except BadInput:
                self.compute_failed = True  # no thread can compute: the loop is left
                raise
        self._mode, mode.await_threads = mode, self.quiesce
        with self._changed:
            self._jobs.append(_MicroBatchWork(mode.hand_to_thread(), batch, self._engine.model.tables.remote))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or len(self._busy) + len(self._jobs) < self._n)
        self._report()

    def compute_here(self, batch: Any) -> Tensor | float | None:
        """In the calling thread, on the model itself."""
        try:
            return self._compute(self._state.model, batch)
        except BaseException:
            self.compute_failed = True
            raise

    def quiesce(self) -> None:
        """Return when no thread computes; the model's buffers are then those of the first. Raises what one raised."""
        if not self._threads:
            return
        if threading.current_thread() in self._threads:
            raise GbaError(
                "compute() asked for an evaluation, a checkpoint or the end of the epoch: these wait for all threads, "
                "also for the one that asks. Do it in the thread that called hogwild, between two epochs"
            )
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and (self._error is not None or not self._jobs))
        self._bring_buffers_home()
        self._report()

    def end(self, suppress: bool = False) -> None:
        """Wait for what is being computed, and end all threads. Raises what one raised, unless `suppress`."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._bring_buffers_home(quietly=suppress)
        self._threads, self._models, self._ending = [], [], False
        self._engine.compute_in(1)
        self._jobs.clear()
        if not suppress:
            self._report()

    def leave_the_loop(self) -> None:
        """After a failure of the user's function: as if the loop over the batches had been left."""
        if (shared := _shared_replica(self._engine)) is not None:
            shared.leave_loop()

    # -----------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._engine.model.gradient_watch.stop()  # threads have gradients of their own
        model, trained, tables = self._state.model, self._engine.model.dense.parameters, self._engine.model.tables
        self._models = [SharedModel(model, trained, tables) for _ in range(self._n)]
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._threads = [
            threading.Thread(target=self._run, args=(shared, gpu), name=f"gba-hvd hogwild {number}", daemon=True)
            for number, shared in enumerate(self._models)
        ]
        self._engine.compute_in(self._n)
        for thread in self._threads:
            thread.start()

    def _report(self) -> None:
        with self._changed:
            refused, self._refused = self._refused, []
        for micro, bad in refused:
            self._engine.reports.refused(micro, bad)
        self._engine.reports.compression()
        if self._error is not None:
            raise self._error

    def _bring_buffers_home(self, quietly: bool = False) -> None:
        changed = self._models[0].bring_buffers_to(self._state.model) if self._models else []
        if changed and not self._warned and not quietly:
            self._warned = True
            warnings.warn(
                f"the forward pass writes buffers ({', '.join(changed[:3])}): each of the {self._n} threads has its "
                "own, and the model keeps those of the first thread. Modules without running statistics have none",
                stacklevel=2,
            )

    def _run(self, model: SharedModel, gpu: int | None) -> None:
        """One thread. gpu: the calling thread's; torch keeps it by thread, and begins with the first."""
        of_compute = False
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            with self._engine.model.tables.apart() as passes:
                while (job := self._next()) is not None:
                    passes.remote, of_compute = job.remote, True
                    loss = self._computed(job, model)
                    of_compute = False
                    self._note_done(job.micro.index, self._submit(job.micro, loss, model.dense))
        except BaseException as error:  # of any kind: the calling thread raises it
            self._fail(error, of_compute)

    def _submit(self, micro: MicroBatch, loss: Tensor | float | None, dense: DenseGradients) -> str:
        assert self._mode is not None
        return self._mode.submit_from_thread(micro, loss, dense)

    def _next(self) -> _MicroBatchWork | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._ending or self._error is not None)
            if not self._jobs or self._error is not None:
                return None
            self._busy.add(threading.get_ident())
            return self._jobs.popleft()

    def _note_done(self, micro: int, refused: str) -> None:
        with self._changed:
            self._busy.discard(threading.get_ident())
            if refused:
                self._refused.append((micro, refused))
            self._changed.notify_all()

    def _computed(self, job: _MicroBatchWork, model: SharedModel) -> Tensor | float | None:
        model.clear()
        loss = self._compute(model.module, job.batch)
        if not model.has_gradient:
            raise BadInput(
                "compute() left no gradient in the model that it was given: call backward() in it, and use its first "
                "argument, a copy of the model for each thread, not the model itself"
            )
        return loss

    def _fail(self, error: BaseException, of_compute: bool) -> None:
        with self._changed:
            self._busy.discard(threading.get_ident())
            if self._error is None:
                self._error, self.compute_failed = error, of_compute
            self._changed.notify_all()
        if self._mode is not None:
            self._mode.fail_leases(error)  # the calling thread may be waiting for the next one
