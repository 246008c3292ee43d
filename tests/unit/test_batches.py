"""Every sample once an epoch, and a loop that stopped goes on where it stood."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from gba_hvd import BadInput, StateMismatch
from gba_hvd.batches import _Epoch
from gba_hvd.comm.collectives import agree_on
from gba_hvd.epoch import EpochPlan
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps.messages import JobPosition, LeaseGrant, LeaseReply
from recovery import state_codec


@pytest.mark.parametrize("n", [1, 16, 50])
def test_every_sample_is_taken_once_an_epoch(training: Any, clicks: Any, n: int) -> None:
    job, dataset = training(), clicks(n)
    for _ in range(2):
        dataset.taken.clear()
        job.epoch(dataset)
        assert sorted(np.concatenate(dataset.taken)) == list(range(n))


def test_batches_carry_their_index_and_their_size(training: Any, clicks: Any) -> None:
    job, seen = training(), []
    for batch in gba_hvd.batches(clicks(50), job.state):
        seen.append((batch.index, len(batch)))
        job.micro_step(batch)
    assert seen == [(i, 4) for i in range(12)] + [(12, 2)]


@pytest.mark.slow
def test_epochs_have_orders_of_their_own_and_seeds_repeat_them(training: Any, clicks: Any) -> None:
    dataset, orders = clicks(50), []
    for seed in (1, 1, 2):
        job = training()
        for _ in range(2):
            dataset.taken.clear()
            job.epoch(dataset, seed=seed)
            orders.append(tuple(np.concatenate(dataset.taken)))
    first, second, first_again, second_again, *_ = orders
    assert (first, second) == (first_again, second_again)
    assert len(set(orders)) == 4


def test_without_shuffling_samples_come_in_their_order(training: Any, clicks: Any) -> None:
    job, dataset = training(), clicks(50)
    job.epoch(dataset, shuffle=False)
    assert np.concatenate(dataset.taken).tolist() == list(range(50))


@pytest.mark.parametrize("stop_after", [1, 4, 6, 8, 12])
def test_a_loop_that_was_left_goes_on_with_the_first_step_not_done(training: Any, clicks: Any, stop_after: int) -> None:
    job, dataset = training(epoch=0), clicks(50)
    for count, batch in enumerate(gba_hvd.batches(dataset, job.state), start=1):
        job.micro_step(batch)
        if count == stop_after:
            break
    steps_done = job.state.step
    again = [batch.index for batch in gba_hvd.batches(dataset, job.state) if job.micro_step(batch) is None]
    assert again == list(range(4 * steps_done, 13))
    assert job.state.samples.applied == 50
    whole = training(epoch=0)
    whole.epoch(dataset)
    for name, rows in whole.all_rows().items():
        assert np.array_equal(rows, job.all_rows()[name])


def test_the_epoch_is_the_one_of_the_state(training: Any, clicks: Any) -> None:
    dataset, orders = clicks(50), []
    for epochs in ([0, 1, 2], [2]):
        job = training(epoch=0)
        for job.state.epoch in epochs:
            dataset.taken.clear()
            job.epoch(dataset)
        orders.append(np.concatenate(dataset.taken).tolist())
    assert orders[0] == orders[1]


def test_an_epoch_that_is_done_is_not_done_again(training: Any, clicks: Any) -> None:
    job, dataset = training(epoch=0), clicks(50)
    job.epoch(dataset)
    job.state.sync()  # as after a failure during the evaluation of that epoch
    assert list(gba_hvd.batches(dataset, job.state)) == []


def test_a_batch_on_a_device_keeps_its_ids_where_the_tables_are() -> None:
    batch = gba_hvd.Batch({"user": torch.tensor([1, 2])}, torch.ones(2, 3), torch.zeros(2), index=7)
    moved = batch.to("meta")
    assert moved.dense.device.type == moved.label.device.type == "meta"
    assert moved.ids["user"] is batch.ids["user"]
    assert moved.index == 7 and len(moved) == 2


def test_batches_may_be_of_any_kind_that_has_ids(training: Any, clicks: Any) -> None:
    job, dataset = training(), clicks(20)

    class Plain:
        def __len__(self) -> int:
            return 20

        def take(self, rows: np.ndarray) -> Any:
            batch = dataset.take(rows)
            return SimpleNamespace(ids=batch.ids, dense=batch.dense, label=batch.label)

    job.epoch(Plain())
    assert job.state.samples.applied == 20


def test_an_id_outside_its_table_stops_the_loop(training: Any, clicks: Any) -> None:
    job, dataset = training(), clicks(50)
    dataset.user[17] = 25
    seen: list[gba_hvd.Batch] = []
    loss = job.loss
    job.loss = lambda batch: (seen.append(batch), loss(batch))[1]
    with pytest.raises(BadInput) as error:
        job.epoch(dataset)
    batch: Any = seen[-1]
    at = batch.ids["user"].tolist().index(25)
    assert str(error.value).startswith(
        f"table 'user' has rows 0 to 19, got id 25 in sample {at} of the batch (epoch 0, micro-batch {batch.index}, "
        "sample 17 of the dataset); make the table larger"
    )


def test_an_id_outside_its_table_is_named_where_a_dataset_is_evaluated(training: Any, clicks: Any) -> None:
    job, dataset = training(), clicks(50)
    job.epoch(dataset)
    dataset.item[33] = 8
    with pytest.raises(BadInput, match=r"got id 8 in sample \d of the batch \(sample 33 of the evaluated dataset\)"):
        gba_hvd.evaluate(job.model, dataset, job.state, batch=10)


def test_an_empty_dataset_is_refused(training: Any, clicks: Any) -> None:
    with pytest.raises(BadInput, match="no samples"):
        training().epoch(clicks(0))


def test_workers_about_to_do_different_things_are_stopped() -> None:
    world = SimpleNamespace(gather=lambda name, row: np.stack([row, row + np.array([0, 5])]))
    with pytest.raises(StateMismatch, match=r"disagree about the seed: by rank \[3, 8\]"):
        agree_on(world, "epoch", {"samples": 50, "seed": 3})
    with pytest.raises(StateMismatch, match=r"disagree about the epoch: .* leave an epoch alike"):
        agree_on(world, "epoch", {"samples": 50, "epoch": 0})


@pytest.mark.parametrize(("theirs", "words"), [(["a", "b"], r"2 on rank 0; 1 on rank 1, missing: b"), (["a"], None)])
def test_workers_with_other_files_name_those_that_differ(theirs: list[str], words: str | None) -> None:
    lists = [np.frombuffer(json.dumps(one).encode(), np.uint8) for one in (theirs, ["a"])]
    world = SimpleNamespace(gather=lambda name, row: np.stack([row, row + 5]), gather_bytes=lambda name, data: lists)
    match = f"disagree about the files or shards of the dataset: {words}" if words else "disagree about the samples"
    with pytest.raises(StateMismatch, match=match):
        agree_on(world, "epoch", {"samples": 50}, lambda: theirs)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [({"item": (2, "aa"), "user": (4, "dd")}, r"'user': by rank \[\[4, 'cc'\], \[4, 'dd'\]\]"),
     ({"item": (2, "aa")}, r"'user': by rank \[\[4, 'cc'\], None\]"),
     ({"item": (2, "aa"), "user": (4, "cc"), "word": (1, "ee")}, r"'word': by rank \[None, \[1, 'ee'\]\]")],
)  # fmt: skip
def test_workers_with_other_vocabularies_name_the_first_table_that_differs(theirs: dict[str, Any], words: str) -> None:
    mine = {"item": (2, "aa"), "user": (4, "cc")}
    gathered = [np.frombuffer(json.dumps(one).encode(), np.uint8) for one in (mine, theirs)]
    world = SimpleNamespace(gather=lambda name, row: np.stack([row, row + 1]), gather_bytes=lambda name, data: gathered)
    with pytest.raises(StateMismatch, match=f"disagree about the vocabularies, first of {words}; they must run"):
        agree_on(world, "epoch", {"vocabularies": 5}, parts={"vocabularies": mine})


@pytest.mark.parametrize("n_threads", [1, 3])
def test_without_replicas_hogwild_is_the_plain_loop_in_the_thread_that_calls(
    training: Any, clicks: Any, n_threads: int
) -> None:
    plain, job, threads = training(epoch=0), training(epoch=0), set()

    def compute(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        assert model is job.model
        threads.add(threading.current_thread())
        loss: torch.Tensor = job.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    plain.epoch(clicks(50), seed=4)
    events: list[gba_hvd.Event] = []
    job.state.engine.reports.emit = lambda event, only_here=False: events.append(event)
    gba_hvd.hogwild(clicks(50), job.state, compute, n_threads=n_threads, seed=4)
    idle = [event for event in events if event.kind == "threads_idle"]
    assert [event.level for event in idle] == ["warning"] * (n_threads > 1)
    said = f"hogwild(n_threads={n_threads}) has no effect in mode 'allreduce': threads share a replica"
    assert all(event.message.startswith(said) and "leave n_threads out" in event.message for event in idle)
    assert threads == {threading.current_thread()} and job.state.samples.applied == 50
    for found, expected in ((job.all_rows(), plain.all_rows()), (job.all_dense(), plain.all_dense())):
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("n_threads", [0, -1, 1.5, True])
def test_a_number_of_threads_that_is_none_is_refused(training: Any, clicks: Any, n_threads: Any) -> None:
    with pytest.raises(BadInput, match="n_threads must be a whole number"):
        gba_hvd.hogwild(clicks(50), training().state, lambda model, batch: None, n_threads=n_threads)


SAVES = ("save_asynchronously_if_due", "leave_asynchronously_if_preempted")


def loop_with_servers(monkeypatch: pytest.MonkeyPatch, said: list[str], ask: Callable[..., LeaseReply]) -> Any:
    """The batches of an epoch in a mode with servers, that leases come for from `ask`. said: what was called."""

    def says(*names: str) -> dict[str, Any]:
        return {name: lambda *_, name=name: said.append(name) for name in names}

    servers: Any = SimpleNamespace(
        name="gba", ask=ask, several_hosts=False, position=JobPosition(), refresh_dense_=lambda: 0
    )
    progress = SimpleNamespace(step=0, n_steps=0)
    watched = SimpleNamespace(note=lambda: None)
    model = SimpleNamespace(
        group_lrs=[], dense_settings=[], row_lr=0.1, tables=SimpleNamespace(**says("drop_gradients"))
    )
    model.parameter_watch, model.dense = watched, SimpleNamespace(**says("zero_"))
    engine: Any = SimpleNamespace(
        model=model, progress=progress,
        reports=SimpleNamespace(**says("other_writers", "row_settings", "dense_settings")),
        world=SimpleNamespace(rank=0),
        participants=[SimpleNamespace(**says("paused", "before_micro_batch", "epoch_over"))],
        **says("observe", "begin_micro_batch", "check_stepped"),
    )  # fmt: skip
    engine.begin_micro_batch = lambda *_, **__: said.append("begin_micro_batch")
    mode = ParameterServerMode(engine, servers)
    monkeypatch.setattr(mode, "take_dense_state", lambda **_: None)
    state: Any = SimpleNamespace(
        engine=engine, check_memory=lambda: None, saving=SimpleNamespace(**says("epoch_begins", *SAVES)),
        late_joiners=SimpleNamespace(**says("start_rejoin", "report", "report_wait")),
    )  # fmt: skip
    run = _Epoch.__new__(_Epoch)
    run.cut, run.epoch, run.segment, run.order_digest = EpochPlan(4, 4, 4), 0, 0, 1
    run.n_samples, run._state = 4, state
    monkeypatch.setattr(run, "read", lambda index: "batch")
    return mode.micro_batches(run)


def test_a_worker_waits_for_a_checkpoint_before_it_begins_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    answers = [LeaseReply(JobPosition(), LeaseGrant(0, 1, 0, 4)), LeaseReply(JobPosition(), None, "finished")]
    assert list(loop_with_servers(monkeypatch, said, lambda *_: answers.pop(0))) == ["batch"]
    at = [said.index(name) for name in ("zero_", "paused", "observe", *SAVES, "begin_micro_batch")]
    assert at == sorted(at)
    assert said[-1] == "epoch_over"


def test_a_worker_that_awaits_the_next_epoch_saves_and_leaves_if_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gba_hvd.ps.worker.lease_prefetch._LOOK_S", 0.0)
    has_looked = threading.Event()

    class Said(list[str]):
        def append(self, name: str) -> None:
            super().append(name)
            if name == SAVES[1]:
                has_looked.set()

    def ask(*_: Any) -> LeaseReply:
        """The others begin no epoch before."""
        assert has_looked.wait(20.0)
        return LeaseReply(JobPosition(), None, "finished")

    said = Said()
    assert list(loop_with_servers(monkeypatch, said, ask)) == []
    assert [name for name in said if name in SAVES][:2] == [*SAVES]


def test_an_evaluation_beside_servers_is_a_pause_for_those_that_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("gba_hvd.modes.evaluation.by_leases", lambda *_: said.append("evaluated"))
    progress = SimpleNamespace(begin_evaluation=lambda: (0, 0))
    measures = SimpleNamespace(paused=lambda: said.append("paused"))
    engine: Any = SimpleNamespace(progress=progress, participants=[measures])
    servers: Any = SimpleNamespace(name="gba", session=SimpleNamespace(rule="none"))
    ParameterServerMode(engine, servers).evaluate(SimpleNamespace())  # type: ignore[arg-type]
    assert said == ["evaluated", "paused"]


def test_idle_workers_are_warned_of() -> None:
    from gba_hvd.batches import _warn_of_idle_workers

    with pytest.warns(
        UserWarning, match=r"6 workers share 4 micro-batches a step: 2 stay idle\. Use a smaller micro_batch \(2"
    ):
        _warn_of_idle_workers(EpochPlan(50, 16, 4), rank=0, size=6)
    _warn_of_idle_workers(EpochPlan(50, 16, 4), rank=1, size=6)
    _warn_of_idle_workers(EpochPlan(50, 16, 4), rank=0, size=4)
    with pytest.warns(UserWarning, match=r"4 workers share 2 batches of sync_micro_batch a step: 2 stay idle\."):
        _warn_of_idle_workers(EpochPlan(50, 16, 4), rank=0, size=4, together=2)


def test_evaluation_is_the_auc_of_all_scores(training: Any, clicks: Any) -> None:
    job, dataset = training(), clicks(50)
    job.epoch(dataset)
    scores = gba_hvd.evaluate(job.model, dataset, job.state, batch=7)
    with torch.no_grad():
        logits = job.model(dataset.take(np.arange(50))).numpy()
    positive, negative = logits[dataset.label == 1, None], logits[None, dataset.label == 0]
    assert scores.auc == pytest.approx(float(np.mean(positive > negative)))
    assert (scores.n, scores.exact) == (50, True)
    assert job.model.training


@pytest.mark.parametrize(
    ("n", "settings", "words"),
    [
        (60, {"seed": 4}, "samples 50, here 60"),
        (50, {"seed": 5}, "seed 4, here 5"),
        (50, {"seed": 4, "shuffle": False}, "shuffle True, here False"),
        (500, {"seed": 5}, "samples 50, here 500, seed 4, here 5"),
    ],
)
def test_an_epoch_goes_on_only_with_the_samples_and_the_order_it_was_begun_with(
    training: Any, clicks: Any, n: int, settings: dict[str, Any], words: str
) -> None:
    first = training(epoch=0)
    for count, batch in enumerate(gba_hvd.batches(clicks(50), first.state, seed=4), start=1):
        first.micro_step(batch)
        if count == 8:
            break
    saved = state_codec.decode(state_codec.encode(first.state.training_state.state_dict()))
    job = training(epoch=0)
    job.state.sync()
    job.state.training_state.load_state_dict(saved)
    with pytest.raises(StateMismatch, match=f"epoch 0 stands at step 2 .*{words}"):
        job.epoch(clicks(n), **settings)
    for shard in range(3):
        job.tables.memory.set_ready(shard, 2)
    job.epoch(clicks(50), seed=4)
    assert job.state.step == 4


@pytest.mark.slow
@pytest.mark.parametrize("n", [60, 500, 20])
def test_new_data_in_a_complete_epoch_is_refused_with_what_to_do(training: Any, clicks: Any, n: int) -> None:
    job = training(epoch=0)
    job.epoch(clicks(50), seed=4)
    job.state.finished_epoch = None  # as in a launch that resumes
    words = rf"epoch 0 is complete: all 4 steps of it were trained, with samples 50, here {n}\..*state.epoch = 1"
    with pytest.raises(StateMismatch, match=words):
        job.epoch(clicks(n), seed=4)
    job.state.epoch = 1
    job.epoch(clicks(n), seed=4)
    assert job.state.samples.applied == 50 + n


def test_the_next_epoch_may_have_other_samples(training: Any, clicks: Any) -> None:
    job = training(epoch=0)
    job.epoch(clicks(50), seed=4)
    job.state.epoch = 1
    job.epoch(clicks(60), seed=5)
    assert job.state.samples.applied == 110
