"""What nobody needs goes; what somebody needs, or somebody else wrote, stays."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.catalog.best import best_checkpoint, unsaved_best
from recovery.catalog.claims import claim, release
from recovery.catalog.retention import Expired, Keep, delete, expired, first_epoch_of, gc, objects_of, orphaned_objects
from recovery.errors import BadInput
from recovery.format.manifest import Blob, Manifest, StateBlob, to_json
from recovery.rows import Schema
from recovery.testing import RamStore
from tests.recovery.stores import Crash, FaultyStore


def saved(number: int, parent: Manifest | None = None, *, epoch: int = 1, step: int | None = None) -> Manifest:
    """A checkpoint per 100 steps and per 60 seconds."""
    prefix = f"blobs/{epoch:06d}-{number:08d}/"
    return Manifest(
        epoch,
        number,
        "delta" if parent else "full",
        parent.name if parent else None,
        100 * number if step is None else step,
        0,
        60.0 * number,
        Schema((), 1),
        (Blob(prefix + "0000", 0, ()),),
        StateBlob(prefix + "state", 5, 5, "raw", "0"),
    )


def names(manifests: list[Manifest]) -> set[str]:
    return {manifest.name for manifest in manifests}


def kept(manifests: list[Manifest], found: Expired) -> list[int]:
    return sorted(manifest.number for manifest in manifests if manifest.name not in found.manifests)


def chain(*numbers: int, epoch: int = 1, base: Manifest | None = None) -> list[Manifest]:
    """A base, and one partial save on top of the other."""
    found = [base] if base else []
    for number in numbers:
        found.append(saved(number, found[-1] if found else None, epoch=epoch))
    return found[1:] if base else found


def test_the_last_ones_are_kept_and_the_sentence_says_so() -> None:
    manifests = [saved(number) for number in range(5)]
    found = expired(manifests, names(manifests), Keep(last=2))
    assert kept(manifests, found) == [3, 4]
    assert found.manifests == tuple(f"manifests/000001-0000000{number}.json" for number in (2, 1, 0)), "newest first"
    assert set(found.blobs) == {name for manifest in manifests[:3] for name in objects_of(manifest)}
    assert found.reason == ("3 of 5 checkpoints of this run expire: the last 2 are kept, and 0 that these are based on")


def test_what_a_kept_one_is_based_on_is_kept() -> None:
    manifests = chain(0, 1, 2) + chain(3, 4, 5)
    assert kept(manifests, expired(manifests, names(manifests), Keep(last=1))) == [3, 4, 5]
    assert kept(manifests, expired(manifests, names(manifests), Keep(last=3))) == [3, 4, 5]
    found = expired(manifests, names(manifests), Keep(last=4))
    assert kept(manifests, found) == [0, 1, 2, 3, 4, 5] and "and 2 that these are based on" in found.reason


@pytest.mark.parametrize("keep", [Keep(1, every_steps=300), Keep(1, every_s=180), Keep(1, 300, 180)])
def test_the_first_of_every_period_is_kept_for_good(keep: Keep) -> None:
    manifests = [saved(number) for number in range(10)]
    assert kept(manifests, expired(manifests, names(manifests), keep)) == [0, 3, 6, 9]
    later = [saved(number) for number in (0, 3, 6, 9, 10)]
    assert kept(later, expired(later, names(later), keep)) == [0, 3, 6, 9, 10]


def of_epochs(manifests: list[Manifest], *epochs: int | None) -> list[Manifest]:
    at = [{"position": {"epoch": epoch, "steps_done": 1}} for epoch in epochs]
    return [replace(one, about=about) for one, about in zip(manifests, at, strict=True)]


def test_the_last_one_of_each_of_the_newest_epochs_is_kept() -> None:
    manifests = of_epochs([saved(number) for number in range(8)], 0, 0, 2, 2, 2, 3, 4, 4)
    found = expired(manifests, names(manifests), Keep(last=1, epochs=3))
    assert kept(manifests, found) == [4, 5, 7]
    assert "the last 1 are kept, the last one of each of the newest 3 epochs, and 0" in found.reason
    assert kept(manifests, expired(manifests, names(manifests), Keep(last=1, epochs=9))) == [1, 4, 5, 7]
    assert kept(manifests, expired(manifests, names(manifests), Keep(last=4, epochs=2))) == [4, 5, 6, 7]
    assert kept(manifests, expired(manifests, names(manifests), Keep(1, every_steps=300, epochs=2))) == [0, 3, 5, 6, 7]


def test_an_epoch_has_one_last_checkpoint_also_where_several_launches_saved_it() -> None:
    manifests = of_epochs([saved(0), saved(1), saved(2, epoch=2), saved(2, epoch=3)], 0, 1, 1, 1)
    found = expired(manifests, names(manifests), Keep(last=1, epochs=2))
    assert found.manifests == (manifests[2].name, manifests[1].name)


def test_what_the_last_one_of_an_epoch_is_based_on_and_the_best_one_stay_beside_it() -> None:
    manifests = of_epochs(chain(0, 1, 2) + chain(3, 4, 5), 0, 0, 1, 1, 2, 2)
    assert kept(manifests, expired(manifests, names(manifests), Keep(last=1, epochs=2))) == [3, 4, 5]
    alone = of_epochs([saved(number) for number in range(4)], 0, 0, 1, 1)
    best = [replace(one, about={**one.about, "best_step": 150}) for one in alone]
    assert kept(best, expired(best, names(best), Keep(last=1, epochs=1))) == [2, 3]
    based = of_epochs(chain(0, 1, 2) + chain(3), 0, 1, 1, 2)
    assert kept(based, expired(based, names(based), Keep(last=1, epochs=2))) == [0, 1, 2, 3]


@pytest.mark.parametrize("none", [None, "2"])
def test_checkpoints_that_name_no_epoch_are_of_none(none: Any) -> None:
    manifests = of_epochs([saved(number) for number in range(5)], none, 0, none, 0, none)
    assert kept(manifests, expired(manifests, names(manifests), Keep(last=1, epochs=5))) == [3, 4]


def test_the_first_one_from_the_best_step_on_is_kept_with_what_it_is_based_on() -> None:
    manifests = chain(0, 1, 2) + chain(3, 4, 5)
    best = [replace(manifest, about={"best_step": 50 if manifest.number < 5 else 130}) for manifest in manifests]
    found = expired(best, names(best), Keep(last=1))
    assert kept(best, found) == [0, 1, 2, 3, 4, 5] and "the one of the best model" in found.reason
    earlier = expired(best[:5], names(best[:5]), Keep(last=1))
    assert kept(best[:5], earlier) == [0, 1, 3, 4]
    final = replace(best[5], about={"best_step": 0, "last_gasp": True})
    assert kept([*best[:5], final], expired([*best[:5], final], names(best), Keep(last=1))) == [0, 1, 3, 4, 5]
    ahead = [replace(manifest, about={"best_step": 501}) for manifest in manifests]
    assert kept(ahead, expired(ahead, names(ahead), Keep(last=1))) == [3, 4, 5], "it is yet to be saved"


def test_the_best_checkpoint_is_of_the_run_that_saved_the_newest_one() -> None:
    about = {"job": "j", "first_epoch": 2, "best_step": 150, "best_metric": "valid_auc", "best_value": 0.75}
    earlier = [replace(saved(1), about={"job": "j", "best_step": 100})]
    own = [replace(saved(number, epoch=2), about=about) for number in (1, 2, 3)]
    assert best_checkpoint([]) is None
    assert best_checkpoint([saved(1)]) is None, "it names none"
    found = best_checkpoint([*own, *earlier])
    assert found is not None
    assert (found.manifest.name, found.words) == (own[1].name, "valid_auc 0.7500 of step 150")
    of_an_older_version = best_checkpoint(earlier)
    assert of_an_older_version is not None and of_an_older_version.words == "best of step 100"
    assert best_checkpoint([replace(own[0], about={**about, "best_step": 101})]) is None, "it is yet to be saved"


def test_no_checkpoint_after_a_worse_evaluation_has_the_best_model() -> None:
    about = {"job": "j", "best_metric": "auc"}
    first = replace(saved(1), about={**about, "best_step": 100, "best_value": 0.6})
    later = [replace(saved(n), about={**about, "best_step": 150, "best_value": 0.9, "best_until": 200}) for n in (2, 3)]
    found = best_checkpoint([first, *later])
    assert found is not None and found.unsaved is not None
    assert (found.manifest, found.words) == (first, "auc 0.6000 of step 100"), "the best one that is saved"
    assert found.unsaved.words.startswith("the best model, auc 0.9000 of step 150, was not saved: ")
    assert best_checkpoint(later) is None
    unsaved = unsaved_best(later)
    assert unsaved is not None and unsaved == found.unsaved
    assert kept([first, *later], expired([first, *later], names([first, *later]), Keep(last=1))) == [1, 3]
    of_another_metric = replace(first, about={**first.about, "best_metric": "loss"})
    assert best_checkpoint([of_another_metric, *later]) is None


def test_the_best_checkpoint_of_a_run_may_be_of_the_job_that_it_resumed_from() -> None:
    about = {"best_step": 100, "best_metric": "auc", "best_value": 0.75}
    theirs = [replace(saved(n), about={**about, "job": "theirs"}) for n in (1, 2)]
    own = [replace(saved(n, epoch=2), about={**about, "job": "mine", "first_epoch": 2}) for n in (3, 4)]
    found = best_checkpoint([*own, *theirs])
    assert found is not None and found.manifest == theirs[0]
    other = [replace(one, about={**one.about, "best_value": 0.5}) for one in theirs]
    found = best_checkpoint([*own, *other])
    assert found is not None and found.manifest == own[0], "those are of another training"


def test_what_another_run_wrote_is_never_touched_nor_what_it_is_based_on() -> None:
    theirs = chain(0, 1)
    mine = chain(0, 1, epoch=2, base=theirs[1]) + [saved(number, epoch=2) for number in range(2, 6)]
    manifests = theirs + mine
    found = expired(manifests, names(mine), Keep(last=1))
    assert set(found.manifests) == names(mine[:-1])
    after_me = saved(0, mine[1], epoch=3)
    found = expired([*manifests, after_me], names(mine), Keep(last=1))
    assert set(found.manifests) == names(mine[2:-1])


@pytest.mark.parametrize(
    ("about", "first"),
    [
        ({"job": "mine", "first_epoch": 2}, 2),
        ({"job": "mine"}, 5),  # of a version that did not write it
        ({"job": "other", "first_epoch": 2}, 0),
        ({}, 0),
        ({"job": "mine", "first_epoch": 0}, 0),
        ({"job": "mine", "first_epoch": 6}, 0),
        ({"job": "mine", "first_epoch": "2"}, 0),
    ],
)
def test_a_launch_continues_the_run_of_the_checkpoint_that_it_resumes_from(about: dict[str, Any], first: int) -> None:
    assert first_epoch_of(replace(saved(0, epoch=5), about=about), "mine") == first


def test_a_clock_that_was_set_back_costs_none_of_the_newest() -> None:
    manifests = [replace(saved(number), saved_unix_s=1000.0 - 100 * number) for number in range(6)]
    assert kept(manifests, expired(manifests, names(manifests), Keep(last=2))) == [4, 5]
    assert {4, 5} <= set(kept(manifests, expired(manifests, names(manifests), Keep(last=2, every_s=250.0))))


@pytest.mark.slow
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_whatever_is_left_can_still_be_restored(parents: list[int], data: st.DataObject) -> None:
    manifests: list[Manifest] = []
    for number, back in enumerate(parents):
        parent = manifests[-back] if 0 < back <= len(manifests) else None
        manifests.append(saved(number, parent, epoch=1 + number // 4))
    mine = data.draw(st.sets(st.sampled_from(sorted(names(manifests)))))
    found = expired(manifests, mine, Keep(data.draw(st.integers(1, 4)), data.draw(st.sampled_from([None, 300]))))
    left = [manifest for manifest in manifests if manifest.name not in found.manifests]
    assert set(found.manifests) <= mine
    assert all(manifest.parent is None or manifest.parent in names(left) for manifest in left)
    assert not {name for manifest in left for name in objects_of(manifest)} & set(found.blobs)
    if mine:
        assert max(mine) in names(left)


@pytest.mark.parametrize(
    "bad",
    [
        {"last": 0},
        {"every_steps": 0},
        {"every_s": -1.0},
        {"every_s": float("inf")},
        {"epochs": 0},
        {"epochs": 1.5},
        {"epochs": float("inf")},
        {"epochs": "7"},
        {"epochs": True},
    ],
)
def test_settings_without_sense_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        Keep(**bad)  # type: ignore[arg-type]


# --- deleting --------------------------------------------------------------------------------------------------------


def fill(store: RamStore, manifests: list[Manifest]) -> None:
    for manifest in manifests:
        for name in objects_of(manifest):
            store.put(name, [b"bytes"])
        store.put(manifest.name, [to_json(manifest)])


def readable(store: RamStore, manifests: list[Manifest]) -> bool:
    """Whether every manifest that is there has its parent and its blobs."""
    there = set(store.objects)
    return all(
        {*objects_of(manifest), *([manifest.parent] if manifest.parent else [])} <= there
        for manifest in manifests
        if manifest.name in there
    )


def test_a_crash_at_any_deletion_leaves_no_checkpoint_without_its_parts() -> None:
    manifests = chain(0, 1, 2) + chain(3, 4)
    found = expired(manifests, names(manifests), Keep(last=1))
    for at in range(1, len(found.manifests) + 2):
        store = RamStore()
        fill(store, manifests)
        faulty = FaultyStore(store).dies_before("delete", at)
        with pytest.raises(Crash):
            delete(faulty, found)
        assert faulty.fired == faulty.planned
        assert readable(store, manifests)
        release(store, claim(store, "next", sleep=lambda _: None))
        claim(store, "next", sleep=lambda _: None)
        delete(store, replace(found, blobs=()))
        gc(store, really=True)
        assert {name for name in store.objects if name.startswith("blobs/")} == {
            name for manifest in manifests[3:] for name in objects_of(manifest)
        }


def test_orphaned_objects_of_dead_epochs_are_found_and_those_of_the_newest_left_alone(ram: RamStore) -> None:
    claim(ram, "job")
    fill(ram, [saved(0)])
    ram.put("blobs/000001-00000001/0000", [b"a save that died"])
    old_claims = {name: len(data) for name, data in ram.objects.items() if name.startswith("claims/")}
    assert not gc(ram).objects
    claim(ram, "job")
    ram.put("blobs/000002-00000000/0000", [b"a save in flight"])
    ram.put("probes/x", [b"?"])
    found = gc(ram)
    assert found.objects == {"blobs/000001-00000001/0000": 16, **old_claims}
    assert found.n_bytes == 16 + sum(old_claims.values())
    assert found.reason == "written under claims before 2, the newest one, and in no checkpoint"
    assert "blobs/000001-00000001/0000" in ram.objects, "nothing is deleted unless it is asked to"
    gc(ram, really=True)
    assert not set(found.objects) & set(ram.objects)
    assert readable(ram, [saved(0)]) and saved(0).name in ram.objects
    assert not gc(ram).objects


def test_without_any_claim_nothing_is_orphaned() -> None:
    found = orphaned_objects({"blobs/000001-00000001/0000": 5}, [], [])
    assert not found.objects and "no claim" in found.reason


def test_the_blobs_of_a_damaged_checkpoint_stay(ram: RamStore) -> None:
    fill(ram, [saved(0), saved(1)])
    claim(ram, "job")
    ram.objects[saved(0).name] = ram.objects[saved(0).name][:-3]
    before = dict(ram.objects)
    found = gc(ram, really=True)
    assert not found.objects and "those of 1 damaged ones stay" in found.reason
    assert ram.objects == before


def test_beside_a_checkpoint_of_a_newer_format_nothing_is_deleted(ram: RamStore) -> None:
    from tests.recovery.format.test_manifest import with_checksum

    claim(ram, "job")
    ram.put("manifests/000001-00000000.json", [with_checksum({"format": 9, "manifest": {}})])
    with pytest.raises(BadInput, match="in format 9"):
        gc(ram, really=True)


def test_retention_of_a_long_run_keeps_a_bounded_number() -> None:
    rng, manifests, mine = random.Random(1), list[Manifest](), set[str]()
    for number in range(300):
        parent = manifests[-1] if manifests and rng.random() < 0.8 and number % 8 else None
        manifests.append(saved(number, parent))
        mine.add(manifests[-1].name)
        found = expired(manifests, mine, Keep(last=3))
        manifests = [manifest for manifest in manifests if manifest.name not in found.manifests]
        assert len(manifests) <= 3 + 8
