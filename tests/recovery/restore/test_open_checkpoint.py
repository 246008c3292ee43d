"""A checkpoint is opened without a job: rows, dense part, what is passed over, and what a living job deletes."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import recovery
from recovery.catalog.best import best_chain
from recovery.catalog.chains import chains
from recovery.config import Config
from recovery.errors import BadInput, Damaged, NotFound
from recovery.hashed_ids import ids_of, keys_of_ids
from recovery.restore.open_checkpoint import dense_of_state
from recovery.state_codec import encode
from recovery.storage.local_store import LocalStore
from recovery.storage.store import Store
from recovery.testing import SMALL, RamStore, Saver, train, two_tables
from tests.recovery.stores import FaultyStore


def saved(store: Store, n: int = 3, n_shards: int = 3, policy: str = "delta") -> Saver:
    """A full save and partial ones on top of it."""
    saver = Saver(two_tables(n_shards), store, Config(**{**vars(SMALL), "policy": policy}))
    for step in range(n):
        saver.save()
        if step < n - 1:
            train(saver.rows, 2, seed=step)
    return saver


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "delta"])
def test_rows_are_those_of_the_newest_save(store: Store, policy: str) -> None:
    saver = saved(store, policy=policy)
    opened = recovery.open_checkpoint(store)
    assert (opened.step, opened.name, opened.skipped) == (saver.rows.last_step, saver.made[-1].name, ())
    user = saver.rows.tables["user"]
    np.testing.assert_array_equal(opened.rows("user"), user.weight.numpy())
    np.testing.assert_array_equal(opened.rows("user", what="sum")[:, 0], user.slots["sum"].numpy())
    ids = np.array([4999, 0, 17, 17, 3])
    np.testing.assert_array_equal(opened.rows("user", ids), user.weight.numpy()[ids])
    np.testing.assert_array_equal(opened.rows("colour", [10, 2]), saver.rows.tables["colour"].weight.numpy()[[10, 2]])
    assert opened.rows("user", []).shape == (0, 4)


def test_the_checkpoint_of_the_best_model_is_opened_by_that_name(ram: RamStore) -> None:
    saver = Saver(two_tables(3), ram, Config(**{**vars(SMALL), "policy": "full"}))
    with pytest.raises(BadInput, match=r"no checkpoint of the best model: CheckpointCallback\(keep_best=METRIC\)"):
        recovery.open_checkpoint(ram, "best")
    for seed in range(3):
        train(saver.rows, 2, seed=seed)
        saver.save(about={"best_step": 3, "best_metric": "valid_auc", "best_value": 0.7} if seed == 2 else {})
    assert recovery.open_checkpoint(ram, "best").step == 4


def test_of_two_checkpoints_of_the_best_step_the_one_that_is_kept_is_opened(ram: RamStore) -> None:
    saver = Saver(two_tables(3), ram, Config(**{**vars(SMALL), "policy": "full"}))
    for seed in (0, None, 1):
        if seed is not None:
            train(saver.rows, 2, seed=seed)
        saver.save(about={"best_step": 2, "best_metric": "valid_auc", "best_value": 0.7})
    assert [manifest.step for manifest in saver.made] == [2, 2, 4]
    best = best_chain(list(chains(ram)))
    assert best is not None and best.manifest.name == saver.made[0].name
    assert recovery.open_checkpoint(ram, "best").name == saver.made[0].name
    assert recovery.open_checkpoint(ram, 2).name == saver.made[1].name


def test_another_checkpoint_is_not_opened_in_place_of_the_best_one_that_is_damaged(ram: RamStore) -> None:
    saver = Saver(two_tables(3), ram, Config(**{**vars(SMALL), "policy": "full"}))
    for seed in range(3):
        train(saver.rows, 2, seed=seed)
        saver.save(about={"best_step": 3, "best_metric": "valid_auc", "best_value": 0.7})
    (name,) = [name for name in ram.objects if name.endswith(saver.made[1].name)]
    ram.objects[name] = ram.objects[name][:10]
    with pytest.raises(Damaged, match=r"the best model \(valid_auc 0.7000 of step 3\) may be a damaged one: "):
        recovery.open_checkpoint(ram, "best")
    assert recovery.open_checkpoint(ram).step == 6


def test_tables_say_what_there_is(ram: RamStore) -> None:
    saved(ram, 1)
    about = recovery.open_checkpoint(ram).tables["user"]
    assert (about.n_rows, about.dim, about.dtype, dict(about.slots)) == (5000, 4, "float32", {"exp_avg": 4, "sum": 1})
    assert not about.is_hashed


def test_nothing_is_written_and_no_claim_taken(ram: RamStore) -> None:
    saved(ram, 2)
    before, watched = dict(ram.objects), FaultyStore(ram)
    recovery.open_checkpoint(watched).rows("user")
    assert ram.objects == before
    assert {operation for operation, _ in watched.calls} == {"get", "names"}


def test_few_rows_read_few_sections(ram: RamStore) -> None:
    saved(ram, 1)
    watched = FaultyStore(ram)
    opened = recovery.open_checkpoint(watched, check="state")
    opened.rows("user", [5])
    some = len(watched.calls)
    opened.rows("user")
    assert some < len(watched.calls) / 2


def damage(store: RamStore, name: str) -> None:
    data = bytearray(store.objects[name])
    data[len(data) // 2] ^= 1
    store.objects[name] = bytes(data)


def test_a_damaged_one_is_passed_over_with_the_reason(ram: RamStore, caplog: pytest.LogCaptureFixture) -> None:
    saver = saved(ram)
    damage(ram, saver.made[-1].blobs[0].name)
    with caplog.at_level(logging.WARNING, "recovery"):
        opened = recovery.open_checkpoint(ram)
    assert opened.name == saver.made[-2].name
    assert [one.name for one in opened.skipped] == [saver.made[-1].name]
    assert "checksum" in opened.skipped[0].why
    (text,) = caplog.messages
    assert text.startswith(f"{ram.url}: a checkpoint is passed over: {saver.made[-1].name}: blobs/")
    assert text.count(saver.made[-1].name) == 1 and opened.skipped[0].step == saver.made[-1].step


def test_a_half_written_one_is_passed_over(ram: RamStore) -> None:
    saver = saved(ram)
    ram.objects[saver.made[-1].name] = ram.objects[saver.made[-1].name][:100]
    opened = recovery.open_checkpoint(ram)
    assert opened.name == saver.made[-2].name
    assert "cut off" in opened.skipped[0].why


def test_a_step_that_was_asked_for_is_that_or_an_error(ram: RamStore) -> None:
    saver = saved(ram)
    assert recovery.open_checkpoint(ram, saver.made[1].step).name == saver.made[1].name
    with pytest.raises(BadInput, match=r"no whole checkpoint of step 77: it has steps 4, 2, 0"):
        recovery.open_checkpoint(ram, 77)
    damage(ram, saver.made[-1].blobs[0].name)
    with pytest.raises(Damaged, match="checksum"):
        recovery.open_checkpoint(ram, saver.made[-1].step)


def test_the_error_about_the_best_one_has_its_step(ram: RamStore) -> None:
    saver = Saver(two_tables(3), ram, Config(**{**vars(SMALL), "policy": "full"}))
    for seed in range(2):
        train(saver.rows, 2, seed=seed)
        saver.save(about={"best_step": 2, "best_metric": "valid_auc", "best_value": 0.7})
    damage(ram, saver.made[0].blobs[0].name)
    with pytest.raises(Damaged, match="no whole checkpoint of the best model, of step 2: it has steps 4; passed over"):
        recovery.open_checkpoint(ram, "best")


def test_without_checking_all_bytes_damage_is_found_by_reading(ram: RamStore) -> None:
    saver = saved(ram, 1)
    opened = recovery.open_checkpoint(ram, check="state")
    for blob in saver.made[0].blobs:
        damage(ram, blob.name)
    with pytest.raises(Damaged, match="checksum"):
        opened.rows("user")


def test_all_damaged(ram: RamStore) -> None:
    saver = saved(ram, 1)
    damage(ram, saver.made[0].blobs[0].name)
    with pytest.raises(Damaged, match="no checkpoint that is whole"):
        recovery.open_checkpoint(ram)


def test_an_empty_location(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no checkpoints"):
        recovery.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.rows("shop"), "no table 'shop'; its tables are user, colour"),
        (lambda c: c.rows("user", [5000]), "rows 0 to 4999, got id 5000 at position 0"),
        (lambda c: c.rows("user", [3, -1]), "got id -1 at position 1"),
        (lambda c: c.rows("user", [0.5]), "ids must be whole numbers"),
        (lambda c: c.rows("user", what="m"), "no slot 'm'; its slots are exp_avg, sum"),
        (lambda c: c.shared_rows("user"), "not hashed"),
        (lambda c: c.dense(), "format of the job's own"),
    ],
)
def test_wrong_questions(ram: RamStore, call: object, words: str) -> None:
    saved(ram, 1)
    opened = recovery.open_checkpoint(ram)
    with pytest.raises(BadInput, match=words):
        call(opened)  # type: ignore[operator]


@pytest.mark.parametrize(("setting", "words"), [({"check": "all"}, "check must be"), ({"step": "oldest"}, "step must")])
def test_wrong_settings(ram: RamStore, setting: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        recovery.open_checkpoint(ram, **setting)  # type: ignore[arg-type]


def test_a_checkpoint_that_the_job_deletes_says_so(ram: RamStore) -> None:
    saver = saved(ram, 2)
    opened = recovery.open_checkpoint(ram)
    saver.save("full")
    ram.delete([name for manifest in saver.made[:2] for name in [manifest.name, *(b.name for b in manifest.blobs)]])
    with pytest.raises(NotFound, match="was deleted while it was read"):
        opened.rows("user")
    assert recovery.open_checkpoint(ram).name == saver.made[-1].name


@pytest.mark.slow
def test_what_is_deleted_between_listing_and_opening_is_looked_for_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    saver = saved(store, 1)

    def save_and_expire() -> None:
        saver.save("full")
        first = saver.made[0]
        store.delete([first.name, *(blob.name for blob in first.blobs)])

    slow = FaultyStore(store).slows("get", 1, save_and_expire)
    opened = recovery.open_checkpoint(slow)
    assert slow.fired == slow.planned
    assert (opened.name, opened.skipped) == (saver.made[1].name, ())


# --- the dense part --------------------------------------------------------------------------------------------------


def test_the_dense_part_is_the_model_s() -> None:
    weight = torch.randn(2, 3)
    assert torch.equal(dense_of_state({"model": {"w": weight}}, "c")["w"], weight)


def test_of_an_asynchronous_mode_the_values_are_those_of_the_servers() -> None:
    values = np.arange(6, dtype=np.float32)
    first = {
        "model": {"mlp.w": torch.zeros(2, 3), "n": torch.ones(1)},
        "parameter_names": {"parameter 0 (2, 3)": "mlp.w"},
    }
    state = {"snapshot": first, "dense": {"parameter 0 (2, 3)": {"values": values, "state": {}}}}
    found = dense_of_state(state, "c")
    assert torch.equal(found["mlp.w"], torch.from_numpy(values).view(2, 3))
    assert torch.equal(found["n"], torch.ones(1))
    with pytest.raises(BadInput, match="the servers call a parameter 'parameter 0"):
        dense_of_state({**state, "snapshot": {"model": {}}}, "c")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.colour, self.out = nn.Embedding(5000, 4), nn.Embedding(11, 2), nn.Linear(6, 1)


def test_a_plain_model_gets_rows_and_dense_part(ram: RamStore) -> None:
    saver, trained = Saver(two_tables(3), ram), Small()
    saver.save(state=encode({"model": {k: v for k, v in trained.state_dict().items() if k.startswith("out")}}))
    model = recovery.open_checkpoint(ram).to_torch(Small())
    assert torch.equal(model.user.weight, saver.rows.tables["user"].weight)
    assert torch.equal(model.out.weight, trained.out.weight)


def test_a_model_that_does_not_fit_is_unchanged(ram: RamStore) -> None:
    saved(ram, 1)
    opened = recovery.open_checkpoint(ram)
    with pytest.raises(BadInput, match="table 'user' is no parameter of Linear"):
        opened.to_torch(nn.Linear(2, 2))
    other = Small()
    other.user = nn.Embedding(5, 4)
    with pytest.raises(BadInput, match=r"table 'user' has 5000 rows of 4, the parameter is \[5, 4\]"):
        opened.to_torch(other)


def test_ids_and_keys_are_each_other_s_inverse() -> None:
    ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 1000)
    np.testing.assert_array_equal(ids_of(keys_of_ids(ids)), ids)
