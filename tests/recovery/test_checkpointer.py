"""The object that users hold: saves beside training, reports what went wrong, and comes back to where it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recovery.catalog import claims
from recovery.checkpointer import Checkpointer, Event, StillSaving
from recovery.config import Config
from recovery.errors import BadInput, Fenced, StoreError
from recovery.process_checkpointer import ProcessCheckpointer
from recovery.restore import restore
from recovery.state_codec import decode
from recovery.storage.store import Store
from recovery.testing import RamStore, train, two_tables, values
from recovery.torch_rows.tensor_rows import TensorRows
from tests.recovery.holders import assert_same
from tests.recovery.saving import ThroughAPipe
from tests.recovery.stores import Crash, FaultyStore

POLICIES = ("full", "delta", "mfu", "ssu", "scar")
# No lease renewal is due during a test: each is a put, and faults go by the number of a put.
SMALL = Config(job="mine", section_bytes=8 << 10, blob_bytes=32 << 10, level=0, lease_s=600)
SETUP_PUTS = 2  # the probe and the claim
Kind = Callable[..., Checkpointer | ProcessCheckpointer]
WRITES_PER_SAVE = 9  # blobs, state, manifest of a full one


@pytest.fixture(params=["threads", "process"])
def saving(request: pytest.FixtureRequest) -> Kind:
    """Either kind of checkpointer keeps the same promises."""
    return Checkpointer if request.param == "threads" else ThroughAPipe


def empty(n_shards: int = 2) -> TensorRows:
    return two_tables(n_shards, seed=None, shared=True)


def restored(store: Store, n_shards: int = 2) -> dict[str, np.ndarray]:
    rows = empty(n_shards)
    assert restore(store, rows) is not None
    return values(rows)


@pytest.fixture
def rows() -> TensorRows:
    return two_tables(2, shared=True)


@contextmanager
def no_threads_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("recovery")]


@pytest.mark.parametrize("lost", range(1, WRITES_PER_SAVE + 1))
def test_a_store_that_loses_any_write_of_a_save_is_found_out_by_that_save(
    saving: Kind, ram: RamStore, rows: TensorRows, lost: int
) -> None:
    faulty = FaultyStore(ram).loses(SETUP_PUTS + lost)
    with saving(faulty, rows, SMALL) as checkpoints:
        train(rows, 2, seed=1)
        with pytest.raises(StoreError, match="this store loses what it has confirmed"):
            checkpoints.save(2, 20, {"lr": 0.5}).result(60)
        assert checkpoints.newest is None
        train(rows, 1, seed=1)
        checkpoints.save(3, 30).result(60)
    assert faulty.fired == faulty.planned
    assert_same(restored(ram), values(rows))


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_quantised_saves_come_back_within_the_error_that_was_reported(ram: RamStore, bits: int) -> None:
    rows = two_tables(2)
    with Checkpointer(ram, rows, replace(SMALL, bits=bits)) as checkpoints:
        base = checkpoints.save(0, 0).result(60)
        train(rows, 2, seed=1)
        saved = checkpoints.save(2, 20).result(60)
    assert base.written.worst_error == 0 < saved.written.worst_error
    found, wanted = restored(ram)["user"], values(rows)["user"]
    assert 0 < np.abs(found[:, :4] - wanted[:, :4]).max() <= saved.written.worst_error
    assert found[:, 4:].tobytes() == wanted[:, 4:].tobytes(), "slots are exact"


@pytest.mark.parametrize("state", [{"lr": 0.5}, b""])
def test_a_listing_that_is_older_than_the_blobs_makes_no_checkpoint_damaged(
    ram: RamStore, rows: TensorRows, state: object
) -> None:
    with Checkpointer(ram, rows, SMALL) as checkpoints:
        train(rows, 2, seed=1)
        checkpoints.save(2, 20, state).result(60)
    faulty = FaultyStore(ram).lists_what_was(2)  # manifests, then blobs
    report = restore(faulty, empty())
    assert faulty.fired == faulty.planned
    assert report is not None and (report.step, report.n_lost, report.skipped) == (2, 0, ())


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_goes_on_where_its_checkpoint_was(store: Store, policy: str) -> None:
    config = replace(SMALL, policy=policy)
    with no_threads_left():
        first = two_tables(2, shared=True)
        with Checkpointer(store, first, config, rng=np.random.default_rng(0)) as checkpoints:
            assert checkpoints.restore() is None
            for _ in range(3):
                train(first, 2, seed=1)
                saved = checkpoints.save(first.last_step, 10 * first.last_step, {"lr": 0.5}).result(60)
        assert saved.manifest.kind == policy
        second = empty(2)
        with Checkpointer(store, second, config, rng=np.random.default_rng(0)) as checkpoints:
            report = checkpoints.restore()
            assert report is not None
            assert report.state is not None
            assert (report.step, report.samples, decode(report.state)) == (6, 60, {"lr": 0.5})
            if policy in ("full", "delta"):
                assert_same(values(second), values(first))
            second.continue_from(report.step)
            train(second, 2, seed=1)
            again = checkpoints.save(second.last_step, 80).result(60)
        assert again.manifest.kind == policy  # the rows are as the chain has them, so it goes on
        assert (again.manifest.parent is None) == (policy == "full")
        if policy in ("full", "delta"):
            assert_same(restored(store), values(second))


@pytest.mark.parametrize("policy", ["mfu", "ssu", "scar"])
def test_a_prioritised_save_takes_its_share_and_the_small_table_whole(saving: Kind, ram: RamStore, policy: str) -> None:
    rows = two_tables(2, shared=True)
    with saving(
        ram, rows, replace(SMALL, policy=policy, row_fraction=0.01), rng=np.random.default_rng(0)
    ) as checkpoints:
        checkpoints.save(0, 0).result(60)
        train(rows, 10, seed=1)
        saved = checkpoints.save(10, 100).result(60)
    found = {0: 0, 1: 0}
    for blob in saved.manifest.blobs:
        for section in blob.sections:
            found[section.table] += section.n_rows
    assert found == {0: 50, 1: 11}
    assert_same({"colour": restored(ram)["colour"]}, {"colour": values(rows)["colour"]})


def test_the_rows_that_mfu_takes_are_those_updated_most(ram: RamStore) -> None:
    rows = two_tables(2, shared=True)
    with Checkpointer(ram, rows, replace(SMALL, policy="mfu", row_fraction=2 / 5000)) as checkpoints:
        checkpoints.save(0, 0).result(60)
        before = values(rows)["user"]
        for ids in ([10, 20, 30], [10, 20], [20], [41]):
            rows.touched("user", np.array(ids))
            with rows.step():
                rows.tables["user"].weight[ids] += 1
        checkpoints.save(4, 40).result(60)
    changed = np.flatnonzero((restored(ram)["user"] != before).any(axis=1))
    assert changed.tolist() == [10, 20]


def test_training_goes_on_during_a_save_and_no_change_is_lost(saving: Kind, ram: RamStore) -> None:
    rows = two_tables(2, shared=True)
    store = FaultyStore(ram).slows("put", SETUP_PUTS + 2, lambda: train(rows, 5, seed=1))
    with saving(store, rows, SMALL) as checkpoints:
        first = checkpoints.save(0, 0).result(60)
        checkpoints.save(rows.last_step, 0).result(60)
    assert store.fired == store.planned
    assert len({s.step for blob in first.manifest.blobs for s in blob.sections}) > 1
    assert_same(restored(ram), values(rows))


def test_a_save_that_comes_too_early_is_left_out_and_reported(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    events: list[Event] = []
    with (
        FaultyStore(ram).hangs("put", SETUP_PUTS + 1) as store,
        saving(store, rows, SMALL, on_event=events.append) as checkpoints,
    ):
        first = checkpoints.save(1, 10)
        second = checkpoints.save(2, 20)
        assert second.done()
        with pytest.raises(StillSaving, match="step 2 is not saved"):
            second.result(0)
        with pytest.raises(TimeoutError, match="not over"):
            first.result(0)
        store.release()
        assert first.result(60).manifest.step == 1
    assert [event.what for event in events] == ["left out", "saved"]


@pytest.mark.parametrize("at", range(1, WRITES_PER_SAVE + 1))
@pytest.mark.parametrize("policy", ["delta", "mfu"])
def test_a_save_that_fails_leaves_the_last_one_in_force_and_the_next_one_mends_it(
    saving: Kind, ram: RamStore, policy: str, at: int
) -> None:
    rows, events = two_tables(2, shared=True), list[Event]()
    with saving(ram, rows, replace(SMALL, policy=policy)) as checkpoints:
        saved = checkpoints.save(0, 0, b"dense").result(60)
    assert len(saved.manifest.blobs) + 2 == WRITES_PER_SAVE
    before = restored(ram)
    store = FaultyStore(ram).fails("put", SETUP_PUTS + at, StoreError("no space left"))
    share = SMALL.row_fraction if policy == "delta" else 1.0
    with saving(store, rows, replace(SMALL, policy=policy, row_fraction=share), on_event=events.append) as checkpoints:
        train(rows, 2, seed=1)
        with pytest.raises(StoreError, match="no space left"):
            checkpoints.save(2, 20, b"dense").result(60)
        assert_same(restored(ram), before)
        train(rows, 2, seed=1)
        checkpoints.save(4, 40, b"dense").result(60)
        assert_same(restored(ram), values(rows))
    assert store.fired == store.planned
    assert [event.what for event in events][:2] == ["failed", "saved"]
    assert "the last checkpoint is none yet: no space left" in events[0].text


def test_after_a_failed_delta_the_next_one_has_its_rows_too(saving: Kind, ram: RamStore) -> None:
    rows = two_tables(2, shared=True)
    store = FaultyStore(ram)
    with saving(store, rows, SMALL) as checkpoints:
        checkpoints.save(0, 0).result(60)
        n_puts = sum(operation == "put" for operation, _ in store.calls)
        store.fails("put", n_puts + 2, StoreError("gone"))  # its blob is there, its manifest not
        train(rows, 2, seed=1)
        with pytest.raises(StoreError):
            checkpoints.save(2, 20).result(60)
        train(rows, 2, seed=1)
        saved = checkpoints.save(4, 40).result(60)
    assert saved.manifest.kind == "delta"
    assert_same(restored(ram), values(rows))


def test_after_a_failed_save_ssu_still_has_its_rows(ram: RamStore) -> None:
    rows, store = two_tables(2, shared=True), FaultyStore(ram)
    with Checkpointer(store, rows, replace(SMALL, policy="ssu"), rng=np.random.default_rng(0)) as checkpoints:
        checkpoints.save(0, 0).result(60)
        store.fails("put", sum(operation == "put" for operation, _ in store.calls) + 1, StoreError("gone"))
        train(rows, 4, seed=1)
        with pytest.raises(StoreError):
            checkpoints.save(4, 40).result(60)
        saved = checkpoints.save(4, 40).result(60)
    assert sum(s.n_rows for blob in saved.manifest.blobs for s in blob.sections) > 50


def test_a_manifest_whose_answer_was_lost_does_no_harm(saving: Kind, ram: RamStore) -> None:
    rows, store = two_tables(2, shared=True), FaultyStore(ram)
    with saving(store, rows, replace(SMALL, keep_last=1)) as checkpoints:
        checkpoints.save(0, 0).result(60)
        n_puts = sum(operation == "put" for operation, _ in store.calls)
        store.answer_is_lost("put", n_puts + 2)
        train(rows, 2, seed=1)
        with pytest.raises(StoreError):
            checkpoints.save(2, 20).result(60)
        assert_same(restored(ram), values(rows))  # it is there, after all
        train(rows, 2, seed=1)
        checkpoints.save(4, 40).result(60)
        assert_same(restored(ram), values(rows))
    assert len(ram.names("manifests/")) == 2  # the base and the newest


def test_a_new_base_comes_when_the_chain_would_cost_more_than_one(saving: Kind, ram: RamStore) -> None:
    rows = two_tables(2, shared=True)
    kinds = []
    with saving(ram, rows, SMALL) as checkpoints:
        for _ in range(8):
            kinds.append(checkpoints.save(rows.last_step, 0).result(60).manifest.kind)
            train(rows, 20, seed=1, n_touched=100)
    assert kinds[:3] == ["full", "delta", "delta"]
    assert kinds.count("full") >= 2


def test_only_the_newest_are_kept_and_what_was_resumed_from(saving: Kind, ram: RamStore) -> None:
    config = replace(SMALL, policy="full", keep_last=2)
    rows = two_tables(2, shared=True)
    with saving(ram, rows, config) as checkpoints:
        for step in range(4):
            checkpoints.save(step, 0).result(60)
    first_run = set(ram.names("manifests/"))
    assert len(first_run) == 2
    with saving(ram, rows, config) as checkpoints:
        checkpoints.restore()
        for step in range(4):
            checkpoints.save(step, 0).result(60)
    assert set(ram.names("manifests/")) > first_run
    assert len(ram.names("manifests/")) == 4


def test_a_store_that_refuses_to_delete_costs_space_only(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    events: list[Event] = []
    store = FaultyStore(ram).fails("delete", 2, StoreError("not allowed"))  # the first one is the probe's
    with saving(store, rows, replace(SMALL, policy="full", keep_last=1), on_event=events.append) as checkpoints:
        for step in range(3):
            checkpoints.save(step, 0).result(60)
    assert store.fired == store.planned
    assert "store" in [event.what for event in events]
    assert len(ram.names("manifests/")) == 1


@pytest.mark.slow
def test_a_second_job_at_the_same_place_is_refused(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    def newest_sign() -> str:
        return max(name for name in ram.names("claims/") if "-mine." in name)

    def a_sign_of_life() -> None:
        before = newest_sign()
        while newest_sign() == before:
            threading.Event().wait(0.01)

    with saving(ram, rows, replace(SMALL, lease_s=0.3)) as first:
        # Its first look, after a tenth of the lease, is when the first job has given one, however busy the machine is.
        is_own = getattr(first, "pid", None) is None  # a process of its own is seen to live, and is not waited for
        store = FaultyStore(ram)
        if is_own:
            store.slows("names", 3, a_sign_of_life)
        other = saving(store, rows, replace(SMALL, job="b", lease_s=10))
        with pytest.raises(BadInput, match="'mine'"), other:
            pass
        assert store.fired == store.planned
    with other:  # now it left in peace
        pass


def test_a_job_that_was_replaced_saves_nothing_more(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    with saving(ram, rows, SMALL) as old:
        old.save(1, 10).result(60)
        with saving(ram, rows, replace(SMALL, job="other"), takeover=True) as new:
            new.save(2, 20).result(60)
            with pytest.raises(Fenced, match="'other'"):
                old.save(3, 30).result(60)
            with pytest.raises(Fenced):
                old.save(4, 40)
        report = restore(ram, empty())
    assert report is not None
    assert report.step == 2


def test_strict_saves_are_of_one_step(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    with saving(ram, rows, replace(SMALL, strict=True)) as checkpoints:
        for _ in range(3):
            before = values(rows)
            handle = checkpoints.save(rows.last_step, 0)
            train(rows, 1, seed=1)  # the save need not be over
            saved = handle.result(60)
            assert {s.step for blob in saved.manifest.blobs for s in blob.sections} == {rows.last_step - 1}
            assert_same(restored(ram), before)
            assert 0 < saved.stall_s <= saved.seconds


def test_a_strict_save_that_fails_does_not_hold_up_its_caller(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    store = FaultyStore(ram).fails("put", SETUP_PUTS + 1, StoreError("gone"))
    with saving(store, rows, replace(SMALL, strict=True)) as checkpoints, pytest.raises(StoreError, match="gone"):
        checkpoints.save(1, 10).result(60)


def test_a_state_that_cannot_be_saved_is_reported_at_once(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    with saving(ram, rows, SMALL) as checkpoints:
        with pytest.raises(BadInput, match=r"state\['f'\]"):
            checkpoints.save(1, 10, {"f": print})
        assert checkpoints.save(1, 10).result(60).manifest.step == 1


def test_leaving_waits_for_the_save_in_flight(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    with no_threads_left(), saving(ram, rows, SMALL) as checkpoints:
        handle = checkpoints.save(1, 10)
    assert handle.result(0).manifest.name in ram.objects


@pytest.mark.slow
def test_leaving_cancels_a_save_that_takes_too_long(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    events: list[Event] = []
    config = replace(SMALL, close_timeout_s=0.1, rate_bytes_s=1000.0)
    with no_threads_left(), saving(ram, rows, config, on_event=events.append) as checkpoints:
        handle = checkpoints.save(1, 10)
    assert not ram.names("manifests/")
    assert [event.what for event in events] == ["failed", "failed"]
    assert handle.done()


def test_it_may_be_left_twice_and_not_used_outside(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    checkpoints = saving(ram, rows, SMALL)
    with pytest.raises(BadInput, match="between `with` and its end"):
        checkpoints.save(1, 10)
    with checkpoints:
        pass
    checkpoints.__exit__(None, None, None)
    with pytest.raises(BadInput, match="between `with` and its end"):
        checkpoints.save(1, 10)


def test_a_store_that_cannot_be_written_is_reported_at_the_start(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    store = FaultyStore(ram).fails("put", 1, StoreError("permission denied"))
    with pytest.raises(BadInput, match="permission denied"), saving(store, rows, SMALL):
        pass


def test_a_listener_that_fails_does_not_stop_saving(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("listener")

    with saving(ram, rows, SMALL, on_event=broken) as checkpoints:
        checkpoints.save(1, 10).result(60)
        checkpoints.save(2, 20).result(60)


def test_signs_of_life_are_given(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    given = threading.Event()
    store = FaultyStore(ram).slows("put", SETUP_PUTS + 2, given.set)
    with saving(store, rows, replace(SMALL, lease_s=0.03)):
        assert given.wait(30)
    (seen,) = claims.claims_of(ram.names("claims/"))
    assert seen.is_closed


def test_lost_shards_come_back_and_saving_goes_on(saving: Kind, ram: RamStore) -> None:
    rows = two_tables(2, shared=True)
    with saving(ram, rows, SMALL) as checkpoints:
        checkpoints.save(0, 0).result(60)
        train(rows, 2, seed=1)
        expected = values(rows)
        checkpoints.save(2, 20).result(60)
        for column in rows.slab(0, 1).columns:
            column[:] = np.nan
        for column in rows.slab(1, 1).columns:
            column[:] = np.nan
        report = checkpoints.restore([1])
        assert report is not None
        assert_same(values(rows), expected)
        train(rows, 2, seed=1)
        saved = checkpoints.save(4, 40).result(60)
        assert saved.manifest.kind == "delta"
    assert_same(restored(ram), values(rows))


@pytest.mark.parametrize("memory", ["the same", "another"])
def test_a_new_process_on_the_same_memory_goes_on_with_deltas(
    saving: Kind, ram: RamStore, tmp_path: Path, memory: str
) -> None:
    rows, kinds = two_tables(2, shared=True), list[str]()
    for counters in ("the same", memory):
        with saving(ram, rows, SMALL, tracker_path=tmp_path / "tracker", counters=counters) as checkpoints:
            for _ in range(2):
                train(rows, 2, seed=1)
                kinds.append(checkpoints.save(rows.last_step, 0).result(60).manifest.kind)
    assert kinds == ["full", "delta", "delta" if memory == "the same" else "full", "delta"]
    assert_same(restored(ram), values(rows))


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ({"policy": "best"}, "full, delta, mfu, ssu, scar"),
        ({"row_fraction": 0}, "row_fraction is a share"),
        ({"budget_bytes": 100}, "budget_bytes must be at least"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"rate_bytes_s": 0}, "rate_bytes_s must be positive"),
        ({"bits": 3}, "bits must be 8, 4 or None"),
        ({"keep_last": 0}, "last=0"),
        ({"keep_epochs": 0}, "keep_epochs is a whole number of epochs, at least 1, got 0"),
        ({"keep_epochs": "7"}, "keep_epochs is a whole number of epochs, at least 1, got '7'"),
        ({"keep_epochs": True}, "keep_epochs is a whole number of epochs, at least 1, got True"),
        ({"row_fraction": 0.5}, "row_fraction=0.5 has no effect with policy='delta', which takes no share of the rows"),
        ({"policy": "full", "row_fraction": 0.5}, "with policy='full'"),
        ({"policy": "mfu", "ssu_period": 3}, "ssu_period=3 has no effect with policy='mfu', which samples no accesses"),
        ({"policy": "full", "bits": 8}, "bits=8 has no effect with policy='full'.* Leave bits out"),
    ],
)
def test_settings_that_make_no_sense_or_have_no_effect_are_refused(setting: dict[str, float], what: str) -> None:
    with pytest.raises(BadInput, match=what):
        Config(**setting)  # type: ignore[arg-type]


def test_settings_that_the_policy_uses_are_taken() -> None:
    for policy in ("mfu", "scar", "ssu"):
        Config(policy=policy, row_fraction=0.5, bits=4)
    Config(policy="ssu", ssu_period=3)
    Config(policy="delta", bits=8)


def test_arguments_win_over_the_environment() -> None:
    environ = {"RECOVERY_POLICY": "mfu", "RECOVERY_R": "0.5", "RECOVERY_STRICT": "yes", "RECOVERY_BITS": "8"}
    config = Config.from_env(environ, row_fraction=0.25)
    assert (config.policy, config.row_fraction, config.strict, config.bits) == ("mfu", 0.25, True, 8)


@pytest.mark.parametrize(("name", "text"), [("STRICT", "perhaps"), ("R", "much"), ("THREADS", "1.5")])
def test_an_environment_that_makes_no_sense_is_named(name: str, text: str) -> None:
    with pytest.raises(BadInput, match=f"RECOVERY_{name}='{text}'"):
        Config.from_env({f"RECOVERY_{name}": text})


def test_a_thread_that_dies_is_reported_to_who_leaves(saving: Kind, ram: RamStore, rows: TensorRows) -> None:
    store = FaultyStore(ram).dies_before("put", SETUP_PUTS + 3)
    with no_threads_left(), pytest.raises(Crash), saving(store, rows, SMALL) as checkpoints:
        handle = checkpoints.save(1, 10)
    assert isinstance(handle.future.exception(0), Crash)
    assert store.fired == store.planned
    assert not ram.names("manifests/")
