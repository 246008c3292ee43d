"""Which mode the job should be in: who requests it, and how all workers learn of it at the same step.

The chief's `GBACallback` decides from measurements; an operator (`gba-hvd switch`) asks through the server of a host.
In allreduce mode requests travel with the commit of a step, in an asynchronous mode they go to the coordinator.
`enter_ps` and `leave_ps` carry them out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gba_hvd.callbacks import Event
from gba_hvd.comm.launcher_slot import LauncherStore
from gba_hvd.comm.traffic import sent_received
from gba_hvd.mode_names import MODE_NUMBERS, MODES, REPLICA_MODES
from gba_hvd.ps.messages import SwitchTo
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.switching import operator_reason
from gba_hvd.switching.callback import GBACallback
from gba_hvd.switching.drops import DropWatch, WorkerDropWatch, backups_too_many
from gba_hvd.switching.measurements import PushReadings
from gba_hvd.switching.requested_mode import SERVERS_NOT_UP
from gba_hvd.training.commit_fields import StepParticipant
from gba_hvd.training.engine import Engine

# On a commit: a number for each mode (the chief requests it), for each mode again (an operator does), whether training
# is to wait for servers that are not up, on how many hosts they are not, whether an operator asks for "auto", and
# whether the chief decides by measurements.
_WAITS = 2 * len(MODE_NUMBERS)
_NOT_READY, _TO_AUTO, _BY_MEASUREMENTS = _WAITS + 1, _WAITS + 2, _WAITS + 3
_RATES_EVERY_S = 2.0
_ASK_AGAIN_S = 2.0


def switching_of(engine: Engine) -> GBACallback | None:
    """The job's GBACallback, if it has one."""
    requests = engine.participant(ModeRequests)
    return None if requests is None else requests.callback


class ModeRequests(StepParticipant):
    """One worker's part. Belongs to the training thread.

    operator_request: what `gba-hvd switch` asked the server of this host for, (mode, reason), once
    refused: number of the mode in which servers refused to train, on any worker, until a mode is entered; 0: none
    """

    name, order = "mode requests", 0

    def __init__(self, engine: Engine, callback: GBACallback) -> None:
        self._engine, self.callback = engine, callback
        self.operator_request: Callable[[], tuple[str, str] | None] = lambda: None
        self.waiting: list[str] = []
        self.refused = 0
        self._requested: tuple[str, str] | None = None
        self._seen_step, self._asked_s = -1, 0.0  # step last looked at, when the coordinator was asked
        self._noted = "", ""  # what was asked of the coordinator, and needs no switch
        self._pushes, self._drops = PushReadings(), DropWatch(callback.discipline("gba"), callback.servers_per_host)
        self._drops_by_worker = WorkerDropWatch(callback.discipline("gba").tolerance)
        self._world_of_backups: Any = None  # in which their number was looked at
        self._pushes_s: float | None = None  # when they were last looked at; None: not since training paused
        self._rates_s = self._rounds_s = self._decision_s = time.perf_counter()  # when they were reported

    def rolled_back(self, step: int) -> None:
        self._requested, self._seen_step, self.waiting = None, min(self._seen_step, step), []
        self.callback.rolled_back(step)

    @property
    def waits_to_enter(self) -> bool:
        return bool(self.waiting)

    def servers_refused(self, mode: str, why: str) -> None:
        """This worker has left a mode whose servers cannot train in it."""
        self._pause(mode, why, only_here=True)

    def refused_elsewhere(self, refused: Mapping[int, int], is_new: bool = False) -> None:
        """When a world forms: the refusal of any worker pauses the mode on all.

        refused: by rank, as `self.refused`. is_new: this worker comes late; the others have paused the mode before
        """
        if refused and not self.refused:
            rank, mode = next(iter(refused.items()))
            if is_new:
                self.refused = mode
                return
            why = f"servers refused a worker, which is rank {rank} now: its log says why"
            self._pause(MODES[mode], why, only_here=False)

    def _pause(self, mode: str, why: str, only_here: bool) -> None:
        step, self.refused = self._engine.progress.step, MODE_NUMBERS[mode]
        self.callback.failed(step, why)
        text = f"mode {mode} was left, allreduce continues ({self.callback.pause_in_words(step)}): {why}"
        self._engine.emit(Event("switch_failed", step, text, {"to": mode}, level="warning"), only_here)

    def missing_mode(self, mode: str) -> str:
        return self.callback.asked.missing(mode)

    def for_people(self) -> dict[str, Any]:
        """What `gba-hvd status` shows of decisions: the mode that is set, which may be "auto", and the chief's newest.

        Other workers' callbacks decide nothing, and in asynchronous modes measure nothing.
        """
        callback, last = self.callback, self.callback.current_decision
        if self._engine.world.rank != 0:
            return {"setting": callback.mode, "decided_elsewhere": True}
        decided = {} if last is None else {"last_decision": last.reason, "decided_at_step": callback.decided_at_step}
        return {"setting": callback.mode, **decided}

    # --- allreduce mode ----------------------------------------------------------------------------------------------

    def n_fields(self) -> int:
        return _BY_MEASUREMENTS + 1

    def before_commit(self, fields: Tensor) -> None:
        engine, callback = self._engine, self.callback
        self._requested = None
        if engine.mode is None:
            return
        callback.lr = max(engine.model.dense_lrs, default=0.0)
        if engine.world.rank == 0:
            self._requested = callback.mode_request(engine.progress.step + 1, engine.mode.name)
            fields[_WAITS] = float(callback.waits)
            fields[_BY_MEASUREMENTS] = float(callback.mode == "auto")
        server = engine.host.server
        fields[_NOT_READY] = float(server is not None and not server.is_ready(to_enter=True))
        order = self.operator_request()
        if self._requested is not None:
            fields[MODE_NUMBERS[self._requested[0]]] = 1.0
        if order is not None and order[0] == "auto":
            fields[_TO_AUTO] = 1.0
        elif order is not None:
            fields[len(MODE_NUMBERS) + MODE_NUMBERS[order[0]]] = 1.0
            self._requested = order
            operator_reason.leave(*order, LauncherStore.of())

    def after_commit(self, agreed: Sequence[float]) -> None:
        """An operator's request counts most.

        Where the servers of some host are not up, a mode waits for them, and allreduce continues: the chief requests it
        again with each commit.
        """
        engine, callback, own = self._engine, self.callback, self._requested
        self.waiting = []
        if engine.mode is None:
            return
        if agreed[_TO_AUTO]:  # asked for at one host; it is the chief's callback that decides
            callback.pin("auto")
        self.measures_micro_batches = bool(agreed[_TO_AUTO] or agreed[_BY_MEASUREMENTS])
        is_ordered = any(agreed[len(MODE_NUMBERS) : _WAITS])
        for mode, code in MODE_NUMBERS.items():
            if not agreed[len(MODE_NUMBERS) + code if is_ordered else code]:
                continue
            reason = own[1] if own is not None and own[0] == mode else self._reason_elsewhere(mode, is_ordered)
            if is_ordered and mode == engine.mode.name:
                self._hold(mode, reason)
            elif is_ordered:  # with the reason, in case that servers have to start first
                callback.pin(mode, "" if engine.world.rank else reason)
            if mode == engine.mode.name:
                engine.signals.requested_mode = None
            elif agreed[_NOT_READY] and not agreed[_WAITS]:
                engine.signals.requested_mode, self.waiting = None, [f"mode {mode}"]
                callback.asked.obstacle = SERVERS_NOT_UP
            else:
                engine.signals.requested_mode = (mode, reason)

    def _reason_elsewhere(self, mode: str, is_ordered: bool) -> str:
        if self._engine.world.rank:
            return "rank 0 reports the reason"
        return operator_reason.found(mode, LauncherStore.of()) if is_ordered else "it was asked for by another worker"

    def _hold(self, mode: str, reason: str) -> None:
        """An operator asks for the mode that the job is in: it stays, where measurements or a plan decided before."""
        engine, callback = self._engine, self.callback
        is_overridden = callback.override_plan(engine.progress.step) and engine.world.rank == 0
        if callback.mode != mode or is_overridden:
            text = f"mode {mode} stays until an operator asks for another (gba-hvd switch auto: measurements): {reason}"
            data = {"mode": mode, "reason": reason}
            engine.emit(Event("mode_held", engine.progress.step, text, data))
        callback.pin(mode)

    def after_step(self, micro_batch_s: Sequence[float], step_s: float, n_micro: int, together: int) -> None:
        is_sample = together != self._engine.model.together
        step, is_chief = self._engine.progress.step, self._engine.world.rank == 0
        self.callback.measured_allreduce(step, list(micro_batch_s), step_s, n_micro, together, is_sample, is_chief)
        if is_chief:
            self._report_rates({str(rank): round(s, 5) for rank, s in enumerate(micro_batch_s) if s})
            self._report_decision()

    # --- asynchronous modes ------------------------------------------------------------------------------------------

    def mode_entered(self) -> None:
        """The coordinator was asked for nothing in it, and counts what is pushed from 0."""
        self._asked_s, self._pushes, self._noted, self.refused = 0.0, PushReadings(), ("", ""), 0
        self._world_of_backups = None
        self._forget_drops()

    def epoch_over(self, servers: PsWorker) -> None:
        """The window that is open ends with the epoch, which may be the job's last, and with the mode."""
        if self._engine.world.rank == 0 and servers.name == "gba":
            self._report_drops(servers)

    def _forget_drops(self) -> None:
        """A window begins."""
        progress = self._engine.progress
        self._drops.forget()
        self._drops.look(progress.step, progress.staleness, progress.dense_ages)
        self._drops_by_worker.forget()

    def paused(self) -> None:
        """In allreduce no step contains a pause, so no reading of pushes does."""
        self._pushes_s = None

    def before_micro_batch(self, servers: PsWorker, waited_s: float) -> None:
        """Pass on to the coordinator what an operator asked for here; on the chief, what would be better."""
        engine, callback = self._engine, self.callback
        self._report_rounds(servers)
        if (order := self.operator_request()) is not None:  # given to this host's server, which does not coordinate
            servers.client.send(0, SwitchTo(*order, pin=True))
        self._note_what_needs_no_switch(servers)
        step, position = engine.progress.step, servers.position
        if position.newest:
            is_forming = engine.forming.wait() is not None
            callback.workers_train(len(position.newest), is_forming, time.perf_counter())
        if engine.world.rank != 0:
            return
        self._report_backups(servers.name)
        if step > self._seen_step:
            self._seen_step = step
            is_reported = self._report_rates({str(rank): round(s, 5) for rank, s in position.rates})
            if servers.name == "gba":
                if is_reported:
                    self._report_drops(servers)
                self._measure_pushes(servers, waited_s)
                self._report_decision()
            self._report_unstable_rate(servers, waited_s)
        request = callback.mode_request(step, servers.name)
        servers.contact.report = self.for_people()
        self._report_if_late()
        now = time.perf_counter()
        is_free = position.requested_mode in ("", "auto", servers.name)
        if callback.mode == "auto" and position.pinned and position.requested_mode == servers.name:
            request = "auto", "planned by switch_at"  # the coordinator still holds the mode that an operator asked for
        if request is not None and is_free and now - self._asked_s > _ASK_AGAIN_S:
            self._asked_s = now  # the next positions have it; until then it is not sent again
            is_pinned = request[0] == "auto" or callback.mode != "auto"
            servers.client.send(0, SwitchTo(*request, pin=is_pinned, world=position.membership_epoch))

    def _report_backups(self, mode: str) -> None:
        """On the chief, once in each world."""
        engine = self._engine
        if self._world_of_backups is engine.world:
            return
        self._world_of_backups = engine.world
        backups = self.callback.discipline(mode).backups
        if (event := backups_too_many(mode, backups, engine.world.size, engine.progress.step)) is not None:
            engine.emit(event)

    def _note_what_needs_no_switch(self, servers: PsWorker) -> None:
        """On all workers, once for each request of an operator: for "auto", or for the mode that the job is in."""
        mode, reason = asked = servers.position.requested_mode, servers.position.reason
        if asked == self._noted or mode not in ("auto", servers.name):
            return
        self._noted = asked
        if mode == servers.name:
            self._hold(mode, reason)
        elif self.callback.mode != "auto":
            self.callback.pin("auto")

    def _rates_of_modes(self) -> dict[str, float]:
        """By the last decision: samples/s in allreduce and in gba; of the mode that the job is in as achieved."""
        decision, micro_batch = self.callback.last, self._engine.model.micro_batch
        assert decision is not None
        of_mode = {"allreduce": decision.allreduce, "gba": decision.gba}
        return {f"{mode}_samples_per_s": round(rate * micro_batch, 1) for mode, rate in of_mode.items()}

    def _report_drops(self, servers: PsWorker) -> None:
        """On the chief, every few seconds in mode gba, and at the end of an epoch or of the mode."""
        step, progress = self._engine.progress.step, self._engine.progress
        events = self._drops_by_worker.look(step, servers.position.drops)
        if (of_all := self._drops.look(step, progress.staleness, progress.dense_ages)) is not None:
            events.append(of_all)
        for event in events:
            self._engine.emit(event)

    def _measure_pushes(self, servers: PsWorker, waited_s: float) -> None:
        """On the chief, once per step."""
        engine, step, now_s = self._engine, self._engine.progress.step, time.perf_counter()
        seconds, n_pushed, is_known = self._pushes.take(servers.position.newest, servers.position.computed)
        elapsed_s = now_s - self._pushes_s if is_known and self._pushes_s is not None else 0.0
        self._pushes_s = now_s
        if self._pushes.members_changed:
            self.callback.members_changed()
            self._forget_drops()
        of_step = engine.model.global_batch // engine.model.micro_batch
        self.callback.measured_async(
            step, seconds, of_step, waited_s, engine.model.together, n_pushed=n_pushed, elapsed_s=elapsed_s,
            done=self._pushes.done,
        )  # fmt: skip

    def _report_if_late(self) -> None:
        """On the chief: a planned change of mode is requested later than it was due."""
        engine, callback = self._engine, self.callback
        if callback.late is None:
            return
        (due, now), callback.late = callback.late, None
        text = (
            f"switch_at={due} is asked for at step {now}: only rank 0 asks, before each of its micro-batches, and the "
            "others continued while it computed one. For exact steps let a slow worker not be rank 0"
        )
        engine.emit(Event("switch_late", engine.progress.step, text, {"due": due, "now": now}, level="warning"))

    # -----------------------------------------------------------------------------------------------------------------

    def _report_rounds(self, servers: PsWorker) -> None:
        """Every few seconds: how a mode keeps its replicas together; the pace from the chief, failures from all."""
        now = time.perf_counter()
        if now - self._rounds_s < _RATES_EVERY_S:
            return
        self._rounds_s = now
        pace, dropped = servers.drain_metrics()
        engine, step = self._engine, self._engine.progress.step
        for why in dropped:
            text = f"a round of replicas was dropped, training continues: {why}"
            engine.emit(Event("round_dropped", step, text, {"why": why}, level="warning"), only_here=True)
        metrics = {name: value for name, value in pace.items() if value is not None}  # none ended well: no pace
        if useless_waits := int(metrics.pop("useless_waits", 0)):
            often, limit_s = (
                f"{useless_waits} times" if useless_waits > 1 else "once",
                engine.model.tables.config.lease_s,
            )
            text = f"training waited {often} for a round of replicas that did not end in {limit_s:.0f} s, and continues"
            engine.emit(Event("round_late", step, text, {"times": useless_waits}, level="warning"), only_here=True)
        if metrics and engine.world.rank == 0:
            text = f"no round of replicas ended well; dropped so far: {metrics.get('rounds_dropped', 0)}"
            if "rounds_per_s" in metrics:
                text = (
                    f"{metrics['rounds_per_s']:.1f} rounds/s, {metrics['steps_per_round']:.1f} local steps each, "
                    f"spread of the replicas {metrics['spread']:.2e}"
                )
            engine.emit(Event("rates", step, text, metrics))

    def _report_rates(self, seconds: dict[str, float]) -> bool:
        """Every few seconds, from the chief: how long the workers take, and where micro-batches went. Whether now."""
        progress, now = self._engine.progress, time.perf_counter()
        if now - self._rates_s < _RATES_EVERY_S:
            return False
        self._rates_s = now
        words = ", ".join(f"{rank}: {s:.3f} s" for rank, s in seconds.items())
        counts = {"dropped": progress.account.dropped, "lost": progress.account.lost, "refused": progress.refused}
        data = {"seconds": seconds, **counts, "reissued": progress.reissued, **progress.delays()}
        data["elp"] = self._engine.elp
        if self.callback.mode == "auto" and self.callback.last is not None:
            data["gain"] = self.callback.last.gain
            data |= self._rates_of_modes()
        data["bytes_sent"], data["bytes_received"] = sent_received(progress.traffic)
        self._engine.emit(Event("rates", progress.step, f"seconds per micro-batch by worker: {words}", data))
        return True

    def _report_unstable_rate(self, servers: PsWorker, waited_s: float) -> None:
        """On the chief, where a curvature is known, once in a mode: the learning rate is predicted unstable in it."""
        engine, rates = self._engine, servers.position.rates
        if servers.name in REPLICA_MODES or len(rates) != engine.world.size:
            return
        self.callback.lr = max(engine.model.dense_lrs, default=0.0)
        of_step = engine.model.global_batch // engine.model.micro_batch
        why = self.callback.unstable_rate(servers.name, [seconds for _, seconds in rates], of_step, waited_s)
        if why:
            data = {"mode": servers.name}
            text = f"mode {servers.name}, with the workers' speeds in it: {why}"
            engine.emit(Event("rate_unstable", engine.progress.step, text, data, level="warning"))

    def _report_decision(self) -> None:
        """From the chief, in mode "auto": what was decided and why, where that is news.

        Decisions to stay every few seconds at most.
        """
        now = time.perf_counter()
        decision = self.callback.decisions.take(stays_too=now - self._decision_s >= _RATES_EVERY_S)
        if decision is None:
            return
        self._decision_s = now
        data = {"mode": decision.mode, "gain": round(decision.gain, 4), "kind": decision.kind, **self._rates_of_modes()}
        self._engine.emit(Event("decision", self._engine.progress.step, decision.reason, data))
