"""The vocabulary of a hashed table in shard memory: lookup, admission, eviction; what a kill and a reader find."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd import kernels
from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm import vocabulary_kernels
from gba_hvd.shm.layout import BUCKET, NO_KEY, HashedSpec, Layout, SlotSpec, ids_of, keys_of_ids
from gba_hvd.shm.vocabulary import Stat, Vocabulary

MIN, MAX = -(2**63), 2**63 - 1


def vocabulary(capacity: int, *, n_shards: int = 1, fallback: int = 4, **settings: Any) -> Vocabulary:
    spec = HashedSpec.of(capacity, fallback, n_shards, **settings)
    layout = Layout.of({"t": (0, 3)}, (SlotSpec("sum"),), n_shards, 5, 0.1, hashed={"t": spec})
    found = Vocabulary(np.zeros(n_shards * layout.region_words, np.float32), layout, layout.groups[0])
    for shard in range(n_shards):
        found.clear(shard)
    return found


def look_up(vocabulary: Vocabulary, ids: dict[int, int] | list[int], step: int) -> None:
    """A step in which these ids were looked up so often."""
    counted = ids if isinstance(ids, dict) else dict.fromkeys(ids, 1)
    keys, accesses = keys_of_ids(np.array(list(counted), np.int64)), np.array(list(counted.values()), np.uint32)
    vocabulary.looked_up(keys, vocabulary.rows(keys), accesses, np.arange(vocabulary._layout.n_shards), step)


def has(vocabulary: Vocabulary, ids: list[int]) -> list[bool]:
    return list(map(bool, vocabulary.has(keys_of_ids(np.array(ids, np.int64)))))


def weights(vocabulary: Vocabulary, ids: list[int]) -> np.ndarray:
    out = np.empty((len(ids), 3), np.float32)
    vocabulary.gather(keys_of_ids(np.array(ids, np.int64)), 0, out)
    return out


@given(st.lists(st.integers(MIN, MAX)))
def test_every_id_has_one_key_and_a_key_gives_its_id_back(ids: list[int]) -> None:
    given_ids = np.array(ids, np.int64)
    keys = keys_of_ids(given_ids)
    assert ids_of(keys).tolist() == ids
    filled = np.empty(len(ids), np.int64)
    bad = kernels.fill_hashed_keys(given_ids, filled)
    n = len(ids) if bad < 0 else bad
    assert filled[:n].tolist() == keys[:n].tolist() and (bad < 0 or ids[bad] == NO_KEY)


def test_the_id_without_a_key_is_the_smallest_number() -> None:
    assert keys_of_ids(np.array([MIN])).tolist() == [NO_KEY]


@pytest.mark.parametrize("n_shards", [1, 3, 5])
def test_kernels_and_numpy_have_negative_keys_in_the_same_shard(n_shards: int) -> None:
    keys = keys_of_ids(np.arange(-500, 500))
    owner = np.arange(n_shards, dtype=np.int32)
    start, order = np.empty(n_shards + 1, np.int64), np.empty(len(keys), np.int32)
    kernels.order_by_owner(keys, n_shards, owner, start, order)
    for shard in range(n_shards):
        assert set(keys[order[start[shard] : start[shard + 1]]].tolist()) == set(keys[keys % n_shards == shard])
    found = vocabulary(2000, n_shards=n_shards, fallback=7)
    look_up(found, list(range(-500, 500)), 1)
    rows = found.rows(keys)
    assert (rows % n_shards == keys % n_shards).all() and len(set(rows.tolist())) == 1000


def test_an_id_is_admitted_by_its_lookups_and_then_starts_like_a_row_of_that_number() -> None:
    found = vocabulary(100, admit_after=3)
    ids = [7, -1, MAX]
    look_up(found, {7: 1, -1: 2, MAX: 3}, 1)
    assert has(found, ids) == [False, False, True]
    look_up(found, {7: 1, -1: 1}, 2)
    assert has(found, ids) == [False, True, True]
    look_up(found, {7: 1}, 3)
    assert has(found, ids) == [True, True, True]
    plain = Layout.of({"t": (8, 3)}, (SlotSpec("sum"),), 1, 5, 0.1)
    rows = np.zeros(plain.region_words, np.float32)
    kernels.init_rows(rows, plain.groups[0].at, 7, 8, 0, 1, 3, found._seed, np.float32(0.1))
    assert np.array_equal(weights(found, [7])[0], rows[plain.groups[0].at + 7 * 7 :][:3])


def test_ids_without_a_row_share_the_fallback_rows() -> None:
    found = vocabulary(100, n_shards=2, fallback=6)
    keys = keys_of_ids(np.arange(1000))
    rows = found.rows(keys)
    assert set(rows.tolist()) == set(range(found.spec.entries * 2, found.spec.entries * 2 + 6))
    assert (weights(found, [1, 2, 3]) != 0).all()


@pytest.mark.parametrize("n_shards", [1, 2, 3])
@pytest.mark.parametrize("per_shard", [2, 4, 10])
def test_an_id_without_a_row_is_the_sum_of_two_distinct_rows_of_its_shard(n_shards: int, per_shard: int) -> None:
    found = vocabulary(100, n_shards=n_shards, fallback=per_shard * n_shards, fallback_hashes=2)
    ids = list(range(-1000, 1000))
    keys = keys_of_ids(np.array(ids))
    half, pairs, first_shared = per_shard * n_shards // 2, set(), found.n_own_rows
    for key, (first, second) in zip(keys.tolist(), found.shared_rows(keys).T.tolist(), strict=True):
        upper = key % 2**64 >> 32
        assert first == first_shared + key % half
        assert second == first_shared + half + key % n_shards + n_shards * (upper % (per_shard // 2))
        assert first % n_shards == second % n_shards == key % n_shards and first != second
        pairs.add((first, second))
    assert len(pairs) == n_shards * (per_shard // 2) ** 2
    assert np.array_equal(found.rows(keys), found.shared_rows(keys)[0])
    assert np.array_equal(weights(found, ids), sums(found, keys))


def sums(vocabulary: Vocabulary, keys: np.ndarray) -> np.ndarray:
    """float32 [n, 3], of ids without a row, read record by record."""
    rows = vocabulary.shared_rows(keys)
    starts = [vocabulary._layout.record_starts(some, vocabulary._group).astype(np.int64) for some in rows]
    return np.sum([vocabulary._flat[at[:, None] + np.arange(3)] for at in starts], axis=0, dtype=np.float32)


def test_the_sums_of_ids_without_a_row_have_the_deviation_of_the_table() -> None:
    found = vocabulary(16, fallback=4000, fallback_hashes=2)
    assert np.std(weights(found, list(range(20_000)))) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(("fallback", "hashes"), [(5, 2), (4, 3), (4, 0)])
def test_shared_rows_that_make_no_pairs_are_refused(fallback: int, hashes: int) -> None:
    with pytest.raises(ValueError, match=f"{hashes} hashes with {fallback} fallback rows"):
        HashedSpec(16, fallback, fallback_hashes=hashes)


def test_shared_rows_are_rounded_up_to_pairs_in_each_shard() -> None:
    assert [HashedSpec.of(16, n, 4, fallback_hashes=2).fallback for n in (2, 8, 9, 17)] == [2, 2, 4, 6]
    assert [HashedSpec.of(16, n, 4).fallback for n in (2, 8, 9)] == [1, 2, 3]


def mix(x: int) -> int:
    """The finaliser of splitmix64, of a key's 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


class Model:
    """One bucket, as plain Python has it: [id, uses, last step] in each place. With "lfu" a filter counts."""

    def __init__(self, evict: str, evict_after: int) -> None:
        self.cells: list[list[int] | None] = [None] * BUCKET
        self.evict, self.evict_after = evict, evict_after
        self.filter, self.counted, self.used = [0] * (4 * BUCKET), 0, 0

    def step(self, ids: dict[int, int], step: int) -> None:
        by_id = {cell[0]: cell for cell in self.cells if cell}
        for id_, n in ids.items():
            if id_ in by_id:
                by_id[id_][1:] = [by_id[id_][1] + n, step]
        new = [id_ for id_ in ids if id_ not in by_id]
        self.new: list[list[int]] = []  # cells that were given away in this step
        for id_ in sorted(new, key=lambda id_: int(keys_of_ids(np.array([id_]))[0])):
            seen = self._seen(id_, ids[id_]) if self.evict == "lfu" else ids[id_]
            place = self._place(step, seen)
            if place is not None:
                self.cells[place] = [id_, seen, step]
                self.new.append(self.cells[place])
        if self.evict == "lfu" and self.used >= 16 * BUCKET:
            self.used = 0
            for cell in filter(None, self.cells):
                cell[1] //= 2
        if self.counted >= 4 * BUCKET:
            self.counted, self.filter = 0, [count // 2 for count in self.filter]
        if self.evict == "ttl":
            for place, cell in enumerate(self.cells):
                if cell and step - cell[2] > self.evict_after:
                    self.cells[place] = None

    def _seen(self, id_: int, n: int) -> int:
        """Lookups of an id so far, of which the filter knows no less than there were since it forgot."""
        bits = mix(mix(int(keys_of_ids(np.array([id_])).view(np.uint64)[0])))
        both = [half * len(self.filter) >> 32 for half in (bits % 2**32, bits >> 32)]
        seen = min(255, min(self.filter[at] for at in both) + n)
        for at in both:
            self.filter[at] = max(self.filter[at], seen)
        self.counted, self.used = self.counted + n, self.used + n
        return seen

    def _place(self, step: int, seen: int) -> int | None:
        if None in self.cells:
            return self.cells.index(None)
        cells = [(cell, place) for place, cell in enumerate(self.cells) if cell]
        cells = [one for one in cells if one[0] not in self.new]
        if self.evict == "ttl":
            cells = [(cell, place) for cell, place in cells if step - cell[2] > self.evict_after]
            return min(((cell[2], place) for cell, place in cells), default=(0, None))[1]
        if self.evict == "lfu":
            uses, _, place = min(((cell[1], cell[2], place) for cell, place in cells), default=(255, 0, None))
            return place if seen > uses else None
        return None


@pytest.mark.slow
@given(
    st.lists(st.dictionaries(st.integers(-30, 30), st.integers(1, 9), max_size=20), max_size=25),
    st.sampled_from([("", 0), ("lfu", 0), ("ttl", 3)]),
)
def test_a_full_bucket_evicts_as_the_model_does(steps: list[dict[int, int]], evict: tuple[str, int]) -> None:
    found, model = vocabulary(BUCKET, evict=evict[0], evict_after_steps=evict[1]), Model(*evict)
    for step, ids in enumerate(steps, 1):
        look_up(found, ids, step)
        model.step(ids, step)
        expected = sorted(cell[0] for cell in model.cells if cell)
        assert found.ids([0]).tolist() == expected
        uses = {int(ids_of(found.keys(0)[[p]])[0]): found.uses(0)[p].tolist() for p in range(BUCKET)}
        assert all(uses[cell[0]] == [cell[1], cell[2] + 1] for cell in model.cells if cell)
        assert found.stats([0]).size == len(expected)


@pytest.mark.slow
@given(st.lists(st.dictionaries(st.integers(0, 40), st.integers(1, 3), max_size=20), max_size=20), st.integers(1, 6))
def test_with_room_for_all_admission_counts_lookups(steps: list[dict[int, int]], admit_after: int) -> None:
    found, counts = vocabulary(2000, n_shards=2, admit_after=admit_after), dict.fromkeys(range(41), 0)
    for step, ids in enumerate(steps):
        look_up(found, ids, step)
        for id_, n in ids.items():
            counts[id_] += n
        assert found.ids([0, 1]).tolist() == [id_ for id_, n in counts.items() if n >= admit_after]
    stats = found.stats([0, 1])
    assert stats.lookups == sum(sum(ids.values()) for ids in steps) and stats.evicted == stats.no_room == 0


def test_ids_that_are_looked_up_about_as_often_do_not_evict_each_other() -> None:
    found = vocabulary(BUCKET, admit_after=2, evict="lfu")
    for step in range(300):
        look_up(found, [step % 40, (step + 20) % 40], step)
    assert found.stats([0]).evicted < 20 and found.stats([0]).size == BUCKET


def test_an_id_that_is_looked_up_more_than_others_gets_a_row_and_ids_that_nobody_wants_any_more_go() -> None:
    found, step = vocabulary(BUCKET, admit_after=2, evict="lfu"), 0
    for first in (0, 100, 200):  # who is popular changes
        for step in range(step, step + 60):
            rare = range(1000 + 9 * step, 1009 + 9 * step)
            look_up(found, {**dict.fromkeys(range(first, first + 12), 3), **dict.fromkeys(rare, 1)}, step)
        assert all(has(found, list(range(first, first + 12))))


def test_an_id_that_was_counted_as_often_as_the_filter_can_takes_the_row_of_one_that_is_used_more() -> None:
    found = vocabulary(BUCKET, evict="lfu")
    look_up(found, list(range(16)), 1)
    look_up(found, dict.fromkeys(range(16), 1000), 2)
    look_up(found, {20: 200}, 3)
    assert not has(found, [20])[0] and found.uses(0)[:BUCKET, 0].min() > 255
    look_up(found, {20: 255}, 4)
    assert has(found, [20])[0]


def test_assigned_ids_get_a_row_whatever_the_others_are_used() -> None:
    found = vocabulary(BUCKET, evict="lfu")
    look_up(found, dict.fromkeys(range(16), 50), 1)
    found.fill(np.arange(100, 116), np.ones((16, 3), np.float32), 2)
    assert all(has(found, list(range(100, 116))))
    with pytest.raises(ShardMemoryError, match="1 of 1 assigned ids found no room"):
        found.fill(np.array([200]), np.ones((1, 3), np.float32), 2)


def test_the_filter_forgets_so_that_it_does_not_fill_up() -> None:
    found = vocabulary(BUCKET, admit_after=200)
    for step in range(100):
        look_up(found, list(range(1000 * step, 1000 * step + 200)), step)
    assert found.stats([0]).size == 0 and found.stats([0]).filled > 0
    small = found._small[found._filter_at :][: found.spec.n_counters]
    assert small.max() < 200


def test_a_full_table_that_evicts_nothing_counts_whom_it_turned_away() -> None:
    found = vocabulary(BUCKET)
    look_up(found, list(range(20)), 1)
    assert found.stats([0]).size == BUCKET and found.stats([0]).no_room == 4
    with pytest.raises(ShardMemoryError, match="3 of 3 assigned ids found no room among the 16 entries"):
        found.fill(np.arange(100, 103), np.ones((3, 3), np.float32), 1)


def test_nine_tenths_of_the_capacity_are_reached_nearly_without_a_loss() -> None:
    found = vocabulary(16_000, n_shards=1)
    look_up(found, list(range(14_400)), 1)
    assert found.stats([0]).no_room < 14


# --- readers, and kills ----------------------------------------------------------------------------------------------

_STORES = ["choose_entries", "init_rows_at", "clear_slots_and_count", "publish_keys", "age_entries"]


def module_of(store: str) -> ModuleType:
    return kernels if store == "init_rows_at" else vocabulary_kernels


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Does something before the writer of a shard comes to one of its stores."""
    vocabulary_kernels.load()
    kernels.load()

    def patch(name: str, act: Callable[[], None]) -> None:
        stored = getattr(module_of(name), name)

        def acted(*args: Any) -> Any:
            act()
            return stored(*args)

        monkeypatch.setattr(module_of(name), name, acted)

    return patch


def full() -> Vocabulary:
    """Sixteen ids with weights of their own numbers, and one free bucket for nobody."""
    found = vocabulary(BUCKET, evict="lfu")
    look_up(found, list(range(1, 17)), 1)
    assert found.ids([0]).tolist() == list(range(1, 17))
    return found


@pytest.mark.parametrize("store", _STORES)
def test_between_any_two_stores_a_reader_finds_complete_records_of_its_own_id(store: str, before: Any) -> None:
    found, alone = full(), vocabulary(2000)
    look_up(alone, list(range(1, 40)), 1)
    own, shared = weights(alone, list(range(1, 40))), weights(found, list(range(100, 140)))
    seen = []

    def read() -> None:
        seen.append(weights(found, list(range(1, 40))))

    before(store, read)
    look_up(found, dict.fromkeys(range(20, 30), 2), 2)
    assert len(seen) == 1
    for row, mine in zip(seen[0], own, strict=True):
        assert np.array_equal(row, mine) or (shared == row).all(axis=1).any()
    assert found.ids([0]).tolist()[-10:] == list(range(20, 30))


@pytest.mark.parametrize("store", _STORES)
def test_a_kill_between_stores_leaves_free_entries_and_no_id_twice(store: str, before: Any) -> None:
    class Killed(Exception):
        pass

    found = full()

    def die() -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of(store), store, lambda *_: die())
        with pytest.raises(Killed):
            look_up(found, dict.fromkeys(range(20, 30), 2), 2)
    there = set(found.ids([0]).tolist())
    assert len(there) == np.count_nonzero(found.keys(0)[:BUCKET] != NO_KEY) <= BUCKET
    assert there <= {*range(1, 17), *range(20, 30)}
    look_up(found, dict.fromkeys(range(40, 56), 5), 3)  # the successor finds room for all
    assert found.ids([0]).tolist() == list(range(40, 56)) and found.settle(0) == 0
    assert found.stats([0]).size == BUCKET


def test_a_record_that_changed_hands_while_it_was_copied_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, copy, taken = full(), kernels.gather_rows, []

    def evicted_meanwhile(*args: Any) -> None:
        if not taken:
            taken.append(True)
            look_up(found, dict.fromkeys(range(20, 36), 2), 2)
        copy(*args)

    monkeypatch.setattr(kernels, "gather_rows", evicted_meanwhile)
    shared = weights(found, [5])
    assert taken and not has(found, [5])[0]
    monkeypatch.undo()
    assert np.array_equal(shared, weights(vocabulary(BUCKET), [5]))


# --- out of a checkpoint ---------------------------------------------------------------------------------------------


def test_of_an_id_in_two_entries_the_one_used_last_stays() -> None:
    found = vocabulary(2 * BUCKET)
    look_up(found, list(range(10)), 1)
    key = found.keys(0)
    place = int(np.flatnonzero(key == keys_of_ids(np.array([4]))[0])[0])
    free = next(p for p in range(place // BUCKET * BUCKET, 2 * BUCKET) if key[p] == NO_KEY and p != place)
    key[free], found.uses(0)[free] = key[place], (1, 9)
    assert found.settle(0) == 1 and key[place] == NO_KEY
    assert found.ids([0]).tolist() == list(range(10)) and found.stats([0]).size == 10


@pytest.mark.parametrize(("evict", "kept"), [("lfu", range(4, 20)), ("", range(16))])
def test_keys_that_find_no_room_go_by_use_where_the_table_evicts(evict: str, kept: range) -> None:
    found = vocabulary(BUCKET, evict=evict)
    uses = np.stack([np.arange(1, 21), np.full(20, 3)], axis=1).astype(np.uint32)
    rows, without = found.insert(0, keys_of_ids(np.arange(20)), uses)
    assert without == 4 and found.ids([0]).tolist() == list(kept)
    assert found.shard_stats(0)[Stat.SIZE] == BUCKET and np.count_nonzero(rows >= 0) == (20 if evict else 16)


@pytest.mark.parametrize(("was", "now"), [(64, 64), (64, 192), (64, 80), (192, 64), (80, 64)])
@given(ids=st.lists(st.integers(MIN + 1, MAX), min_size=1, max_size=16, unique=True))
def test_counters_of_another_size_count_no_id_less(was: int, now: int, ids: list[int]) -> None:
    first, then = vocabulary(was, admit_after=200), vocabulary(now, admit_after=200)
    so_far = {id_: 1 + place for place, id_ in enumerate(ids)}  # too few lookups to be halved
    look_up(first, so_far, 1)
    then.insert_filter(0, first.filter_words(0)[: first.spec.entries])
    assert then.filter_words(0)[then.spec.entries :].view(np.uint32).sum() == 0
    if now == was:
        assert np.array_equal(then.filter_words(0)[: then.spec.entries], first.filter_words(0)[: first.spec.entries])
    look_up(then, {id_: 200 - n for id_, n in so_far.items()}, 2)
    assert all(has(then, ids))


def test_ageing_goes_on_where_a_shared_record_says_it_was() -> None:
    steps = [dict.fromkeys(range(7 * step, 7 * step + 12), 3) for step in range(12)]
    whole = vocabulary(2 * BUCKET, admit_after=5, evict="lfu")
    for step, ids in enumerate(steps):
        look_up(whole, ids, step)
    again = vocabulary(2 * BUCKET, admit_after=5, evict="lfu")
    for step, ids in enumerate(steps[:6]):
        look_up(again, ids, step)
    stats = again.shard_stats(0)
    before = [int(stats[one]) for one in (Stat.USED, Stat.SWEPT, Stat.COUNTED)]
    stats[[Stat.USED, Stat.SWEPT, Stat.COUNTED]] = 0  # which no checkpoint has
    assert again.settle(0) == 0
    assert [int(stats[one]) for one in (Stat.USED, Stat.SWEPT, Stat.COUNTED)] == before and min(
        before[0], before[2]
    ) > 0
    for step, ids in enumerate(steps[6:], 6):
        look_up(again, ids, step)
    for one in ("keys", "uses", "filter_words"):
        assert np.array_equal(getattr(again, one)(0), getattr(whole, one)(0)), one
