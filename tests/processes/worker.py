"""A small but real training script that the process tests launch with `horovodrun`.

Reads what to do from the JSON file in TEST_PLAN: sizes, epochs, faults. Each worker appends what it did to
`OUT/<host>-<pid>.jsonl`: the samples it is about to contribute to a step or push, the steps that were committed,
events, the end. The chief writes the final parameters. Faults really happen (SIGKILL, SIGSTOP, exceptions) and are
written down just before.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

PLAN: dict[str, Any] = json.loads(Path(os.environ["TEST_PLAN"]).read_text())
OUT = Path(PLAN["out"])

if PLAN.get("own_memory_per_name"):  # two names of one machine then count as two hosts
    os.environ["GBA_HVD_SHARD_DIR"] = f"{PLAN['shard_dir']}/{os.environ.get('HOROVOD_HOSTNAME', 'alone')}"
else:
    os.environ["GBA_HVD_SHARD_DIR"] = PLAN["shard_dir"]

if PLAN.get("horovod", True):
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError

    (OUT / f"joins-{os.getpid()}").touch()
    if "late_joiners_wait_for" in PLAN and list(OUT.glob("*.jsonl")):  # a late joiner that takes long to start
        late_s = time.monotonic() + 300
        while not (OUT / PLAN["late_joiners_wait_for"]).exists() and time.monotonic() < late_s:
            time.sleep(0.05)
    hvd.init()

from balance import Books  # noqa: E402
from shown import evaluated, softmax_loss  # noqa: E402
from workload import ParquetClicks, ShardedClicks, Training, digest_of_dense, digests, to_batch  # noqa: E402

import gba_hvd  # noqa: E402
from gba_hvd import losses  # noqa: E402
from gba_hvd.averaging import schedule  # noqa: E402
from gba_hvd.averaging.sync_thread import SyncThread  # noqa: E402
from gba_hvd.checkpoint.job_checkpoints import JobCheckpoints, checkpoints_of  # noqa: E402
from gba_hvd.comm import collective_waits  # noqa: E402
from gba_hvd.comm.collectives import HorovodWorld  # noqa: E402
from gba_hvd.comm.groups import Group  # noqa: E402
from gba_hvd.data import parquet_files  # noqa: E402
from gba_hvd.elastic import torch_state  # noqa: E402
from gba_hvd.elastic.training_state import TrainingState  # noqa: E402
from gba_hvd.elastic.worker_saves import WorkerSaves  # noqa: E402
from gba_hvd.faults import Fault  # noqa: E402
from gba_hvd.membership import full_recovery, shard_transfer  # noqa: E402
from gba_hvd.modes.allreduce_exchange import AllreduceExchange  # noqa: E402
from gba_hvd.modes.parameter_server import ParameterServerMode  # noqa: E402
from gba_hvd.ps import launch  # noqa: E402
from gba_hvd.ps.worker.replica_worker import ReplicaWorker  # noqa: E402
from gba_hvd.ps.worker.worker import PsWorker  # noqa: E402
from gba_hvd.reading import slow_reads  # noqa: E402
from gba_hvd.shm.host_sum import HostSum  # noqa: E402
from gba_hvd.shm.process_state import is_alive  # noqa: E402
from gba_hvd.shm.shard_memory import ShardMemory  # noqa: E402
from gba_hvd.shm.vocabulary import Vocabulary  # noqa: E402
from gba_hvd.switching import enter_ps  # noqa: E402
from recovery.callback import CheckpointCallback  # noqa: E402


def note(**facts: Any) -> None:
    with open(OUT / f"{socket.gethostname()}-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), **facts}) + "\n")


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "int": signal.SIGINT, "term": signal.SIGTERM}


def die(point: str, step: int) -> None:
    """Carry out the faults planned for this worker at this point of this step; each happens once in the job.

    `after`: not before the fault of that number has happened; `once`: the worker waits here for this file first.
    """
    rank = state.world.rank
    for number, fault in enumerate(PLAN.get("faults", [])):
        fired = OUT / f"fault-{number}"
        in_turn = "after" not in fault or (OUT / f"fault-{fault['after']}").exists()
        if (fault["point"], fault["step"], fault["rank"]) == (point, step, rank) and in_turn and not fired.exists():
            if "once" in fault:
                wait_for_file(fault["once"])
            fired.write_text(json.dumps({"pid": os.getpid(), "time": time.time()}))
            if fault["do"] == "mark":
                return
            if fault["do"] == "exit":
                sys.exit(fault["code"])
            if fault["do"] == "cut the file":
                os.truncate(state.engine.folder / "shards", 4096)
                return
            if fault["do"] == "warn":
                text = "planned: what rank 0 alone reports"
                state.engine.emit(gba_hvd.callbacks.Event("rows_lost", state.step, text, level="warning"))
                return
            if fault["do"] == "spoil the store":
                shutil.rmtree(PLAN["checkpoint"]["url"])
                Path(PLAN["checkpoint"]["url"]).write_text("no folder any more")
                return
            if fault["do"] == "raise":
                raise RuntimeError("planned failure")
            if fault["do"] == "lose the result":
                raise HorovodInternalError("planned: the result of this collective is lost on the way")
            if fault["do"] == "wait for":
                wait_for_file(fault["file"])
                return
            if fault["do"] == "kill the server":
                os.kill(launch.pid_of(state.engine.folder, 0) or os.getpid(), signal.SIGKILL)
                return
            os.kill(os.getpid(), SIGNALS[fault["do"]])


def wait_for_file(name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Until the test, or another worker's fault, makes it."""
    deadline = time.monotonic() + 300
    while not (OUT / name).exists():
        assert time.monotonic() < deadline, f"{name} did not come"
        meanwhile()
        time.sleep(0.02)


def around(owner: Any, name: str, before: Callable[[Any], None] | None, after: Callable[[Any], None] | None) -> None:
    """Make a method of the package call us before and after: faults happen at exact places of the real code."""
    method = getattr(owner, name)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            before(self)
        result = method(self, *args, **kwargs)
        if after:
            after(self)
        return result

    setattr(owner, name, wrapper)


def before_exchange(_: Any) -> None:
    drawn = [torch.rand(1).item(), np.random.rand(), random.random()]
    note(attempt=state.step + 1, world=optimizer.engine.progress.restarts, rows=notes.rows, drawn=drawn)
    notes.rows = []
    die("before exchange", state.step + 1)


_gather_negatives = losses._gather


def gather_negatives(engine: Any, what: str, mine: Any) -> Any:
    """Faults happen between the two collectives of a loss with negatives of all workers."""
    if what != "vectors":
        die("in the loss", state.step + 1)
    return _gather_negatives(engine, what, mine)


losses._gather = gather_negatives
around(AllreduceExchange, "exchange", before_exchange, lambda _: die("after exchange", state.step + 1))
around(gba_hvd.elastic.TorchState, "on_hosts_updated", lambda _: note(hosts_updated=True), None)
_hosts_updated = torch_state.hosts_updated


def hosts_updated() -> Exception:
    note(interrupted=True, at=state.step, shards=shards_here())
    return _hosts_updated()


torch_state.hosts_updated = hosts_updated
around(AllreduceExchange, "commit", None, lambda _: die("after commit", state.step + 1))
around(HostSum, "_await", lambda _: die("posted", state.step + 1), None)
around(
    Group, "sum_", lambda _: die("leaders sum", state.step + 1), lambda _: die("leaders have summed", state.step + 1)
)
_wait_in_group = Group._wait


def wait_in_group(self: Group, name: str, begin: Any) -> None:
    """An all-to-all without known counts waits twice; to die at is the first, for the counts."""
    die(f"{name} begins", state.step + 1)
    _wait_in_group(self, name, begin)
    die(f"{name} waited", state.step + 1)


setattr(Group, "_wait", wait_in_group)  # noqa: B010
around(ShardMemory, "begin", None, lambda _: die("in apply", state.step + 1))
around(Vocabulary, "looked_up", None, lambda _: die("in vocabulary", state.step + 1))
around(ShardMemory, "finish", None, lambda _: die("after apply", state.step + 1))
around(ReplicaWorker, "export", lambda _: die("before submitting", state.epoch), None)
around(
    ReplicaWorker, "_exported", lambda _: die("all have submitted", state.epoch), lambda _: die("exported", state.epoch)
)
around(ReplicaWorker, "_submit", None, lambda _: die("after submitting", state.epoch))


def falls_out(_: Any) -> None:
    note(restored=True)
    (OUT / f"fell-out-{os.getpid()}").touch()


around(gba_hvd.elastic.TorchState, "restore", falls_out, None)
_push, _stop_rounds = PsWorker.push, SyncThread.stop


def stop_rounds(self: SyncThread, together: bool = False, timeout_s: float = 10.0) -> bool:
    """Where planned, find that the rounds did not end together with the others'."""
    ended_well = _stop_rounds(self, together, timeout_s)
    badly = together and state.world.rank == PLAN.get("rounds_end_badly") and not (OUT / "ended-badly").exists()
    if badly:
        (OUT / "ended-badly").touch()
    return ended_well and not badly


SyncThread.stop = stop_rounds  # type: ignore[method-assign]
if PLAN.get("in_step"):  # in the foreground, no worker takes part in a round before it has made a step itself
    schedule._is_due = lambda now, standing, *_: bool(standing.ending) or standing.round_requested


def push(self: PsWorker, lease: Any, rows: Any, loss: Any, seconds: float, refused: str, drop: bool = False) -> str:
    die("before push", state.epoch)
    die("before push of step", lease.token)
    fatal = fatal_push(lease.micro)
    if PLAN.get("follow_the_chief"):
        wait_for_the_request(self, lease.token)
    note(push=lease.micro, serial=lease.serial, token=lease.token, epoch=state.epoch, rank=state.world.rank,
         segment=state.engine.progress.cursor.segment, refused=refused, drop=drop, rows=notes.rows)  # fmt: skip
    notes.rows = []
    reported: str = _push(self, lease, rows, loss, seconds, refused, drop)
    if fatal is not None:
        self.flush()  # the server has it, and the coordinator knows
        pid = launch.pid_of(state.engine.folder, 0)
        assert pid is not None
        fatal.write_text(json.dumps({"pid": pid, "time": time.time()}))
        os.kill(pid, signal.SIGKILL)
    return reported


PsWorker.push = push  # type: ignore[method-assign]


def fatal_push(micro: int) -> Path | None:
    """What to write when this push has arrived and its server is to be killed: by [epoch, step, n], the n-th of a step.

    The step is not complete before: its later pushes wait here. Which micro-batches come first is open.
    """
    step = micro // (state.engine.model.global_batch // state.engine.model.micro_batch)
    for number, planned in enumerate(PLAN.get("kill_server_after_push", [])):
        fired = OUT / f"fault-server-{number}"
        if planned[:2] != [state.epoch, step] or fired.exists():
            continue
        with open(OUT / f"order-{number}", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            position = file.read().count(".") + 1
            file.write(".")
        if position == planned[2]:
            return fired
        if position > planned[2]:
            wait_for_file(fired.name)
    return None


def wait_for_the_request(mode: PsWorker, token: int) -> None:
    """Who is not the chief goes no further in a mode that is due to end before the coordinator has received it.

    In hop_bs nobody gets far ahead of the chief, which could itself not go on before a worker that waits here.
    """
    due = [int(at) for at in PLAN["gba"]["switch_at"] if int(at) < token]
    if state.world.rank == 0 or mode.name == "hop_bs" or not due:
        return
    deadline = time.monotonic() + 120
    while PLAN["gba"]["switch_at"][str(max(due))] != mode.name and not mode.position.requested_mode:
        assert time.monotonic() < deadline, f"the chief did not ask for another mode than {mode.name}"
        time.sleep(0.02)


_ask = PsWorker.ask
_n_given = itertools.count()  # leases to this worker


def ask(self: PsWorker, epoch: int, *args: Any) -> Any:
    """Note what was given, in the thread that asks ahead."""
    in_step, others = PLAN.get("in_step"), set(range(state.world.size)) - {state.world.rank}
    number = next(_n_given) if in_step else 0
    for rank in others if number else ():  # all have as many leases, so that all have as many steps
        wait_for_file(f"given-{rank}-{number}")
    given = _ask(self, epoch, *args)
    if in_step and given.lease is not None:
        (OUT / f"given-{state.world.rank}-{number + 1}").touch()
    note(
        given=None if given.lease is None else given.lease.micro,
        instead=given.status,
        of=epoch,
        as_rank=self.contact.rank,
    )
    if given.status == "finished":
        die("learned of the end", epoch)
    return given


PsWorker.ask = ask  # type: ignore[method-assign]
_enter, _start, _take = enter_ps._enter, enter_ps.start, ParameterServerMode.take_dense_state


def enter_servers(*args: Any) -> None:
    die("before entering", state.step)
    if "entering_fails" in PLAN:
        (OUT / "entering failed").touch()
        raise gba_hvd.GbaError(PLAN["entering_fails"])
    _enter(*args)


def start_asynchronous(*args: Any) -> None:
    die("entered", state.step)
    _start(*args)


def ends() -> bool:
    return "last_to_end" in PLAN and state.epoch == PLAN["epochs"] - 1


def take_dense_state(mode: ParameterServerMode, *args: Any, **more: Any) -> None:
    """One worker fetches what it ends with when another has: in gba has ended, in shadow has submitted its replica."""
    if ends() and PLAN["last_to_end"] == state.world.rank:
        wait_for_file("another-ends")
    _take(mode, *args, **more)


around(ReplicaWorker, "_submit", None, lambda _: (OUT / "another-ends").touch() if ends() else None)


def world_has_changed(mode: ParameterServerMode) -> None:
    """Where planned, one worker has left the world, and waits for the other one, which does not know of it."""
    if state.world.rank == PLAN.get("world_changes_for") and not (OUT / "world-changed").exists():
        assert mode.rejoin is not None
        (OUT / "world-changed").touch()
        hvd.shutdown()
        while not list(OUT.glob("fell-out-*")):
            time.sleep(0.02)
        mode.rejoin.n_formed += 1


around(ParameterServerMode, "end_rejoin", world_has_changed, None)
enter_ps._enter, enter_ps.start = enter_servers, start_asynchronous
ParameterServerMode.take_dense_state = take_dense_state  # type: ignore[method-assign]
around(WorkerSaves, "_save_last", lambda _: die("before the last save", 0), None)
around(WorkerSaves, "epoch_begins", None, lambda _: die("kept", state.step))
_move = shard_transfer.move_shards


def move_shards(*args: Any) -> None:
    die("in sync", state.step)
    _move(*args)


shard_transfer.move_shards = move_shards
_decide = full_recovery.decide


def decide(*args: Any) -> Any:
    """Full recovery dies at step 0 of these points, at any step of the job."""
    decided = _decide(*args)
    if decided is not None and decided.is_full:
        die("decided", 0)
    return decided


def in_full_recovery(point: str) -> Callable[[Any], None]:
    def look(_: Any) -> None:
        rollback = state.engine.rollback
        if rollback.decision is not None or rollback.unreported is not None:
            die(point, 0)

    return look


_gather = HorovodWorld.gather


def gather(self: HorovodWorld, name: str, row: np.ndarray) -> np.ndarray:
    """Of the collectives, one is a point to die at: this worker has noted the decision, others may not have."""
    if name == "recovery agreed":
        die("noted", 0)
    return _gather(self, name, row)


HorovodWorld.gather = gather  # type: ignore[method-assign]
full_recovery.decide = decide
around(JobCheckpoints, "fill_from", in_full_recovery("before filling"), in_full_recovery("filled"))
around(TrainingState, "share", in_full_recovery("before sending"), in_full_recovery("sent"))


def shards_here() -> dict[str, Any]:
    """Digests of the shards that this worker's host holds, as it is about to train on them."""
    memory = tables.memory
    return {} if memory is None else {str(shard): digest for shard, digest in digests(memory).items()}


class Notes(gba_hvd.Callback):
    """Writes down events and committed steps; `rows` are this thread's samples of the step in flight."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def rows(self) -> list[int]:
        return getattr(self._of_thread, "rows", [])

    @rows.setter
    def rows(self, rows: list[int]) -> None:
        self._of_thread.rows = rows

    def on_event(self, event: gba_hvd.Event) -> None:
        note(event=event.kind, step=event.step, message=event.message, **event.data)

    def on_job(self, job: gba_hvd.Job) -> None:
        if (OUT / f"fell-out-{os.getpid()}").exists():
            (OUT / "is-back").touch()
        held = [
            (p.detach(), optimizer.engine.model.optimizer.state.get(p, {}))
            for p in optimizer.engine.model.dense.parameters
        ]
        note(job=job.job_id, rank=job.rank, host=job.host, shards=shards_here(), dense=digest_of_dense(held))

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        note(
            committed=record.step, epoch=record.epoch, world=optimizer.engine.progress.restarts, workers=record.workers
        )

    def on_end(self, status: str, error: BaseException | None) -> None:
        sigterm("report")
        note(end=status, error=None if error is None else str(error))
        if "last_to_end" in PLAN:
            (OUT / "another-ends").touch()
        if PLAN.get("ends_last") == state.world.rank:
            wait_for_the_others_to_end()


def sigterm(at: str) -> None:
    """While the end is reported, or when the interpreter exits: `{"sigterm_at": "exit"}`."""
    if PLAN.get("sigterm_at") == at:
        note(sigterm_at=at)
        os.kill(os.getpid(), signal.SIGTERM)


atexit.register(sigterm, "exit")
if "long_waits_s" in PLAN:  # when a wait leaves its mark with the launcher, and when it is reported
    collective_waits.MARKED_S, collective_waits.FIRST_S = PLAN["long_waits_s"]


def hang(_: Any) -> None:
    (OUT / "hangs").touch()
    wait_for_file("go on")


if PLAN.get("read_hangs"):  # each row group, until the test says so
    slow_reads.FIRST_S = 1.0
    around(parquet_files, "_read_group", hang, None)
if "slow_to_start" in PLAN and hvd.rank() == PLAN["slow_to_start"]:  # after `hvd.init`, until the test says so
    (OUT / "starts").touch()
    wait_for_file("go on")

more_users = PLAN.get("rank_one_differs", 0) if os.environ.get("HOROVOD_RANK") == "1" else 0
training = Training.of(PLAN, more_users, epoch=0, aucs=[])
for seed in (torch.manual_seed, np.random.seed, random.seed):
    seed(5)
dataset, tables, model, optimizer, state, scaler = vars(training).values()
if "parquet" in PLAN:
    dataset = ParquetClicks(PLAN["parquet"])
how: dict[str, Any] = {"seed": PLAN.get("seed", 1), **PLAN.get("reading", {})}
if "shards" in PLAN:
    dataset, how["collate_fn"] = ShardedClicks(**PLAN["shards"]), to_batch


def fewer() -> Any:
    """A dataset that lacks some of the files or shards."""
    return ParquetClicks(PLAN["fewer"]) if "parquet" in PLAN else ShardedClicks(**PLAN["fewer"])


hooked: list[int] = []
state.on_step(lambda: hooked.append(state.step))
notes = Notes()
past_switches: set[int] = set()  # this worker has waited for these already
books = Books(state.engine, note, die) if state.engine.model.compression is not None else None
state.register_callbacks([notes])
if "gba" in PLAN:
    of_rank = PLAN.get("gba_of_rank_one", {}) if os.environ.get("HOROVOD_RANK") == "1" else {}
    state.register_callbacks([gba_hvd.GBACallback(**{"wait_s": 180.0, **PLAN["gba"], **of_rank})])
if "mlflow" in PLAN:
    state.register_callbacks([gba_hvd.MLflowCallback(**PLAN["mlflow"])])
if "checkpoint" in PLAN:
    if "cwd" in PLAN:
        os.chdir(PLAN["cwd"])
    state.register_callbacks([CheckpointCallback(**PLAN["checkpoint"])])
if "fault_schedule" in PLAN:
    state.register_callbacks([gba_hvd.FaultSchedule(map(Fault.of, PLAN["fault_schedule"]), OUT / "schedule")])


@gba_hvd.elastic.run
def train(state: gba_hvd.elastic.TorchState) -> None:
    if state.world.rank == 0:
        (OUT / "training").touch()
    for state.epoch in range(state.epoch, PLAN.get("epochs", 2)):
        notes.rows = []  # of a step that a failure cut off
        read = fewer() if state.epoch == PLAN.get("sources_differ_in") and state.world.rank == 1 else dataset
        if "threads" in PLAN:
            gba_hvd.hogwild(read, state, compute, n_threads=PLAN["threads"], **how)
        for batch in () if "threads" in PLAN else gba_hvd.batches(read, state, **how):
            wait_where_planned(state.step)
            wait_for_workers()
            wait_for_switch(batch)
            if PLAN.get("horovod", True):
                hvd.rank(), hvd.size(), hvd.local_rank()  # as scripts do; also while the world is formed again
            notes.rows += batch.rows
            optimizer.zero_grad()
            loss = softmax_loss(training, batch) if PLAN.get("global_negatives") else training.loss(batch)
            if PLAN.get("nan_at_step") == state.step + 1 and state.world.rank == PLAN.get("nan_rank", 0):
                loss = loss * float("nan")
            if state.epoch == PLAN.get("nan_epoch", 0) and batch.index in PLAN.get("nan_micros", ()):
                loss = loss * float("nan")
            training.backward(loss, [state.epoch, batch.index] in PLAN.get("overflows", ()))
            if PLAN.get("diverge_at_push") == batch.index:  # finite gradients, too large for what they are added to
                for p in model.parameters():
                    p.data.fill_(3e38).mul_(10)
            training.step(loss)
            if PLAN.get("evaluate_after") == [state.epoch, batch.index]:
                evaluate_now()
            if PLAN.get("break_off") == [state.world.rank, state.epoch]:
                break
            if PLAN.get("sleep_s"):
                time.sleep(PLAN["sleep_s"])
        scale = None if scaler is None else scaler.state_dict()
        note(values=values_now(), of_epoch=state.epoch, mode=state.engine.mode.name, scaler=scale)
        late = {"label": label_that_waits} if PLAN.get("hangs_in_evaluation") == state.epoch else {}
        if any(one["point"] == "in an evaluation" for one in PLAN.get("faults", [])):
            late = {"label": label_or_death}
        scores = gba_hvd.evaluate(model, training.dataset, state, batch=64, **late)
        note(auc=scores.auc)
        state.aucs = [*state.aucs, scores.auc]
        state.report(auc=PLAN["scores"][state.epoch] if "scores" in PLAN else scores.auc)
        if "others_wait_s" in PLAN and state.world.rank == 1:
            with gba_hvd.others_wait(state):
                before = shards_here()
                time.sleep(PLAN["others_wait_s"])
                note(between_epochs=[before, shards_here()])
        if PLAN.get("evaluates_more"):
            note(
                evaluation=evaluated(training, **PLAN.get("evaluation_reading", {})),
                rank=state.world.rank,
                mode=state.engine.mode.name,
            )
    if books is not None:
        books.close()
    if state.world.rank == 0:
        write_result()


def label_that_waits(batch: gba_hvd.Batch) -> Any:
    """On rank 1 until the test says so: it hangs in the user's code, and its heartbeats go on. Others wait for that."""
    deadline = time.monotonic() + 300
    if state.world.rank == 1:
        (OUT / "hangs").touch()
    while not (OUT / ("go on" if state.world.rank == 1 else "hangs")).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return batch.label


def label_or_death(batch: gba_hvd.Batch) -> Any:
    die("in an evaluation", state.epoch)
    return batch.label


def compute(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """One micro-batch in one of several threads."""
    wait_for_workers()
    wait_for_switch(batch)
    notes.rows += batch.rows
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
    loss.backward()
    return loss


def evaluate_now() -> None:
    """Evaluate within an epoch, and note the parameters before it, during it, and after it."""
    before, meanwhile = values_now(), set()

    def label(batch: gba_hvd.Batch) -> Any:
        meanwhile.add(values_now())
        return batch.label

    gba_hvd.evaluate(model, dataset, state, batch=64, label=label)
    note(evaluated=sorted(meanwhile), before=before, after=values_now())


def wait_for_workers() -> None:
    """From the third epoch on, go on only when so many workers have been seen: `{"workers_seen": n}`.

    Or when one that fell out of the world is back: `{"one_comes_back": true}`. Who is about to be killed does not wait.
    """
    deadline = time.monotonic() + 300
    faults = state.engine.faults
    while state.epoch >= 2 and (
        len(list(OUT.glob("*.jsonl"))) < PLAN.get("workers_seen", 0)
        or (PLAN.get("one_comes_back") and not (OUT / "is-back").exists())
    ):
        if faults is not None and faults.due(state.world.rank, state.step):
            return
        assert time.monotonic() < deadline, "the late joiner did not come"
        time.sleep(0.05)


def wait_for_switch(batch: Any) -> None:
    """Where a change of mode is due, wait until the coordinator knows.

    Only the chief reports it, and asynchronous modes wait for nobody: if the chief is not scheduled for a while, the
    others may be past the next change, or through with the job. Where rounds keep workers together it is not needed;
    near the end of an epoch there may be no micro-batch left that would bring the chief there.
    """
    due = {int(at) for at in PLAN.get("gba", {}).get("switch_at", {}) if int(at) <= state.step} - past_switches
    n_micro = -(-len(training.dataset) // state.engine.model.micro_batch)
    if not due or batch.index >= n_micro - 8:
        return
    target, deadline = PLAN["gba"]["switch_at"][str(max(due))], time.monotonic() + 60
    while time.monotonic() < deadline:
        servers = state.engine.mode.servers
        if servers is None or servers.name in (target, "ma", "bmuf"):
            break
        if servers.contact.rank == 0 or servers.position.requested_mode:
            break
        time.sleep(0.02)
    past_switches.update(due)


def values_now() -> str:
    """A fingerprint of the dense parameters."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def wait_where_planned(step: int) -> None:
    """Hold step k, or a later one, until the test makes a file. `{"holds": {k: name}}`; `wait_at_step`: k for `go`.

    A job held at step 1 waits for its servers: let go, it has received their reports, so a due checkpoint is begun.
    Where servers did not answer just then, it is begun after a later step: a job that waits for it is held there.
    """
    holds = {int(at): name for at, name in PLAN.get("holds", {}).items()}
    if "wait_at_step" in PLAN:
        holds[PLAN["wait_at_step"]] = "go"
    closed = [name for at, name in holds.items() if step >= at and not (OUT / name).exists()]
    if closed and checkpoint_waits() and learn_of_the_servers():
        return
    for name in closed:
        (OUT / f"waiting-{socket.gethostname()}-{os.getpid()}").touch()
        (OUT / f"held-by-{name}-{socket.gethostname()}-{os.getpid()}").touch()
        wait_for_file(name, follow_checkpoints)
        if step == 1:
            learn_of_the_servers()


def checkpoint_waits() -> bool:
    """Whether one is due and was not begun, since servers were not up. The same on all workers, as it was agreed."""
    engine, checkpoints = state.engine, checkpoints_of(state.engine)
    return checkpoints is not None and engine.mode.steps_together and bool(checkpoints.waiting)


def learn_of_the_servers() -> bool:
    """Whether they are up, on the lead of a host. For a while: in some tests a server is to die before that."""
    engine, deadline = state.engine, time.monotonic() + 60
    line = engine.host.server if checkpoints_of(engine) is not None else None
    while line is not None and not line.is_ready() and time.monotonic() < deadline:
        time.sleep(0.05)
    return line is None or line.is_ready()


def follow_checkpoints() -> None:
    """What a held chief does before its next step: report what became of a checkpoint; asynchronously, begin one."""
    engine, checkpoints = state.engine, checkpoints_of(state.engine)
    if checkpoints is None or engine.world.rank != 0:
        return
    line = state.saving._host_server
    if engine.mode.servers is not None:
        state.saving.save_asynchronously_if_due()
    elif line is not None:
        checkpoints.schedule.poll(line.saved)


def wait_for_the_others_to_end() -> None:
    """The launcher ends all workers when the first one has failed: they are to say first what they have to say."""
    deadline = time.monotonic() + 120
    while True:
        others = {int(path.stem.rpartition("-")[2]) for path in OUT.glob("*.jsonl")} - {os.getpid()}
        if len(others) == state.world.size - 1 and not any(map(is_alive, others)):
            return
        assert time.monotonic() < deadline, f"of the others, {others} were seen and not all have ended"
        time.sleep(0.02)


def write_result() -> None:
    """The chief's view of the end; rows only where one host has them all."""
    np.savez(OUT / "result.npz", **training.arrays())  # type: ignore[arg-type]
    np.savez(OUT / "optimizer.npz", **training.optimizer_arrays())  # type: ignore[arg-type]
    np.savez(OUT / "accesses.npz", **training.accesses())  # type: ignore[arg-type]
    engine = state.engine
    facts = {"step": state.step, "aucs": state.aucs, "restarts": engine.progress.restarts, **vars(state.samples)}
    facts |= {"refused": engine.progress.refused, "reissued": engine.progress.reissued, "mode": engine.mode.name}
    facts["hooked"] = len(hooked)
    facts["scaler"] = None if scaler is None else scaler.state_dict()
    facts["staleness"] = {str(steps): count for steps, count in engine.progress.staleness.items()}
    (OUT / "result.json").write_text(json.dumps(facts))


train.__wrapped__(state) if PLAN.get("plain_loop") else train(state)
