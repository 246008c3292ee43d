"""What is in a checkpoint: every byte checked, or the rows of one table read into arrays. Without a model.

For people and tools that look at checkpoints; a model is filled by `restore`. Manifests and chains come from
`catalog.chains`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

from recovery.catalog.chains import Chain, open_chain
from recovery.errors import Damaged, NotFound
from recovery.format import row_codec
from recovery.format.manifest import Blob, Manifest, Section, StateBlob
from recovery.restore.row_loader import SectionRun, runs
from recovery.rows import KEY, NO_KEY, Table
from recovery.storage.store import Store, read

_READ_BYTES = 16 << 20
_READERS = 4
_FLAWS_SHOWN = 3


def verify(store: Store, manifest: Manifest, on_bytes: Callable[[int], object] = lambda n: None) -> list[str]:
    """Read and check everything that one save wrote; a sentence for each part that is not what was saved.

    on_bytes: called with how many more bytes were checked. Raises StoreError when the store fails.
    """

    def check(run: SectionRun) -> list[str]:
        found = []
        try:
            data = memoryview(store.get(run.blob, run.sections[0].start, run.n_bytes))
        except NotFound:
            return [f"{manifest.name}: {run.blob} is gone"]
        for section, piece in run.pieces(data):
            table = manifest.schema.tables[section.table]
            try:
                row_codec.decode_rows(piece, section, table, manifest.schema.n_shards, f"{manifest.name}: {run.blob}")
            except Damaged as error:
                found.append(str(error))
        on_bytes(run.n_bytes)
        return found

    with ThreadPoolExecutor(_READERS, "verify") as pool:
        flaws = [flaw for part in pool.map(check, runs(manifest.blobs, lambda _: True, _READ_BYTES)) for flaw in part]
    written: list[Blob | StateBlob] = [*manifest.blobs, *([] if manifest.state is None else [manifest.state])]
    folders = {blob.name.rpartition("/")[0] + "/" for blob in written}
    sizes = {name: n_bytes for folder in folders for name, n_bytes in store.names(folder).items()}
    longer = [blob for blob in written if sizes.get(blob.name, 0) > blob.n_bytes]
    flaws += [f"{manifest.name}: {b.name} has {sizes[b.name]} bytes, {b.n_bytes} were saved" for b in longer]
    try:
        if manifest.state is not None:
            row_codec.check_state(_pieces(store, manifest.state), manifest.state)
    except (Damaged, NotFound) as error:
        flaws.append(f"{manifest.name}: {error}")
    on_bytes(manifest.state.n_bytes if manifest.state else 0)
    return list(dict.fromkeys(flaws))


def verify_saved(store: Store, manifest: Manifest, what: str) -> None:
    """Open a checkpoint that was just written, as a restore would. what: see `Config.verify`.

    Raises Damaged saying what keeps it from being restored, StoreError when the store fails.
    """
    open_chain(store, manifest.name)
    flaws = verify(store, manifest) if what == "bytes" else []
    if what == "state" and (state := manifest.state) is not None:
        hashed = xxhash.xxh3_128()
        for piece in _pieces(store, state):
            hashed.update(piece)
        if hashed.hexdigest() != state.checksum:
            flaws = [f"{state.name}: the checksum was {state.checksum} when it was saved, it is {hashed.hexdigest()}"]
    if flaws:
        raise Damaged("; ".join(flaws[:_FLAWS_SHOWN]) + f" and {len(flaws)} flaws in all" * (len(flaws) > _FLAWS_SHOWN))


def _pieces(store: Store, state: StateBlob) -> Iterator[memoryview]:
    for start in range(0, state.n_bytes, _READ_BYTES):
        piece = read(store, state.name, start, min(_READ_BYTES, state.n_bytes - start))
        yield piece
        if len(piece) < min(_READ_BYTES, state.n_bytes - start):  # a store may refuse what is beyond the end
            return


def read_state(store: Store, manifest: Manifest) -> bytes | None:
    """What was saved beside the rows, as bytes. Raises Damaged or NotFound."""
    if manifest.state is None:
        return None
    return row_codec.decode_state(store.get(manifest.state.name, 0, manifest.state.n_bytes + 1), manifest.state)


def read_rows(
    store: Store,
    chain: Chain,
    table: int,
    columns: Sequence[np.ndarray | None],
    *,
    residue: int = 0,
    modulo: int = 1,
    only: np.ndarray | None = None,
    on_bytes: Callable[[int], object] = lambda n: None,
) -> np.ndarray:
    """Fill arrays with the rows r of a table for which r mod `modulo` is `residue`; which of them were saved, bool [n].

    columns: float32 [n, width] of each column of the table, None: not wanted. Row r goes to r div modulo; what was
        never saved stays as it is.
    only: int64 [n], ascending and distinct: these rows and no others, only[i] at i. Sections without any are not read.

    Raises Damaged when a byte is not what was saved; the arrays are then worth nothing.
    """
    n_rows = chain.newest.schema.tables[table].n_rows
    there = np.zeros(len(range(residue, n_rows, modulo)) if only is None else len(only), np.bool_)

    def fill(manifest: Manifest) -> None:
        about, n_shards = manifest.schema.tables[table], manifest.schema.n_shards
        whole = n_shards % modulo == 0  # then a shard's rows are all wanted, or none

        def read_run(run: SectionRun) -> None:
            data = memoryview(store.get(run.blob, run.sections[0].start, run.n_bytes))
            for section, piece in run.pieces(data):
                indices, records = row_codec.decode_rows(
                    piece, section, about, n_shards, f"{manifest.name}: {run.blob}"
                )
                rows = section.shard + n_shards * indices
                if only is not None:
                    at = np.minimum(np.searchsorted(only, rows), len(only) - 1)
                    mine = only[at] == rows
                    _scatter(about, columns, at[mine], records[mine])
                    there[at[mine]] = True
                    continue
                if not whole:
                    mine = rows % modulo == residue
                    rows, records = rows[mine], records[mine]
                _scatter(about, columns, rows // modulo, records)
                there[rows // modulo] = True
            on_bytes(run.n_bytes)

        def wanted(section: Section) -> bool:
            if section.table != table or (whole and section.shard % modulo != residue):
                return False
            return only is None or _may_have(section, n_shards, only)

        with ThreadPoolExecutor(_READERS, "read") as pool:
            try:
                for future in [pool.submit(read_run, run) for run in runs(manifest.blobs, wanted, _READ_BYTES)]:
                    future.result()
            except NotFound as error:
                raise Damaged(f"{manifest.name}: {error}") from error
            finally:
                pool.shutdown(cancel_futures=True)

    for manifest in chain.manifests:  # the later one wins
        fill(manifest)
    return there


def keys_of(
    store: Store, chain: Chain, table: int, shard: int, on_bytes: Callable[[int], object] = lambda n: None
) -> np.ndarray:
    """int64 [n], ascending: the keys of a shard of a keyed table that have a row of their own.

    Raises Damaged when a byte is not what was saved.
    """
    about, n_shards = chain.newest.schema.tables[table], chain.newest.schema.n_shards
    keys = np.full(about.rows_in(shard, n_shards), NO_KEY, np.int64)
    columns = [keys[:, None].view(np.float32) if column == KEY else None for column in about.columns]
    read_rows(store, chain, table, columns, residue=shard, modulo=n_shards, on_bytes=on_bytes)
    return own_keys(keys, about.shared_rows)


def own_keys(keys: np.ndarray, n_shared: int) -> np.ndarray:
    """int64 [n], ascending and distinct, of the keys of some rows, of which the last `n_shared` belong to no key."""
    own = keys[: len(keys) - n_shared]
    return np.unique(own[own != NO_KEY])


def saved_rows(
    store: Store, manifest: Manifest, on_bytes: Callable[[int], object] = lambda n: None
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """What one save wrote, verified: (table, rows int64 [n], records float32 [n, width]) of each section.

    No row comes twice. on_bytes: as of `verify`. Raises Damaged when a byte is not what was saved, NotFound when an
    object is gone.
    """

    def decoded(run: SectionRun) -> list[tuple[int, np.ndarray, np.ndarray]]:
        data, found, n_shards = read(store, run.blob, run.sections[0].start, run.n_bytes), [], manifest.schema.n_shards
        for section, piece in run.pieces(data):
            table, where = manifest.schema.tables[section.table], f"{manifest.name}: {run.blob}"
            indices, records = row_codec.decode_rows(piece, section, table, n_shards, where)
            found.append((section.table, section.shard + n_shards * indices, records))
        return found

    waiting: deque[tuple[SectionRun, Future[list[tuple[int, np.ndarray, np.ndarray]]]]] = deque()
    with ThreadPoolExecutor(_READERS, "read") as pool:
        try:
            for run in (*runs(manifest.blobs, lambda _: True, _READ_BYTES), None):
                if run is not None:
                    waiting.append((run, pool.submit(decoded, run)))
                while len(waiting) > (_READERS if run is not None else 0):
                    done, future = waiting.popleft()
                    yield from future.result()
                    on_bytes(done.n_bytes)
        finally:
            pool.shutdown(cancel_futures=True)


def _may_have(section: Section, n_shards: int, only: np.ndarray) -> bool:
    """Whether a section may have one of these rows (int64 [n], ascending)."""
    if section.first is None:
        return bool(len(only))
    start, stop = (section.shard + n_shards * index for index in (section.first, section.first + section.n_rows))
    near = only[np.searchsorted(only, start) : np.searchsorted(only, stop)]
    return bool((near % n_shards == section.shard).any())


def _scatter(table: Table, columns: Sequence[np.ndarray | None], at: np.ndarray, records: np.ndarray) -> None:
    start = 0
    for column, into in zip(table.columns, columns, strict=True):
        if into is not None:
            into[at] = records[:, start : start + column.width]
        start += column.width
