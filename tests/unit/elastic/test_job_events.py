"""What callbacks get when a world has formed, and what it cost."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gba_hvd
from gba_hvd import Compression, GBACallback
from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import JobCheckpoints
from gba_hvd.elastic import job_events
from gba_hvd.elastic.job_events import end, settings, start, world
from gba_hvd.elastic.launcher_start import launcher_started_s
from gba_hvd.embedding.row_optimizers import TableOptimizers
from gba_hvd.epoch import SampleAccount
from gba_hvd.membership import JoinResult
from gba_hvd.membership.resume_job import ResumedFromMemory
from gba_hvd.shm import host_identity, memory_limit
from gba_hvd.shm.layout import HashedSpec, TableSpec
from gba_hvd.switching.requests import ModeRequests
from gba_hvd.training.job_state import JobIdentity, LocalHost, Progress, Rollback
from gba_hvd.training.left_epoch import LeftEpoch, LeftEpochs
from gba_hvd.training.step_hooks import StepHooks
from recovery.callback import CheckpointCallback
from recovery.catalog.chains import Skipped
from recovery.rows import KEY, USES, Column, Schema, Table
from recovery.schedule.recovery_choice import RecoveryDecision

STARTED = JoinResult("j", 0, 1, True, False, 0, 0, host=1)
CHANGED = replace(STARTED, is_restart=True, n_hosts=2)
RESUMED: Any = SimpleNamespace(
    manifest=SimpleNamespace(name="m-3", about={}, schema=Schema((), 3)), n_rows=2000, n_lost=0, without_room={},
    without_filter=(), seconds=1.5, step=7, of_other_steps={},
    age=SimpleNamespace(mean=0.5),
    skipped=[],
)  # fmt: skip


def reported(
    joined: JoinResult,
    *,
    size: int = 2,
    checkpoints: Any = None,
    board: Any = lambda *_, **facts: facts,
    row_coder: Any = None,
    rollback: Rollback | None = None,
    hashed: Any = None,
    callbacks: Sequence[Any] = (),
    assigned: Sequence[str] = (),
    step: int = 7,
    **how: Any,
) -> tuple[list[str], list[Event]]:
    """What callbacks got, in its order, and the events among it; 400 of 500 samples applied."""
    received: list[str] = []
    events: list[Event] = []

    def emit(event: Event, only_here: bool = False) -> None:
        received.append(event.kind)
        events.append(event)

    tables = SimpleNamespace(layout=SimpleNamespace(
        tables=[TableSpec("t", 50, 4)], n_shards=3, n_rows=50, hashed_settings=lambda: hashed or {}
    ))  # fmt: skip
    tables.optimizers, tables.n_trained = SimpleNamespace(default="rows", own=()), 1
    tables.initial_rows = SimpleNamespace(assigned=list(assigned))
    progress = Progress(None, StepHooks())
    progress.step, progress.account = step, SampleAccount(total=500, applied=400)
    progress.staleness, progress.dense_ages, progress.gaps = {1: 3, 0: 8}, {2: 11}, {1: (11, 0.5, 5.5, 42)}
    engine: Any = SimpleNamespace(
        job=JobIdentity("j", "clicks"), mode=None, folder=Path("/nowhere"), host=LocalHost(), emit=emit, faults=None,
        world=SimpleNamespace(rank=0, size=size, local_rank=0, host="h"), rollback=rollback or Rollback(),
        progress=progress,
        model=SimpleNamespace(
            tables=tables, global_batch=16, micro_batch=4, sync_micro_batch=None, untrained=[],
            optimizer=torch.optim.Rprop([torch.zeros(1)]),
            row_coder=row_coder,
            row_average="global", compression=None, row_compression=Compression.none,
        ),
        callbacks=[
            SimpleNamespace(on_job=lambda job: received.append(f"job {job.job_id} of {job.size}")), *callbacks
        ],
        participant=lambda kind: None if kind is ModeRequests or not checkpoints else SimpleNamespace(
            schedule=SimpleNamespace(
                plan_pace=lambda n_hosts: received.append(f"pace of {n_hosts}"),
                samples_lost=getattr(checkpoints, "samples_lost", 0.0),
            ),
            callback=CheckpointCallback(
                "memory://place", total_samples=getattr(checkpoints, "total_samples", None),
                resume=getattr(checkpoints, "resume", True), target_pls=getattr(checkpoints, "target_pls", 0.5),
                recovery=getattr(checkpoints, "recovery", "auto"),
            ),
        ),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "Board", board)
        job_events.world_formed(engine, joined, **{"before": None, **how})
    assert (engine.host.board is not None) == (board is not no_room)
    return received, events


def no_room(*_: Any, **facts: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_job_that_cannot_be_shown_says_so() -> None:
    received, (not_shown, _) = reported(STARTED, board=no_room)
    assert received == ["job j of 2", "not_shown", "started"]
    assert not_shown.level == "warning"
    assert "gba-hvd ps and gba-hvd status cannot show this job on h: [Errno 28]" in not_shown.message


def test_a_job_starts() -> None:
    received, (started,) = reported(STARTED)
    assert received == ["job j of 2", "started"]
    data = dict(started.data)
    assert data.pop("launcher_unix_s") == launcher_started_s()
    assert (started.step, data) == (7, {"workers": 2, "checkpoints": ""})
    assert started.message == (
        "2 workers on 1 host, job j: mode allreduce, global batch 16 in micro-batches of 4, tables t 50 x 4, no "
        "checkpoints"
    )
    assert "t 50 x 4, checkpoints in memory://place" in reported(STARTED, checkpoints=True)[1][0].message


def test_what_becomes_of_assigned_rows_is_reported() -> None:
    def said(joined: JoinResult, assigned: Sequence[str]) -> str:
        return reported(joined, assigned=assigned)[1][0].message.partition("no checkpoints")[2]

    assert said(STARTED, []) == ""
    assert said(STARTED, ["user", "item"]) == (
        "; rows that the script assigned, of user, item, are where training begins: weights alone, their optimizer "
        "slots begin at zero"
    )
    assert said(replace(STARTED, resumed=RESUMED), ["user"]).endswith(
        "of user, are not used: the job resumes, with the rows that it had"
    )


def test_a_start_without_a_checkpoint_says_why_training_begins_at_step_0() -> None:
    def said(joined: JoinResult, **about: Any) -> str:
        return reported(joined, checkpoints=SimpleNamespace(**about))[1][0].message.partition("memory://place")[2]

    assert said(STARTED) == "; no checkpoint was found there, so training begins at step 0"
    assert said(STARTED, resume=False).startswith("; resume=False: checkpoints that are there are not read")
    assert said(replace(STARTED, resumed=RESUMED)) == ""
    assert said(replace(STARTED, taken=ResumedFromMemory(7, 0, "all is there", None))) == ""
    assert said(replace(STARTED, source=1)) == "", "another rank has looked, and the job is at step 7"


@pytest.mark.parametrize("resume", [True, False])
def test_all_workers_report_a_start_in_the_same_words(resume: bool) -> None:
    """So what a worker recorded that is rank 0 later counts as no other launch."""
    looked, other = (
        reported(joined, checkpoints=SimpleNamespace(resume=resume), step=0)[1][0]
        for joined in (STARTED, replace(STARTED, source=1))
    )
    assert looked.message == other.message and "training begins at step 0" in other.message


HASHED = {"capacity": 64, "admit_after": 3, "evict": "lfu", "init": 0.01, "seed": 0, "fallback_hashes": 2}
HASHED["fallback_rows"] = 24
SAVED_SCHEMA = Schema((Table("t", 30, (Column("weights", 4), KEY, USES), 4, 2),), 3)


@pytest.mark.parametrize(
    ("saved", "without_filter", "said"),
    [
        ({}, (), []),  # of a version that did not note them
        (HASHED | {"capacity": 640}, (), []),
        (
            HASHED | {"init": 0.5, "evict": ""},
            (),
            ["evict was none when", "init was 0.5 when the checkpoint was saved"],
        ),
        (HASHED | {"seed": 4}, (), ["seed was 4 when the checkpoint was saved and is 0: that holds for ids that come"]),
        (HASHED, ("t",), ["no counts of lookups", "such an id needs admit_after=3 lookups from here on"]),
    ],
)
def test_what_a_hashed_table_does_otherwise_after_a_restart_is_a_warning(
    saved: dict[str, Any], without_filter: tuple[str, ...], said: list[str]
) -> None:
    about = {"hashed": {"t": saved}} if saved else {}
    resumed = SimpleNamespace(
        **vars(RESUMED)
        | {"manifest": SimpleNamespace(name="m-3", about=about, schema=SAVED_SCHEMA), "without_filter": without_filter}
    )
    _, events = reported(replace(STARTED, resumed=resumed), hashed={"t": HASHED})
    changed = [event for event in events if event.kind == "vocabulary_changed"]
    assert len(changed) == bool(said)
    assert all(event.level == "warning" and text in event.message for event in changed for text in said)
    assert all(event.message.startswith("table 't': ") for event in changed)


@pytest.mark.parametrize(
    ("was", "saved_in", "now", "said"),
    [
        (1, 3, 1, ""),
        (1, 6, 1, ""),
        (2, 3, 2, ""),
        (1, 3, 2, "ids without a row had 1 shared row each .* of which the second starts as zeros: fallback_hashes=1"),
        (2, 3, 1, "ids without a row had 2 shared rows each .* and have the first of them: fallback_hashes=2 keeps"),
        (2, 6, 2, "the second shared row of an id without a row is another one in 3 shards than in 6, and starts as"),
    ],
)
def test_other_shared_rows_of_an_id_than_it_had_are_a_warning(was: int, saved_in: int, now: int, said: str) -> None:
    schema = Schema((replace(SAVED_SCHEMA.tables[0], shared_hashes=was),), saved_in)
    about = {"hashed": {"t": HASHED | {"fallback_hashes": was}}}
    manifest = SimpleNamespace(name="m-3", about=about, schema=schema)
    resumed = SimpleNamespace(**vars(RESUMED) | {"manifest": manifest, "without_filter": ()})
    _, events = reported(replace(STARTED, resumed=resumed), hashed={"t": HASHED | {"fallback_hashes": now}})
    changed = [event for event in events if event.kind == "vocabulary_changed"]
    assert len(changed) == bool(said)
    assert all(re.search(said, event.message) for event in changed)
    assert all(event.data["changed"] == {"fallback_hashes": [was, now]} for event in changed)


@pytest.mark.parametrize(
    ("was", "saved_in", "hashes", "rows", "keeps"),
    [
        (1, 3, 1, 12, ""),
        (1, 3, 1, 36, ""),
        (1, 3, 1, 15, "fallback_rows=12, or a multiple of it, keeps them"),
        (1, 3, 1, 6, "fallback_rows=12, or a multiple of it, keeps them"),
        (1, 2, 1, 12, "fallback_rows=24, or a multiple of it, keeps them"),  # 8 rows, of which 3 shards need 24
        (2, 3, 2, 36, ""),
        (2, 3, 2, 18, "fallback_rows=12, or a multiple of it, keeps them"),
        (1, 3, 2, 12, "fallback_rows=24, or a multiple of it, keeps the first of each id"),  # 6 are the first ones
        (2, 3, 1, 6, ""),
        (2, 6, 2, 18, "fallback_rows=24, or a multiple of it, keeps the first of each id"),
    ],
)
def test_a_number_of_shared_rows_that_is_no_multiple_of_the_saved_one_is_a_warning(
    was: int, saved_in: int, hashes: int, rows: int, keeps: str
) -> None:
    schema = Schema((replace(SAVED_SCHEMA.tables[0], shared_hashes=was),), saved_in)
    settings = HASHED | {"fallback_hashes": hashes, "fallback_rows": rows}
    manifest = SimpleNamespace(name="m-3", about={"hashed": {"t": HASHED}}, schema=schema)
    resumed: Any = SimpleNamespace(**vars(RESUMED) | {"manifest": manifest})
    _, events = reported(replace(STARTED, resumed=resumed), hashed={"t": settings})
    found = [event for event in events if "fallback_rows" in event.data.get("changed", {})]
    assert [event.data["changed"]["fallback_rows"] for event in found] == [[4 * saved_in, rows]] * bool(keeps)
    said = f"{rows} shared rows are here, {4 * saved_in} are in the checkpoint: many ids without a row find other "
    assert all(event.kind == "vocabulary_changed" and said in event.message for event in found)
    assert all(event.message.endswith(keeps) for event in found)


def test_ids_that_found_no_room_are_named_by_table() -> None:
    resumed: Any = SimpleNamespace(**vars(RESUMED) | {"without_room": {"sku": (73, 2560), "uid": (1200, 512)}})
    _, (_, event) = reported(replace(STARTED, resumed=resumed))
    assert "; 73 ids of table 'sku', the least used, found no room among its 2,560 rows: " in event.message
    assert "; 1,200 ids of table 'uid', the least used, found no room among its 512 rows: " in event.message
    assert event.message.count("were taken; more capacity helps") == 2
    _, (_, event) = reported(replace(STARTED, resumed=resumed, n_hosts=2))
    assert "among its 512 rows of this host: " in event.message


@pytest.mark.parametrize(
    ("of_other_steps", "about", "said", "ahead", "behind"),
    [
        (
            {8: 397}, {"mode": "allreduce", "last_gasp": True},
            "the dense part of m-3 is of step 7, and 397 rows are as of step 8: what was trained of them there is "
            "trained twice. The servers made this checkpoint when the workers had died within a step. preemption_s= ",
            397, 0,
        ),
        (
            {8: 5, 9: 1000}, {"mode": "allreduce"},
            "1,005 rows are as of steps 8 to 9: what was trained of them there is trained twice. They were read while "
            "training continued: CheckpointCallback(strict=True) avoids it",
            1005, 0,
        ),
        ({6: 4}, {"mode": "allreduce"}, "and 4 rows are as of step 6, and miss what was trained since. ", 0, 4),
    ],
)  # fmt: skip
def test_rows_of_another_step_than_the_dense_part_are_warned_of(
    of_other_steps: dict[int, int], about: dict[str, Any], said: str, ahead: int, behind: int
) -> None:
    manifest = SimpleNamespace(name="m-3", about=about, schema=Schema((), 3))
    resumed: Any = SimpleNamespace(**vars(RESUMED) | {"of_other_steps": of_other_steps, "manifest": manifest})
    _, (*_, event) = reported(replace(STARTED, resumed=resumed))
    assert (event.kind, event.level) == ("rows_of_other_steps", "warning") and said in event.message
    assert event.data == {"rows_ahead": ahead, "rows_behind": behind, "manifest": "m-3"}
    manifest.about = about | {"mode": "gba"}  # where no row is of one step with the dense values
    assert [event.kind for event in reported(replace(STARTED, resumed=resumed))[1]] == ["started", "resumed"]


@pytest.mark.parametrize("n_computed", [0, 40])
def test_a_worker_that_ends_within_an_epoch_has_it_in_its_log(
    n_computed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 warns where samples are in no count; the others do not know whether they are alone in leaving."""
    events, left = list[Event](), LeftEpochs()
    engine: Any = SimpleNamespace(
        world=SimpleNamespace(rank=1), progress=SimpleNamespace(step=3, left=left),
        reports=SimpleNamespace(once=lambda event, only_here: events.append(event)),
    )  # fmt: skip
    left.newest = LeftEpoch(0, None, 3, 3, 18, 360, 2050, n_computed, 2)
    with caplog.at_level("INFO", "gba_hvd"):
        end.left_early(engine)
    (text,) = [event.message for event in events] + caplog.messages
    where = "within step 4" if n_computed else "after step 3"
    assert text.startswith(f"rank 1 left the loop over batches of epoch 0 {where}, with steps to come: ")
    engine.world.rank, left.newest, events[:] = 0, LeftEpoch(0, None, 3, 3, 18, 360, 2050, n_computed, 2), []
    end.left_early(engine)
    assert len(events) == bool(n_computed)


def test_a_worker_that_leaves_samples_at_the_servers_says_that_others_may_complete_their_step() -> None:
    left = LeftEpoch(0, None, 3, 3, 18, 360, 2050, 32, 2, steps_together=False)
    assert left.words_alone == (
        "left the loop over batches of epoch 0 after step 3: 32 samples that were computed wait for step 4, which is "
        "not complete: they are in no count unless another worker trains the rest of the epoch"
    )


def test_a_hashed_table_is_described_by_rows_of_ids_and_shared_rows() -> None:
    spec = HashedSpec.of(4000, 4000, 16, 2)
    table = TableSpec("sku", spec.rows * 16, 16, hashed=spec)
    assert start._shape(table, 16) == "sku 4,096 ids and 4,000 shared rows x 16 by hash"
    assert start._shape(TableSpec("dept", 7, 4), 16) == "dept 7 x 4"


def test_row_compression_on_one_host_is_reported_as_idle() -> None:
    _, (_, idle) = reported(STARTED, row_coder=object())
    assert (idle.kind, idle.level) == ("row_compression_idle", "warning")
    assert "changes nothing on one host" in idle.message and "when a second host joins" in idle.message
    assert reported(replace(STARTED, n_hosts=2), row_coder=object())[0] == ["job j of 2", "started"]


def test_the_pace_of_checkpoints_is_planned_before_the_rest_is_reported() -> None:
    assert reported(STARTED, checkpoints=True)[0] == ["job j of 2", "pace of 1", "started"]


def test_a_job_goes_on_from_a_checkpoint_that_lacks_residuals() -> None:
    _, (_, resumed, residuals) = reported(replace(STARTED, resumed=RESUMED), residuals_missing=1)
    assert resumed.message == "resuming at step 7 from m-3: 2,000 rows in 1.5 s"
    assert (resumed.data["staleness"], resumed.data["lags"]) == ({"0": 8, "1": 3}, {"2": 11})
    assert resumed.data["gaps"] == {"1": [11, 0.5, 5.5, 42]}
    assert (resumed.data["rows_lost"], resumed.data["age"]) == (0, 0.5)
    assert (residuals.kind, residuals.message) == ("residual_lost", "the checkpoint lacks what 1 worker had not sent")


@pytest.mark.parametrize(
    ("skipped", "lost", "words"),
    [
        (
            [Skipped("m-5", "m-5: gone", 27), Skipped("m-4", "torn")],
            20,
            "So 20 steps, from 7 to 27, are lost",
        ),
        ([Skipped("m-4", "m-4: altered")], None, "So what was trained after step 7 is lost"),
    ],
)
def test_a_damaged_checkpoint_that_a_restart_passes_over_is_a_warning(
    skipped: list[Skipped], lost: int | None, words: str
) -> None:
    resumed: Any = SimpleNamespace(**vars(RESUMED) | {"skipped": skipped})
    _, (_, event, damaged) = reported(replace(STARTED, resumed=resumed), checkpoints=True)
    assert (event.kind, event.level) == ("resumed", "info") and "cannot be used" not in event.message
    assert (damaged.kind, damaged.level, damaged.step) == ("checkpoint_damaged", "warning", 7)
    assert damaged.data == {"skipped": [one.words for one in skipped], "steps_lost": lost}
    assert all(damaged.message.count(one.name) == 1 for one in skipped), "each is named once"
    assert words in damaged.message and "gba-hvd checkpoint verify memory://place" in damaged.message


def test_residuals_of_rows_that_no_checkpoint_has_are_reported() -> None:
    on_two_hosts = replace(STARTED, n_hosts=2)
    _, (_, _, lost) = reported(replace(on_two_hosts, resumed=RESUMED), row_coder=object())
    assert (lost.kind, lost.level) == ("row_residual_lost", "warning")
    assert reported(on_two_hosts, row_coder=object())[0] == ["job j of 2", "started"], "a new job has none"


def test_a_job_goes_on_from_memory() -> None:
    _, (_, resumed) = reported(
        replace(STARTED, taken=ResumedFromMemory(7, 0, "all is there", None), shard_steps_missed=2)
    )
    assert resumed.message == "resuming at step 7 where the launch before stood: all is there"
    assert (resumed.data["from_memory"], resumed.data["shard_steps_missed"]) == (True, 2)


@pytest.mark.parametrize(("before", "words"), [(None, ""), (3, ", before 3")])
def test_workers_come_and_go(before: int | None, words: str) -> None:
    received, (change,) = reported(CHANGED, size=1, before=before)
    assert received == ["job j of 1", "membership"]
    assert change.message == f"1 worker on 2 hosts{words}; resuming at step 7"


def test_what_a_change_cost_is_reported_piece_by_piece() -> None:
    lost = replace(
        CHANGED, shard_steps_missed=2, rows_restored=25, rows_age=3.0, refilled=((300, 20), (400, 5)), rows_lost=5
    )
    _, events = reported(lost, checkpoints=SimpleNamespace(samples_lost=80.0))
    assert [event.kind for event in events] == ["membership", "shard_steps_missed", "rows_restored", "rows_lost"]
    assert events[1].message.startswith(
        "a worker died while it applied step 7: 2 of 3 shards have this step in part or not at all, which costs about "
        "67% of the row updates of this one step at most."
    )
    assert "25 rows that went down with their host came back from the checkpoint" in events[2].message
    # Of 500 samples so far: 20 of 50 rows lost 100, 5 lost none, and 5 lost all 400 that were applied.
    assert events[2].data["pls"] == events[2].data["pls_total"] == pytest.approx((100 * 20 + 400 * 5) / 50 / 500)
    assert "PLS 0.16, 0.16 with all recoveries so far, of 500 samples so far" in events[2].message
    assert "pls" not in events[3].data


CHOSEN = RecoveryDecision("partial", "partial: it costs less", "auto", 0.02, 0.01, 0.001)


def test_the_choice_of_partial_recovery_is_told_with_the_rows() -> None:
    _, (_, back) = reported(replace(CHANGED, rows_restored=25, decision=CHOSEN), checkpoints=True)
    assert back.message.endswith("; partial: it costs less")
    assert {name: back.data[name] for name in CHOSEN.event_data()} == {
        "strategy": "partial", "strategy_reason": "partial: it costs less", "strategy_asked": "auto",
        "overhead_full": 0.02, "overhead_partial": 0.01, "pls_expected": 0.001,
    }  # fmt: skip
    _, (_, lost) = reported(replace(CHANGED, rows_lost=5, decision=CHOSEN), checkpoints=True)
    assert lost.message.endswith("; partial: it costs less") and lost.data["strategy"] == "partial"


def test_full_recovery_is_told_once_as_a_return_to_a_checkpoint() -> None:
    facts = {"manifest": "m-3", "rows_restored": 50, "rows_lost": 0, "seconds": 0.2, "from_step": 12, "skipped": []}
    facts |= {
        "samples_redone": 480,
        "pls": 0.0,
        **replace(CHOSEN, strategy="full", reason="full: as asked").event_data(),
    }
    rollback = Rollback(1, unreported=facts)
    _, (_, back) = reported(replace(CHANGED, decision=CHOSEN), checkpoints=True, rollback=rollback)
    assert (back.kind, back.step, back.data) == ("resumed", 7, facts)
    assert (
        "all workers rolled back from step 12 to m-3, 50 rows in 0.2 s; 480 samples are trained again" in back.message
    )
    assert back.message.endswith("full: as asked")
    assert reported(CHANGED, checkpoints=True, rollback=rollback)[0][2:] == ["membership"], "it is told once"
    rollback.unreported = facts | {"skipped": ["m-4: torn"]}
    _, (_, back, damaged, residuals) = reported(CHANGED, checkpoints=True, rollback=rollback, residuals_missing=1)
    assert (back.kind, residuals.kind) == ("resumed", "residual_lost")
    assert (damaged.kind, damaged.level) == ("checkpoint_damaged", "warning")
    assert "cannot be used: m-4: torn. So the job went back to m-3" in damaged.message


def test_the_portion_lost_adds_up_and_is_of_the_planned_training() -> None:
    planned = SimpleNamespace(total_samples=4000, samples_lost=120.0)
    _, events = reported(replace(CHANGED, rows_restored=25, refilled=((300, 20), (400, 5))), checkpoints=planned)
    assert (events[1].data["pls"], events[1].data["pls_total"]) == pytest.approx((100 * 20 / 50 / 4000, 120 / 4000))
    assert "of 4,000 samples of the planned training" in events[1].message


def test_more_lost_than_the_target_is_a_warning() -> None:
    back = replace(CHANGED, rows_restored=25, refilled=((300, 20), (400, 5)))
    _, events = reported(back, checkpoints=SimpleNamespace(samples_lost=80.0, target_pls=0.1))
    assert [event.kind for event in events] == ["membership", "rows_restored", "pls_above_target"]
    assert events[2].level == "warning"
    assert events[2].message.startswith(
        "the recoveries so far have a PLS of 0.16, above target_pls=0.1: save more often"
    )
    assert "of the samples so far, and too much" in events[2].message
    planned = SimpleNamespace(samples_lost=80.0, target_pls=0.1, total_samples=800)
    assert [event.kind for event in reported(back, checkpoints=planned)[1]] == ["membership", "rows_restored"]


def test_a_damaged_checkpoint_that_rows_did_not_come_from_is_named() -> None:
    back = replace(CHANGED, rows_restored=25, rows_age=3.0, restored_from=("m-3",), skipped=("m-4: torn",))
    _, (_, event, damaged) = reported(back, checkpoints=True)
    assert "they are 3 steps old; PLS 0" in event.message
    assert (damaged.kind, damaged.level) == ("checkpoint_damaged", "warning")
    assert "cannot be used: m-4: torn. So lost rows came back from m-3, without what they" in damaged.message
    assert (event.data["manifest"], event.data["skipped"]) == ("m-3", ["m-4: torn"])


@pytest.mark.parametrize(
    ("checkpoints", "why_lost", "why"),
    [
        (None, "", "no checkpoint was configured"),
        (True, "", "no checkpoint has them"),
        (True, "the store does not answer", "the store does not answer"),
    ],
)
def test_why_rows_are_lost(checkpoints: Any, why_lost: str, why: str) -> None:
    _, (_, lost) = reported(replace(CHANGED, rows_lost=5, why_lost=why_lost), checkpoints=checkpoints)
    assert lost.message == f"5 rows went down with their host and are reinitialised; {why}"
    assert lost.data["why"] == why


def settings_of(switching: GBACallback | None = None, checkpoints: Any = None, **model: Any) -> dict[str, Any]:
    """What MLflow gets as parameters of such a job."""
    layout = SimpleNamespace(tables=[], n_shards=3, hashed_settings=dict)
    tables = SimpleNamespace(layout=layout, optimizers=TableOptimizers(gba_hvd.SGD(lr=9.0)))
    plain = {"tables": tables, "global_batch": 16, "micro_batch": 4, "sync_micro_batch": None}
    plain["optimizer"] = torch.optim.Rprop([torch.zeros(1)])
    nothing = {"row_average": "contributors", "compression": None, "row_compression": Compression.none}
    requests = None if switching is None else SimpleNamespace(callback=switching)
    saves = None if checkpoints is None else SimpleNamespace(callback=checkpoints)
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(**{**plain, **nothing, **model}),
        participant=lambda kind: requests if kind is ModeRequests else saves,
    )
    return settings.settings_of(engine)


def test_the_settings_say_how_a_job_saves() -> None:
    planned = settings_of(checkpoints=CheckpointCallback("memory://x", mtbf_h=0.5, target_pls=0.02, total_samples=99))
    expected = {"recovery": "auto", "policy": "mfu", "target_pls": 0.02, "total_samples": 99, "mtbf_h": 0.5}
    assert {name: planned[name] for name in expected} == expected and planned["longest_s"] == 3600.0
    assert "checkpoint_every_s" not in planned and 0 < planned["row_fraction"] <= 1
    given = settings_of(checkpoints=CheckpointCallback("memory://x", every_s=60, policy="full"))
    assert (given["checkpoint_every_s"], given["policy"]) == (60, "full")
    assert not {"mtbf_h", "total_samples", "longest_s", "checkpoint_every_steps"} & {*given}


def test_the_settings_say_how_gradients_and_rows_travel() -> None:
    dct = Compression.dct(keep=0.01).then(Compression.int8)
    reported = settings_of(compression=SimpleNamespace(spec=dct), row_compression=Compression.fp16.always())
    assert reported["compression"] == "dct(keep=0.01, refresh_every=1000).then(int8)"
    assert reported["row_compression"] == "fp16.always()"
    plain = settings_of()
    assert (plain["compression"], plain["row_compression"], plain["row_average"]) == ("none", "none", "contributors")


def test_the_settings_have_the_momentum_of_sgd_also_of_a_class_of_the_user_s_own() -> None:
    class OwnSgd(torch.optim.SGD):
        pass

    groups = [{"params": [torch.zeros(1)], "momentum": 0.8}, {"params": [torch.zeros(1)]}]
    optimizer = OwnSgd(groups, lr=0.1)
    assert settings_of(optimizer=optimizer)["dense_momentum"] == 0.8
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10, base_momentum=0.5, max_momentum=0.95)
    assert settings_of(optimizer=optimizer)["dense_momentum"] == 0.95, "the largest, at any step"
    assert "dense_momentum" not in settings_of(optimizer=torch.optim.Adam([torch.zeros(1)]))


def test_the_settings_have_the_learning_rate_of_the_dense_part_before_schedules_and_the_betas() -> None:
    tables = {"params": [torch.zeros(0)], "lr": 9.0, "gba_hvd": "tables"}
    groups: list[dict[str, Any]] = [{"params": [torch.zeros(1)], "lr": 0.2}, {"params": [torch.zeros(1)]}]
    adam = torch.optim.Adam([*groups, tables], lr=0.1, betas=(0.8, 0.99))
    torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.01)
    reported = settings_of(optimizer=adam)
    assert (reported["dense_lr"], reported["dense_betas"]) == (0.2, [0.8, 0.99])
    adam.param_groups[1]["betas"] = (0.9, 0.999)
    assert settings_of(optimizer=adam)["dense_betas"] == [[0.8, 0.99], [0.9, 0.999]]
    assert "dense_betas" not in settings_of(optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.3))


def test_the_settings_have_no_learning_rate_of_a_group_without_parameters() -> None:
    groups = [{"params": []}, {"params": [torch.zeros(1)], "lr": 0.1}]
    assert settings_of(optimizer=torch.optim.SGD(groups, lr=0.5))["dense_lr"] == 0.1
    assert "dense_lr" not in settings_of(optimizer=torch.optim.SGD(groups[:1], lr=0.5))


def test_the_settings_say_which_mode_was_asked_for_and_what_belongs_to_it() -> None:
    callback = GBACallback(mode="ma", every=5, elasticity=0.25)
    reported = settings_of(switching=callback)
    asked = {"mode": "ma", "rule": "none", "sync": "easgd", "every": 5, "elasticity": 0.25, "block_rate": 0.9}
    assert reported.items() >= asked.items()
    assert "curvature" not in reported, "what was not given is left out"
    callback.pin("gba")
    assert settings_of(switching=callback) == reported, "MLflow refuses another value for a parameter"


def test_a_job_that_asks_for_no_mode_is_in_allreduce() -> None:
    reported = settings_of()
    assert reported["mode"] == "allreduce"
    assert "rule" not in reported


def test_a_launcher_passes_ctrl_c_on_as_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    assert [end._interruption(error) for error in ("", "SIGTERM")] == ["Ctrl-C", "SIGTERM"]
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert end._interruption("SIGTERM") == "Ctrl-C or SIGTERM"
    assert end._interruption("SIGTERM, after a checkpoint") == "Ctrl-C or SIGTERM, after a checkpoint"


BEGINS = "when all workers have ended, the same command "
MEMORY, SAVED = (
    "resumes from step 955 if it comes within 20 s of the end, while that is kept in memory",
    "resumes from step 602, of the newest",
)
SAVED_SO_FAR = "resumes from the newest checkpoint, so far of step 602"
NONE_YET = "starts at step 0 again, since no checkpoint has been saved yet"


@pytest.mark.parametrize(
    ("is_kept", "saved_step", "job_id", "words"),
    [
        (True, 602, "", f"{BEGINS}{MEMORY}, else {SAVED} checkpoint"),
        (False, 602, "", f"{BEGINS}{SAVED} checkpoint"),
        (True, -1, "ctr", f"{BEGINS}{MEMORY}, else {NONE_YET}"),
        (True, -1, "", BEGINS + NONE_YET),
        (False, -1, "ctr", BEGINS + NONE_YET),
    ],
)
def test_an_interrupted_job_says_where_the_same_command_goes_on(
    is_kept: bool, saved_step: int, job_id: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_identity, "is_of_a_container", lambda pid: False)
    if is_kept:
        (tmp_path / "kept").touch()
    checkpoints = SimpleNamespace(
        schedule=SimpleNamespace(saved_step=saved_step), callback=SimpleNamespace(resume=True, final_checkpoint_s=60)
    )
    config, found = SimpleNamespace(grace_s=20.0, job_id=job_id), {JobCheckpoints: checkpoints}
    tables = SimpleNamespace(config=config, memory=SimpleNamespace(folder=tmp_path))
    engine: Any = SimpleNamespace(
        participant=found.get, world=SimpleNamespace(rank=0), progress=SimpleNamespace(step=955),
        model=SimpleNamespace(tables=tables), host=LocalHost(),
    )  # fmt: skip
    assert end._what_continues(engine) == words
    monkeypatch.setattr(host_identity, "is_of_a_container", lambda pid: True)
    assert ("(a container that ends with this job takes" in end._what_continues(engine)) == (MEMORY in words)
    monkeypatch.setattr(host_identity, "is_of_a_container", lambda pid: False)
    repaired = words.replace("when all", "when that is repaired and all").replace(f"{SAVED} checkpoint", SAVED_SO_FAR)
    assert end._what_continues(engine, to_repair=True) == repaired
    engine.host.server = object()
    may_be = ", unless its servers save a last one when all workers have ended"
    assert end._what_continues(engine) == words + may_be
    checkpoints.callback.final_checkpoint_s = 0
    assert end._what_continues(engine) == words
    tables.memory = None  # interrupted before the world had formed
    assert end._what_continues(engine) == BEGINS + (f"{SAVED} checkpoint" if saved_step >= 0 else NONE_YET)
    checkpoints.callback.resume, over = False, f"{BEGINS}starts at step 0 again, since "
    assert end._what_continues(engine) == f"{over}CheckpointCallback(resume=False) reads no checkpoints"
    found.clear()
    assert end._what_continues(engine) == f"{over}it has no CheckpointCallback"
    engine.progress.step = 0
    assert end._what_continues(engine) == "", "nothing was trained"
    engine.progress.step, engine.world.rank = 955, 1
    assert end._what_continues(engine) == "", "the chief says it"


@pytest.mark.parametrize(
    ("left", "least", "words"),
    [
        (1, "2", "Training continues with 1 worker, fewer than the 2 of `-np MIN:MAX`"),
        (2, "2", "Training continues with 2 workers"),
        (1, "", "Training continues with 1 worker"),
        (None, "2", "are expected"),
    ],
)
def test_a_loss_says_how_many_train_on_and_that_they_are_fewer_than_asked_for(
    left: int | None, least: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world._fewer_than_asked, "__defaults__", ({world.MIN_WORKERS: least},))
    events: list[Event] = []
    engine: Any = SimpleNamespace(
        emit=events.append, progress=SimpleNamespace(step=9), world=SimpleNamespace(size=3),
        reports=SimpleNamespace(n_working=left), host=LocalHost(),
    )  # fmt: skip
    job_events.worker_gone(engine)
    (event,) = events
    assert words in event.message and ("fewer" in event.message) == ("fewer" in words)
    assert event.data == {"workers": 3} | ({} if left is None else {"left": left})


def test_a_loss_does_not_count_the_worker_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server counts it until it has been silent for a while."""
    monkeypatch.setattr(world, "is_alive", lambda pid: pid != 12)
    events: list[Event] = []
    engine: Any = SimpleNamespace(
        emit=events.append, progress=SimpleNamespace(step=9), world=SimpleNamespace(size=3),
        reports=SimpleNamespace(n_working=3), host=LocalHost(neighbours={1: 11, 2: 12}),
    )  # fmt: skip
    monkeypatch.setattr(memory_limit, "n_kills", lambda: engine.host.n_kills + 1)
    job_events.worker_gone(engine)
    assert events[0].message.count(". The kernel has killed 1 process of this container or service") == 1
    assert events[0].data["left"] == 2 and "Training continues with 2 workers" in events[0].message


@pytest.mark.parametrize(
    ("saved_step", "preemption_s", "resume", "words"),
    [
        (
            602,
            None,
            True,
            "353 steps are in no checkpoint, and computed again from there: CheckpointCallback(preemption_s",
        ),
        (954, None, True, "1 step is in no checkpoint"),
        (-1, None, True, "955 steps are in no checkpoint"),
        (955, None, True, ""),
        (602, 4.0, True, ""),
        (602, None, False, ""),
    ],
)
def test_an_interruption_that_costs_steps_names_the_setting_that_saves_first(
    saved_step: int, preemption_s: float | None, resume: bool, words: str
) -> None:
    callback = SimpleNamespace(preemption_s=preemption_s, resume=resume)
    checkpoints = SimpleNamespace(schedule=SimpleNamespace(saved_step=saved_step), callback=callback)
    found = {JobCheckpoints: checkpoints}
    engine: Any = SimpleNamespace(participant=found.get, progress=SimpleNamespace(step=955))
    text = end._steps_not_saved(engine)
    assert words in text and bool(words) == bool(text)
    found.clear()
    assert end._steps_not_saved(engine) == ""


@pytest.mark.parametrize(
    ("n_threads", "n_workers", "warns"), [(2, 2, True), (1, 2, False), (2, 1, False), (1, 9, False)]
)
def test_workers_with_more_threads_than_cores_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, n_threads: int, n_workers: int, warns: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    host = LocalHost(neighbours=dict.fromkeys(range(1, n_workers), 5))
    monkeypatch.setattr(sys.modules[__name__], "LocalHost", lambda: host)
    _, events = reported(STARTED)
    found = [event for event in events if event.kind == "too_many_threads"]
    assert [event.level for event in found] == ["warning"] * warns
    if warns:
        assert "2 workers on h compute with 2 threads each, and it has 2 cores" in found[0].message
        assert "OMP_NUM_THREADS=1 " in found[0].message


def test_partial_recovery_of_a_job_on_one_host_is_reported_as_idle() -> None:
    checkpoints = SimpleNamespace(recovery="partial")
    found = [event for event in reported(STARTED, checkpoints=checkpoints)[1] if event.kind == "recovery_idle"]
    assert [event.level for event in found] == ["warning"] and "when a second host joins" in found[0].message
    assert "recovery_idle" not in reported(replace(STARTED, n_hosts=2), checkpoints=checkpoints)[0]


def test_mode_auto_names_the_servers_that_a_standing_decision_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end, "switching_of", lambda engine: engine.switching)
    engine: Any = SimpleNamespace(
        progress=SimpleNamespace(launched_at=0, step=94), mode=None,
        switching=SimpleNamespace(why_never_switched=lambda obstacle: f"to gba; not carried out: {obstacle}"),
        participant=lambda kind: SimpleNamespace(waiting=["mode gba"]),
        host=SimpleNamespace(server=SimpleNamespace(why_not_ready=lambda to_enter: "server 0 has not answered yet")),
    )  # fmt: skip
    stayed = end._never_switched(engine)
    assert stayed is not None and stayed.message.endswith(
        "to gba; not carried out: the companion servers were not up at the end; server 0 has not answered yet"
    )
