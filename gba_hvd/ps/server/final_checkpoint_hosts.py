"""The last checkpoint of a job in allreduce mode on several hosts: servers that do not know each other agree on it.

They meet in the store, under the epoch of the claim that their workers' world had. Each holds its host's memory
meanwhile (`final_checkpoint`), for `final_checkpoint_s` at most. In the order in which things become visible:

    1. gone   every server but the first one reports that its host's workers are all gone, with no save in flight:
              a save of the first one that waits for rows not asked for fails                blobs/EPOCH-last/gone-NNNN
    2. word   the first one, which has the training state, waits for them, for half of the time, and publishes what is
              to be saved, or why nothing is                                                     blobs/EPOCH-last/word
    3. save   each saves the rows of its host (`saver`), and states in its list of which steps they are
    4. check  the first one: every shard has come, from one host; then the manifest is written, last

Before 4 nothing counts, and the checkpoint before stays in force: a server or a host that dies, a host whose workers
live, rows that are of other steps than the training state (`rows_of`), a store that fails. Workers that continue
without a host have claimed the location again, so its server stops at the next look at the claims. What a crash leaves:
objects under the epoch that nothing refers to; `recovery.catalog.retention.gc` finds them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import msgspec

from gba_hvd.epoch import position_in
from gba_hvd.errors import GbaError
from gba_hvd.ps.messages import DelegateClaim, Save, SaveAbout
from gba_hvd.ps.partition.saver import Agreed, Saver, last_prefix
from gba_hvd.shm.retained_state import RetainedState
from gba_hvd.shm.shard_memory import ShardMemory
from recovery import state_codec
from recovery.catalog import claims
from recovery.errors import BadInput, RecoveryError, StoreError
from recovery.storage.store import Store
from recovery.write.section_pipeline import Cancelled

_LOOK_S = 0.2


class SaveOrder(msgspec.Struct, frozen=True):
    """What is to be saved, as in `Save`. why: nothing is, for this reason."""

    number: int = 0
    kind: str = "full"
    parent: str | None = None
    step: int = 0
    samples: int = 0
    why: str = ""


class PartInventory(msgspec.Struct, frozen=True):
    """What a server has: shards; steps that they missed, all together; how many are in the middle of a step.

    why: it saves nothing, for this reason
    """

    shards: list[int] = []
    missed: int = 0
    torn: int = 0
    why: str = ""


def begin(saver: Saver, memory: ShardMemory, state: RetainedState | None) -> None:
    """Agree on a last checkpoint and save this host's part of it, in the saver's thread. state: the first server's."""
    held, now = saver.held, time.monotonic()
    request: Save | None = None
    assert held is not None
    if not held.part and state is not None and not state.generation:
        position = state_codec.decode(state.state)["position"]
        request = saver.last_request(state.step, position["account"]["applied"])
        if request is not None:
            request.about.position = position_in(position)

    def first(store: Store, cancel: threading.Event) -> Agreed:
        epoch = held.claim.epoch
        try:
            if state is None or state.generation:
                raise GbaError("the training state was not kept in memory")
            if request is None:
                raise GbaError(f"nothing is newer than the last checkpoint, the training state is of step {state.step}")
            await_gone(store, held, now + saver.final_checkpoint_s / 2, cancel)
            mine = rows_of(memory, state.step)
        except (GbaError, OSError) as error:
            with contextlib.suppress(BadInput, RecoveryError, OSError):
                publish(store, epoch, SaveOrder(why=str(error)))
            raise
        request.n_parts = held.n_parts
        word = SaveOrder(request.number, request.kind, request.parent, request.step, request.samples)
        publish(store, epoch, word)

        def whole(parts: Sequence[bytes]) -> bytes:
            clear(store, epoch)  # all have read it
            inventories = [msgspec.msgpack.decode(part, type=PartInventory) for part in parts]
            return collect_state(state.state, inventories, memory.layout.n_shards)

        return request, mine.shards, whole, msgspec.msgpack.encode(mine)

    def other(store: Store, cancel: threading.Event) -> Agreed:
        word = await_order(store, held, now + saver.final_checkpoint_s, cancel)
        try:
            mine = rows_of(memory, word.step)
        except GbaError as error:
            mine = PartInventory(why=str(error))
        mine_of = Save(
            epoch=held.claim.epoch, number=word.number, part=held.part, n_parts=held.n_parts, kind=word.kind,
            parent=word.parent, step=word.step, samples=word.samples, settings=held.settings, claim=held.claim,
            about=SaveAbout(is_final=True), first_epoch=held.first_epoch,
        )  # fmt: skip
        return mine_of, mine.shards, lambda parts: b"", msgspec.msgpack.encode(mine)

    saver.begin_agreed(other if held.part else first)


def rows_of(memory: ShardMemory, step: int) -> PartInventory:
    """The shards that are here, if they can go with a training state of this step.

    All workers had entered the commit of `step` when the chief retained the state, and none that of step + 2: rows that
    the workers of that world left are of the step, one ahead or one behind, or in the middle of it. Raises GbaError for
    others.
    """
    marks, shards = memory.marks(), memory.ready()
    begun, finished = marks.begun[shards], marks.finished[shards]
    if (finished < step - 1).any() or (begun > step + 1).any():
        raise GbaError(
            f"the training state is of step {step}, the rows of {memory.folder} are of steps "
            f"{int(finished.min())} to {int(begun.max())}: they do not belong together"
        )
    missed = int((step - finished).clip(min=0).sum())
    return PartInventory(shards, missed, int((begun > finished).sum()))


def collect_state(state: bytes, inventories: Sequence[PartInventory], n_shards: int) -> bytes:
    """The training state, with the steps that shards missed in its account. inventories: those of all servers.

    Raises GbaError when a server refused, or when the shards of all are not each shard once.
    """
    if refused := [f"host {number}: {one.why}" for number, one in enumerate(inventories) if one.why]:
        raise GbaError("; ".join(refused))
    found = sorted(shard for one in inventories for shard in one.shards)
    if found != list(range(n_shards)):
        missing, twice = sorted({*range(n_shards)} - {*found}), sorted({s for s in found if found.count(s) > 1})
        raise GbaError(f"all hosts together lack shards {missing[:8]}, and have shards {twice[:8]} more than once")
    decoded = state_codec.decode(state)
    decoded["position"]["account"]["shard_steps_missed"] += sum(one.missed for one in inventories)
    return state_codec.encode(decoded)


# --- the objects in the store ----------------------------------------------------------------------------------------


def await_gone(store: Store, held: DelegateClaim, until_s: float, cancel: threading.Event) -> None:
    """Return when the servers of all other hosts have reported that their workers are gone.

    Raises StoreError when one has not until then, Fenced when workers continue without them, Cancelled.
    """
    prefix, claim = f"{last_prefix(held.claim.epoch)}gone-", held.claim
    while True:
        claims.check(store, claim)
        missing = {f"{prefix}{part:04d}" for part in range(1, held.n_parts)} - set(store.names(prefix))
        if not missing:
            return
        if time.monotonic() > until_s:
            numbers = sorted(int(name.removeprefix(prefix)) for name in missing)
            raise StoreError(
                f"the servers of hosts {numbers[:8]} of {held.n_parts} have not reported that their workers are gone"
            )
        if cancel.wait(_LOOK_S):
            raise Cancelled("the last checkpoint was cancelled")


def await_order(store: Store, held: DelegateClaim, until_s: float, cancel: threading.Event) -> SaveOrder:
    """Report that the workers of this host are gone, and return what is to be saved.

    Raises StoreError when nothing is, or when no order came until then, Fenced and Cancelled as `await_gone`.
    """
    epoch, claim = held.claim.epoch, held.claim
    gone, name = f"{last_prefix(epoch)}gone-{held.part:04d}", _word(epoch)
    claims.check(store, claim)
    store.put(gone, [b"gone"])
    try:
        while name not in store.names(name):
            if time.monotonic() > until_s:
                raise StoreError("the server of the first host has sent no order to save: it is gone, or cannot agree")
            if cancel.wait(_LOOK_S):
                raise Cancelled("the last checkpoint was cancelled")
            claims.check(store, claim)
        word = msgspec.json.decode(store.get(name), type=SaveOrder)
    finally:
        with contextlib.suppress(BadInput, RecoveryError, OSError):
            store.delete([gone])
    if word.why:
        raise StoreError(f"the server of the first host saves nothing: {word.why}")
    return word


def publish(store: Store, epoch: int, word: SaveOrder) -> None:
    store.put(_word(epoch), [msgspec.json.encode(word)])


def clear(store: Store, epoch: int) -> None:
    """What all have read is of no more use; what cannot be deleted now, `gc` finds."""
    with contextlib.suppress(BadInput, RecoveryError, OSError):
        store.delete(sorted(store.names(last_prefix(epoch))))


def _word(epoch: int) -> str:
    return f"{last_prefix(epoch)}word"
