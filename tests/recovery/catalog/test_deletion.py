"""All checkpoints of a location go, and nothing of a job that lives."""

from __future__ import annotations

import pytest

from recovery.catalog.chains import Chain, chains
from recovery.catalog.claims import claim, release, renew
from recovery.catalog.deletion import delete_all, plan_deletion
from recovery.catalog.retention import objects_of
from recovery.errors import BadInput, Fenced
from tests.recovery.catalog.test_retention import chain
from tests.recovery.catalog.test_rollback import stored
from tests.recovery.stores import Crash, FaultyStore

MANIFESTS = chain(1, 2, 3)


def test_all_that_saves_have_written_goes_and_nothing_else() -> None:
    store = stored(MANIFESTS)
    store.put("versions/000001.json", [b"a saved model"])
    store.objects["blobs/notes.txt"] = b"of a person"
    store.objects[MANIFESTS[0].name] = b"cut off"
    before = dict(store.objects)
    plan = plan_deletion(store)
    assert store.objects == before
    assert plan.manifests == tuple(one.name for one in reversed(MANIFESTS))
    assert set(plan.objects) == {name for one in MANIFESTS for name in objects_of(one)}
    assert plan.n_bytes == sum(len(before[name]) for name in (*plan.manifests, *plan.objects))
    assert delete_all(store) == plan
    assert set(store.objects) == {"versions/000001.json", "blobs/notes.txt"}
    assert delete_all(store).manifests == ()


def test_a_job_that_lives_is_not_touched() -> None:
    store = stored(MANIFESTS)
    lives, before = claim(store, "job.1"), None

    def sleep(pause_s: float) -> None:
        nonlocal lives, before
        lives = renew(store, lives)
        before = {name: data for name, data in store.objects.items() if not name.startswith("claims/")}

    store.objects[f"{lives.name}/000000"] = b"{}"  # of another host
    with pytest.raises(BadInput, match=r"is being written to by job 'job\.1'"):
        delete_all(store, sleep=sleep)
    assert before is not None
    assert {name: data for name, data in store.objects.items() if not name.startswith("claims/")} == before
    release(store, lives)
    assert delete_all(store).manifests
    assert not store.objects


def test_a_job_that_comes_meanwhile_keeps_what_is_left() -> None:
    inner = stored(MANIFESTS)

    class Taken(FaultyStore):
        def delete(self, names: object) -> None:
            super().delete(names)  # type: ignore[arg-type]
            if MANIFESTS[-1].name in names:  # type: ignore[operator]
                claim(inner, "job.2", takeover=True)

    with pytest.raises(Fenced, match=r"job 'job\.2'"):
        delete_all(Taken(inner))
    assert {name for name in inner.objects if name.startswith("blobs/")} == set(plan_deletion(inner).objects) != set()
    assert any("job.2" in name for name in inner.objects)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_one_that_dies_is_done_again(at: int) -> None:
    inner = stored(MANIFESTS)
    dying = FaultyStore(inner).dies_before("delete", at)
    with pytest.raises(Crash):
        delete_all(dying)
    assert dying.fired == dying.planned
    assert all(isinstance(one, Chain) for one in chains(inner))
    delete_all(inner, sleep=lambda _: None)
    assert not inner.objects
