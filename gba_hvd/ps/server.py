"""The companion server: one process per host that serves rows, takes gradients and applies steps in asynchronous modes.

Who owns what. The main thread owns the control sockets, the part (buffer, dense tensors), and in server 0 the
coordinator; it is the only writer of the host's shards while the job is in an asynchronous mode. A second thread owns
the pull socket and only reads shard memory. What must survive the process lies in files of the job's folder: shard
memory, dense part, `session` (what it serves), `ledger` (the coordinator's state, saved before any answer leaves).

A killed server is started again by a worker of its host and goes on from these files. Its waiting pushes are gone: the
coordinator has their micro-batches computed again. No message ends a server: what a request raises is its answer.
Life: it holds no claim on the memory; when the folder goes (`shard.keeper`), it ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from gba_hvd.errors import GbaError
from gba_hvd.ps import compressed as wire
from gba_hvd.ps import protocol, residuals, transport
from gba_hvd.ps.coordinator import Coordinator
from gba_hvd.ps.dense import DensePart
from gba_hvd.ps.judging import Judging
from gba_hvd.ps.last_gasp import LastGasp
from gba_hvd.ps.part import Limits, Part, optimizer_of
from gba_hvd.ps.protocol import (
    Alive,
    Answer,
    Applied,
    Apply,
    Ask,
    Beat,
    Blend,
    Bye,
    Dense,
    Discard,
    Done,
    Enter,
    Evaluate,
    Export,
    Exported,
    Given,
    HandedIn,
    HandIn,
    Hold,
    Lives,
    Ok,
    Position,
    ProtocolError,
    Publish,
    PullDense,
    PullRows,
    Push,
    Refused,
    Request,
    Residual,
    Rows,
    Save,
    Saved,
    Score,
    Status,
    StatusReport,
    SwitchTo,
    Taken,
)  # fmt: skip
from gba_hvd.ps.saver import Saver
from gba_hvd.ps.snapshot import SnapshotFile
from gba_hvd.shard import kept
from gba_hvd.shard.layout import Layout
from gba_hvd.shard.memory import ShardMemory, is_alive
from gba_hvd.switching import known_mode
from recovery import state_codec

log = logging.getLogger("gba_hvd.ps")
_TICK_MS = 100
_WAIT_S = 0.5  # longest time an `Ask` is kept before it is told to wait
_RESEND_S = 1.0
_MESSAGES_A_TURN = 64  # from one socket, before the others have their turn
_LATE_TICK_S = 1.0  # after such a pause of this server, nobody is called silent for one tick
_KEPT_DECISIONS = 10
_GIVEN_UP = 10  # a worker of another host that is silent for so many times `alive_s` counts as dead
_DEFECTS_LOGGED = 50


@dataclass(frozen=True)
class Settings:
    """What a server reads at its start, from `ps.json` in the job's folder, written by the worker that starts it."""

    job: str
    layout: dict[str, Any]
    row_optimizer: dict[str, Any]
    address: str
    alive_s: float = 2.0
    lease_s: float = 60.0
    buffer_bytes: int = 4 << 30
    grace_s: float = 20.0


@dataclass
class _Waiter:
    socket: Any
    peer: bytes
    number: int
    ask: Ask
    since_s: float


@dataclass
class _Applying:
    """A decided step on its way: which servers have not applied it yet."""

    request: Apply
    pending: set[int]
    sent_s: float
    lost: set[int]
    missed: int


@dataclass(frozen=True)
class _SaveNext:
    """A checkpoint that waits until no step is under way. snapshot: what a newcomer would start from."""

    request: Save | None = None
    snapshot: bytes = b""


class Server:
    """`run()` until the job's folder is gone. Not thread-safe."""

    def __init__(self, folder: Path, index: int) -> None:
        self.folder, self.index = folder, index
        self.settings = Settings(**json.loads((folder / "ps.json").read_text()))
        described = dict(self.settings.layout)
        self.layout = layout_from(described)
        self.memory = ShardMemory.attach(folder, self.layout)
        self.optimizer = optimizer_of(self.settings.row_optimizer)
        self.key = (folder / "key").read_bytes()
        self.part: Part | None = None
        self.coordinator: Coordinator | None = None
        self.idle = True  # workers apply the steps; this server must not touch a shard
        self._ledger_file: SnapshotFile | None = None
        self._waiters: list[_Waiter] = []
        self._applying: _Applying | None = None
        self._alive_asked: dict[int, float] = {}
        self._told: dict[str, Any] = {}
        self._judging = Judging()
        self._wanted: tuple[str, str] = ("", "")
        self._decisions: list[str] = []
        self._leaving: set[int] = set()  # workers that wait for a checkpoint
        self._ended = False
        self._context: zmq.Context[Any] = zmq.Context()
        ports = {"control": 0, "pull": 0}
        with contextlib.suppress(FileNotFoundError):  # a successor listens where its predecessor did
            ports |= json.loads(self._file("address").read_text())
        self._gate = transport.Gate(self._context, self.key)
        self._row_lender = wire.RowLender()
        self._control, self._pull = self._listen("control", ports["control"]), self._listen("pull", ports["pull"])
        self._folder_id = os.stat(folder).st_ino
        self._n_saved = 0
        self._failure = ""  # why a step could not be applied; told to whoever asks for a lease
        self._ticked_s = time.monotonic()
        self._peers: dict[int, Any] = {}  # the coordinator's sockets to the other servers, by index
        self._limits = Limits(self.settings.buffer_bytes)
        self._poller = self._poll_all()
        self._saver, self._save_next = Saver(self.memory, self._file("saved")), _SaveNext()
        self._gasp = LastGasp(folder, index, self.settings.grace_s / 2)
        self._gasp_asked: Saved | None = None  # what was the newest save when a last one was asked for
        self._resume()

    def _file(self, name: str) -> Path:
        return self.folder / f"ps-{self.index}.{name}"

    def _listen(self, purpose: str, port: int) -> transport.Listener:
        settings = self.settings
        return transport.Listener(
            self._context, self.folder, f"ps-{self.index}.{purpose}", settings.address, port, self.key,
            min(transport.MAX_FRAME_BYTES, settings.buffer_bytes), settings.buffer_bytes,
        )  # fmt: skip

    # --- life --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        puller = threading.Thread(target=self._serve_pulls, name="pulls", daemon=True)
        puller.start()
        fresh = self._file("address.new")
        fresh.write_text(json.dumps({"control": self._control.port, "pull": self._pull.port, "pid": os.getpid()}))
        fresh.rename(self._file("address"))  # last: from here on the server is there
        next_tick = 0.0
        while not self._ended:
            try:
                self._turn()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + _TICK_MS / 1000
                    self._tick()
            except Exception:
                log.exception("the server goes on after an error that belongs to no request")
                time.sleep(_TICK_MS / 1000)  # should it come again at once, the log must not fill the disk
        self._saver.close()
        puller.join()  # sockets belong to one thread: close them when it is done
        self._context.destroy(linger=0)

    def _turn(self) -> None:
        """Wait for messages and answer them, some from each socket."""
        ready = dict(self._poller.poll(_TICK_MS))
        if self._gate.socket in ready:
            self._gate.serve()
        for socket in (self._control.local, self._control.tcp):
            for _ in range(_MESSAGES_A_TURN if socket in ready else 0):
                try:
                    peer, frames = transport.receive(socket, wait=False)
                except zmq.Again:
                    break
                self._handle(socket, peer, frames)
        for index, socket in list(self._peers.items()):
            if socket in ready and not socket.closed:
                self._peer_answered(index, socket)

    def end(self) -> None:
        self._ended = True

    def _tick(self) -> None:
        if not self._folder_is_there():
            self.end()  # the job is over and its memory gone
            return
        self._save_the_last()
        now, before = time.monotonic(), self._ticked_s
        self._ticked_s = now
        coordinator = self.coordinator
        if coordinator is None or self.idle:
            self._answer_waiters()
            return
        assert self.part is not None
        here = self.part.enter.servers[0].host
        for worker, seen in list(coordinator.workers.items()):
            if seen.host == here and not is_alive(seen.pid):  # no need to wait until it is missed
                self._worker_is_dead(worker)
        # A server that was stopped or busy has not heard anybody: heartbeats wait to be read.
        for worker in coordinator.fall_silent() if now - before < _LATE_TICK_S else []:
            self._judging.leave(worker)
            seen = coordinator.workers[worker]
            if time.monotonic() - seen.heard_s > _GIVEN_UP * self.settings.alive_s and seen.host != here:
                self._worker_is_dead(worker)  # nobody there could say; should it live, it comes back with a heartbeat
            elif seen.host != here and time.monotonic() - self._alive_asked.get(worker, 0.0) > _RESEND_S:
                self._alive_asked[worker] = time.monotonic()
                self._ask_whether_alive(worker, seen.host, seen.pid)
        applying = self._applying
        if applying is not None and time.monotonic() - applying.sent_s > _RESEND_S:
            self._send_apply(applying)
        self._advance()
        self._save_between_steps()

    def _folder_is_there(self) -> bool:
        """Whether the folder is still ours: a job of the same name may have made a new one."""
        try:
            return os.stat(self.folder).st_ino == self._folder_id and (self.folder / "alive").exists()
        except FileNotFoundError:
            return False

    # --- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, socket: Any, peer: bytes, frames: list[Any]) -> None:
        number = 0
        try:
            if not frames:
                raise ProtocolError("an empty message")
            envelope = protocol.open_envelope(frames[0], self.settings.job)
            number = envelope.number
            request = protocol.decode_request(envelope)
            answer, out = self._answer(socket, peer, number, request, frames[1:])
        except Exception as error:
            answer, out = _refusal(error), ()
            number = number or getattr(error, "number", 0)
        if answer is not None:
            header = protocol.encode(self.settings.job, number, answer)
            if not self._control.answer(socket, peer, header, out):
                transport.send(socket, peer, protocol.encode(self.settings.job, number, _TOO_MUCH_UNREAD))

    def _answer(
        self, socket: Any, peer: bytes, number: int, request: Request, frames: list[Any]
    ) -> tuple[Answer | None, Sequence[Any]]:
        match request:
            case Push():
                return self._on_push(request, frames), ()
            case Residual():
                if len(frames) != 1:
                    raise ProtocolError(f"Residual comes with one frame, got {len(frames)}")
                self._active(request.generation).residuals.came(request.worker, frames[0])
                return Ok(), ()
            case Ask():
                return self._on_ask(_Waiter(socket, peer, number, request, time.monotonic())), ()
            case Evaluate():
                self._lead(request.generation)
                return self._judging.ask(request, frames)
            case Score():
                self._lead(request.generation)
                self._judging.score(request, frames)
                return Ok(), ()
            case Done():
                return self._on_done(request), ()
            case Beat():
                return self._on_beat(request), ()
            case PullDense():
                return wire.answer_pull(self._active(request.generation), request)
            case Apply():
                return self._on_apply(request), ()
            case Discard():
                self._active(request.generation).buffer.forget_before(request.oldest_serial)
                return Ok(), ()
            case Export():
                return self._on_export(request)
            case Blend():
                part = self._active(request.generation)
                values = part.central.blend(request, frames)
                return Dense(part.dense.step), (values,)
            case Publish():
                self._active(request.generation).central.publish(request, frames)
                return Ok(), ()
            case HandIn():
                counts = self._active(request.generation).central.hand_in(request, frames)
                return Taken(late=not counts), ()
            case HandedIn():
                return self._on_handed_in(request), ()
            case Enter():
                return self._on_enter(request, frames), ()
            case Bye():
                self._judging.leave(request.worker)
                if self.part is not None:
                    self.part.forget_worker(request.worker, request.finished)
                if self.coordinator is not None and not self.idle and request.worker in self.coordinator.workers:
                    if request.finished:
                        self.coordinator.bye(request.worker)
                    else:  # its process may go on, but not as a worker of this world
                        self.coordinator.dead(request.worker)
                    self._save_ledger()
                    self._advance()
                return Ok(), ()
            case Alive():
                return Lives(is_alive(request.pid)), ()
            case Status():
                return StatusReport(self._status()), ()
            case SwitchTo():
                return self._on_switch(request), ()
            case Hold():
                self._saver.hold(request)
                return Ok(), ()
            case Save():
                return self._on_save(request, frames), ()
            case PullRows():
                return Refused("rows are pulled at the other port", kind="ProtocolError"), ()

    def _active(self, generation: int) -> Part:
        if self.part is None or self.part.enter.generation != generation:
            now = 0 if self.part is None else self.part.enter.generation
            raise ProtocolError(f"generation {generation} is not served here, it is {now}: the job switched meanwhile")
        return self.part

    def _lead(self, generation: int) -> Coordinator:
        self._active(generation)
        if self.coordinator is None:
            raise ProtocolError("this server is not the coordinator")
        return self.coordinator

    def _on_push(self, request: Push, frames: list[Any]) -> Answer:
        part = self._active(request.generation)
        if request.compressed or request.rows_compressed:
            frames = wire.opened(part, self.layout, request, frames)
        if part.push(request.micro, request.serial, frames, request.dense_step, request.worker):
            return Ok()
        if self.coordinator is not None:  # pushes of revoked leases will never be asked for
            part.buffer.forget_before(self.coordinator.ledger.oldest_serial)
            if part.push(request.micro, request.serial, frames, request.dense_step, request.worker):
                return Ok()
        return Refused(
            f"{part.buffer.n_bytes:,} bytes of gradients wait already, buffer_bytes is {self.settings.buffer_bytes:,}; "
            "the gradients of one global batch have to fit",
            again=True,
        )

    def _on_ask(self, waiter: _Waiter) -> Answer | None:
        coordinator = self._lead(waiter.ask.generation)
        if self._failure:
            return Refused(self._failure, kind="failed")
        answer = coordinator.ask(waiter.ask)
        if answer is None:
            asked = waiter.ask.worker, waiter.ask.request
            self._waiters = [w for w in self._waiters if (w.ask.worker, w.ask.request) != asked] + [waiter]
            return None
        if isinstance(answer, Given) and answer.lease is not None:
            self._save_ledger()
        return answer

    def _on_done(self, request: Done) -> Answer:
        coordinator, part = self._lead(request.generation), self._active(request.generation)
        if not request.refused and (request.micro, request.serial) not in part.buffer:
            coordinator.lost_push(request)  # it went down with a predecessor, unless the step had it already
        coordinator.done(request)
        before = self._n_saved
        self._advance()
        if self._n_saved == before:  # no step was decided, whose save has this in it
            self._save_ledger()
        return Ok(coordinator.position())

    def _on_beat(self, request: Beat) -> Answer:
        self._saver.alive()
        if request.told:
            self._told = dict(request.told)
        if self.coordinator is None or self.idle:
            wanted, reason = self._wanted
            return Ok(Position(wanted=wanted, reason=reason, saved=self._saver.report()))
        world = self.coordinator.world
        self.coordinator.beat(request)
        self._leaving = self._leaving - {request.worker} | ({request.worker} if request.leaving else set())
        if self.coordinator.world != world:
            self._save_ledger()
        position = self.coordinator.position()
        position.saved = self._saver.report()
        position.leaving = not self._leaving.isdisjoint(self.coordinator.workers)
        return Ok(position)

    def _on_switch(self, request: SwitchTo) -> Answer:
        known_mode(request.mode)
        self._decisions = [*self._decisions[1 - _KEPT_DECISIONS :], f"{request.mode}: {request.reason}"]
        if self.coordinator is not None and not self.idle:
            self.coordinator.want(request.mode, request.reason, request.pin)
            self._save_ledger()
            self._advance()
        else:
            self._wanted = (request.mode, request.reason)
        return Ok()

    def _on_save(self, request: Save, frames: list[Any]) -> Answer:
        state = bytes(frames[0]) if frames else b""
        if not request.generation:
            if self.part is not None and not self.idle:
                raise ProtocolError("this save is of allreduce mode: the job switched meanwhile")
            self._saver.begin(request, self.memory.ready(), lambda extras: state)
            return Ok()
        part = self._active(request.generation)
        if self.coordinator is not None:  # at the next moment between two steps
            self._save_next = _SaveNext(request, state)
            self._save_between_steps()
        else:
            self._saver.begin(request, part.shards.tolist(), lambda extras: b"", part_state(part))
        return Ok()

    def _save_between_steps(self) -> None:
        """At the coordinator: all servers save, as of the same step."""
        request, snapshot = self._save_next.request, self._save_next.snapshot
        if request is None or self.coordinator is None or self.part is None or self._applying is not None:
            return
        position = self.coordinator.to_go_on_from()
        if position is None:
            return
        self._save_next = _SaveNext()
        facts = {"n_parts": 1 + len(self._peers), "step": position.step, "samples": position.account["applied"]}
        request = msgspec.structs.replace(request, number=position.step, **facts)

        living = None if request.about.get("compression", "none") == "none" else sorted(self.coordinator.workers)

        def state(extras: list[bytes]) -> bytes:
            return asynchronous_state(snapshot, extras, position, living)

        try:
            self._saver.begin(request, self.part.shards.tolist(), state, part_state(self.part))
        except Exception:  # nobody waits for this answer; the chief asks again when it has heard nothing
            log.exception("a checkpoint was not begun")
            return
        for index, socket in self._peers.items():  # they get it before the next step
            message = protocol.encode(self.settings.job, 0, msgspec.structs.replace(request, part=index))
            with contextlib.suppress(zmq.Again):
                socket.send(message, flags=zmq.DONTWAIT)

    def _save_the_last(self) -> None:
        """When all workers are gone: what is newer than the last checkpoint, before the memory goes.

        In an asynchronous mode all servers save; in allreduce mode one that has all shards, if the training state was
        kept in memory. A server that is not asked by its coordinator only keeps the memory, for as long as it may take.
        """
        gasp, limit_s = self._gasp, self._saver.last_gasp_s
        if limit_s <= 0 or not gasp.is_due() or self._hears_workers():
            return
        if not gasp.is_under_way:
            if gasp.begin(limit_s):
                self._gasp_asked = None
            return
        report = self._saver.report()
        if report.state == "running" and not gasp.is_late:
            return
        if self._gasp_asked is None:
            self._gasp_asked = report
            if self._ask_for_the_last():
                return
        if gasp.is_late or report != self._gasp_asked or not self._serves_a_coordinator():
            log.warning("all workers are gone; the last checkpoint: %s %s", report.state or "none", report.facts)
            gasp.end()

    def _hears_workers(self) -> bool:
        """Those of other hosts, at the coordinator."""
        seen = () if self.coordinator is None or self.idle else self.coordinator.workers.values()
        return any(not one.silent for one in seen)

    def _serves_a_coordinator(self) -> bool:
        return self.part is not None and not self.idle and (self.coordinator is None or bool(self._save_next.request))

    def _ask_for_the_last(self) -> bool:
        """Whether something is being saved, or will be."""
        try:
            state = kept.read(self.folder)
            if self.part is not None and not self.idle:
                if self.coordinator is None:
                    return True  # its coordinator asks
                request = self._saver.last_request(self.coordinator.ledger.step, 0, self.part.enter.generation)
                if request is None or state is None or state.generation != self.part.enter.generation:
                    return False
                self._save_next = _SaveNext(request, state.state)
                self._save_between_steps()
                return True
            shards = self.memory.ready()
            if self.index or state is None or state.generation or len(shards) < self.layout.n_shards:
                return False
            position = state_codec.decode(state.state)["position"]
            request = self._saver.last_request(state.step, position["account"]["applied"])
            if request is None:
                return False
            marks = self.memory.marks()
            torn = [int(s) for s in shards if marks.begun[s] > marks.finished[s]]
            for shard in torn:  # whoever was applying a step there is dead: it will never be finished
                self.memory.set_ready(shard, int(marks.begun[shard]))
            if torn:
                request.about["torn_shards"] = len(torn)
            self._saver.begin(request, shards, lambda extras: state.state)
        except (GbaError, OSError, KeyError) as error:
            log.warning("no last checkpoint is made: %s", error)
            return False
        return True

    def _on_enter(self, request: Enter, frames: list[Any]) -> Answer:
        if self.part is not None and self.part.enter.generation == request.generation:
            return Ok()  # asked again
        coordinator = self._new_coordinator(request)  # what can be refused is tried before anything is changed
        part = Part.begin(request, frames, self._file("dense"), self.memory, self.optimizer, self._limits)
        if self.part is not None:
            self.part.close()
        coordinator.lags = part.lags
        self.part, self.coordinator = part, coordinator if request.me == 0 else None
        self._waiters, self._applying, self._wanted, self._failure = [], None, ("", ""), ""
        self._save_next = _SaveNext()
        self._connect_peers()
        self._save_ledger()
        self.idle = False
        self._save_session()
        return Ok()

    def _on_apply(self, request: Apply) -> Answer:
        part = self._active(request.generation)
        if self.idle:  # the workers write shards: whoever asks was cut off when they fell out of the mode
            raise ProtocolError(
                f"step {request.step} of generation {request.generation} comes too late: its mode is over"
            )
        return part.apply(request)

    def _on_export(self, request: Export) -> tuple[Answer, Sequence[Any]]:
        part, position = self._active(request.generation), None
        if request.position and self.coordinator is not None:
            position = None if self._applying is not None else self.coordinator.to_go_on_from()
            if position is None:
                return Refused("a step is under way", again=True), ()
        step, values, state = part.export(request.phase)
        if request.leaving and not self.idle:
            self.idle, part.mirrors = True, None
            self._save_session()  # before the workers write shards: a successor must leave them alone
        return Exported(step, position), (values, state)

    def _on_handed_in(self, request: HandedIn) -> Answer:
        _ = self._active(request.generation).central  # refuses where there are no replicas
        if self.idle:
            return Ok()  # the mode is being left: all had handed in before, and a successor has no coordinator
        coordinator = self._lead(request.generation)
        before = coordinator.gathered
        if not coordinator.handed_in(request):
            return Refused("other workers have not handed in their replicas yet", again=True)
        if request.early or coordinator.gathered != before:
            self._save_ledger()
        if request.early:
            self._advance()  # others may have its leases
        return Ok()

    # --- steps, at the coordinator -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Decide and apply what is due, then answer who waits."""
        coordinator = self.coordinator
        if coordinator is None or self.idle:
            return
        while not self._failure and self._applying is None and (request := coordinator.decide()) is not None:
            self._save_ledger()  # the decision, before anything of it is applied
            self._applying = _Applying(request, set(self._peers), time.monotonic(), set(), 0)
            self._send_apply(self._applying)
            assert self.part is not None
            try:
                answer = self.part.apply(request)
            except GbaError as error:  # nothing of it was applied, and nothing after it will be: workers are told why
                self._failure = f"step {request.step}: {error}"
                self._applying = None
                break
            self._note_applied(self._applying, answer)
            self._finish_step()
        self._answer_waiters()

    def _send_apply(self, applying: _Applying) -> None:
        applying.sent_s = time.monotonic()
        message = protocol.encode(self.settings.job, applying.request.step, applying.request)
        for index in applying.pending:
            with contextlib.suppress(zmq.Again):
                self._peers[index].send(message, flags=zmq.DONTWAIT)

    def _note_applied(self, applying: _Applying, answer: Applied) -> None:
        applying.lost |= set(answer.missing)
        applying.missed += answer.missed
        self._failure = self._failure or answer.failed

    def _finish_step(self) -> None:
        applying = self._applying
        if applying is not None and not applying.pending:
            assert self.coordinator is not None
            self.coordinator.applied(applying.request.step, applying.lost, applying.missed)
            self._applying = None
            self._save_ledger()
            self._save_between_steps()

    def _peer_answered(self, index: int, socket: Any) -> None:
        frames = [frame.buffer for frame in socket.recv_multipart(copy=False)]
        applying, number = self._applying, None
        try:
            envelope = protocol.open_envelope(frames[0], self.settings.job)
            number = envelope.number
            answer = protocol.decode_answer(envelope)
        except ProtocolError as error:
            answer = Refused(str(error))
        if isinstance(answer, Refused) and not answer.again:
            log.error("server %d refused: %s", index, answer.why)
            if applying is not None and index in applying.pending and number in (None, applying.request.step):
                self._failure = f"server {index} cannot take part in step {applying.request.step}: {answer.why}"
                self._answer_waiters()
        elif isinstance(answer, Applied) and self._applying is not None:
            if answer.step == self._applying.request.step and index in self._applying.pending:
                self._applying.pending.discard(index)
                self._note_applied(self._applying, answer)
                self._finish_step()
                self._advance()
        elif isinstance(answer, Lives) and not answer.alive:
            self._worker_is_dead(envelope.number)

    def _answer_waiters(self) -> None:
        waiting: list[_Waiter] = []
        answered: list[tuple[_Waiter, Answer]] = []
        for waiter in self._waiters:
            answer: Answer | None
            try:
                coordinator = self._lead(waiter.ask.generation)
                answer = Refused(self._failure, kind="failed") if self._failure else coordinator.ask(waiter.ask)
                if answer is None and time.monotonic() - waiter.since_s < _WAIT_S:
                    waiting.append(waiter)
                    continue
                answered.append((waiter, answer or Given(coordinator.position(), None, "wait")))
            except Exception as error:
                answered.append((waiter, _refusal(error)))
        self._waiters = waiting
        if any(isinstance(answer, Given) and answer.lease is not None for _, answer in answered):
            self._save_ledger()
        for waiter, answer in answered:
            transport.send(waiter.socket, waiter.peer, protocol.encode(self.settings.job, waiter.number, answer))

    def _worker_is_dead(self, worker: int) -> None:
        assert self.coordinator is not None
        if worker in self.coordinator.workers:
            log.warning("worker of rank %d is dead", self.coordinator.workers[worker].rank)
            self.coordinator.dead(worker)
            self._judging.leave(worker)
            if self.part is not None:
                self.part.forget_worker(worker)
            self._save_ledger()
            self._advance()

    def _ask_whether_alive(self, worker: int, host: int, pid: int) -> None:
        assert self.part is not None
        there = [i for i, endpoint in enumerate(self.part.enter.servers) if endpoint.host == host]
        if there and there[0] in self._peers:
            with contextlib.suppress(zmq.Again):
                message = protocol.encode(self.settings.job, worker, Alive(pid))
                self._peers[there[0]].send(message, flags=zmq.DONTWAIT)

    # --- what survives -----------------------------------------------------------------------------------------------

    def _new_coordinator(self, enter: Enter) -> Coordinator:
        settings = self.settings
        try:
            return Coordinator(enter, alive_s=settings.alive_s, lease_s=settings.lease_s, clock=time.monotonic)
        except TypeError as error:  # a discipline or an account with names that it does not have
            raise ProtocolError(f"Enter: {error}") from error

    def _save_ledger(self) -> None:
        if self.coordinator is None:
            return
        if self._ledger_file is None:
            self._ledger_file = SnapshotFile(self._file("ledger"))
        assert self.part is not None
        record = {"generation": self.part.enter.generation, **self.coordinator.state()}
        self._ledger_file.write(msgspec.msgpack.encode(record))
        self._n_saved += 1

    def _save_session(self) -> None:
        assert self.part is not None
        fresh = self._file("session.new")
        fresh.write_bytes(msgspec.msgpack.encode({"idle": self.idle, "enter": self.part.enter}))
        fresh.rename(self._file("session"))

    def _resume(self) -> None:
        """Go on where a server that died stopped, if there was one."""
        try:
            session = msgspec.msgpack.decode(self._file("session").read_bytes())
        except FileNotFoundError:
            return
        enter = msgspec.convert(session["enter"], Enter)
        self.idle = session["idle"]
        if self.idle:
            dense = DensePart.open(self._file("dense"))
            self.part = Part(enter, dense, self.memory, self.optimizer, self._limits)
            return
        self.part, torn = Part.resume(enter, self._file("dense"), self.memory, self.optimizer, self._limits)
        self._connect_peers()
        if enter.me != 0:
            return
        self.coordinator = self._new_coordinator(enter)
        self.coordinator.lags = self.part.lags
        self._ledger_file = SnapshotFile(self._file("ledger"))
        saved = self._ledger_file.read()
        if (
            saved is not None
            and (state := msgspec.msgpack.decode(saved, strict=False))["generation"] == enter.generation
        ):
            self.coordinator.resume(state)
        self._settle(torn)
        self._save_ledger()
        log.warning("going on at step %d where a server that died stopped", self.coordinator.ledger.step)

    def _settle(self, torn: int) -> None:
        """What became of the pushes and of a decided step that the dead server held."""
        assert self.coordinator is not None and self.part is not None
        ledger = self.coordinator.ledger
        decided = ledger.decided
        if decided is not None:
            begun, done = self.part.begun_and_done(decided.step)
            if not begun and not self._peers:
                ledger.undo()
            elif done and not torn:
                self.coordinator.applied(decided.step, set(), 0) if not self._peers else None
            else:
                missed = self.part.skip(decided.step)
                self.coordinator.applied(decided.step, set(), missed) if not self._peers else None
        ledger.lost_pushes()
        discard = Discard(self.part.enter.generation, ledger.last_serial + 1)
        if ledger.decided is None:  # else the peers may still need what they have
            for peer in self._peers.values():
                peer.send(protocol.encode(self.settings.job, 0, discard), flags=zmq.DONTWAIT)

    def _connect_peers(self) -> None:
        for socket in self._peers.values():
            socket.close()
        self._peers = {}
        assert self.part is not None
        enter = self.part.enter
        if enter.me == 0:
            for index, server in enumerate(enter.servers[1:], start=1):
                self._peers[index] = transport.connect(
                    self._context, self.key, address=server.address, port=server.control
                )
        self._poller = self._poll_all()

    def _poll_all(self) -> zmq.Poller:
        poller = zmq.Poller()
        for socket in (self._gate.socket, self._control.local, self._control.tcp, *self._peers.values()):
            poller.register(socket, zmq.POLLIN)
        return poller

    # --- a look ------------------------------------------------------------------------------------------------------

    def _status(self) -> dict[str, Any]:
        report: dict[str, Any] = {"job": self.settings.job, "server": self.index, "decisions": self._decisions}
        report["checkpoints"] = self._saver.url
        if self.coordinator is None or self.idle:
            return {**report, "mode": "allreduce", **self._told}
        position = self.coordinator.position()
        now = time.monotonic()
        return {
            **report,
            "mode": self.coordinator.ledger.discipline.name,
            **msgspec.to_builtins(position, str_keys=True),
            "under_way": self.coordinator.ledger.n_outstanding,
            "refused_gradients": self.coordinator.names_refused,
            "by_worker": [
                {"rank": s.rank, "pid": s.pid, "silent_s": round(now - s.heard_s, 1), "micro_batches": s.done,
                 "seconds_per_micro_batch": round(s.seconds, 4)}
                for s in sorted(self.coordinator.workers.values(), key=lambda s: s.rank)
            ],
        }  # fmt: skip

    # --- the other thread --------------------------------------------------------------------------------------------

    def _serve_pulls(self) -> None:
        """Answer pulls of rows. Only reads shard memory; a row that is being written may come half old, half new."""
        everywhere = np.ones(self.layout.n_shards, dtype=bool)
        poller = zmq.Poller()
        for socket in (self._pull.local, self._pull.tcp):
            poller.register(socket, zmq.POLLIN)
        while not self._ended:
            try:
                for socket, _ in poller.poll(_TICK_MS):
                    self._answer_pull(socket, everywhere)
            except Exception:
                log.exception("the server goes on after an error that belongs to no pull")
                time.sleep(_TICK_MS / 1000)

    def _answer_pull(self, socket: Any, everywhere: np.ndarray) -> None:
        peer, frames = transport.receive(socket)
        number = 0
        answer: Answer
        out: Sequence[Any] = ()
        try:
            envelope = protocol.open_envelope(frames[0], self.settings.job)
            number = envelope.number
            request = protocol.decode_request(envelope)
            if not isinstance(request, PullRows):
                raise ProtocolError(f"{type(request).__name__} does not belong to the port for pulls")
            part = self.part
            mine = everywhere if part is None else part.mine
            answer, out = Rows(), self._row_lender.rows(self.memory, mine, request, frames[1:])
        except Exception as error:
            answer, out = _refusal(error), ()
            number = number or getattr(error, "number", 0)
        if not self._pull.answer(socket, peer, protocol.encode(self.settings.job, number, answer), out):
            transport.send(socket, peer, protocol.encode(self.settings.job, number, _TOO_MUCH_UNREAD))


def part_state(part: Part) -> bytes:
    """What this server adds to a checkpoint: its dense tensors by name, and what its host's workers had not sent."""
    _, values, state = part.export()
    ends = np.cumsum([0, *(tensor.size for tensor in part.dense.tensors)])
    states = state_codec.decode(state)
    dense = {
        tensor.name: {"values": values[ends[i] : ends[i + 1]], "state": states[i]}
        for i, tensor in enumerate(part.dense.tensors)
    }
    return state_codec.encode({"dense": dense, "workers": part.residuals.workers, "rest": part.residuals.total()})


def asynchronous_state(
    snapshot: bytes, extras: Sequence[bytes], position: Position, living: Sequence[int] | None = None
) -> bytes:
    """What a checkpoint has beside rows: the user's values, the dense tensors of all servers, and where to go on.

    extras: of all servers (`part_state`). living: the workers, where gradients are compressed: what all of them had not
    sent yet is in it too, and of how many that is not known.
    Raises GbaError when the values are of an earlier epoch than the job is in: whole epochs would be trained again.
    """
    values = state_codec.decode(snapshot)
    order = values["position"].get("order")
    if order is not None and order["epoch"] < position.epoch:
        raise GbaError(
            f"the values of the training script are as of epoch {order['epoch']}, the job is in epoch {position.epoch} "
            "already: they do not belong together"
        )
    parts = [state_codec.decode(extra) for extra in extras]
    dense: dict[str, Any] = {}
    for part in parts:
        dense |= part["dense"]
    state = {"snapshot": values, "dense": dense, "position": msgspec.to_builtins(position)}
    if living is not None:
        known = {worker for part in parts for worker in part["workers"]}
        rest = residuals.total(part["rest"] for part in parts)
        state["compression"] = {"rest": rest, "missing": len(set(living) - known)}
    return state_codec.encode(state)


_logged: list[str] = []  # a peer that goes wrong again and again must not fill the disk


def _refusal(error: Exception) -> Refused:
    """The answer to a request that raised. What is no fault of the request goes to the log as a defect of ours."""
    if not isinstance(error, GbaError | ValueError) and len(_logged) < _DEFECTS_LOGGED:
        _logged.append(error.__class__.__name__)
        log.error("a request failed", exc_info=error)
    return Refused(str(error)[:2000] or type(error).__name__, kind=type(error).__name__)


_TOO_MUCH_UNREAD = Refused("too many large answers wait to be read by others", again=True)


def layout_from(description: dict[str, Any]) -> Layout:
    """The inverse of `Layout.describe`."""
    from gba_hvd.shard.layout import SlotSpec

    slots = tuple(SlotSpec(name, kind == "row") for name, kind in description["slots"].items())
    tables = {name: (rows, dim) for name, (rows, dim) in description["tables"].items()}
    return Layout.of(tables, slots, description["n_shards"], description["seed"], description["init_std"])


def main(folder: Path, index: int) -> None:
    """Serve until the job is over."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    # The first optimizer of a process imports for seconds: now, not when the workers wait.
    torch.optim.Adam([torch.zeros(1, requires_grad=True)]).step()
    try:
        server = Server(folder, index)
    except Exception as error:
        fresh = folder / f"ps-{index}.failed.new"
        fresh.write_text(f"{type(error).__name__}: {error}")
        fresh.rename(folder / f"ps-{index}.failed")
        raise
    signal.signal(signal.SIGTERM, lambda *_: server.end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers; the server sees them go
    server.run()
    logging.shutdown()
    os._exit(0)  # threads that wait for a store that hangs must not keep this process
