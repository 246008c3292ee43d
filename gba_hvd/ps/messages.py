"""The messages between workers and servers, as typed structs.

A message is a msgpack header and, where it carries numbers, raw frames. `wire` encodes and decodes them, so that a
wrong field is refused by the decoder; `validation` checks frames against the tables, before anything is stored.
Numbered by sender:

    1. a host leader                   Enter             here is your part of the dense parameters; serve these shards
    2. any worker                      LeaseRequest, PullRows, PullDense, Push, PushDone, HeartbeatMsg, Evaluate, Score,
                                       Export, Leave
                                       ReturnLeases    where it left its loop over an epoch's batches
                                       Sources         where a worker was refused for other samples
                                       Residual        where checkpoints are made of compressed gradients
                                       Blend, Publish, SubmitReplica, ReplicaSubmitted      where workers have replicas
                                       (`replica_worker`)
    3. the coordinator, to servers     Measure, Apply, Discard, ProbeProcess
    4. an operator                     Status, SwitchTo
    5. the chief                       DelegateClaim, Save      in asynchronous modes the coordinator passes it on
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gba_hvd.comm.traffic import NOTHING, Sums
from gba_hvd.epoch import run_number
from gba_hvd.errors import GbaError
from gba_hvd.metrics.accumulators import Part
from recovery.catalog.claims import Claim
from recovery.catalog.epoch_position import EpochPosition
from recovery.config import Config
from recovery.schedule.adaptive import Goals, JobMeasurements
from recovery.schedule.costs import Costs

VERSION = 1
MAX_HEADER_BYTES = 16 << 20  # `Enter` names every dense tensor; all other headers are small
MAX_ANSWER_BYTES = 1 << 31  # of rows, to one pull


RefusalKind = Literal["", "ProtocolError", "NotFinite", "mismatch", "failed"]
"""Why a request was refused, as far as the sender acts on it. Sent as it stands here."""


Wire = Literal["curve", "plain", "tls"]
"""How servers are spoken to over TCP: encrypted by ZeroMQ or TLS, or with a proof of the job's key only."""
WIRES: tuple[Wire, ...] = ("curve", "plain", "tls")  # their numbers where workers exchange them


GroupSetting = bool | int | float | None | tuple[bool | int | float | None, ...]
"""A setting of an optimizer's group beside `lr`, as of `torch_optimizers.is_numeric`."""


class ProtocolError(GbaError):
    """A message that is not what the protocol says. Nothing was changed. `number`: the request's, when it has one."""

    number = 0
    kind: RefusalKind = "ProtocolError"


class NotFinite(ProtocolError):
    """A gradient with NaN or infinity. It was not stored."""

    kind = "NotFinite"


class Mismatch(ProtocolError):
    """Workers disagree about what they train. A new world would not change that, so the job ends."""

    kind = "mismatch"


class TrainingFailed(ProtocolError):
    """A step could not be applied. No worker gets another lease, so the job ends."""

    kind = "failed"


class Struct(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


SaveState = Literal["", "running", "done", "failed", "part"]


# --- values inside messages ------------------------------------------------------------------------------------------


class Endpoint(Struct, omit_defaults=True):
    """Where and how a server listens: control and pulls, and the host (number of its memory) it serves."""

    host: int
    index: int  # of the host's servers
    address: str  # an IP address
    control: int
    pull: int
    wire: Wire = "curve"


class SaveFacts(msgspec.Struct, omit_defaults=True):
    """Figures of a save. No tag, and what is not known is left out: so it is written as a plain map.

    why: it failed; while it runs, what its store meets. read: this server has read its rows.
    rows, n_bytes (in the store), raw_bytes (before encoding), torn (pieces read again), worst_error (of a weight,
    through quantisation), seconds: of this server's part; of all parts when the checkpoint is "done". Then also:
    manifest: its name; checksum: of the manifest; saved_step: as in the manifest
    """

    why: str = ""
    read: bool = False
    rows: int = 0
    n_bytes: int = 0
    raw_bytes: int = 0
    torn: int = 0
    worst_error: float = 0.0
    seconds: float = 0.0
    manifest: str = ""
    kind: str = ""
    checksum: str = ""
    url: str = ""
    saved_step: int = 0

    def of_checkpoint(self) -> dict[str, Any]:
        """What callbacks receive about a checkpoint that is done."""
        found = msgspec.structs.asdict(self)
        del found["why"], found["read"]
        return found


class SaveStatus(Struct, tag="Saved"):
    """Status of the newest checkpoint: "running", "done", "failed", or "part": this server's part of it is saved.

    All zero: there was none.
    """

    epoch: int = 0
    number: int = 0
    state: SaveState = ""
    facts: SaveFacts = msgspec.field(default_factory=SaveFacts)


class JobPosition(Struct, tag="Position"):
    """Where training stands: what every worker needs to know of the job."""

    step: int = 0
    epoch: int = 0
    steps_done: int = 0
    account: dict[str, int] = {}
    staleness: dict[int, int] = {}  # histogram over applied and dropped micro-batches
    # as staleness, but of the dense values that gradients were computed with
    dense_ages: dict[int, int] = msgspec.field(name="lags", default_factory=dict)
    arrivals: list[list[tuple[int, float]]] = []  # the same by step, for the chief: with "finished", "drained"
    traffic: dict[str, Sums] = {}  # bytes on the wires of all workers, by mode
    gaps: list[tuple[int, int, float, float, int]] = []  # rank, as of `GapMeter.by_worker` (server 0), worker
    drops: list[tuple[int, int, int, int]] = []  # rank, worker, its pushes in steps, those dropped as stale
    refused: int = 0
    reissued: int = 0
    n_waiting: int = 0  # samples of pushes that wait for a step that is not complete yet
    loss: float | None = None  # of the newest step
    grad_norm: float | None = None  # the same, where steps are clipped: before that
    grad_norms: list[tuple[int, float]] = []  # the same of the newest steps, oldest first: `step` after it, norm
    rates: list[tuple[int, float]] = []  # of each living worker: rank, seconds per micro-batch
    newest: list[tuple[int, int, int, float]] = []  # of each: rank, worker, micro-batches so far, seconds of its newest
    computed: list[tuple[int, float]] = []  # of each: worker, seconds of all its micro-batches so far
    hanging: list[tuple[int, int, float]] = []  # of each worker that lives and does nothing: rank, process, seconds
    segment: int = 0  # of the epoch
    n_steps: int = 0  # of the epoch, or of the segment; 0: not known
    requested_mode: str = msgspec.field(name="wanted", default="")  # the requested mode, with the reason
    reason: str = ""
    pinned: bool = msgspec.field(name="pin", default=False)  # an operator asked for it: stay there
    failure: str = ""  # training cannot continue
    # How often the membership changed; workers form a new Horovod world when it grows.
    membership_epoch: int = msgspec.field(name="world", default=0)
    saved: SaveStatus | None = None
    leaving: bool = False  # some worker is to leave, and waits for a checkpoint
    loss_scale: tuple[float, int, int] | None = None  # as of `LossScale.now`, after `step`
    # As of `Ledger.resume_order`, in the job this one resumes from.
    remapped: dict[int, int] = msgspec.field(name="moved", default_factory=dict)
    server: int = 0  # process that answers; a successor has another one
    warming: bool = False  # it still imports what an asynchronous mode needs
    # As of `DelegateClaim`, the claim that the coordinator's server has; with answers to heartbeats.
    claim: Claim | None = None
    first_epoch: int = 0
    sources_wanted: int = 0  # as of `SourceLists.wanted`; with answers to heartbeats


class LeaseGrant(Struct, tag="GivenLease"):
    """The right to compute one micro-batch. A serial is given once: a micro-batch handed out again has a new one.

    expected: micro-batches that the worker will probably get next, to be read ahead; nothing is promised
    """

    micro: int
    serial: int
    token: int
    n_samples: int
    expected: list[int] = []


class PlannedMember(Struct):
    micro: int
    serial: int
    weight: float
    row_damping: float = 1.0  # what its row gradients are multiplied by beside; the same on every server


# --- requests --------------------------------------------------------------------------------------------------------


class Enter(Struct):
    """Serve these dense tensors from `position` on, and the shards that `shard_servers` gives to server `me`.

    Frames: values, optimizer state (state_codec).
    """

    generation: int
    servers: list[Endpoint]
    me: int  # index into servers; server 0 is the coordinator
    shard_servers: list[int]  # shard -> index into servers
    position: JobPosition
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
    rule: str = "none"  # how dense parameters are updated (`gba_hvd.update_rules`)
    rule_settings: dict[str, float | bool] = {}
    until_s: float = 0.0  # of this host's monotonic clock (its own leader asks): void afterwards; 0: without a limit
    max_norm: float | None = None  # as of `clipping.Clip`
    max_row_norm: float | None = None
    loss_scale: dict[str, Any] | None = None  # as of `loss_scale.LossScale`; None: a gradient that overflows is dropped
    accesses: bool = False  # row gradients come with how often each row was looked up


class LeaseRequest(Struct, tag="Ask"):
    """A lease, please. `request` grows with every new question; the same one again gets the same answer."""

    worker: int
    generation: int
    request: int
    epoch: int
    n_samples: int
    lrs: list[float]  # of the dense groups, then the rows', as of step `lrs_step`
    lrs_step: int
    segment: int = 0  # of the epoch
    order: int = 0  # digest of the order of the samples, and of what they are
    settings: list[dict[str, GroupSetting]] = []  # of the dense groups, changed since the mode began; empty: none is

    @property
    def run(self) -> int:
        return run_number(self.epoch, self.segment)


class Compressor(Struct, omit_defaults=True):
    """As `compression.Spec`."""

    selector: str
    keep: float
    refresh_every: int
    drift: float
    values: str
    per_table: bool = False


class PullRows(Struct):
    """Frames: for each group the keys, int64. Answer: for each group the weights, float32 [n, dim].

    With a compressor keys and rows are as of `compression.row_codec`; with dct_mp requests and activations, as of
    `compression.activation_codec`.
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
    """Gradients of one micro-batch, for one server. Frames: its dense slice float32, its row message (`row_gradients`).

    compressed: the first frame is a message as of `compression.dense_push`, in which those of this server's tensors
    that are in `whole` are uncompressed; rows_compressed: the second one is one as of `compression.row_push`, or, with
    rows_masked, of `compression.activation_codec`. A third
    frame, to the first server of the worker's host: what the worker had not sent after this push, float32 [n of all
    dense]
    """

    worker: int
    generation: int
    micro: int
    serial: int
    dense_step: int = -1  # step of this server's dense values that they were computed with, -1 if not known
    compressed: bool = False
    rows_compressed: bool = False
    whole: tuple[int, ...] = ()
    rows_masked: bool = False


class Residual(Struct):
    """What a worker had not sent as it came into the mode. Frame: float32 [n of all dense], empty: nothing."""

    worker: int
    generation: int


class PushDone(Struct, tag="Done"):
    """Every server has its part of this micro-batch's gradients. `refused` names what was not finite.

    lrs, settings: as of `LeaseRequest`, when the gradients were computed; so a step is applied with rates as new as its
    gradients
    dense_step: of the dense values it was computed with, of several servers the oldest; -1: not known
    traffic: bytes on this worker's wires since it came into the mode
    """

    worker: int
    generation: int
    micro: int
    serial: int
    loss: float | None = None
    seconds: float = 0.0
    refused: str = ""
    lrs: list[float] = []
    lrs_step: int = -1
    dense_step: int = -1
    traffic: Sums = NOTHING
    settings: list[dict[str, GroupSetting]] = []


class HeartbeatMsg(Struct, tag="Beat"):
    """I live. The chief also reports the last decision, in allreduce mode the training's position, too, for people."""

    worker: int
    rank: int
    host: int
    pid: int
    generation: int  # 0 in allreduce mode
    hosts_updated: bool = False
    leaving: bool = False  # once a checkpoint is there
    report: dict[str, Any] = msgspec.field(name="told", default_factory=dict)
    # Generation of a mode that the workers of this host continue without: no worker is in it.
    abandoned: int = msgspec.field(name="given_up", default=0)
    host_name: str = ""  # for people
    awaited: bool = False  # between two epochs the others wait for the thread that trains, however long it takes


class Evaluate(Struct):
    """Samples to score, please, in evaluation `ordinal` of `epoch`. Frame: this worker's buffers (state_codec).

    parts: what is measured, the same on all workers
    """

    worker: int
    generation: int
    request: int
    epoch: int
    ordinal: int
    n_samples: int
    batch: int
    parts: list[Part]


class Score(Struct):
    """Measures of one lease of an evaluation. Frames: of each part in order, see `accumulators.DTYPES`."""

    worker: int
    generation: int
    epoch: int
    ordinal: int
    micro: int
    serial: int


class Sources(Struct):
    """What this worker reads. Frame: the names of its files or shards (`ps.worker.source_names`).

    asks: it was refused for samples that others do not have, and is to receive the names of one of these
    """

    worker: int
    generation: int
    asks: bool = False


class Export(Struct):
    """All of this server's dense state. Frames of the answer: values, optimizer state (state_codec).

    leaving: the workers apply the steps from here on; the server must not touch a shard any more
    phase: of replicas: first becomes the mean of what was submitted for this phase (-1: as it is)
    position: the coordinator also returns where to resume, between two steps: its workers are all gone
    """

    generation: int
    leaving: bool
    phase: int = -1
    position: bool = False


class Blend(Struct):
    """Blend a replica into the central copy. Frame: its values here, float32. Answer: `Dense` with the copy's.

    number: grows with each round of the worker: a repeated one is not blended twice
    phase: see `replica_worker`; elasticity: see `averaging`
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


class SubmitReplica(Struct, tag="HandIn"):
    """One worker's replica, for the mean of this phase. Frames: values float32, optimizer state (state_codec).

    early: it left its loop before the epoch's end; should it come back, what it submits then takes the place of this
    """

    worker: int
    generation: int
    phase: int
    early: bool = False


class ReplicaSubmitted(Struct, tag="HandedIn"):
    """To the coordinator: every server has what this worker had. Answered when all living workers have sent it.

    early: as of `SubmitReplica`; answered at once
    """

    worker: int
    generation: int
    phase: int
    early: bool = False


class ReturnLeases(Struct):
    """To the coordinator: this worker left its loop before the epoch's end. What it had leased is leased again."""

    worker: int
    generation: int


class Leave(Struct, tag="Bye"):
    """The worker leaves. finished: training is over; otherwise a replacement is wanted."""

    worker: int
    finished: bool = True


class Measure(Struct):
    """How large is the gradient of step `step`, which is decided and to be clipped? Changes nothing.

    damping: how much does the update rule damp each of its members here, instead; asked first, see `step_executor`
    """

    generation: int
    step: int
    members: list[PlannedMember]
    scale: float
    dropped: list[tuple[int, int]] = []  # as of `Apply`
    n_micro: int = 0
    damping: bool = False


class Apply(Struct):
    """Step `step` is decided: merge these pushes, apply them once."""

    generation: int
    step: int
    members: list[PlannedMember]
    scale: float
    row_lr: float
    lrs: list[float]
    oldest_serial: int  # pushes of older leases will never be asked for
    workers: list[int] = []  # who lives, by id: for rules that need it, and that discard state of workers that are gone
    dense_factor: float = 1.0  # what clipping multiplies the gradients by
    row_factor: float = 1.0
    n_skipped: int = 0  # steps before this one that were not applied, for a row optimizer that counts
    dropped: list[tuple[int, int]] = []  # micro, serial: too stale, and still contributors of the rows they contain
    n_micro: int = 0  # micro-batches that `scale` makes a mean over; needed where rows are averaged over contributors
    settings: list[dict[str, GroupSetting]] = []  # as of `LeaseRequest`: all changes since the mode began


class Discard(Struct):
    """Discard the pushes of leases older than `oldest_serial`: their micro-batches will be computed again."""

    generation: int
    oldest_serial: int


class ProbeProcess(Struct, tag="Alive"):
    """Does the process live?"""

    pid: int


class Status(Struct):
    pass


class SwitchTo(Struct, omit_defaults=True):
    """pin, world: as of `Coordinator.request_mode`"""

    mode: str
    reason: str
    pin: bool = False
    world: int | None = None


class SaveSettings(msgspec.Struct):
    """How and where to save. Written as a plain map, without a tag.

    storage_options: see `recovery.storage.open`. final_checkpoint_s: for how long a final save may take when all
    workers are gone; 0: there is to be none
    """

    url: str
    storage_options: dict[str, Any]
    config: Config
    final_checkpoint_s: float = msgspec.field(name="last_gasp_s", default=0.0)


class SavePace(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How often the job saves: see `CheckpointCallback.pace`."""

    is_planned: bool
    every_s: float | None = None
    every_steps: int | None = None


class SaveAbout(msgspec.Struct, omit_defaults=True):
    """What a manifest says about the job, for people and for the job that resumes from it: `Manifest.about`.

    why: this checkpoint was made, and is of its kind. n_servers: hosts. is_final: saved when no worker was left.
    torn_shards: were in the middle of a step. hashed: see `Layout.hashed_settings`. best_step: see
    `recovery.catalog.retention.BEST_STEP`; best_metric, best_value: by which it was the best; best_until: the step of
    the next evaluation; best_unsaved_step, best_unsaved_value, best_unsaved_why: of a better one that was not saved.
    position: where the job stood in its data; None: not known, or before its first epoch
    """

    why: str = ""
    job: str = ""
    mode: str = ""
    global_batch: int = 0
    micro_batch: int = 0
    n_servers: int = 0
    given: Goals | None = None
    measured: JobMeasurements | None = None
    costs: Costs | None = None
    pace: SavePace | None = None
    compression: str = ""
    is_final: bool = msgspec.field(name="last_gasp", default=False)
    torn_shards: int = 0
    hashed: dict[str, dict[str, Any]] = {}
    best_step: int | None = None
    best_metric: str = ""
    best_value: float | None = None
    best_until: int | None = None
    best_unsaved_step: int | None = None
    best_unsaved_value: float | None = None
    best_unsaved_why: str = ""
    position: EpochPosition | None = None

    @property
    def is_compressed(self) -> bool:
        return self.compression not in ("", "none")


class DelegateClaim(Struct, tag="Hold"):
    """Renew this claim until another one comes.

    settings, about, first_epoch: as in `Save`; of a final save, should all workers be lost. part, n_parts: the number
    of this host, and how many there are; only the first one renews it. 0 hosts: not known
    """

    claim: Claim
    settings: SaveSettings
    about: SaveAbout = msgspec.field(default_factory=SaveAbout)
    first_epoch: int = 0
    part: int = 0
    n_parts: int = 1


class SavePlan(Struct, kw_only=True):
    """What the chief has decided of a save, the same for all hosts.

    kind, parent, about: as in `recovery.format.manifest.Manifest`
    first_epoch: of the job: what was saved in its name since then, by earlier launches too, may expire
    claim: under which it is saved
    """

    epoch: int
    number: int
    kind: str
    parent: str | None
    step: int
    samples: int
    about: SaveAbout
    claim: Claim
    first_epoch: int = 0


class Save(SavePlan, kw_only=True):
    """Save the shards that are here, as one part of a checkpoint. Frame: what it has beside rows (part 0 only).

    generation: of the asynchronous mode; its servers add the dense state themselves. 0 in allreduce mode
    """

    part: int
    n_parts: int
    settings: SaveSettings
    generation: int = 0
    supersedes: bool = False  # the requester has abandoned the save in flight: it is cancelled


Request = (
    Enter
    | LeaseRequest
    | Evaluate
    | Score
    | Sources
    | PullRows
    | PullDense
    | Push
    | Residual
    | PushDone
    | HeartbeatMsg
    | Export
    | Blend
    | Publish
    | SubmitReplica
    | ReplicaSubmitted
    | ReturnLeases
    | Leave
    | Measure
    | Apply
    | Discard
    | ProbeProcess
    | Status
    | SwitchTo
    | Save
    | DelegateClaim
)

# --- answers ---------------------------------------------------------------------------------------------------------


class Ok(Struct):
    position: JobPosition | None = None


class ReplicaAccepted(Struct, tag="Taken"):
    """The answer to `SubmitReplica`. late: the mean of the phase was made before, without this replica."""

    late: bool = False


class LeaseReply(Struct, tag="Given"):
    """The answer to `LeaseRequest`: a lease, or why there is none: "wait", "finished", "drained"."""

    position: JobPosition
    lease: LeaseGrant | None = None
    status: Literal["", "wait", "finished", "drained"] = msgspec.field(name="instead", default="")


class EvaluationReply(Struct, tag="Judged"):
    """The answer to `Evaluate`: a lease, or the result (`accumulators.combined`, by part), or neither: ask again soon.

    like_probabilities: the evaluation is refused: it is not specified that the outputs of these tasks are logits, and
    the first ones lie in [0, 1]
    """

    lease: LeaseGrant | None = None
    result: list[dict[str, Any]] | None = None
    like_probabilities: list[str] = msgspec.field(default_factory=list)


class OtherSources(Struct):
    """The answer to `Sources`. Frame: the names of a worker, of this rank, that reads other ones; none: not known."""

    rank: int = -1


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
    position: JobPosition | None = None


class Measured(Struct):
    """The sums of squares of this server's part of a step's gradient.

    damping: of each member that is here, micro-batch, numbers of the dense part here, and `Damping.rows`; None unless
    that was asked for, and then the squares are 0
    """

    step: int
    dense_squares: float
    row_squares: float
    damping: list[tuple[int, int, float]] | None = None


class Applied(Struct):
    """`missing`: micro-batches whose push is not here; `missed`: shards and dense parts that did not get the step.

    failed: why the step could not be applied; it is over all the same, and the job should end with these words
    """

    step: int
    missing: list[int] = []
    missed: int = 0
    failed: str = ""


class ProcessAlive(Struct, tag="Lives"):
    alive: bool


class StatusReport(Struct):
    report: dict[str, Any]


class Refused(Struct):
    """The request was not carried out, and changed nothing. `again`: it may be sent again later.

    kind: of the error that `request_port.refused_by` answers
    """

    why: str
    retry: bool = msgspec.field(name="again", default=False)
    kind: RefusalKind = ""


Answer = (
    Ok
    | ReplicaAccepted
    | LeaseReply
    | EvaluationReply
    | OtherSources
    | Dense
    | Rows
    | Exported
    | Measured
    | Applied
    | ProcessAlive
    | StatusReport
    | Refused
)
