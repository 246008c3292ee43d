"""An earlier version of a saved model is the newest again, or nothing has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gba_hvd_tools.cli import main

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.serving.manifest import (
    next_version,
    no_new_version,
    read_manifest,
    version_name,
    versions,
    withdrawn_name,
)
from gba_hvd.serving.old_versions import delete_unneeded, unneeded
from gba_hvd.serving.withdrawal import plan_withdrawal, withdraw
from recovery.errors import StoreError
from recovery.storage.open import open_store
from recovery.storage.store import Store
from recovery.testing import RamStore
from tests.recovery.stores import Crash, FaultyStore
from tests.unit.serving.conftest import CODE, batch, evaluated

pytestmark = pytest.mark.slow  # three versions are saved for each

CHANGED = batch(9, users=4)  # of users whose rows each version has changed


@pytest.mark.parametrize("tables", ["memory", "mmap", "remote"])
def test_what_has_a_withdrawn_version_open_keeps_it_and_what_opens_the_model_then_does_not(
    three: Any, tables: str
) -> None:
    model, folder = three
    store = open_store(folder)
    first = gba_hvd.load_for_inference(folder, version=1)(CHANGED)
    is_open = gba_hvd.load_for_inference(folder, tables=tables)
    withdraw(store, plan_withdrawal(store, 1))
    assert torch.equal(is_open(CHANGED), evaluated(model, CHANGED))
    assert torch.equal(gba_hvd.load_for_inference(folder, tables=tables)(CHANGED), first)
    assert not torch.equal(first, evaluated(model, CHANGED))


def test_a_withdrawn_version_is_not_there_and_its_number_is_not_used_again(three: Any) -> None:
    model, folder = three
    store = open_store(folder)
    withdraw(store, plan_withdrawal(store, 1))
    assert versions(store) == [1]
    with pytest.raises(BadInput, match="no version 3, which `gba-hvd model rollback` has withdrawn; it has 1"):
        gba_hvd.load_for_inference(folder, version=3)
    with pytest.raises(BadInput, match="no version 7; it has 1"):
        gba_hvd.load_for_inference(folder, version=7)
    assert gba_hvd.save_model(model, folder, build=CODE).version == 4
    assert torch.equal(gba_hvd.load_for_inference(folder)(CHANGED), evaluated(model, CHANGED))


def test_what_only_withdrawn_versions_name_goes_with_gc(three: Any) -> None:
    store = open_store(three[1])
    withdraw(store, plan_withdrawal(store, 1))
    needed = {one.name for one in read_manifest(store, 1).objects()}
    assert not needed & unneeded(store).objects.keys()
    assert delete_unneeded(store).n_bytes > 0
    assert set(store.names("rows/") | store.names("files/")) == needed


@pytest.mark.parametrize(
    ("when", "operation", "at", "newest"),
    [
        ("dies_before", "put", 1, 3),  # the mark
        *(("dies_after", "put", at, 3) for at in (1, 2, 3)),  # and the numbers
        ("dies_before", "delete", 1, 3),
        ("dies_after", "delete", 1, 3),  # version 2
        ("dies_after", "delete", 2, 1),
        ("dies_before", "delete", 3, 1),  # the mark
    ],
)
def test_where_it_dies_the_newest_is_the_old_or_the_new_one(
    three: Any, when: str, operation: str, at: int, newest: int
) -> None:
    model, folder = three
    store = open_store(folder)
    faulty = getattr(FaultyStore(store), when)(operation, at)
    with pytest.raises(Crash):
        withdraw(faulty, plan_withdrawal(faulty, 1))
    assert faulty.fired == faulty.planned
    assert read_manifest(store).version == newest
    rows = store.names("rows/")
    completes = main(["model", "rollback", str(folder), "1", "--yes", "--force"]) == 0
    assert completes == (newest != 1) and store.names("rows/") == rows
    assert versions(store) == [1] and gba_hvd.save_model(model, folder, build=CODE).version == 4


def test_a_killed_one_is_completed_by_force_only(three: Any, capsys: pytest.CaptureFixture[str]) -> None:
    store, rollback = open_store(three[1]), ["model", "rollback", str(three[1]), "1"]
    mark = "versions/deletes-" + "ab" * 8
    store.put(mark, [b"claimed"])
    assert main([*rollback, "--yes"]) != 0
    assert f"(if it was killed: --yes --force removes {mark} first)" in capsys.readouterr().err
    assert main([*rollback, "--force"]) != 0 and "--force only comes with --yes" in capsys.readouterr().err
    assert mark in store.names("versions/") and versions(store) == [1, 2, 3]
    assert main([*rollback, "--yes", "--force"]) == 0
    assert versions(store) == [1] and not store.names("versions/deletes-")


class Meanwhile:
    """A store where another process is done with something just before the first call of an operation."""

    def __init__(self, store: Store, operation: str, other: Callable[[Store], None]) -> None:
        self.url, self.names, self.delete = store.url, store.names, store.delete
        self.put, self.get = store.put, store.get
        call, self.others = getattr(store, operation), [other]

        def after_other(*args: Any) -> Any:
            if self.others:
                self.others.pop()(store)
            return call(*args)

        setattr(self, operation, after_other)


def test_a_save_does_not_take_a_number_that_was_withdrawn_since_it_looked() -> None:
    store = RamStore()
    store.put(version_name(3), [b"3"])

    def saved_and_withdrawn(store: Store) -> None:
        with next_version(store) as number:
            store.put(version_name(number), [b"4"])
        store.put(withdrawn_name(4), [b"withdrawn"])
        store.delete([version_name(4)])

    slow = Meanwhile(store, "put", saved_and_withdrawn)
    with pytest.raises(StoreError, match="another process saves version 4"), next_version(slow):
        pass
    assert not slow.others and versions(store) == [3]
    with next_version(store) as number:
        assert number == 5


def test_what_opens_the_model_while_its_newest_version_is_withdrawn_takes_the_earlier_one(three: Any) -> None:
    store = open_store(three[1])
    slow = Meanwhile(store, "get", lambda store: withdraw(store, plan_withdrawal(store, 2)))
    assert read_manifest(slow).version == 2 and not slow.others
    gone = Meanwhile(store, "get", lambda store: withdraw(store, plan_withdrawal(store, 1)))
    with pytest.raises(BadInput, match=r"000002\.json was deleted meanwhile"):
        read_manifest(gone, 2)


def test_it_is_refused_while_a_save_completes_or_another_process_deletes(three: Any) -> None:
    store = open_store(three[1])
    plan, before = plan_withdrawal(store, 1), store.names("")
    with next_version(store), pytest.raises(StoreError, match="a save completes a version"):
        withdraw(store, plan)
    with no_new_version(store), pytest.raises(StoreError, match="another process deletes versions"):
        withdraw(store, plan)
    assert store.names("") == before


def test_it_is_refused_where_it_would_do_something_else_than_planned(three: Any) -> None:
    model, folder = three
    store = open_store(folder)
    with pytest.raises(BadInput, match="version 3 is the newest"):
        plan_withdrawal(store, 3)
    plan = plan_withdrawal(store, 1)
    gba_hvd.save_model(model, folder, build=CODE)
    with pytest.raises(BadInput, match=r"its versions are 1, 2, 3, 4 now: look again"):
        withdraw(store, plan)
    assert versions(store) == [1, 2, 3, 4] and not store.names(withdrawn_name(2))


def test_the_command_changes_something_only_when_asked(three: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = three[1]
    store, rollback = open_store(folder), ["model", "rollback", str(folder), "1"]
    before = store.names("")
    assert main(rollback) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in shown[:2]] == ["version 2", "version 3"]
    assert shown[2].startswith("2 later versions (2, 3), to be withdrawn; version 1, saved 2")
    assert shown[2].endswith("becomes the newest: add --yes to do it") and store.names("") == before
    assert main([*rollback, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["to"], found["done"], [one["version"] for one in found["withdrawn"]]) == (1, False, [2, 3])
    assert main([*rollback, "--yes"]) == 0
    assert "2 later versions (2, 3) withdrawn. The newest is version 1, saved 2" in capsys.readouterr().out
    assert versions(store) == [1]


def test_the_command_does_not_go_back_to_a_version_that_is_damaged(
    three: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = three[1]
    store = open_store(folder)
    one = next(iter(read_manifest(store, 1).objects()))
    (folder / one.name).write_bytes(bytes(one.n_bytes))
    assert main(["model", "rollback", str(folder), "1", "--yes"]) != 0
    assert "nothing was changed: " in capsys.readouterr().err and versions(store) == [1, 2, 3]
