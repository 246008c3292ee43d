"""Stores say what to do when they cannot be used. What all of them promise is in `gba_hvd/testing/stores.py`."""

from __future__ import annotations

import errno
import functools
import os
import random
import resource
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import BadInput, NotFound, StoreError
from recovery.storage.fsspec_store import FsspecStore
from recovery.storage.local_store import LocalStore
from recovery.storage.open import open_store
from recovery.storage.retry import MOST_HUNG, RetryingStore, RetryPolicy
from recovery.storage.store import Store, Transient, check, is_name
from recovery.testing import RamStore
from tests.recovery.conftest import BUCKET
from tests.recovery.stores import Crash, FaultyStore

NAME = "blobs/000001-00000002/0003"


# --- names ---------------------------------------------------------------------------------------------------------


BAD_NAMES = ["../x", "blobs/../../x", "/blobs/x", "blobs//x", "blobs/.x", "blobs/x\n", "", "blobs", "C:/blobs/x"]
BAD_NAMES += ["elsewhere/x", "blobs/a\\b", "blobs/" + "x" * 300, "blobs/ä", "blobs/a b", "blobs/x/.."]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_lead_out_of_the_store_is_refused(tmp_path: Path, name: str) -> None:
    assert not is_name(name)
    for store in (open_store(tmp_path / "store"), open_store("memory://traversal")):
        with pytest.raises(BadInput):
            store.put(name, [b"x"])
        with pytest.raises(BadInput):
            store.get(name)
        with pytest.raises(BadInput):
            store.delete([name])
        with pytest.raises(BadInput):
            store.names("../")
    assert not list(tmp_path.iterdir())


# --- URLs ------------------------------------------------------------------------------------------------------------


def test_a_path_and_a_file_url_are_the_same_place(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/a").put(NAME, [b"x"])
    assert open_store(str(tmp_path / "a")).get(NAME) == b"x"
    assert (tmp_path / "a" / NAME).read_bytes() == b"x"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s4://bucket/job", "protocol 's4' is not known"),
        ("s3://", "names no location"),
        ("gs://bucket/job", "pip install gcsfs"),
        ("sftp://host/job", "pip install paramiko"),
    ],
)
def test_a_url_that_cannot_be_served_says_what_to_do(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gcsfs", "paramiko"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(BadInput, match=said):
        open_store(url)


def test_a_password_in_a_url_is_not_repeated_in_messages() -> None:
    assert FsspecStore("memory://user:secret@host/job").url == "memory://***@host/job"


@pytest.mark.slow
def test_a_bucket_that_does_not_exist_is_not_listed_as_an_empty_one(s3_options: dict[str, Any]) -> None:
    with pytest.raises(NotFound, match=r"s3://absent/job: manifests/ cannot be listed: 'absent' does not exist"):
        open_store("s3://absent/job", tries=1, **s3_options).names("manifests/")


@pytest.mark.slow
def test_a_bucket_that_is_missing_is_named(s3_options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"s3://absent/job cannot hold checkpoints.*'absent' does not exist"):
        check(open_store("s3://absent/job", timeout_s=100, tries=1, **s3_options))


@pytest.mark.slow
def test_without_credentials_the_message_says_where_to_put_them(
    s3_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = open_store(
        f"s3://{BUCKET}/job",
        timeout_s=100,
        tries=1,
        endpoint_url=s3_options["endpoint_url"],
        skip_instance_cache=True,
    )
    with pytest.raises(BadInput, match=r"no valid credentials.*AWS_ACCESS_KEY_ID"):
        check(store)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_an_error_that_may_pass() -> None:
    once = {"retries": {"total_max_attempts": 1}}
    options = {"key": "a", "secret": "b", "endpoint_url": "http://127.0.0.1:9", "config_kwargs": once}
    store = FsspecStore(f"s3://{BUCKET}/job", options)
    with pytest.raises(Transient, match="manifests/ cannot be listed"):
        store.names("manifests/")


def test_a_web_server_that_is_not_there_is_an_error_that_may_pass() -> None:
    with pytest.raises(Transient, match=r"manifests/ cannot be listed: Cannot connect to host 127\.0\.0\.1:9"):
        FsspecStore("http://127.0.0.1:9/job").names("manifests/")


@pytest.mark.slow
def test_listings_of_a_web_server_have_no_sizes_and_a_missing_folder_is_empty(tmp_path: Path) -> None:
    (tmp_path / "job" / "manifests").mkdir(parents=True)
    (tmp_path / "job" / "manifests" / "1").write_bytes(b"x")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            store = FsspecStore(f"http://127.0.0.1:{server.server_port}/job")
            assert store.names("absent/") == {}
            assert store.get("manifests/1") == b"x"
            with pytest.raises(StoreError, match="cannot be listed: listings of http:// do not have the sizes"):
                store.names("manifests/")
        finally:
            server.shutdown()
            thread.join(60)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(f"file://{tmp_path}")
    assert store.names("manifests/") == {}

    def refused(self: object, path: str, **more: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.ls", refused)
    with pytest.raises(StoreError, match=r"manifests/ cannot be listed.*Permission denied"):
        store.names("manifests/")


def test_refused_credentials_are_two_sentences_and_an_object_that_is_looked_for_is_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: object, path: str, **more: Any) -> None:
        raise PermissionError("The key you provided is not known.")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.ls", refused)
    words = r"whether manifests/1 is there cannot be asked: .*is not known\. The credentials are wrong or lack the perm"
    with pytest.raises(StoreError, match=words):
        FsspecStore(f"file://{tmp_path}").names("manifests/1")


# --- a local disk ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs privileges")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_in_the_middle_of_a_save_is_reported_with_bytes_and_advice(small_disk: Path) -> None:
    store = open_store(small_disk)
    store.put(NAME, [b"good"])
    with pytest.raises(StoreError, match=r"2,000,000 bytes cannot be written: the disk is full: free space") as caught:
        store.put("blobs/000001-00000002/0004", [b"x" * 1_000_000] * 2)
    assert not isinstance(caught.value, Transient)
    assert store.names("") == {NAME: 4}, "the part that was written is gone, and its room with it"
    store.put("blobs/000001-00000002/0005", [b"y" * 500_000])


def test_a_limit_on_the_size_of_files_is_reported_too(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(StoreError, match=r"5,000 bytes cannot be written.*ulimit -f"):
            store.put(NAME, [b"x" * 5000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert store.names("") == {}


def test_a_read_only_store_is_found_by_the_check(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(BadInput, match=r"cannot be written to.*read-only: mount it writable"):
        check(open_store(small_disk / "job"))


def test_a_file_in_the_place_of_the_folder_is_found_by_the_check(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="a part of the path is a file"):
        check(open_store(tmp_path / "file" / "job"))


def test_what_a_writer_is_about_to_name_outlives_the_deletion_beside_it(tmp_path: Path) -> None:
    """Shards of many versions of a model share a folder; that of blobs is of one save, and goes with it."""
    store = open_store(tmp_path)
    for folder in ("rows/ab", "blobs/000001-00000002"):
        store.put(f"{folder}/0003", [b"data"])
        (tmp_path / folder / ".0004.12345678").write_bytes(b"not whole yet")
        store.delete([f"{folder}/0003"])
    assert (tmp_path / "rows/ab/.0004.12345678").exists()
    assert not (tmp_path / "blobs/000001-00000002").exists()


def test_a_name_is_used_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(NAME, [b"abc"])
    for other in (b"abd", b"ab", b"abcd"):
        with pytest.raises(StoreError, match="names are used once"):
            store.put(NAME, [other])
    assert store.get(NAME) == b"abc"


# --- patience --------------------------------------------------------------------------------------------------------


def test_a_file_system_without_hard_links_takes_each_name_once_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    store = open_store(tmp_path)
    store.put(NAME, [b"first"])
    store.put(NAME, [b"first"])
    with pytest.raises(StoreError, match="names are used once"):
        store.put(NAME, [b"other"])
    assert store.get(NAME) == b"first" and store.names("") == {NAME: 5}
    monkeypatch.setattr("recovery.storage.local_store.rename_new", lambda old, new: False)
    with pytest.raises(StoreError, match=r"can neither make hard links .* nor rename without replacing"):
        store.put(NAME + "9", [b"x"])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [NAME.rpartition("/")[2]]


class Pauses:
    """In the place of sleep: remembers."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []

    def __call__(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)


MANY = 1000  # attempts, where one that does not hang may still be given up on: the machine may be busy


def patient(store: Store, tries: int = 4, timeout_s: float = 30.0) -> tuple[RetryingStore, Pauses]:
    pauses = Pauses()
    return RetryingStore(
        store, RetryPolicy(timeout_s, tries, 1.0, 3.0, sleep=pauses, rng=random.Random(0), least_bytes_s=1e12)
    ), pauses


def test_what_may_pass_is_tried_again_after_longer_and_longer_pauses(ram: RamStore) -> None:
    faulty = FaultyStore(ram).fails("put", 1).fails("put", 2).answer_is_lost("put", 3)
    store, pauses = patient(faulty)
    store.put(NAME, [b"a", b"b"])
    assert ram.objects == {NAME: b"ab"}
    assert faulty.fired == faulty.planned
    for pause_s, longest_s in zip(pauses.pauses_s, [1.0, 2.0, 3.0], strict=True):
        assert longest_s / 2 <= pause_s <= longest_s


def test_trouble_is_known_while_a_call_is_tried_again(ram: RamStore) -> None:
    faulty = FaultyStore(ram).fails("put", 1, Transient("slow down")).fails("put", 2, Transient("no answer"))
    seen: list[str] = []
    store = RetryingStore(faulty, RetryPolicy(30.0, 3, sleep=lambda pause_s: seen.append(store.trouble)))
    store.put(NAME, [b"a"])
    assert seen == ["slow down (tried 1 of 3 times)", "no answer (tried 2 of 3 times)"] and store.trouble == ""
    assert faulty.fired == faulty.planned


def test_what_will_not_pass_is_not_tried_again(ram: RamStore) -> None:
    faulty = FaultyStore(ram).fails("get", 1, StoreError("permission denied")).fails("put", 1, BadInput("no"))
    store, pauses = patient(faulty)
    with pytest.raises(StoreError, match="permission denied"):
        store.get(NAME)
    with pytest.raises(NotFound):
        store.get(NAME)
    with pytest.raises(BadInput):
        store.put(NAME, [b"x"])
    assert faulty.fired == faulty.planned and not pauses.pauses_s


def test_in_the_end_the_last_error_is_reported(ram: RamStore) -> None:
    faulty = FaultyStore(ram)
    for at in range(1, 5):
        faulty.fails("names", at, Transient(f"slow down {at}"))
    store, pauses = patient(faulty)
    with pytest.raises(StoreError, match=r"slow down 4 \(tried 4 times\)") as caught:
        store.names("blobs/")
    assert not isinstance(caught.value, Transient)
    assert faulty.fired == faulty.planned and len(pauses.pauses_s) == 3


def test_a_store_that_hangs_is_given_up_on_and_asked_again(ram: RamStore) -> None:
    with FaultyStore(ram).hangs("get", 1) as faulty:
        ram.put(NAME, [b"x"])
        store, _ = patient(faulty, tries=MANY, timeout_s=0.05)
        assert store.get(NAME) == b"x"
        assert faulty.fired == faulty.planned


def test_an_attempt_that_wakes_up_late_writes_what_it_was_given(ram: RamStore) -> None:
    """The caller has filled its buffer with other bytes since."""
    buffer = bytearray(b"first bytes")
    with FaultyStore(ram).hangs("put", 1) as faulty:
        store, _ = patient(faulty, tries=MANY, timeout_s=0.05)
        store.put(NAME, [memoryview(buffer)])
        buffer[:] = b"other bytes"
        ram.delete([NAME])
    for thread in threading.enumerate():  # the late attempt ends
        if thread.name.endswith(f"put {NAME}"):
            thread.join()
    assert ram.objects == {NAME: b"first bytes"}


def test_a_local_disk_that_hangs_is_an_error(ram: RamStore) -> None:
    with FaultyStore(ram).hangs("put", 1) as faulty:
        store, _ = patient(faulty, tries=1, timeout_s=0.05)
        with pytest.raises(StoreError, match=r"put blobs/.*no answer within 0\.05 s"):
            store.put(NAME, [b"x"])


@pytest.mark.slow
def test_a_large_object_may_take_longer_by_a_least_rate(ram: RamStore) -> None:
    data, wait = bytes(4 << 20), threading.Event()
    faulty = FaultyStore(ram).slows("put", 1, lambda: wait.wait(1.0))
    store = RetryingStore(faulty, RetryPolicy(0.1, 1, least_bytes_s=len(data) / 60))
    store.put(NAME, [data])
    assert faulty.fired == faulty.planned and ram.objects == {NAME: data}
    assert RetryPolicy(60.0).limit_s(600 << 20) == 660.0
    with pytest.raises(BadInput, match="least_bytes_s is a rate"):
        RetryPolicy(least_bytes_s=0)


def test_threads_of_a_store_that_hangs_are_few_and_the_refusal_says_so(ram: RamStore) -> None:
    with FaultyStore(ram) as faulty:
        for at in range(1, MOST_HUNG + 1):
            faulty.hangs("get", at)
        store = RetryingStore(faulty, RetryPolicy(0.01, 1, least_bytes_s=1e12))
        for _ in range(2 * MOST_HUNG):
            with pytest.raises(StoreError):
                store.get(NAME)
        with pytest.raises(StoreError, match=f"not tried, {MOST_HUNG} earlier calls still hang"):
            store.get(NAME)
        hung = [thread for thread in threading.enumerate() if thread.name.endswith(f"get {NAME}")]
        assert len(hung) == MOST_HUNG and faulty.fired == faulty.planned
    for thread in hung:
        thread.join()
    with pytest.raises(NotFound):
        RetryingStore.get(store, NAME)


@pytest.mark.slow
def test_a_local_write_that_nobody_waits_for_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes may be others by then."""
    asked, release, before = threading.Event(), threading.Event(), os.fsync

    def slow(file: int) -> None:
        asked.set()
        release.wait()
        before(file)

    monkeypatch.setattr("recovery.storage.local_store.os.fsync", slow)
    store = open_store(tmp_path, timeout_s=0.2)
    with pytest.raises(StoreError, match=r"no answer within 0\.2"):
        store.put(NAME, [b"x"])
    assert asked.is_set()
    release.set()
    for thread in threading.enumerate():
        if thread.name.endswith(f"put {NAME}"):
            thread.join()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_an_upload_that_is_given_up_on_is_cancelled() -> None:
    """A server that takes the request, and says nothing, sees the connection go; and no thread is left."""
    accepted, closed = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                accepted.set()
                while connection.recv(1 << 16):
                    pass
                closed.set()

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        store = open_store(f"s3://{uuid.uuid4().hex}/x", timeout_s=3, tries=1, key="k", secret="s", endpoint_url=url)
        for _ in range(20):  # on a busy machine a try may end before it has connected
            with pytest.raises(StoreError, match="no answer within"):
                store.put(NAME, [b"x" * (1 << 20)])
            if accepted.is_set():
                break
        assert closed.wait(60)
        thread.join()
    for left in threading.enumerate():
        if left.name.endswith(f"put {NAME}"):
            left.join(60)
            assert not left.is_alive()


def test_an_object_of_unknown_size_is_read_in_pieces(ram: RamStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.storage.retry._FIRST_BYTES", 3)
    monkeypatch.setattr("recovery.storage.retry._PIECE_BYTES", 10)
    for n_bytes in (0, 2, 3, 13, 25):
        ram.put(f"blobs/{n_bytes}", [bytes(range(n_bytes))])
        assert patient(ram)[0].get(f"blobs/{n_bytes}") == bytes(range(n_bytes))


def test_a_process_that_dies_tries_nothing_again(ram: RamStore) -> None:
    faulty = FaultyStore(ram).dies_within(1, keep_bytes=1)
    store, pauses = patient(faulty)
    with pytest.raises(Crash):
        store.put(NAME, [b"xyz"])
    with pytest.raises(Crash):
        store.names("")
    assert ram.objects == {NAME: b"x"} and not pauses.pauses_s


def test_a_store_that_loses_or_cuts_what_it_is_given_does_not_pass_the_check(ram: RamStore) -> None:
    with pytest.raises(BadInput, match=r"cannot be read from.*there is no such object"):
        check(FaultyStore(ram).loses(1))
    with pytest.raises(BadInput, match="19 bytes were written, other 5 came back"):
        check(FaultyStore(ram).truncates("put", 1, keep_bytes=5))
    with pytest.raises(BadInput, match=r"cannot be listed.*not in the listing"):
        check(FaultyStore(ram).lists_what_was(1))
    with pytest.raises(BadInput, match="cannot be cleaned up"):
        check(FaultyStore(ram).fails("delete", 1, StoreError("permission denied")))
    with pytest.raises(BadInput, match="came back"):
        check(FaultyStore(ram).flips(1, bit=3))


@pytest.mark.parametrize("settings", [{"timeout_s": 0}, {"tries": 0}, {"first_pause_s": 5.0, "longest_pause_s": 1.0}])
def test_patience_without_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        RetryPolicy(**settings)


def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    name = "blobs/000017-00000003/0004"
    (tmp_path / name).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / name)
    for read in (LocalStore(tmp_path).get, LocalStore(tmp_path).read):
        with pytest.raises(StoreError, match="0004 cannot be read: it is no regular file"):
            read(name, 0, 10)
