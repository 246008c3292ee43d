"""From a mode with servers back to allreduce, after the coordinator ran dry at a step boundary.

It says so to each worker that asks for a lease:

    1. export   each worker takes the dense parameters and the optimizer's state from the servers, which thereby go idle
    2. gather   all are to resume in the same world. A worker whose world changed already does not come, and those that
                wait are notified by Horovod when it leaves. Where the mode ran rounds in it: did they end well for all?
    3. resume   the allreduce mode that was left, if Horovod's world is still the same; else it is formed again
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from gba_hvd.callbacks import Event
from gba_hvd.comm.collectives import hosts_updated
from gba_hvd.errors import GbaError
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps import launch
from gba_hvd.ps.client import Client
from gba_hvd.ps.messages import Endpoint, Export, JobPosition
from gba_hvd.shm.process_state import is_alive
from gba_hvd.switching.requests import switching_of
from gba_hvd.training.engine import Engine

log = logging.getLogger("gba_hvd")
_LEAVE_TIMEOUT_S = 5.0


def leave(engine: Engine, position: JobPosition) -> None:
    """Leave a mode with servers that ran dry at `position`.

    Raises Horovod's interruption when the membership changed meanwhile: first the world is formed again.
    """
    started = time.perf_counter()
    mode, switching = engine.mode, switching_of(engine)
    assert isinstance(mode, ParameterServerMode) and switching is not None
    servers, idle, signals = mode.servers, mode.idle, engine.signals
    mode.take_dense_state(leaving=True)
    engine.observe(position)
    for participant in engine.participants:
        participant.epoch_over(servers)
    cursor = engine.progress.cursor
    cursor.epoch, cursor.segment, cursor.steps_done = position.epoch, position.segment, position.steps_done
    cursor.n_steps = position.n_steps
    if mode.rejoin is not None:
        mode.end_rejoin()
        world = max(position.membership_epoch, servers.position.membership_epoch)
        signals.hosts_updated = signals.hosts_updated or servers.contact.hosts_updated
        if idle is not None and (mode.rejoin.n_formed or world > mode.rejoin.number):
            idle.close()
            idle = None  # of a world that is no more
    servers.close()
    engine.mode = idle
    data = {
        "from": mode.name,
        "to": "allreduce",
        "seconds": round(time.perf_counter() - started, 4),
        "reason": position.reason,
    }
    engine.emit(Event("switch", engine.progress.step, f"{mode.name} -> allreduce: {position.reason}", data))
    # What is not pinned, the chief decided in mode "auto", of which this worker may not have learned.
    switching.pin(position.requested_mode if position.pinned else "auto")
    switching.switched("allreduce", engine.progress.step)
    if position.requested_mode not in ("allreduce", "auto"):
        signals.requested_mode = (position.requested_mode, position.reason)  # from one mode with servers to another
    if idle is not None and not servers.all_left_together(engine.world):
        idle.close()
        idle = engine.mode = None  # something of the mode hangs in its world
    if idle is None:
        raise hosts_updated()
    engine.traffic.mode = idle.name
    idle.exchange.resume()


def retire_servers(job: str, key: bytes, folder: Path, host: int) -> None:
    """On a host's leader, when a world forms in allreduce mode: its servers write no shard from here on.

    One may still be in an asynchronous mode that its workers fell out of, under a coordinator that was cut off and may
    come back. A server that does not answer is killed; its successor finds no session and is idle.
    """
    for session in folder.glob("ps-*.session"):
        index = int(session.name.removeprefix("ps-").removesuffix(".session"))
        stored = msgspec.msgpack.decode(session.read_bytes())
        session.unlink()  # first, so that a successor that is started meanwhile does not find it
        pid = launch.pid_of(folder, index)
        if not stored["idle"] and pid is not None and is_alive(pid):
            with Client(job, key, [Endpoint(host, index, "", 0, 0)], host, folder, _LEAVE_TIMEOUT_S) as client:
                try:
                    client.call(0, Export(stored["enter"]["generation"], leaving=True))
                except GbaError as error:
                    log.warning("server %d of this host was still in a mode that is over: %s", index, error)
                    launch.kill(folder, index)
        session.unlink(missing_ok=True)  # a server that received it has written down that it is idle
