"""Changing the mode of a running job, at a global step on which all workers agree. No embedding row moves.

To an asynchronous mode, after the commit of step k told all workers to, and that the servers of all hosts are up (they
are started and started again beside training, by `local_server`); every rank runs every line:

    1. wait     until the rows of this host are as of step k; for servers that are not up only if the user said so
    2. gather   where the servers listen
    3. enter    each lead gives its servers their part of the dense parameters and of the optimizer's state, as of k;
                they take it until a given time only
    4. gather   did all enter? Then, and only then, the workers ask for leases. If not, allreduce goes on; that gather
                is the commit of the switch: a worker that dies before it leaves a job that is still in allreduce mode

A server that is stopped within 3 and wakes after 4 finds an `Enter` that is void. One that has carried it out, and
whose answer came too late, hears from each heartbeat of its lead which generation nobody is in, and leaves it.

To allreduce, after the coordinator ran dry at a step boundary and said so to each worker that asked for a lease:

    1. export   each worker takes the dense parameters and the optimizer's state from the servers, which thereby go idle
    2. gather   where the mode ran rounds in Horovod's world: did they end well for all? Whoever finds the world changed
                already does not come, and those that wait are told by Horovod when it leaves
    3. go on    with the allreduce mode that was left, if Horovod's world is still the same; else it is formed anew
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from gba_hvd import torch_optimizers, update_rules
from gba_hvd.callbacks import Event
from gba_hvd.comm.collectives import hosts_updated
from gba_hvd.comm.world_formation import still_forms
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.mode_names import REPLICA_MODES
from gba_hvd.modes.allreduce_exchange import AllreduceMode
from gba_hvd.modes.model_averaging import ReplicaMode
from gba_hvd.modes.parameter_server import GbaMode
from gba_hvd.ps import launch
from gba_hvd.ps.client import Client
from gba_hvd.ps.messages import Endpoint, Enter, Export, Position
from gba_hvd.ps.worker.session import DenseState, Session, place_dense
from gba_hvd.shm.shard_memory import is_alive
from gba_hvd.training.mode_limits import check_mode
from gba_hvd.update_rules.dana_slim import SlimWorker
from gba_hvd.update_rules.sgd_momentum import Sgd, buffer_of
from recovery import state_codec

if TYPE_CHECKING:
    from gba_hvd.training.engine import Engine

log = logging.getLogger("gba_hvd")
_LOOK_S, _SAY_AFTER_S = 0.05, 3.0
_LEAVE_TIMEOUT_S = 5.0
_RESCUE_TIMEOUT_S = 3.0


def to_servers(engine: Engine, mode: str, reason: str, n_samples: int) -> bool:
    """Enter an asynchronous mode. A collective between steps; False when it could not be done and allreduce goes on.

    n_samples: of the epoch at hand. Raises GbaError on all workers when the mode is required (`GBACallback`).
    """
    started = time.perf_counter()
    here, world = engine.mode, engine.world
    assert isinstance(here, AllreduceMode) and engine.switching is not None
    here.await_rows(engine.step)
    members, n = here.members, engine.switching.servers_per_host
    host = members.hosts[world.rank]
    leads = members.lead_of(host) == world.rank
    failure = ""
    own: list[Endpoint] = []
    if leads:
        try:
            _refuse_what_servers_cannot_do(engine, mode)
            _await_own(engine, mode)
            own = [launch.endpoint(engine.folder, i, host, 0.0) for i in range(n)]
        except (GbaError, OSError) as error:
            failure = str(error)
    generation = secrets.randbits(48) if world.rank == 0 else 0
    servers, workers, generation = _gather_who_is_there(engine, own, host, n, generation)
    session = None
    if len(servers) == n * len(members.order):
        session = _session(engine, here, mode, servers, generation)
        if leads:
            try:
                _enter(engine, session, own, workers, n_samples)
            except (GbaError, OSError) as error:
                failure = str(error)
    entered = world.gather("entered", np.array([session is not None and not failure], dtype=np.int64))
    if session is None or not entered.all():
        text = failure or "a server of another host could not take over (the log of its workers says why)"
        if engine.line is not None:
            engine.line.abandon(generation)
        if leads and session is not None and not failure:
            _leave(engine, session, own)
        here.resume()
        engine.switching.failed(engine.step, text)
        pause = f"tried again after {engine.switching.paused_until - engine.step} steps or more"
        data = {"to": mode, "seconds": round(time.perf_counter() - started, 4)}
        words = f"mode {mode} was not entered, allreduce goes on ({pause}): {text}"
        engine.emit(Event("switch_failed", engine.step, words, data, level="warning"), only_here=bool(failure))
        if engine.switching.required:
            raise GbaError(
                f"step {engine.step}: mode {mode} is required (GBACallback(required=True)) and was not entered: {text}"
            )
        return False
    start(engine, session, world.rank, host, len(workers))
    engine.idle_mode = here
    seconds = time.perf_counter() - started
    data = {"from": "allreduce", "to": mode, "seconds": round(seconds, 4), "reason": reason}
    engine.emit(Event("switch", engine.step, f"allreduce -> {mode}: {reason}", data))
    engine.switching.switched(mode, engine.step)
    return True


def start(engine: Engine, session: Session, rank: int, host: int, sharers: int = 0) -> None:
    """Be a worker of an asynchronous mode from now on.

    sharers: workers that enter together and share the optimizer's momentum; 0 for a newcomer, who has none.
    """
    parts = (session, engine.worker_id, rank, host, os.getpid(), engine.tables, engine.dense)
    patience_s = engine.tables.config.server_s
    mode: GbaMode
    if session.mode in REPLICA_MODES:
        assert engine.switching is not None
        mode = ReplicaMode(
            *parts, patience_s, averaging=engine.switching.averaging(session.mode), world=engine.world,
            optimizer=engine.optimizer, step_dense=engine.step_dense,
            is_elastic=os.environ.get("HOROVOD_ELASTIC") == "1", row_coder=engine.row_coder, traffic=engine.traffic,
        )  # fmt: skip
    else:
        mode = GbaMode(*parts, patience_s, engine.compression, engine.row_coder)
    mode.client.traffic = engine.traffic
    mode.contact.hosts_updated, engine.hosts_updated = engine.hosts_updated, False
    if session.rule == "dana_slim":
        mode.outgoing.slim = _slim_worker(engine, session, sharers)
    mode.start()
    if engine.compression is not None:
        engine.compression.forget_known()
    engine.mode, engine.traffic.mode = mode, session.mode
    engine.wishes.entered()


def _slim_worker(engine: Engine, session: Session, sharers: int) -> SlimWorker:
    """This worker's momentum, of all dense parameters."""
    optimizer, sizes = engine.optimizer, engine.dense.sizes
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    parameters = engine.dense.parameters
    sgd = Sgd.of(torch_optimizers.spec_of(optimizer), np.repeat([group_of[id(p)] for p in parameters], sizes))
    v: np.ndarray = np.zeros(engine.dense.n, np.float32)
    by_step = session.mode in ("gba", "bsp")
    pushes = engine.global_batch // engine.micro_batch if by_step else 1  # of a step, by which the server divides
    if sharers:
        v = buffer_of([optimizer.state.get(p, {}) for p in parameters], sizes) * np.float32(pushes / sharers)
    return SlimWorker(sgd, v, by_step)


def to_workers(engine: Engine, position: Position) -> None:
    """Leave an asynchronous mode that ran dry at `position`.

    Raises Horovod's interruption when the membership changed meanwhile: first the world is formed anew.
    """
    started = time.perf_counter()
    mode = engine.mode
    assert isinstance(mode, GbaMode) and engine.switching is not None
    take_dense_state(engine, mode, leaving=True)
    engine.observe(position)
    engine.cursor.epoch, engine.cursor.steps_done = position.epoch, position.steps_done
    if engine.reformer is not None:
        end_reformer(engine)
        world = max(position.world, mode.position.world)
        engine.hosts_updated = engine.hosts_updated or mode.contact.hosts_updated
        if engine.reformer.n_formed or world > engine.reformer.number:
            engine.idle_mode = None  # of a world that is no more
        engine.reformer = None
    mode.close()
    left, engine.mode, engine.idle_mode = mode.name, engine.idle_mode, None
    data = {
        "from": left,
        "to": "allreduce",
        "seconds": round(time.perf_counter() - started, 4),
        "reason": position.reason,
    }
    engine.emit(Event("switch", engine.step, f"{left} -> allreduce: {position.reason}", data))
    if position.pin or engine.switching.mode != "auto":
        engine.switching.pin(position.wanted)
    engine.switching.switched("allreduce", engine.step)
    if position.wanted not in ("allreduce", "auto"):
        engine.switch_to = (position.wanted, position.reason)  # from one asynchronous mode to another
    if engine.mode is not None and isinstance(mode, ReplicaMode) and not mode.all_left_together(engine.world):
        engine.mode = None  # something of the mode hangs in its world
    if engine.mode is None:
        raise hosts_updated()
    assert isinstance(engine.mode, AllreduceMode)
    engine.traffic.mode = engine.mode.name
    engine.mode.resume()


def end_reformer(engine: Engine) -> None:
    """Waits for a world that forms beside the mode: without it there is none to go on in."""

    def waits() -> None:
        if (wait := engine.forming.word()) is not None:
            engine.emit(still_forms(engine.step, wait, "the mode is left, and training stands still until then"))

    if engine.reformer is not None:
        engine.reformer.stop(waits=waits)


def take_dense_state(engine: Engine, mode: GbaMode, leaving: bool, ended: bool = True) -> None:
    """Bring the model's dense parameters and the optimizer's state to what the servers hold, bit for bit.

    ended: the epoch is over or the mode is left, on all workers; else this one alone has left the epoch's loop.
    """
    mode.rest()
    mode.flush()
    _put(engine, mode.export(leaving, ended))
    if isinstance(mode, ReplicaMode) and mode.late_for is not None:
        epoch, mode.late_for = mode.late_for, None
        text = (
            f"this worker handed in its replica of epoch {epoch} when the mean was made already: what it learned since "
            f"its last round is lost. Others wait {engine.tables.config.lease_s:.0f} s (lease_s) for a worker that "
            "lives, and for none that is silent"
        )
        told = {"of_epoch": epoch, "rank": mode.contact.rank}
        engine.emit(Event("replica_late", engine.step, text, told, level="warning"), only_here=True)


def rescue_dense_state(engine: Engine, mode: GbaMode) -> None:
    """This worker fell out of the mode: take over what the servers that still answer hold, and say what is missing."""
    found = mode.rescue(_RESCUE_TIMEOUT_S)
    engine.observe(mode.position)
    _put(engine, found)
    missing = len(engine.dense.parameters) - len(found)
    if missing:
        text = (
            f"{missing} of {len(engine.dense.parameters)} dense tensors were on servers that do not answer any more: "
            "their values are those this worker last saw, their optimizer state is of the last epoch's end or switch"
        )
        told = {"tensors": missing}
        engine.emit(Event("dense_state_old", engine.step, text, told, level="warning"), only_here=True)


def _put(engine: Engine, tensors: Mapping[int, DenseState]) -> None:
    engine.parameter_watch.forget()
    for number, tensor in tensors.items():
        engine.dense.set_parameters_([number], torch.from_numpy(tensor.values.copy()))
        if tensor.state:
            torch_optimizers.put_state(engine.optimizer, engine.dense.parameters[number], tensor.state)


# ---------------------------------------------------------------------------------------------------------------------


def _await_own(engine: Engine, mode: str) -> None:
    """On a host's lead: return when its servers are up, if training is to wait for them. Raises GbaError if not."""
    assert engine.switching is not None
    line, wait_s, began_s = engine.line, engine.switching.wait_s, time.monotonic()
    if line is None or not engine.switching.waits:
        return
    has_said = False
    while not line.is_ready(to_enter=True):
        passed_s = time.monotonic() - began_s
        why = line.folder_lost or launch.why_not_started(engine.folder, 0)
        if why or passed_s > wait_s:
            raise GbaError(
                f"the companion servers of this host were not up in {passed_s:.0f} s: {line.why_not_ready()}"
            )
        if not has_said and passed_s > _SAY_AFTER_S:
            has_said = True
            text = (
                f"training stands and waits for the companion servers of this host, to enter mode {mode}, for "
                f"{wait_s:.0f} s at most (wait_s)"
            )
            data = {"waiting": [f"mode {mode}"], "seconds": round(passed_s, 1)}
            engine.emit(Event("server_missing", engine.step, text, data, level="warning"), only_here=True)
        time.sleep(_LOOK_S)


def _gather_who_is_there(
    engine: Engine, own: list[Endpoint], host: int, n: int, generation: int
) -> tuple[list[Endpoint], list[tuple[int, int, int, int]], int]:
    """The servers of all hosts, in the order of their lowest ranks; the workers (id, rank, host, pid); and the
    generation that rank 0 drew.
    """
    row = [generation, engine.worker_id, host, os.getpid(), len(own)]
    for i in range(n):
        row += [host, int(ipaddress.IPv4Address(own[i].address)), own[i].control, own[i].pull] if own else [0, 0, 0, 0]
    everyone = engine.world.gather("servers", np.array(row, dtype=np.int64))
    servers, workers = [], []
    for rank, told in enumerate(everyone):
        _, worker, of_host, pid, n_own = map(int, told[:5])
        workers.append((worker, rank, of_host, pid))
        for i in range(n_own):
            at, address, control, pull = map(int, told[5 + 4 * i : 9 + 4 * i])
            servers.append(Endpoint(at, i, str(ipaddress.IPv4Address(address)), control, pull))
    return servers, workers, int(everyone[0][0])


def _session(engine: Engine, here: AllreduceMode, mode: str, servers: list[Endpoint], generation: int) -> Session:
    assert engine.switching is not None
    of_host = {host: [i for i, s in enumerate(servers) if s.host == host] for host in here.members.order}
    shard_servers = []
    for shard, home in enumerate(here.placement.host):
        candidates = of_host[here.members.order[home]]
        shard_servers.append(candidates[shard % len(candidates)])
    rule = "none" if mode in REPLICA_MODES else engine.switching.rule  # replicas know no delay
    return Session(
        generation, mode, engine.job_id, engine.key, tuple(servers), tuple(shard_servers),
        tuple(place_dense(engine.dense.sizes, len(servers))), engine.row_average, rule,
    )  # fmt: skip


def _enter(
    engine: Engine,
    session: Session,
    own: list[Endpoint],
    workers: list[tuple[int, int, int, int]],
    n_samples: int,
) -> None:
    """Give this host's servers their parts."""
    assert engine.switching is not None and engine.tables.memory is not None
    optimizer = engine.optimizer
    spec = torch_optimizers.spec_of(optimizer)
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    parameters = engine.dense.parameters
    host = own[0].host
    patience_s = engine.tables.config.server_s
    until_s = time.monotonic() + patience_s
    client = Client(session.job, session.key, session.servers, host, engine.folder, patience_s)
    client.start()
    try:

        def enter(me: int) -> None:
            mine = [t for t, server in enumerate(session.dense_servers) if server == me]
            values = [parameters[t].detach().cpu().numpy().ravel() for t in mine]
            state = state_codec.encode([dict(optimizer.state.get(parameters[t], {})) for t in mine])
            assert engine.switching is not None
            body = Enter(
                generation=session.generation,
                servers=list(session.servers),
                me=me,
                shard_servers=list(session.shard_servers),
                position=engine.wire_position(),
                n_samples=n_samples,
                global_batch=engine.global_batch,
                micro_batch=engine.micro_batch,
                discipline=vars(engine.switching.discipline(session.mode)).copy(),
                row_average=session.row_average,
                row_lr=engine.row_lr,
                lrs=engine.dense_lrs,
                tensors=[(engine.names[t], list(parameters[t].shape), group_of[id(parameters[t])]) for t in mine],
                optimizer=spec,
                workers=workers,
                rule=session.rule,
                until_s=until_s,
                max_norm=engine.clip.max_norm,
                max_row_norm=engine.clip.max_row_norm,
                loss_scale=None if engine.loss_scale is None else engine.loss_scale.describe(),
            )
            flat = np.concatenate(values) if values else np.empty(0, np.float32)
            client.call(me, body, [np.ascontiguousarray(flat), state])

        indices = [i for i, server in enumerate(session.servers) if server.host == host]
        with ThreadPoolExecutor(len(indices)) as pool:
            entering = {pool.submit(enter, me): me for me in indices}
            if late := wait(entering, _SAY_AFTER_S).not_done:
                silent = sorted(session.servers[entering[one]].index for one in late)
                _say_that_all_wait(engine, session.mode, silent, patience_s)
            for one in entering:
                one.result()
    finally:
        client.beat = None
        client.close()


def _say_that_all_wait(engine: Engine, mode: str, silent: list[int], patience_s: float) -> None:
    """All workers stand while a server takes over: one that hangs is told of long before it is given up."""
    text = (
        f"training stands, on all workers, and waits for server {' and '.join(map(str, silent))} of this host to enter "
        f"mode {mode}: no answer for {_SAY_AFTER_S:.0f} s, {patience_s:.0f} s at most (GBA_HVD_SERVER_S)"
    )
    data = {"waiting": [f"mode {mode}"], "seconds": _SAY_AFTER_S}
    engine.emit(Event("server_missing", engine.step, text, data, level="warning"), only_here=True)


def _leave(engine: Engine, session: Session, own: list[Endpoint]) -> None:
    """Tell this host's servers that the mode was not entered after all. Those that cannot hear it have not entered."""
    client = Client(session.job, session.key, session.servers, own[0].host, engine.folder, _LEAVE_TIMEOUT_S)
    client.start()
    for me, server in enumerate(session.servers):
        if server.host == own[0].host:
            with contextlib.suppress(GbaError):
                client.call(me, Export(session.generation, leaving=True))
    client.close()


def retire_servers(job: str, key: bytes, folder: Path, host: int) -> None:
    """On a host's lead, when a world forms in allreduce mode: its servers write no shard from here on.

    One may still be in an asynchronous mode that its workers fell out of, under a coordinator that was cut off and may
    come back. A server that does not answer is killed; its successor finds no session and is idle.
    """
    for session in folder.glob("ps-*.session"):
        index = int(session.name.removeprefix("ps-").removesuffix(".session"))
        told = msgspec.msgpack.decode(session.read_bytes())
        session.unlink()  # first, so that a successor that somebody starts meanwhile does not find it
        pid = launch.pid_of(folder, index)
        if not told["idle"] and pid is not None and is_alive(pid):
            client = Client(job, key, [Endpoint(host, index, "", 0, 0)], host, folder, _LEAVE_TIMEOUT_S)
            client.start()
            try:
                client.call(0, Export(told["enter"]["generation"], leaving=True))
            except GbaError as error:
                log.warning("server %d of this host was still in a mode that is over: %s", index, error)
                launch.kill(folder, index)
            finally:
                client.close()
        session.unlink(missing_ok=True)  # a server that heard it has written down that it is idle


def _refuse_what_servers_cannot_do(engine: Engine, mode: str) -> None:
    kinds = {p.dtype for p in engine.dense.parameters}
    if kinds and kinds != {torch.float32}:
        raise BadInput(f"asynchronous modes take dense parameters of float32, got {sorted(map(str, kinds))}")
    assert engine.switching is not None
    update_rules.check(engine.switching.rule, torch_optimizers.spec_of(engine.optimizer))
    check_mode(engine, mode, "none" if mode in REPLICA_MODES else engine.switching.rule)
