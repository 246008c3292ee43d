"""A job that lost all its workers, resuming from what it left in memory: nothing is lost. At the start of the next one.

A job of this name that runs on one of the hosts is found first, and this one is refused (`refuse_if_in_use`): it has
claimed nothing and changed nothing then.

Each host's leader looks at what is in the job's folder on its host (`survey`); from what all found, `decide_resume`
decides, the same on every rank. Then, in the order in which things become visible:

    1. open    a host leader that found something locks the memory, so that the reaper leaves it alone
    2. end     if an asynchronous mode was on, its servers, started again where they died, give the dense state and the
               position, and touch no shard from then on (`collect_state`)
    3. resume  one rank has the training state; shards stay where they are

A crash before 3 leaves the memory as it was; the next attempt starts over. A failure is reported and loses
what came after the newest checkpoint: the memory is removed and the job resumes from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gba_hvd.errors import GbaError, ShardMemoryError
from gba_hvd.ps import launch
from gba_hvd.ps.client import Client, Reply
from gba_hvd.ps.messages import Enter, Export, Exported, ProtocolError, Refused
from gba_hvd.ps.partition.checkpoint_state import asynchronous_state
from gba_hvd.ps.state_files import MARK, StateFiles
from gba_hvd.ps.worker.dense_export import unpacked
from gba_hvd.ps.worker.session import DenseParts, place_dense
from gba_hvd.shm import retained_state
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.retained_state import Absence, RetainedState
from gba_hvd.shm.shard_memory import ShardMemory, in_use, is_of, no_process_lives, users_of
from recovery import state_codec

log = logging.getLogger("gba_hvd")

_LOOKS, _LOOK_S = 8, 0.1
_SERVERS_TIMEOUT_S = 60.0
_WHY_ABSENT = {
    Absence.NO_STEP: "no step was over yet when the job was killed",
    Absence.COST: "writing it took more of a step than CheckpointCallback(retain_state_share=...) allows",
    Absence.NO_ROOM: "it had no room beside the rows",
    Absence.SHARE_IS_0: "CheckpointCallback(retain_state_share=0) was given",
    Absence.COMPRESSION: "gradients are compressed, and each worker has what it has not sent",
}


@dataclass(frozen=True)
class MemorySurvey:
    """What a host has of the job. kept: step of the training state, -1: none; generation: see `RetainedState`.

    absence: why there is no training state, as far as this host knows (`Absence`).
    begun: the newest step begun on any of its shards; ready: its shards, bool [S]; placed: their placement numbers
    (`HostShards`), int64 [S]
    """

    kept: int
    generation: int
    settings: int
    begun: int
    ready: np.ndarray
    placed: np.ndarray
    absence: int = Absence.NO_STEP

    def row(self) -> np.ndarray:
        facts = (self.kept, self.generation, self.settings, self.begun, self.absence)
        return np.array([*facts, *self.ready, *self.placed], dtype=np.int64)

    @classmethod
    def of_row(cls, row: np.ndarray) -> MemorySurvey:
        kept_step, generation, settings, begun, absence = map(int, row[:5])
        ready, placed = np.split(row[5:], 2)
        return cls(kept_step, generation, settings, begun, ready.astype(bool), placed, absence)

    @classmethod
    def nothing(cls, n_shards: int) -> MemorySurvey:
        return cls(-1, 0, 0, -1, np.zeros(n_shards, dtype=bool), np.zeros(n_shards, dtype=np.int64))


@dataclass(frozen=True)
class ResumeDecision:
    """rank: that has the training state; None: the job cannot resume from memory. reason: why; empty: there was
    none."""

    rank: int | None
    reason: str


def decide_resume(found: Sequence[MemorySurvey], settings: int, saved_step: int) -> ResumeDecision:
    """Whether the job resumes from memory. found: by rank; saved_step: of the newest checkpoint, -1: there is none."""
    found = _without_outdated(found)
    there = np.any([one.ready for one in found], axis=0)
    if not there.any():
        return ResumeDecision(None, "")
    missing = np.flatnonzero(~there)
    if len(missing):
        return ResumeDecision(None, f"the memory of hosts that are not here any more had shards {missing.tolist()[:8]}")
    rank = max(range(len(found)), key=lambda rank: found[rank].kept)
    mine, begun = found[rank], max(one.begun for one in found)
    if mine.kept < 0:
        why = _WHY_ABSENT[Absence(max(one.absence for one in found))]  # the chief's host has a note, if any has
        return ResumeDecision(None, f"the rows are in memory, but the training state was not kept there: {why}")
    if mine.settings != settings:
        return ResumeDecision(
            None, "what is in memory is of a model with other settings, or of another version of gba_hvd"
        )
    if not mine.generation and not mine.kept <= begun <= mine.kept + 1:
        return ResumeDecision(
            None, f"the training state in memory is of step {mine.kept}, the rows are of step {begun}"
        )
    if begun < saved_step:
        return ResumeDecision(None, f"what is in memory is of step {begun}, the newest checkpoint of step {saved_step}")
    found_there = f"all rows and the training state are in memory, of step {max(mine.kept, begun)}"
    if not mine.generation and begun > mine.kept:
        found_there = (
            f"all rows and the training state are in memory; some rows or all have step {begun} already: it is "
            "computed again with them, and not applied to them twice, so its dense gradient is a little different"
        )
    return ResumeDecision(rank, found_there)


def _without_outdated(found: Sequence[MemorySurvey]) -> list[MemorySurvey]:
    """Nothing, for hosts all of whose shards others took over: the job continued without them.

    What they have may be of a later step than the others' if the job rolled back to a checkpoint meanwhile.
    """
    newest = np.max([one.placed * one.ready for one in found], axis=0)
    current = [one.ready & (one.placed == newest) for one in found]
    return [
        one if mine.any() or not one.ready.any() else MemorySurvey.nothing(len(one.ready))
        for one, mine in zip(found, current, strict=True)
    ]


def survey(folder: Path, layout: Layout, timeout_s: float) -> bool:
    """Whether a memory of this model is in a folder that no process lives in. Waits for a server's final save."""
    deadline, is_announced = time.monotonic() + timeout_s, False
    while True:
        try:
            if no_process_lives(folder):
                return is_of(folder, layout)
        except FileNotFoundError:
            return False
        if not any(folder.glob(MARK)) or time.monotonic() > deadline:
            return False
        if not is_announced:
            _report_wait(folder, timeout_s)
            is_announced = True
        time.sleep(_LOOK_S)


def refuse_if_in_use(folder: Path, mine: Collection[int], owner: str) -> None:
    """Raises ShardMemoryError where another job of this name runs on this host. Nothing of it is touched.

    mine: the processes of this job on this host; owner: its fingerprint, empty where it has none yet. A server that
    makes a last checkpoint is waited for later.
    """
    for attempt in range(_LOOKS):
        try:
            others = users_of(folder, owner) - set(mine)
        except FileNotFoundError:
            return
        if not others or any(folder.glob(MARK)):
            return
        if attempt < _LOOKS - 1:  # keepers and servers try the lock for a moment, and a job that was killed ends
            time.sleep(_LOOK_S)
    raise ShardMemoryError(in_use(folder, others))


def await_last_checkpoint(folder: Path, timeout_s: float) -> None:
    """While a server makes one, it holds the memory, as a worker would."""
    deadline = time.monotonic() + timeout_s
    if any(folder.glob(MARK)):
        _report_wait(folder, timeout_s)
    while any(folder.glob(MARK)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _report_wait(folder: Path, timeout_s: float) -> None:
    log.warning(
        "waiting for at most %.0f s: a server of the job before saves a final checkpoint of the memory in %s; "
        "this job resumes from one of the two after that. CheckpointCallback(final_checkpoint_s=...) is the limit",
        timeout_s, folder,
    )  # fmt: skip


def found_in(memory: ShardMemory) -> tuple[MemorySurvey, RetainedState | None]:
    """What is in a memory that was just opened. Raises ShardMemoryError when the training state is damaged."""
    marks, state = memory.marks(), retained_state.read(memory.folder)
    ready = marks.ready.astype(bool)
    begun = int(marks.begun[ready].max()) if ready.any() else -1
    if state is None:
        return MemorySurvey(-1, 0, 0, begun, ready, marks.placed, retained_state.absence(memory.folder)), None
    return MemorySurvey(state.step, state.generation, state.settings, begun, ready, marks.placed), state


def key_of(folder: Path) -> bytes:
    """What the servers of the folder's job prove themselves with; empty when they had not begun."""
    try:
        return (folder / "key").read_bytes()
    except FileNotFoundError:
        return b""


# --- an asynchronous mode that was on --------------------------------------------------------------------------------


def session_of(folder: Path, state: RetainedState | None) -> Enter | None:
    """What the servers of this host serve; None where the asynchronous mode is over, or never was."""
    session = StateFiles(folder, 0).session()
    if session is None:
        return None
    enter, idle = session
    return None if idle and not (state is not None and state.generation) else enter


def start_servers(folder: Path, enter: Enter) -> None:
    """Those of this host, where they died. They listen where they did before."""
    host = enter.servers[enter.me].host
    for endpoint in enter.servers:
        if endpoint.host == host:
            launch.endpoint(folder, endpoint.index, host, _SERVERS_TIMEOUT_S)


def collect_state(
    folder: Path, job: str, state: RetainedState, enter: Enter | None, sizes: Sequence[int], names: Sequence[str]
) -> tuple[bytes, int]:
    """The training state as a checkpoint has it, and its step. The servers go idle.

    enter: what they serve; sizes, names: of the dense tensors. Raises GbaError when a server does not answer or is at
    another step.
    """
    if enter is None:
        if state.generation:
            raise GbaError("an asynchronous mode was on, but what its servers were serving is gone")
        return state.state, state.step
    if not state.generation:  # the mode was being entered; the rows must still be as allreduce mode left them
        bodies = [reply.body for reply in _export(folder, job, enter, all_entered=False)]
        steps = sorted({body.step for body in bodies if isinstance(body, Exported)})
        if steps != [state.step]:
            raise GbaError(f"the servers are at steps {steps}, the training state of step {state.step}")
        return state.state, state.step
    if state.generation != enter.generation:
        raise GbaError("the training state in memory is of another asynchronous mode than the servers are in")
    replies = _export(folder, job, enter)
    bodies = [reply.body for reply in replies]
    position = bodies[0].position if isinstance(bodies[0], Exported) else None
    steps = sorted({body.step for body in bodies if isinstance(body, Exported)})
    if position is None or steps != [position.step]:
        raise GbaError(f"the servers are at steps {steps}, the coordinator says {position and position.step}")
    parts = DenseParts(len(enter.servers), place_dense(sizes, len(enter.servers)), sizes)
    dense = {names[t]: vars(one) for server, reply in enumerate(replies) for t, one in unpacked(parts, server, reply)}
    return asynchronous_state(state.state, [state_codec.encode({"dense": dense})], position), position.step


def _export(folder: Path, job: str, enter: Enter, all_entered: bool = True) -> list[Reply]:
    """The servers' dense state; from now on they touch no shard.

    all_entered: otherwise one may serve another generation or none, so it has changed nothing in this one.
    """
    key, host = (folder / "key").read_bytes(), enter.servers[enter.me].host
    replies = []
    with Client(job, key, enter.servers, host, folder, _SERVERS_TIMEOUT_S) as client:
        for server in range(len(enter.servers)):  # the coordinator first: it decides no step from then on
            reply = client.send(server, Export(enter.generation, True, position=server == 0)).result()
            body = reply.body
            if isinstance(body, Refused) and (all_entered or body.kind != ProtocolError.kind):
                raise GbaError(f"server {server} refused to say what it has: {body.why}")
            replies.append(reply)
    return replies
