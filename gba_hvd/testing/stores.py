"""`StoreContract`: what every checkpoint store promises."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from recovery.errors import NotFound
from recovery.storage.store import Store, check

NAME = "blobs/000001-00000002/0003"


class StoreContract:
    def second_view(self, store: Store) -> Store:
        """The same place as another process would see it: override where a store remembers what it listed."""
        return store

    @pytest.fixture
    def store(self) -> Store:
        """An empty one, new for each test."""
        raise NotImplementedError

    def test_what_is_put_in_pieces_is_got_as_a_whole_and_in_ranges(self, store: Store) -> None:
        store.put(NAME, [b"abc", memoryview(b"defg"), b"", bytearray(b"hij")])  # type: ignore[list-item]
        assert store.get(NAME) == b"abcdefghij"
        assert store.get(NAME, 2, 4) == b"cdef"
        assert store.get(NAME, 7) == b"hij"
        assert store.get(NAME, 8, 100) == b"ij"
        assert store.get(NAME, 10, 5) == b""
        assert store.get(NAME, 500, 5) == b""
        assert store.get(NAME, 3, 0) == b""

    def test_an_object_may_have_many_pieces_or_no_byte(self, store: Store) -> None:
        pieces = [bytes([i % 251]) * (i % 7) for i in range(3000)]
        store.put(NAME, pieces)
        assert store.get(NAME) == b"".join(pieces)
        store.put("blobs/000001-00000002/empty", [])
        assert store.get("blobs/000001-00000002/empty") == b""
        assert store.names("blobs/")["blobs/000001-00000002/empty"] == 0

    def test_an_object_of_some_megabytes_comes_back(self, store: Store) -> None:
        data = random.Random(1).randbytes(9 << 20)
        store.put(NAME, [memoryview(data)[:1000], memoryview(data)[1000:]])
        assert store.get(NAME) == data
        assert store.get(NAME, 5 << 20, 1 << 20) == data[5 << 20 : 6 << 20]

    def test_names_begin_with_the_prefix_and_come_with_sizes(self, store: Store) -> None:
        assert store.names("blobs/") == {}
        for name in (NAME, "blobs/000001-00000012/0", "manifests/000001-00000002.json"):
            store.put(name, [name.encode()])
        assert store.names("blobs/000001-00000002/") == {NAME: len(NAME)}
        assert set(store.names("blobs/000001-0000000")) == {NAME}
        assert set(store.names("blobs/")) == {NAME, "blobs/000001-00000012/0"}
        assert len(store.names("")) == 3

    def test_a_listing_shows_what_was_just_written_and_deleted_by_whom_ever(self, store: Store) -> None:
        other = self.second_view(store)
        store.names("blobs/")
        other.put(NAME, [b"x"])
        assert store.names("blobs/") == {NAME: 1}
        store.delete([NAME])
        assert other.names("blobs/") == {}

    def test_deleting_what_is_not_there_is_no_error(self, store: Store) -> None:
        store.put(NAME, [b"x"])
        store.delete([NAME, "blobs/000001-00000002/never", NAME])
        assert store.names("") == {}

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        with pytest.raises(NotFound, match="0003"):
            store.get(NAME)
        with pytest.raises(NotFound):
            store.get(NAME, 3, 5)

    def test_the_same_bytes_may_be_put_again(self, store: Store) -> None:
        for _ in range(2):
            store.put(NAME, [b"once"])
        assert store.get(NAME) == b"once"

    def test_threads_may_use_a_store_together(self, store: Store) -> None:
        def one(i: int) -> bool:
            name = f"blobs/000001-00000001/{i}"
            store.put(name, [bytes([i]) * 1000])
            return name in store.names("blobs/") and store.get(name, 10, 5) == bytes([i]) * 5

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(one, range(24)))

    def test_a_store_that_works_passes_the_check_and_is_left_as_it_was(self, store: Store) -> None:
        store.put(NAME, [b"x"])
        check(store)
        assert store.names("") == {NAME: 1}
