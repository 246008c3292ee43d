"""What workers and servers say to each other: the messages, their encoding, and the checks before anything is believed.

A message is a msgpack header and, where it carries numbers, raw frames. Headers are decoded into typed structs, so a
wrong field is refused by the decoder; frames are checked here against the tables, before anything is stored.
Numbered by who speaks:

    1. a worker that leads its host    Enter             here is your part of the dense parameters; serve these shards
    2. any worker                      Ask, PullRows, PullDense, Push, Done, Beat, Evaluate, Score, Export, Bye
                                       Residual        where checkpoints are made of compressed gradients
                                       Blend, Publish, HandIn, HandedIn      where workers have replicas (`shadow`)
    3. the coordinator, to servers     Apply, Discard, Alive
    4. an operator                     Status, SwitchTo
    5. the chief                       Hold, Save              in asynchronous modes the coordinator passes it on
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gba_hvd.errors import GbaError
from gba_hvd.shard.layout import Layout

VERSION = 1
MAX_HEADER_BYTES = 16 << 20  # `Enter` names every dense tensor; all other headers are small
MAX_ANSWER_BYTES = 1 << 31  # of rows, to one pull


class ProtocolError(GbaError):
    """A message that is not what the protocol says. Nothing was changed. `number`: the request's, when it has one."""

    number = 0


class NotFinite(ProtocolError):
    """A gradient with NaN or infinity. It was not stored."""


class Struct(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


# --- values inside messages ------------------------------------------------------------------------------------------


class Endpoint(Struct):
    """Where a server listens: control and pulls, and the host (number of its memory) it serves."""

    host: int
    index: int  # of the host's servers
    address: str  # an IP address
    control: int
    pull: int


class Saved(Struct):
    """What became of the newest checkpoint: "running", "done", "failed", or "part": this server's part of it is saved.

    All zero: there was none.
    """

    epoch: int = 0
    number: int = 0
    state: str = ""
    facts: dict[str, Any] = {}


class Position(Struct):
    """Where training stands: what every worker needs to know of the job."""

    step: int = 0
    epoch: int = 0
    steps_done: int = 0
    account: dict[str, int] = {}
    staleness: dict[int, int] = {}  # histogram over applied and dropped micro-batches
    lags: dict[int, int] = {}  # as staleness, but of the dense values that gradients were computed with (server 0)
    refused: int = 0
    reissued: int = 0
    loss: float | None = None  # of the newest step
    rates: list[tuple[int, float]] = []  # of each living worker: rank, seconds per micro-batch
    wanted: str = ""  # the mode somebody asked for, with the reason
    reason: str = ""
    pin: bool = False  # an operator asked for it: stay there
    failure: str = ""  # training cannot go on
    world: int = 0  # how often the membership changed; workers form a new Horovod world when it grows
    saved: Saved | None = None
    leaving: bool = False  # some worker is to leave, and waits for a checkpoint
    moved: dict[int, int] = {}  # as of `tokens.Ledger.moved`, in the job this one goes on from


class GivenLease(Struct):
    micro: int
    serial: int
    token: int
    n_samples: int


class PlannedMember(Struct):
    micro: int
    serial: int
    weight: float


# --- requests --------------------------------------------------------------------------------------------------------


class Enter(Struct):
    """Serve `shards` and these dense tensors from `position` on. Frames: values, optimizer state (state_codec)."""

    generation: int
    servers: list[Endpoint]
    me: int  # index into servers; server 0 is the coordinator
    shard_servers: list[int]  # shard -> index into servers
    position: Position
    n_samples: int  # of the epoch
    global_batch: int
    micro_batch: int
    discipline: dict[str, Any]
    row_average: str
    row_lr: float
    lrs: list[float]
    tensors: list[tuple[str, list[int], int]]  # name, shape, optimizer group
    optimizer: dict[str, Any]
    workers: list[tuple[int, int, int, int]] = []  # those who enter: id, rank, host, pid
    rule: str = "none"  # how dense parameters are updated (`gba_hvd.rules`)


class Ask(Struct):
    """A lease, please. `request` grows with every new question; the same one again gets the same answer."""

    worker: int
    generation: int
    request: int
    epoch: int
    n_samples: int
    lrs: list[float]  # of the dense groups, then the rows', as of step `lrs_step`
    lrs_step: int


class Compressor(Struct):
    """As `compression.Spec`."""

    selector: str
    keep: float
    refresh_every: int
    drift: float
    values: str


class PullRows(Struct):
    """Frames: for each group the keys, int64. Answer: for each group the weights, float32 [n, dim].

    With a compressor keys and rows are as of `compression.rows`.
    """

    generation: int
    compressor: Compressor | None = None


class PullDense(Struct):
    """This server's dense values, if they are newer than `newer_than`.

    compressor: the worker, of another host, takes differences to the values of step `newer_than`, which it has
    """

    generation: int
    newer_than: int
    worker: int = 0
    compressor: Compressor | None = None


class Push(Struct):
    """Gradients of one micro-batch, for one server. Frames: its dense slice float32, its row message (`gradients`).

    compressed: the first frame is a message as of `compression.push`, in which those of this server's tensors that are
    in `whole` go as they are; rows_compressed: the second one is one as of `compression.row_push`.
    A third frame, to the first server of the worker's host: what the worker had not sent after this push, float32 [n of
    all dense]
    """

    worker: int
    generation: int
    micro: int
    serial: int
    dense_step: int = -1  # step of this server's dense values that they were computed with, -1 if not known
    compressed: bool = False
    rows_compressed: bool = False
    whole: tuple[int, ...] = ()


class Residual(Struct):
    """What a worker had not sent as it came into the mode. Frame: float32 [n of all dense], empty: nothing."""

    worker: int
    generation: int


class Done(Struct):
    """Every server has its part of this micro-batch's gradients. `refused` names what was not finite."""

    worker: int
    generation: int
    micro: int
    serial: int
    loss: float | None = None
    seconds: float = 0.0
    refused: str = ""


class Beat(Struct):
    """I live. In allreduce mode the chief also tells where training stands, for `gba-hvd status`."""

    worker: int
    rank: int
    host: int
    pid: int
    generation: int  # 0 in allreduce mode
    hosts_updated: bool = False
    leaving: bool = False  # once a checkpoint is there
    told: dict[str, Any] = {}


class Evaluate(Struct):
    """Samples to score, please, in evaluation `ordinal` of `epoch`. Frame: this worker's buffers (state_codec)."""

    worker: int
    generation: int
    request: int
    epoch: int
    ordinal: int
    n_samples: int
    batch: int
    exact_limit: int


class Score(Struct):
    """Scores of one lease of an evaluation. Frames: logits float32, labels float32."""

    worker: int
    generation: int
    epoch: int
    ordinal: int
    micro: int
    serial: int


class Export(Struct):
    """All of this server's dense state. Frames of the answer: values, optimizer state (state_codec).

    leaving: the workers apply the steps from here on; the server must not touch a shard any more
    phase: of replicas: first becomes the mean of what was handed in for this phase (-1: as it is)
    position: the coordinator also says where to go on, between two steps: its workers are all gone
    """

    generation: int
    leaving: bool
    phase: int = -1
    position: bool = False


class Blend(Struct):
    """Blend a replica into the central copy. Frame: its values here, float32. Answer: `Dense` with the copy's.

    number: grows with each round of the worker: a repeated one is not blended twice
    phase: see `shadow`; elasticity: see `averaging`
    """

    worker: int
    generation: int
    number: int
    phase: int
    elasticity: float


class Publish(Struct):
    """Overwrite the central copy, unless `phase` is over. Frames: values float32, optimizer state; empty: stays."""

    generation: int
    phase: int


class HandIn(Struct):
    """One worker's replica, for the mean of this phase. Frames: values float32, optimizer state (state_codec).

    early: it left its loop before the epoch's end; should it come back, what it hands in then takes the place of this
    """

    worker: int
    generation: int
    phase: int
    early: bool = False


class HandedIn(Struct):
    """To the coordinator: every server has what this worker had. Answered when all living workers have said so.

    early: as of `HandIn`; answered at once
    """

    worker: int
    generation: int
    phase: int
    early: bool = False


class Bye(Struct):
    """The worker leaves. finished: training is over; otherwise a replacement is wanted."""

    worker: int
    finished: bool = True


class Apply(Struct):
    """Step `step` is decided: merge these pushes, apply them once."""

    generation: int
    step: int
    members: list[PlannedMember]
    scale: float
    row_lr: float
    lrs: list[float]
    oldest_serial: int  # pushes of older leases will never be asked for
    workers: list[int] = []  # who lives, by id: for rules that want to know, and to forget who is gone


class Discard(Struct):
    """Forget the pushes of leases older than `oldest_serial`: their micro-batches will be computed again."""

    generation: int
    oldest_serial: int


class Alive(Struct):
    """Does the process live?"""

    pid: int


class Status(Struct):
    pass


class SwitchTo(Struct):
    mode: str
    reason: str
    pin: bool = False


class Hold(Struct):
    """Give the signs of life of this claim (`recovery.claims`) until another one comes.

    settings, about, first_epoch: as in `Save`; of a last save, should all workers be lost. part, n_parts: the number of
    this host, and how many there are; only the first one gives signs of life. 0 hosts: not known
    """

    claim: dict[str, Any]
    settings: dict[str, Any]
    about: dict[str, Any] = {}
    first_epoch: int = 0
    part: int = 0
    n_parts: int = 1


class Save(Struct):
    """Save the shards that are here, as one part of a checkpoint. Frame: what it has beside rows (part 0 only).

    kind, parent, about: as in `recovery.manifest.Manifest`. settings: url, storage_options, config. claim: see `Hold`.
    generation: of the asynchronous mode; its servers add the dense state themselves. 0 in allreduce mode
    first_epoch: of the job: what was saved since then is its own, and may expire
    """

    epoch: int
    number: int
    part: int
    n_parts: int
    kind: str
    parent: str | None
    step: int
    samples: int
    settings: dict[str, Any]
    claim: dict[str, Any]
    about: dict[str, Any]
    generation: int = 0
    first_epoch: int = 0


Request = (
    Enter
    | Ask
    | Evaluate
    | Score
    | PullRows
    | PullDense
    | Push
    | Residual
    | Done
    | Beat
    | Export
    | Blend
    | Publish
    | HandIn
    | HandedIn
    | Bye
    | Apply
    | Discard
    | Alive
    | Status
    | SwitchTo
    | Save
    | Hold
)

# --- answers ---------------------------------------------------------------------------------------------------------


class Ok(Struct):
    position: Position | None = None


class Taken(Struct):
    """The answer to `HandIn`. late: the mean of the phase was made before, without this replica."""

    late: bool = False


class Given(Struct):
    """The answer to `Ask`: a lease, or why there is none: "wait", "finished", "drained"."""

    position: Position
    lease: GivenLease | None = None
    instead: str = ""


class Judged(Struct):
    """The answer to `Evaluate`: a lease, or the result (`metrics.Scores`), or neither: ask again soon."""

    lease: GivenLease | None = None
    result: dict[str, Any] | None = None


class Dense(Struct):
    """Frames: the values, unless `step` is not newer than asked.

    base: if not -1, the frame is the compressed difference to the values of this step
    """

    step: int
    base: int = -1


class Rows(Struct):
    pass


class Exported(Struct):
    step: int
    position: Position | None = None


class Applied(Struct):
    """`missing`: micro-batches whose push is not here; `missed`: shards and dense parts that did not get the step.

    failed: why the step could not be applied; it is over all the same, and the job should end with these words
    """

    step: int
    missing: list[int] = []
    missed: int = 0
    failed: str = ""


class Lives(Struct):
    alive: bool


class StatusReport(Struct):
    report: dict[str, Any]


class Refused(Struct):
    """The request was not carried out, and changed nothing. `again`: it may be sent again later."""

    why: str
    again: bool = False
    kind: str = ""


Answer = Ok | Taken | Given | Judged | Dense | Rows | Exported | Applied | Lives | StatusReport | Refused


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: int
    job: str
    number: int  # the answer carries its request's
    body: msgspec.Raw


_UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)  # text that is no UTF-8; nesting without end
_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(Envelope)
_request: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(job: str, number: int, body: Request | Answer) -> bytes:
    return _encoder.encode(Envelope(VERSION, job, number, msgspec.Raw(_encoder.encode(body))))


def open_envelope(data: Any, job: str) -> Envelope:
    """Raises ProtocolError for anything that is not a message of this version and job."""
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(data):,} bytes, the limit is {MAX_HEADER_BYTES:,}")
    try:
        envelope = _envelope.decode(data)
    except _UNDECODABLE as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from error
    refusal = ""
    if envelope.version != VERSION:
        refusal = f"protocol version {envelope.version}, this is {VERSION}: all hosts need the same version of gba-hvd"
    elif envelope.job != job:
        refusal = f"a message for job {envelope.job[:80]!r} came to job {job!r}"
    if refusal:
        refused = ProtocolError(refusal)
        refused.number = envelope.number
        raise refused
    return envelope


def decode_request(envelope: Envelope) -> Request:
    try:
        return _request.decode(envelope.body)
    except _UNDECODABLE as error:
        raise ProtocolError(f"request {envelope.number}: {error}") from error


def decode_answer(envelope: Envelope) -> Answer:
    try:
        return _answer.decode(envelope.body)
    except _UNDECODABLE as error:
        raise ProtocolError(f"answer {envelope.number}: {error}") from error


# --- checks of frames ------------------------------------------------------------------------------------------------


def array_of(frame: Any, dtype: str, what: str) -> np.ndarray:
    """A frame as an array, a view where its place in memory allows."""
    size = np.dtype(dtype).itemsize
    if len(frame) % size:
        raise ProtocolError(f"{what}: {len(frame)} bytes are no whole number of {dtype}")
    array = np.frombuffer(frame, dtype=dtype)
    return array if array.flags.aligned else array.copy()


def check_keys(layout: Layout, group: int, keys: np.ndarray, mine: np.ndarray) -> None:
    """Raises ProtocolError unless every key is a row of a table, in a shard of `mine` (bool [S])."""
    if len(keys) == 0:
        return
    spec = layout.groups[group]
    if keys.min() < 0 or keys.max() >= spec.places * layout.n_shards:
        raise ProtocolError(
            f"tables of dimension {spec.dim}: keys {keys.min()} to {keys.max()}, "
            f"expected 0 to {spec.places * layout.n_shards - 1}"
        )
    first = np.array(spec.first)
    table = np.searchsorted(first, keys // layout.n_shards, side="right") - 1
    rows = keys - first[table] * layout.n_shards
    beyond = np.flatnonzero(rows >= np.array([t.n_rows for t in spec.tables])[table])
    if len(beyond):
        at = beyond[0]
        found = spec.tables[table[at]]
        raise ProtocolError(f"table {found.name!r} has rows 0 to {found.n_rows - 1}, got {rows[at]}")
    foreign = np.flatnonzero(~mine[keys % layout.n_shards])
    if len(foreign):
        raise ProtocolError(f"shard {keys[foreign[0]] % layout.n_shards} is not served here")


def check_row_message(layout: Layout, message: np.ndarray, mine: np.ndarray, extra: int) -> None:
    """Raises ProtocolError unless `message` is row gradients of shards served here (`gradients.pack_by_owner`).

    extra: words that follow a row's gradient (its number of contributors, when rows are averaged over them).
    """
    at = 0
    for number, group in enumerate(layout.groups):
        if at + 2 > len(message):
            raise ProtocolError(f"row gradients end in group {number} of {len(layout.groups)}")
        n = int(message[at : at + 2].view(np.int64)[0])
        width = 2 + group.dim + extra
        if n < 0 or at + 2 + n * width > len(message):
            raise ProtocolError(f"row gradients of dimension {group.dim}: {n} rows do not fit {len(message)} words")
        keys = message[at + 2 : at + 2 + 2 * n].view(np.int64)
        check_keys(layout, number, keys, mine)
        values = message[at + 2 + 2 * n : at + 2 + n * width]
        if not all_finite(values):
            bad = np.flatnonzero(~np.isfinite(values.reshape(n, -1)).all(axis=1))[0]
            table, row = layout.locate(int(keys[bad]), number)
            raise NotFinite(f"the gradient of row {row} of table {table!r} is not finite")
        if extra and (values.reshape(n, -1)[:, group.dim :] != 1.0).any():
            raise ProtocolError(f"row gradients of dimension {group.dim}: a micro-batch contributes once to a row")
        at += 2 + n * width
    if at != len(message):
        raise ProtocolError(f"row gradients: {len(message) - at} words too many")


def check_finite(values: np.ndarray, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Raises NotFinite naming the dense tensor whose gradient is not finite."""
    if all_finite(values):
        return
    at = 0
    for name, size in zip(names, sizes, strict=True):
        if not np.isfinite(values[at : at + size]).all():
            raise NotFinite(f"the gradient of {name} is not finite")
        at += size


def all_finite(values: np.ndarray) -> bool:
    """Whether no number is NaN or infinite. In float64 the sum of float32 numbers cannot overflow: one pass tells."""
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(values.sum(dtype=np.float64)))


def check_rates(lrs: Sequence[float], expected: int) -> None:
    """Raises ProtocolError unless these are learning rates for so many optimizer groups."""
    if len(lrs) != expected or not all(math.isfinite(lr) for lr in lrs):
        raise ProtocolError(f"expected {expected} finite learning rates, got {list(lrs)[:10]}")


def check_enter(enter: Enter, layout: Layout) -> None:
    """Raises ProtocolError for an `Enter` that contradicts itself or the tables."""
    n_servers = len(enter.servers)
    if not 0 <= enter.me < n_servers:
        raise ProtocolError(f"server {enter.me} of {n_servers} servers")
    if len(enter.shard_servers) != layout.n_shards:
        raise ProtocolError(f"{len(enter.shard_servers)} shards, this job has {layout.n_shards}")
    if not all(0 <= server < n_servers for server in enter.shard_servers):
        raise ProtocolError(f"shards are at servers 0 to {n_servers - 1}, got {sorted(set(enter.shard_servers))[:10]}")
    if enter.row_average not in ("global", "contributors"):
        raise ProtocolError(f"rows are averaged 'global' or over 'contributors', got {enter.row_average[:80]!r}")
    for name, shape, _ in enter.tensors:
        if any(size < 0 for size in shape):
            raise ProtocolError(f"{name} has the shape {shape}")
    check_rates([*enter.lrs, enter.row_lr], len(enter.optimizer.get("groups", ())) + 1)


def check_apply(request: Apply, last_step: int, n_groups: int) -> None:
    """Raises ProtocolError unless this step follows `last_step` and nothing in it would destroy parameters."""
    if request.step != last_step + 1:
        raise ProtocolError(f"step {request.step} cannot follow step {last_step}")
    if not all(math.isfinite(m.weight) and m.weight > 0 for m in request.members):
        raise ProtocolError(f"step {request.step}: weights are positive numbers")
    if not (math.isfinite(request.scale) and request.scale > 0):
        raise ProtocolError(f"step {request.step}: the scale is a positive number, got {request.scale}")
    check_rates([*request.lrs, request.row_lr], n_groups + 1)
