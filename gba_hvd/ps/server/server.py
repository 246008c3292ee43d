"""The companion server: one process per host that serves rows, takes gradients and applies steps in asynchronous modes.

    a message -> `request_port` -> its handler is looked up here -> the owner of what it is about -> the answer

Who owns what. The main thread owns the control sockets, the mode that is on (`mode`: the part, and in server 0 the
coordinator), checkpoints, and nearly all else; it is the only writer of the host's shards while the job is in an
asynchronous mode. A second thread owns the pull socket and only reads shard memory (`pull_thread`). What must survive
the process lies in files of the job's folder (`state_files`).

A killed server is started again by a worker of its host and resumes from these files. Its waiting pushes are gone: the
coordinator has their micro-batches computed again. No message ends a server: what a request raises is its answer.
Life: it holds no claim on the memory; when the folder goes (`shm.reaper`), it ends.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zmq

from gba_hvd import kernels
from gba_hvd.compression import kernels as compression_kernels
from gba_hvd.gc_pause import gc_paused
from gba_hvd.ps import messages, transport
from gba_hvd.ps.coordinator.failure_detector import FailureDetector
from gba_hvd.ps.coordinator.peers import Peers
from gba_hvd.ps.launch import Settings
from gba_hvd.ps.messages import Answer, Ok, ProtocolError, Refused, Request
from gba_hvd.ps.partition import compressed_frames
from gba_hvd.ps.partition.checkpoint_state import part_state
from gba_hvd.ps.partition.partition import Partition
from gba_hvd.ps.partition.saver import Saver
from gba_hvd.ps.request_port import Requester, RequestPort
from gba_hvd.ps.server.active_mode import ActiveMode
from gba_hvd.ps.server.final_checkpoint import FinalCheckpoint
from gba_hvd.ps.server.pull_thread import PullThread
from gba_hvd.ps.server.status import StatusService
from gba_hvd.ps.state_files import StateFiles
from gba_hvd.shm import job_folder as folders
from gba_hvd.shm import vocabulary_kernels
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.process_state import is_alive
from gba_hvd.shm.shard_memory import ShardMemory

log = logging.getLogger("gba_hvd.ps")
_TICK_MS = 100
MOST_FILES = 1 << 16
_MESSAGES_A_TURN = 64  # from one socket, before the others have their turn


class Server:
    """`run()` until the job's folder is gone. Not thread-safe."""

    def __init__(self, folder: Path, index: int) -> None:
        folders.check(folder)
        self._folder = folder
        self._settings = settings = Settings.read(folder)
        self._memory = ShardMemory.attach(folder, Layout.of_description(settings.layout))
        self._records = StateFiles(folder, index)
        self._saver = Saver(self._memory, self._records.path("saved"))
        key = (folder / "key").read_bytes()
        self._context: zmq.Context[Any] = zmq.Context(transport.IO_THREADS)
        self._poller = zmq.Poller()
        self._peers = Peers(self._context, key, settings.job, self._poller)
        self._mode = ActiveMode(settings, self._memory, self._records, self._peers, self._saver)
        self._reporting = StatusService(settings.job, index, self._mode, self._saver)
        self._last_save = FinalCheckpoint(index, settings.grace_s, self._memory, self._mode, self._saver)

        self._gate = transport.Gate(self._context, key)
        control, pull = self._records.ports()  # a successor listens where its predecessor did
        self._port = RequestPort(self._listen("control", control, key), settings.job, self._carry_out)
        self._pulling = PullThread(self._listen("pull", pull, key), settings.job, self._memory, self._mode.owned_shards)
        for socket in (self._gate.socket, *self._port.sockets):
            self._poller.register(transport.pollable(socket), zmq.POLLIN)

        self._folder_id = os.stat(folder).st_ino
        self._failure_detector = FailureDetector(self._peers, settings.heartbeat_timeout_s)
        self._ended = False
        self._warm_up = threading.Thread(target=self._import_optimizers, name="warm-up", daemon=True)
        if self._records.session() is not None:  # a mode that resumes needs them at once
            self._import_optimizers()
        self._mode.resume()

    def _listen(self, purpose: str, port: int, key: bytes) -> transport.Listener:
        name, limit = self._records.path(purpose).name, self._settings.buffer_bytes
        return transport.Listener(
            self._context, self._folder, name, self._settings.address, port, key,
            limit, self._settings.wire,
        )  # fmt: skip

    # --- life --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self._pulling.start()
        self._records.save_address(self._port.number, self._pulling.port)  # from here on the server is there
        self._reporting.warming = self._mode.part is None
        if self._reporting.warming:
            self._warm_up.start()
        next_tick = 0.0
        while not self._ended:
            try:
                self._turn()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + _TICK_MS / 1000
                    self._tick()
            except Exception:
                log.exception("the server continues after an error that belongs to no request")
                time.sleep(_TICK_MS / 1000)  # should it come again at once, the log must not fill the disk
        self._saver.close()
        self._pulling.join()  # sockets belong to one thread: close them when it is done
        self._context.destroy(linger=0)

    def _import_optimizers(self) -> None:
        """The first step of a torch optimizer imports for seconds, as numba does: done beside the first answers."""
        try:
            kernels.load()
            compression_kernels.load()
            if any(group.hashed is not None for group in self._memory.layout.groups):
                vocabulary_kernels.load()
            with gc_paused():
                torch.optim.Adam([torch.zeros(1, requires_grad=True)]).step()
        finally:
            self._reporting.warming = False

    def end(self) -> None:
        self._ended = True
        self._pulling.end()

    def _turn(self) -> None:
        """Wait for messages and answer them, some from each socket."""
        ready = dict(self._poller.poll(_TICK_MS))
        if self._gate.socket in ready:
            self._gate.serve()
        for socket in self._port.sockets:
            if transport.pollable(socket) in ready:
                self._port.serve(socket, _MESSAGES_A_TURN)
        for index, number, answer in self._peers.answers(ready):
            assert self._mode.coordinator_service is not None
            self._mode.coordinator_service.peer_answered(index, number, answer)

    def _tick(self) -> None:
        self._port.tick()
        self._peers.tick()
        if not self._folder_is_there():
            self.end()  # the job is over and its memory gone
            return
        if self._memory.is_cut_short:
            log.error("this server ends: %s", self._memory.trouble())
            self.end()
            return
        self._last_save.tick()
        self._failure_detector.check(self._mode.active_coordinator)
        if self._mode.coordinator_service is not None:
            self._mode.coordinator_service.tick()

    def _folder_is_there(self) -> bool:
        """Whether the folder is still ours: a job of the same name may have made a new one."""
        try:
            return os.stat(self._folder).st_ino == self._folder_id and (self._folder / "alive").exists()
        except FileNotFoundError:
            return False

    # --- requests ----------------------------------------------------------------------------------------------------

    def _carry_out(self, caller: Requester, request: Request, frames: list[Any]) -> tuple[Answer | None, Sequence[Any]]:
        mode = self._mode
        match request:
            # Of the part: gradients and values.
            case messages.Push():
                return self._on_push(request, frames), ()
            case messages.Residual():
                if len(frames) != 1:
                    raise ProtocolError(f"Residual comes with one frame, got {len(frames)}")
                mode.active(request.generation).residuals.came(request.worker, frames[0])
                return Ok(), ()
            case messages.PullDense():
                return compressed_frames.answer_pull(mode.active(request.generation), request)
            case messages.PullRows():
                raise ProtocolError("rows are pulled at the other port")
            case messages.Blend():
                part = mode.active(request.generation)
                values = part.central.blend(request, frames)
                return messages.Dense(part.dense.step), (values,)
            case messages.Publish():
                mode.active(request.generation).central.publish(request, frames)
                return Ok(), ()
            case messages.SubmitReplica():
                counts = mode.active(request.generation).central.submit(request, frames)
                return messages.ReplicaAccepted(late=not counts), ()
            # Of the coordinator.
            case messages.LeaseRequest():
                return mode.coordinated(request.generation).ask(caller, request), ()
            case messages.PushDone():
                return mode.coordinated(request.generation).done(request), ()
            case messages.ReplicaSubmitted():
                return self._on_handed_in(request), ()
            case messages.ReturnLeases():
                return mode.coordinated(request.generation).returned(request), ()
            case messages.Evaluate():
                return mode.coordinated(request.generation).evaluate(request, frames)
            case messages.Score():
                return mode.coordinated(request.generation).score(request, frames), ()
            case messages.Sources():
                return mode.coordinated(request.generation).sources(request, frames)
            # From the coordinator.
            case messages.Measure():
                return self._decided(request).measure(request), ()
            case messages.Apply():
                return self._decided(request).apply(request), ()
            case messages.Discard():
                mode.active(request.generation).buffer.discard_before(request.oldest_serial)
                return Ok(), ()
            case messages.ProbeProcess():
                return messages.ProcessAlive(is_alive(request.pid)), ()
            # Of the mode, and who is in it.
            case messages.Enter():
                if self._warm_up.ident is not None:
                    self._warm_up.join()  # two threads are not to import the same at once
                mode.enter(request, frames)
                return Ok(), ()
            case messages.Export():
                return mode.export(request)
            case messages.Leave():
                mode.bye(request)
                return Ok(), ()
            case messages.HeartbeatMsg():
                return Ok(self._reporting.beat(request)), ()
            case messages.Status():
                return messages.StatusReport(self._reporting.status()), ()
            case messages.SwitchTo():
                self._reporting.switch(request)
                return Ok(), ()
            # Of checkpoints.
            case messages.DelegateClaim():
                self._saver.hold(request)
                return Ok(), ()
            case messages.Save():
                self._on_save(request, frames)
                return Ok(), ()

    def _on_push(self, request: messages.Push, frames: list[Any]) -> Answer:
        part, coordinator_service = self._mode.active(request.generation), self._mode.coordinator_service
        if request.compressed or request.rows_compressed:
            frames = compressed_frames.decompress_push(part, self._memory.layout, request, frames)
        if part.push(request.micro, request.serial, frames, request.dense_step, request.worker):
            return Ok()
        if coordinator_service is not None:  # pushes of revoked leases will never be asked for
            part.buffer.discard_before(coordinator_service.coordinator.ledger.oldest_serial)
            if part.push(request.micro, request.serial, frames, request.dense_step, request.worker):
                return Ok()
        limit = self._settings.buffer_bytes
        return Refused(
            f"{part.buffer.n_bytes:,} bytes of gradients wait already, buffer_bytes is {limit:,}; "
            "the gradients of one global batch have to fit",
            retry=True,
        )

    def _on_handed_in(self, request: messages.ReplicaSubmitted) -> Answer:
        part = self._mode.active(request.generation)
        _ = part.central  # refuses where there are no replicas
        if part.idle:
            return Ok()  # the mode is being left: all had submitted before, and a successor has no coordinator
        return self._mode.coordinated(request.generation).replica_submitted(request)

    def _decided(self, request: messages.Measure | messages.Apply) -> Partition:
        """Whose part of a decided step it is."""
        part = self._mode.active(request.generation)
        if part.idle:  # the workers write shards: the requester was cut off when they were evicted from the mode
            raise ProtocolError(
                f"step {request.step} of generation {request.generation} comes too late: its mode is over"
            )
        return part

    def _on_save(self, request: messages.Save, frames: list[Any]) -> None:
        mode, state = self._mode, bytes(frames[0]) if frames else b""
        if not request.generation:
            if not mode.idle:
                raise ProtocolError("this save is of allreduce mode: the job switched meanwhile")
            self._saver.begin(request, self._memory.ready(), lambda extras: state)
            return
        part = mode.active(request.generation)
        if mode.coordinator_service is not None:  # at the next moment between two steps
            mode.coordinator_service.executor.save(request, state)
        else:
            self._saver.begin(request, part.shards.tolist(), lambda extras: b"", part_state(part))


def raise_file_limit() -> None:
    """As far as this process may: each connection takes a file descriptor, also of peers that do not get in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(folder: Path, index: int) -> None:
    """Serve until the job is over."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    faulthandler.enable()  # a shard file that was cut short: SIGBUS, with where it happened
    torch.set_num_threads(1)
    raise_file_limit()
    try:
        server = Server(folder, index)
    except Exception as error:
        StateFiles(folder, index).save_failure(error)
        raise
    signal.signal(signal.SIGTERM, lambda *_: server.end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers; the server sees them go
    server.run()
    logging.shutdown()
    os._exit(0)  # threads that wait for a store that hangs must not keep this process
