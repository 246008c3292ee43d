"""From allreduce to a mode with servers, at a global step on which all workers agree. No embedding row moves.

After the commit of step k requested it, and showed that the servers of all hosts are up (they are started and started
again beside training, by `host_server`); every rank runs every line:

    1. wait     until the rows of this host are as of step k; for servers that are not up only if that is configured
    2. gather   where the servers listen
    3. enter    each host leader gives its servers their part of the dense parameters and optimizer state, as of k;
                they take it until a given time only
    4. gather   did all enter? Then, and only then, the workers ask for leases. If not, allreduce continues; that gather
                is the commit of the switch: a worker that dies before it leaves a job that is still in allreduce mode

A server that is stopped within 3 and wakes after 4 finds an `Enter` that is void. One that has carried it out, and
whose answer came too late, learns from each heartbeat of its host leader which generation no worker is in, and leaves
it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from gba_hvd import torch_optimizers, update_rules
from gba_hvd.callbacks import Event
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.mode_names import BY_NAME
from gba_hvd.modes.allreduce import AllreduceMode
from gba_hvd.modes.model_averaging import ModelAveragingMode
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps import launch
from gba_hvd.ps.client import Client
from gba_hvd.ps.messages import WIRES, Endpoint, Enter, Export, Wire
from gba_hvd.ps.worker.replica_worker import ReplicaWorker
from gba_hvd.ps.worker.session import PsSession, place_dense
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.switching.callback import GBACallback
from gba_hvd.switching.mode_limits import check_mode, compression_idle, options_idle, row_average_idle, strict_idle
from gba_hvd.switching.requests import switching_of
from gba_hvd.training.engine import Engine
from gba_hvd.training.settings_watch import ChangedSettings
from gba_hvd.update_rules.dana_slim import SlimWorker
from gba_hvd.update_rules.sgd_momentum import Sgd, buffer_of
from recovery import state_codec

_LOOK_S, _REPORT_AFTER_S = 0.05, 3.0
_NEARLY_OVER = 0.75  # of a wait that was asked for: from here on it is a warning
_LEAVE_TIMEOUT_S = 5.0
_N_NUMBERS = 5  # of an endpoint: `_as_numbers`


def enter(engine: Engine, mode: str, reason: str, n_samples: int) -> bool:
    """Enter an asynchronous mode. A collective between steps; False when it could not be done and allreduce continues.

    n_samples: of the epoch at hand. Raises GbaError on all workers when the mode is required (`GBACallback`).
    """
    started = time.perf_counter()
    here, world, switching = engine.mode, engine.world, switching_of(engine)
    assert isinstance(here, AllreduceMode) and switching is not None
    assert engine.model.tables.memory is not None
    engine.model.tables.memory.await_device()
    here.exchange.await_rows(engine.progress.step)
    members, n = here.exchange.members, switching.servers_per_host
    host = members.hosts[world.rank]
    is_leader = members.leader_of(host) == world.rank
    failure = ""
    own: list[Endpoint] = []
    if is_leader:
        try:
            _refuse_what_servers_cannot_do(engine, switching, mode)
            _await_own(engine, switching, mode)
            own = [launch.endpoint(engine.folder, i, host, 0.0) for i in range(n)]
            _refuse_another_wire(own, switching.wire, engine.folder)
        except (GbaError, OSError) as error:
            failure, own = str(error) or repr(error), []
    generation = secrets.randbits(48) if world.rank == 0 else 0
    servers, workers, generation = _gather_who_is_there(engine, own, host, n, generation, switching.wait_s)
    session = None
    if len(servers) == n * len(members.order):
        session = _session(engine, switching, here, mode, servers, generation)
        if is_leader:
            try:
                _enter(engine, switching, session, own, workers, n_samples)
            except (GbaError, OSError) as error:
                failure = str(error) or repr(error)
    failed = np.flatnonzero(world.gather("entered", np.array([bool(failure)], dtype=np.int64)))
    if session is None or len(failed):
        others = f"the servers of the host of rank {', '.join(map(str, failed))} could not take over; its log says why"
        text = failure or others
        if engine.host.server is not None:
            engine.host.server.abandon(generation)
        if is_leader and session is not None and not failure:
            _leave(engine, session, own)
        here.exchange.resume()
        switching.failed(engine.progress.step, text)
        pause = switching.pause_in_words(engine.progress.step)
        data = {"to": mode, "seconds": round(time.perf_counter() - started, 4)}
        then = "" if switching.required else f", allreduce continues ({pause})"
        words = f"mode {mode} was not entered{then}: {text}"
        engine.emit(Event("switch_failed", engine.progress.step, words, data, level="warning"), only_here=bool(failure))
        if switching.required:
            raise GbaError(
                f"step {engine.progress.step}: mode {mode} is required (GBACallback(required=True)) and was not "
                f"entered: {text}"
            )
        return False
    start(engine, session, world.rank, host, len(workers), here)
    seconds = time.perf_counter() - started
    rule = switching.rule_in(mode)
    data = {"from": "allreduce", "to": mode, "seconds": round(seconds, 4), "reason": reason}
    data |= {"rule": rule.rule, "rule_reason": rule.reason}
    if first_used := switching.settings_first_used_in(mode):
        data["settings_first_used"] = first_used
    text = f"allreduce -> {mode}: {reason}; update {rule}{_pace_of_step_functions(engine, mode)}"
    engine.emit(Event("switch", engine.progress.step, text, data))
    _report_what_is_idle(engine, switching, mode, len(members.order))
    switching.switched(mode, engine.progress.step)
    return True


def _report_what_is_idle(engine: Engine, switching: GBACallback, mode: str, n_hosts: int) -> None:
    """Once for each mode: what was asked for and has no effect in the one that is entered."""
    step = engine.progress.step
    for warning in (
        row_average_idle(mode, engine.model.row_average, step), compression_idle(engine, mode, n_hosts),
        strict_idle(engine, mode), options_idle(switching, mode, step),
    ):  # fmt: skip
        if warning is not None:
            engine.reports.once(warning, of=mode)


def _pace_of_step_functions(engine: Engine, mode: str) -> str:
    """What becomes of functions of `state.on_step` where a step is no global batch; empty where there are none."""
    n_micro, step_of = engine.model.global_batch // engine.model.micro_batch, BY_NAME[mode].step_of
    if step_of == "batch" or n_micro == 1 or not engine.step_hooks.functions:
        return ""
    pace = f"{n_micro} times as often as in allreduce" if step_of == "push" else "at another pace than in allreduce"
    return f"; each {step_of} is a step, so functions of state.on_step, such as a schedule's, run {pace}"


def start(
    engine: Engine, session: PsSession, rank: int, host: int, sharers: int = 0, idle: AllreduceMode | None = None
) -> None:
    """Be a worker of a mode with servers from now on.

    sharers: workers that enter together and share the optimizer's momentum; 0 for a late joiner, which has none.
    idle: the mode that is left for this one
    """
    model, switching = engine.model, switching_of(engine)
    parts = (session, engine.job.worker_id, rank, host, os.getpid(), model.tables, model.dense)
    patience_s = model.tables.config.server_timeout_s
    mode: ParameterServerMode
    if BY_NAME[session.mode].has_replicas:
        assert switching is not None
        replicas = ReplicaWorker(
            *parts, patience_s, averaging=switching.averaging(session.mode), world=engine.world,
            optimizer=model.optimizer, step_dense=model.step_dense,
            is_elastic=os.environ.get("HOROVOD_ELASTIC") == "1", row_coder=model.row_coder, traffic=engine.traffic,
        )  # fmt: skip
        mode = ModelAveragingMode(engine, replicas, idle)
    else:
        takes_over = update_rules.takes_over(session.rule, model.optimizer)
        changed = ChangedSettings(model.dense_settings, is_followed=not takes_over)
        servers = PsWorker(*parts, patience_s, model.compression, model.row_coder)
        mode = ParameterServerMode(engine, servers, idle, changed)
    servers = mode.servers
    servers.client.traffic, servers.contact.host_name = engine.traffic, engine.world.host
    servers.source_names.names = engine.progress.source_names
    model.tables.while_saved = mode.while_saved
    servers.contact.hosts_updated, engine.signals.hosts_updated = engine.signals.hosts_updated, False
    engine.signals.workers_come = False  # training does not pause for them
    if session.rule == "dana_slim":
        servers.outgoing.slim = _slim_worker(engine, session, sharers)
    servers.start()
    if model.compression is not None:
        model.compression.forget_known()
    engine.mode, engine.traffic.mode = mode, session.mode
    for participant in engine.participants:
        participant.mode_entered()


def _slim_worker(engine: Engine, session: PsSession, sharers: int) -> SlimWorker:
    """This worker's momentum, of all dense parameters."""
    optimizer, sizes = engine.model.optimizer, engine.model.dense.sizes
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    parameters = engine.model.dense.parameters
    sgd = Sgd.of(torch_optimizers.spec_of(optimizer), np.repeat([group_of[id(p)] for p in parameters], sizes))
    v: np.ndarray = np.zeros(engine.model.dense.n, np.float32)
    by_step = BY_NAME[session.mode].step_of == "batch"
    # Of a step, by which the server divides.
    pushes = engine.model.global_batch // engine.model.micro_batch if by_step else 1
    if sharers:
        v = buffer_of([optimizer.state.get(p, {}) for p in parameters], sizes) * np.float32(pushes / sharers)
    return SlimWorker(sgd, v, by_step)


def _await_own(engine: Engine, switching: GBACallback, mode: str) -> None:
    """On a host's leader: return when its servers are up, if training is to wait for them. Raises GbaError if not.

    The wait was asked for, so it is reported once; and once as a warning, when it is nearly over.
    """
    line, wait_s, began_s = engine.host.server, switching.wait_s, time.monotonic()
    if line is None or not switching.waits:
        return
    due_s: list[tuple[float, Literal["info", "warning"]]] = [
        (_REPORT_AFTER_S, "info"), (max(_REPORT_AFTER_S, _NEARLY_OVER * wait_s), "warning")
    ]  # fmt: skip
    while not line.is_ready(to_enter=True):
        passed_s = time.monotonic() - began_s
        why = line.folder_lost or launch.why_not_started(engine.folder, 0)
        if why or passed_s > wait_s:
            raise GbaError(
                f"the companion servers of this host were not up in {passed_s:.0f} s: {line.why_not_ready()}"
            )
        if due_s and passed_s > due_s[0][0]:
            level = due_s.pop(0)[1]
            text = (
                f"training stands and waits for the companion servers of this host, to enter mode {mode}, for "
                f"{wait_s:.0f} s at most (wait_s)"
            )
            if level == "warning":
                text += f", of which {passed_s:.0f} s are over: {line.why_not_ready(to_enter=True)}"
            data = {"waiting": [f"mode {mode}"], "seconds": round(passed_s, 1)}
            kind = "server_missing" if level == "warning" else "server_awaited"
            engine.emit(Event(kind, engine.progress.step, text, data, level=level), only_here=True)
        time.sleep(_LOOK_S)


def _refuse_another_wire(own: Sequence[Endpoint], wire: Wire, folder: Path) -> None:
    """Raises GbaError: a job of the same name that was here before started this host's servers with other settings."""
    for server in own:
        if server.wire != wire:
            raise GbaError(
                f"this job has GBACallback(wire={wire!r}), but server {server.index} of this host has "
                f"wire={server.wire!r}: the job before it of this name started it. Stop the job, remove {folder} or "
                "choose another GBA_HVD_JOB_ID, and start again"
            )


def _gather_who_is_there(
    engine: Engine, own: list[Endpoint], host: int, n: int, generation: int, wait_s: float
) -> tuple[list[Endpoint], list[tuple[int, int, int, int]], int]:
    """The servers of all hosts, in the order of their lowest ranks; the workers (id, rank, host, pid); and the
    generation that rank 0 drew.
    """
    row = [generation, engine.job.worker_id, host, os.getpid(), len(own)]
    for i in range(n):
        row += _as_numbers(own[i]) if own else [0] * _N_NUMBERS
    # Others see by the name why a leader may come late: `comm.collective_waits`.
    everyone = engine.world.gather(f"servers.wait_s={wait_s:g}", np.array(row, dtype=np.int64))
    servers, workers = [], []
    for rank, reported in enumerate(everyone):
        _, worker, of_host, pid, n_own = map(int, reported[:5])
        workers.append((worker, rank, of_host, pid))
        for i in range(n_own):
            at, address, control, pull, wire = map(int, reported[5 + _N_NUMBERS * i :][:_N_NUMBERS])
            servers.append(Endpoint(at, i, str(ipaddress.IPv4Address(address)), control, pull, WIRES[wire]))
    return servers, workers, int(everyone[0][0])


def _as_numbers(own: Endpoint) -> list[int]:
    address = int(ipaddress.IPv4Address(own.address))
    return [own.host, address, own.control, own.pull, WIRES.index(own.wire)]


def _session(
    engine: Engine, switching: GBACallback, here: AllreduceMode, mode: str, servers: list[Endpoint], generation: int
) -> PsSession:
    of_host = {host: [i for i, s in enumerate(servers) if s.host == host] for host in here.exchange.members.order}
    shard_servers = []
    for shard, home in enumerate(here.exchange.placement.host):
        candidates = of_host[here.exchange.members.order[home]]
        shard_servers.append(candidates[shard % len(candidates)])
    switching.check_fits(
        torch_optimizers.spec_of(engine.model.optimizer), bool(engine.model.dense.n)
    )  # as it is now, on every worker
    return PsSession(
        generation, mode, engine.job.id, engine.job.key, tuple(servers), tuple(shard_servers),
        tuple(place_dense(engine.model.dense.sizes, len(servers))), engine.model.row_average,
        switching.rule_in(mode).rule, engine.model.tables.counts_accesses,
    )  # fmt: skip


def _enter(
    engine: Engine,
    switching: GBACallback,
    session: PsSession,
    own: list[Endpoint],
    workers: list[tuple[int, int, int, int]],
    n_samples: int,
) -> None:
    """Give this host's servers their parts."""
    assert engine.model.tables.memory is not None
    optimizer = engine.model.optimizer
    spec = torch_optimizers.spec_of(optimizer)
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    parameters = engine.model.dense.parameters
    host = own[0].host
    patience_s = engine.model.tables.config.server_timeout_s
    until_s = time.monotonic() + patience_s
    with Client(session.job, session.key, session.servers, host, engine.folder, patience_s) as client:

        def enter(me: int) -> None:
            mine = [t for t, server in enumerate(session.dense_servers) if server == me]
            values = [parameters[t].detach().cpu().numpy().ravel() for t in mine]
            state = state_codec.encode([dict(optimizer.state.get(parameters[t], {})) for t in mine])
            body = Enter(
                generation=session.generation,
                servers=list(session.servers),
                me=me,
                shard_servers=list(session.shard_servers),
                position=engine.progress.to_wire(),
                n_samples=n_samples,
                global_batch=engine.model.global_batch,
                micro_batch=engine.model.micro_batch,
                discipline=vars(switching.discipline(session.mode)).copy(),
                row_average=session.row_average,
                accesses=session.accesses,
                row_lr=engine.model.row_lr,
                lrs=engine.model.group_lrs,
                tensors=[(engine.model.names[t], list(parameters[t].shape), group_of[id(parameters[t])]) for t in mine],
                optimizer=spec,
                workers=workers,
                rule=session.rule,
                rule_settings=switching.rule_settings if session.rule != "none" else {},
                until_s=until_s,
                max_norm=engine.model.clip.max_norm,
                max_row_norm=engine.model.clip.max_row_norm,
                loss_scale=None if engine.model.loss_scale is None else engine.model.loss_scale.describe(),
            )
            flat = np.concatenate(values) if values else np.empty(0, np.float32)
            client.call(me, body, [np.ascontiguousarray(flat), state])

        indices = [i for i, server in enumerate(session.servers) if server.host == host]
        with ThreadPoolExecutor(len(indices)) as pool:
            entering = {pool.submit(enter, me): me for me in indices}
            if late := wait(entering, _REPORT_AFTER_S).not_done:
                silent = sorted(session.servers[entering[one]].index for one in late)
                _report_that_all_wait(engine, session.mode, silent, patience_s)
            for one in entering:
                one.result()


def _report_that_all_wait(engine: Engine, mode: str, silent: list[int], patience_s: float) -> None:
    """All workers stand while a server takes over: a hanging one is reported long before its time-out."""
    text = (
        f"training stands, on all workers, and waits for server {' and '.join(map(str, silent))} of this host to enter "
        f"mode {mode}: no answer for {_REPORT_AFTER_S:.0f} s, {patience_s:.0f} s at most (GBA_HVD_SERVER_TIMEOUT_S)"
    )
    data = {"waiting": [f"mode {mode}"], "seconds": _REPORT_AFTER_S}
    engine.emit(Event("server_missing", engine.progress.step, text, data, level="warning"), only_here=True)


def _leave(engine: Engine, session: PsSession, own: list[Endpoint]) -> None:
    """Notify this host's servers that the mode was not entered after all. Those out of reach have not entered."""
    with Client(session.job, session.key, session.servers, own[0].host, engine.folder, _LEAVE_TIMEOUT_S) as client:
        for me, server in enumerate(session.servers):
            if server.host == own[0].host:
                with contextlib.suppress(GbaError):
                    client.call(me, Export(session.generation, leaving=True))


def _refuse_what_servers_cannot_do(engine: Engine, switching: GBACallback, mode: str) -> None:
    kinds = {p.dtype for p in engine.model.dense.parameters}
    if kinds and kinds != {torch.float32}:
        raise BadInput(f"asynchronous modes take dense parameters of float32, got {sorted(map(str, kinds))}")
    switching.check_fits(torch_optimizers.spec_of(engine.model.optimizer), bool(engine.model.dense.n))
    check_mode(engine, mode, switching.rule_in(mode).rule)
