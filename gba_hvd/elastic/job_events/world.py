"""Reports on the world that has formed, and on workers that are gone or awaited."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from gba_hvd.callbacks import Event, Job
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.comm.world_formation import Wait, stands
from gba_hvd.elastic.job_events.change import of_a_change, of_a_continuation
from gba_hvd.elastic.job_events.settings import settings_of
from gba_hvd.elastic.job_events.start import of_a_start
from gba_hvd.elastic.job_events.words import count, mode_of
from gba_hvd.elastic.training_state import Restored
from gba_hvd.membership import JoinResult
from gba_hvd.shm.job_board import Board
from gba_hvd.shm.process_state import is_alive
from gba_hvd.switching.requests import switching_of
from gba_hvd.training.engine import Engine
from recovery.redaction import redacted

MIN_WORKERS = "GBA_HVD_MIN_WORKERS"  # set by `gba-hvd run`: the MIN of -np


def world_formed(
    engine: Engine,
    joined: JoinResult,
    before: int | None,
    residuals_missing: int = 0,
    restored: Restored | None = None,
    after_end: bool = False,
) -> None:
    """Report to all callbacks this worker's place in the job, and the job's changes.

    before: workers in the world that this worker was in, if it was in one.
    residuals_missing: in the checkpoint that the job resumes from, or rolled back to: of so many workers
    restored: beside the rows, by a job that resumes, on the rank that read it
    after_end: the job had ended in this process, which trains on
    """
    world, switching = engine.world, switching_of(engine)
    job = Job(
        engine.job.id, world.rank, world.size, world.local_rank, world.host, joined.is_host_leader, settings_of(engine),
        engine.job.name, () if switching is None else sorted(switching.idle_settings),
    )  # fmt: skip
    for callback in engine.callbacks:
        callback.on_job(job)
    engine.host.is_leader = joined.is_host_leader
    engine.host.board = _board(engine, joined) if joined.is_host_leader else None
    checkpoints = checkpoints_of(engine)
    if checkpoints is not None and world.rank == 0:
        checkpoints.schedule.plan_pace(joined.n_hosts)
    if after_end:
        events = of_a_continuation(engine, joined)
    elif joined.is_restart:
        events = of_a_change(engine, joined, before, residuals_missing)
    else:
        engine.progress.launched_at, engine.progress.launched_unix_s = engine.progress.step, time.time()
        events = of_a_start(engine, joined, residuals_missing, restored)
    for event in events:
        engine.emit(event)
    engine.rollback.unreported = None
    if joined.leaders_apart:
        text = (
            "the workers could not be connected, so Horovod carries rows between hosts and sums the dense gradients "
            f"over all workers: the same model, in slower steps. {joined.leaders_apart}. Workers listen on ports that "
            "the system gives them, on Horovod's network interface: see what blocks these. Until then, "
            "HOROVOD_CYCLE_TIME=1 makes steps faster"
        )
        data = {"why": joined.leaders_apart}
        engine.emit(Event("leaders_not_connected", engine.progress.step, text, data, level="warning"))
    if joined.is_host_leader and not joined.is_restart:
        _warn_of_threads(engine, torch.get_num_threads(), len(os.sched_getaffinity(0)))


def _warn_of_threads(engine: Engine, n_threads: int, n_cores: int) -> None:
    """Once at the start, by each host leader: workers that compute with more threads than the host has cores."""
    n_workers = 1 + len(engine.host.neighbours)
    if n_threads > 1 and n_threads * n_workers > n_cores:
        text = (
            f"{n_workers} workers on {engine.world.host} compute with {n_threads} threads each, and it has {n_cores} "
            "cores for them: they slow each other down, often many times. Start the job with "
            f"OMP_NUM_THREADS={max(1, n_cores // n_workers)} (cores / workers), or with gba-hvd run, which sets it"
        )
        data = {"workers": n_workers, "threads": n_threads, "cores": n_cores}
        event = Event("too_many_threads", engine.progress.step, text, data, level="warning")
        engine.emit(event, only_here=True)


def _board(engine: Engine, joined: JoinResult) -> Board | None:
    """What `gba-hvd ps` shows on this host; None where there is no room for it."""
    checkpoints = checkpoints_of(engine)
    place = "" if checkpoints is None else redacted(checkpoints.callback.url)
    try:
        return Board(
            engine.folder, mode_of(engine), engine.progress.step, name=engine.job.name, job=engine.job.id,
            workers=engine.world.size, hosts=joined.n_hosts, switchable=switching_of(engine) is not None,
            checkpoints=place,
        )  # fmt: skip
    except OSError as error:
        text = (
            f"gba-hvd ps and gba-hvd status cannot show this job on {engine.world.host}: {error}; free some space there"
        )
        engine.emit(
            Event("not_shown", engine.progress.step, text, {"why": str(error)}, level="warning"), only_here=True
        )
        return None


def worker_gone(engine: Engine) -> None:
    """Other workers, or a server, do not answer: what comes next, beside what Horovod prints of it on every worker."""
    text = (
        "a worker is gone, or cannot be reached: the job continues with those that are left. Horovod's lines "
        "'background loop uncaught exception' and 'Read error' (or 'Connection ...') are expected"
    )
    data: dict[str, Any] = {"workers": engine.world.size}
    if (n_left := engine.reports.n_working) is not None:
        n_left = min(n_left, engine.world.size - sum(not is_alive(pid) for pid in engine.host.neighbours.values()))
        data["left"] = n_left
        text += f". Training continues with {count(n_left, 'worker')}{_fewer_than_asked(n_left)}"
    if killed := engine.host.killed_for_memory():
        text += f". {killed}"
    engine.emit(Event("worker_lost", engine.progress.step, text, data))


def _fewer_than_asked(n_workers: int, environ: Mapping[str, str] = os.environ) -> str:
    """An asynchronous mode needs no world, and so not the least number of workers that the launcher forms one of."""
    least = environ.get(MIN_WORKERS, "")
    if not least.isdecimal() or n_workers >= int(least):
        return ""
    return f", fewer than the {least} of `-np MIN:MAX`, until the launcher has started others"


def pauses_for_workers(engine: Engine) -> None:
    """In allreduce mode, on rank 0: the world is left to let workers in, which the launcher starts only then."""
    text = "workers are let in: training pauses until they have started (imports and what the script does first)"
    engine.emit(Event("workers_awaited", engine.progress.step, text, {"workers": engine.world.size}))


def world_was_late(engine: Engine, wait: Wait | None, meanwhile: str) -> None:
    """What the world that stands now took to form, if it was long, or broke up."""
    if wait is not None and wait.is_worth_a_word:
        engine.emit(stands(engine.progress.step, wait, engine.world.size, meanwhile))
