"""An earlier checkpoint becomes the newest at one moment, and keeps all that it needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recovery.catalog.chains import Chain, chains
from recovery.catalog.claims import Claim, claim, release, renew
from recovery.catalog.retention import gc, objects_of
from recovery.catalog.rollback import ROLLED_BACK, plan_rollback, roll_back
from recovery.errors import BadInput, Damaged, StoreError
from recovery.format.manifest import Manifest, to_json
from recovery.storage.store import Store, manifest_names
from recovery.testing import RamStore
from tests.recovery.catalog.test_retention import chain, saved
from tests.recovery.stores import Crash, FaultyStore


def stored(manifests: list[Manifest]) -> RamStore:
    """With the claim of the job that saved them, which has ended."""
    store = RamStore()
    release(store, claim(store, "job.1"))
    for manifest in manifests:
        for name in objects_of(manifest):
            store.put(name, [b"" if name.endswith("0000") else b"state"])
        store.put(manifest.name, [to_json(manifest)])
    return store


def newest(store: Store) -> Chain:
    found = next(iter(chains(store)))
    assert isinstance(found, Chain)
    return found


def test_the_earlier_one_is_the_newest_and_has_its_chain() -> None:
    base, first, second, _ = manifests = chain(1, 2, 3, 4)
    later = saved(5)
    store = stored([*manifests, later])
    done = roll_back(store, plan_rollback(store, second.name))
    assert done == replace(second, epoch=2, about={ROLLED_BACK: later.name})
    assert newest(store).manifests == (base, first, done)
    assert manifest_names(store) == [base.name, first.name, done.name]
    kept = {name for one in (base, first, second) for name in objects_of(one)}
    assert set(store.names("blobs/")) == kept
    assert not any(name.startswith("blobs/") for name in gc(store, really=True).objects)
    assert newest(store).manifests == (base, first, done)
    release(store, claim(store, "job.2", sleep=lambda _: pytest.fail("the claim was not released")))
    again = roll_back(store, plan_rollback(store, base.name))
    assert newest(store).manifests == (again,) and set(store.names("blobs/")) == set(objects_of(base))


def test_damaged_ones_after_it_go_and_a_damaged_one_is_not_gone_back_to() -> None:
    base, first, second = chain(1, 2, 3)
    store = stored([base, first, second])
    store.objects[second.name] = b"cut off"
    done = roll_back(store, plan_rollback(store, first.name))
    assert manifest_names(store) == [base.name, done.name]
    store.delete([base.name])
    with pytest.raises(Damaged, match=f"{base.name} is gone"):
        plan_rollback(store, done.name)
    store = stored([base, first])
    with pytest.raises(BadInput, match="there is nothing to go back from"):
        plan_rollback(store, first.name)


@pytest.mark.parametrize(
    ("when", "operation", "at", "is_done"),
    [
        ("dies_before", "put", 1, False),  # the claim
        ("dies_after", "put", 1, False),
        ("dies_before", "put", 2, False),  # the manifest
        ("dies_after", "put", 2, True),
        *(
            ("dies_before", "delete", at, True) for at in (1, 2, 3, 4)
        ),  # two later ones, the earlier one itself, objects
        ("dies_after", "delete", 4, True),
        ("dies_before", "put", 3, True),  # the release of the claim
    ],
)
def test_a_rollback_that_dies_leaves_the_old_or_the_new_newest(
    when: str, operation: str, at: int, is_done: bool
) -> None:
    base, first, second, third = chain(1, 2, 3, 4)
    inner = stored([base, first, second, third])
    faulty = getattr(FaultyStore(inner), when)(operation, at)
    with pytest.raises(Crash):
        roll_back(faulty, plan_rollback(faulty, first.name))
    assert faulty.fired == faulty.planned
    done = replace(first, epoch=2, about={ROLLED_BACK: third.name})
    assert newest(inner).manifests == ((base, done) if is_done else (base, first, second, third))


def test_a_store_that_fails_before_the_manifest_changes_nothing() -> None:
    base, first = chain(1, 2)
    inner = stored([base, first])
    faulty = FaultyStore(inner).fails("put", 2)
    with pytest.raises(StoreError):
        roll_back(faulty, plan_rollback(faulty, base.name))
    assert faulty.fired == faulty.planned and newest(inner).manifests == (base, first)


def test_it_is_refused_while_a_job_holds_the_location() -> None:
    base, first = chain(1, 2)
    store = stored([base, first])
    held: list[Claim] = [claim(store, "job.2")]
    with pytest.raises(BadInput, match=r"is being written to by job 'job\.2'"):
        roll_back(store, plan_rollback(store, base.name), sleep=lambda _: held.append(renew(store, held[-1])))
    assert newest(store).manifests == (base, first)


def test_it_is_refused_where_a_checkpoint_came_after_the_plan() -> None:
    base, first, second = chain(1, 2, 3)
    store = stored([base, first])
    plan = plan_rollback(store, base.name)
    for name in objects_of(second):
        store.put(name, [b"" if name.endswith("0000") else b"state"])
    store.put(second.name, [to_json(second)])
    with pytest.raises(BadInput, match="is the newest now: look again"):
        roll_back(store, plan)
    assert newest(store).manifests == (base, first, second)
