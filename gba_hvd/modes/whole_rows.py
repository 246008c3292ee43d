"""Rows and their gradients between the hosts of an allreduce step, as they are.

One step, on every rank, for all groups of tables together:

    pull   the keys of the rows it needs, to the ranks that serve them; the rows, back. Both sides note which these are
    send   their gradients, in the order in which the rows were asked for: no key travels, and as both sides know how
           many words they are, no count does

A row that was asked for may have no gradient, as the model did not use it, or its micro-batch was skipped: a bit for
each says whether it has. What is lent belongs to one step: a step that is computed again begins with another `pull`, in
another world with another `WholeRows`. Between the ranks of one host nothing goes through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gba_hvd import kernels
from gba_hvd.comm.collectives import Alltoall
from gba_hvd.comm.traffic import Traffic
from gba_hvd.embedding.passes import PulledRows
from gba_hvd.embedding.row_gradients import Packed, PickedRows, RowGrad, distinct_by_owner
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import GbaError


@dataclass(frozen=True)
class AskedRows:
    """Rows of one group of tables that this rank asked for.

    keys: int64 [n], distinct; start: int64 [ranks + 1], where those of each rank begin; slots: see `PulledRows`
    """

    keys: np.ndarray
    start: np.ndarray
    slots: np.ndarray

    def of(self, rank: int) -> np.ndarray:
        """int64 [n], those that the rank serves."""
        keys: np.ndarray = self.keys[self.start[rank] : self.start[rank + 1]]
        return keys

    def in_order(self, rank: int, given: PickedRows) -> np.ndarray:
        """int32 [n], for each row that the rank served its row in the gradient; -1: it has none there.

        given: the rows of the gradient that the rank serves
        Raises GbaError for one that was not asked for, or is there twice.
        """
        asked = self.of(rank)
        if np.array_equal(given.keys, asked):
            return given.rows
        at = np.empty(len(given.rows), np.int32)
        if (stranger := kernels.find_keys(given.keys, self.slots, self.keys, at)) >= 0:
            raise GbaError(
                f"key {given.keys[stranger]} has a gradient for rank {rank}, and its row was not fetched in this step"
            )
        rows = np.full(len(asked), -1, np.int32)
        rows[at - self.start[rank]] = given.rows
        if np.count_nonzero(rows >= 0) != len(given.rows):
            raise GbaError(f"a key has two gradients for rank {rank}: they were to be added up")
        return rows


class WholeRows:
    """One worker's part in one world. Owns what is lent and borrowed; uses the tables.

    server: int32 [S], the rank that serves each shard; here: the ranks of this host
    dims: by group, the columns of its gradients
    """

    def __init__(
        self, tables: EmbeddingTables, server: np.ndarray, size: int, here: Iterable[int], dims: Sequence[int],
        traffic: Traffic,
    ) -> None:  # fmt: skip
        self._tables, self._size, self._dims, self._traffic = tables, size, dims, traffic
        self._remote = sorted(set(range(size)) - set(here))
        self._owner = np.where(np.isin(server, self._remote), server, -1).astype(np.int32)
        self._lent: dict[int, list[np.ndarray]] = {}  # by rank and group, keys
        self._borrowed: list[AskedRows] = []  # by group

    def pull(self, keys: Sequence[np.ndarray], alltoall: Alltoall, returns: bool) -> None:
        """Fetch rows of other hosts: per group the keys this rank will use next. A collective.

        returns: gradients of these rows follow
        """
        borrowed = [AskedRows(*distinct_by_owner(some, self._owner, self._size)) for some in keys]
        lent = self._ask(borrowed, alltoall)
        fetched = self._fetch(borrowed, lent, alltoall)
        for number, (asked, rows) in enumerate(zip(borrowed, fetched, strict=True)):
            self._tables.remote[number] = PulledRows(asked.keys, asked.slots, rows)
        if returns:
            self._borrowed, self._lent = borrowed, lent

    def send(self, packed: Packed, alltoall: Alltoall) -> dict[int, list[RowGrad]]:
        """Give back the gradients of what was pulled last; returns what other hosts' ranks gave back: by rank, per
        group. A collective.

        packed: of the step's gradients
        """
        borrowed, lent, self._borrowed, self._lent = self._borrowed, self._lent, [], {}
        n_sent, n_lent = np.zeros(self._size, np.int64), np.zeros(self._size, np.int64)
        for rank in self._remote:
            n_sent[rank] = sum(self._returned_words([len(asked.of(rank)) for asked in borrowed]))
            n_lent[rank] = sum(self._returned_words([len(asked) for asked in lent[rank]]))
        message, ends = np.empty(int(n_sent.sum()), np.float32), np.cumsum(n_sent)
        for rank in self._remote:
            self._write(message[ends[rank] - n_sent[rank] : ends[rank]], rank, borrowed, packed.picked(rank))
        received, _ = alltoall("rows", message, n_sent, n_lent)
        self._traffic.count("sent", "rows", message.nbytes)
        self._traffic.count("received", "rows", received.nbytes)
        parts = np.split(received, np.cumsum(n_lent)[:-1])
        return {rank: self._read(parts[rank], lent[rank]) for rank in self._remote}

    def _ask(self, borrowed: Sequence[AskedRows], alltoall: Alltoall) -> dict[int, list[np.ndarray]]:
        """What other ranks need from this one. A message is, int64: the number of keys of each group, and these."""
        parts, n_sent = [np.empty(0, np.int64)], np.zeros(self._size, np.int64)
        for rank in self._remote:
            keys = [asked.of(rank) for asked in borrowed]
            message = np.concatenate([np.array([len(some) for some in keys], np.int64), *keys])
            parts.append(message)
            n_sent[rank] = 2 * len(message)
        words = np.concatenate(parts).view(np.float32)
        received, n_received = alltoall("pull.keys", words, n_sent)
        self._traffic.count("sent", "header", words.nbytes)
        self._traffic.count("received", "header", received.nbytes)
        asked = np.split(np.ascontiguousarray(received).view(np.int64), np.cumsum(n_received)[:-1] // 2)
        n_groups = len(borrowed)
        return {rank: np.split(asked[rank][n_groups:], np.cumsum(asked[rank][:n_groups])[:-1]) for rank in self._remote}

    def _fetch(
        self, borrowed: Sequence[AskedRows], lent: dict[int, list[np.ndarray]], alltoall: Alltoall
    ) -> list[np.ndarray]:
        """Per group, the rows that were borrowed, float32 [n, dim]. A message is the rows of each group."""
        memory, groups = self._tables.memory, self._tables.layout.groups
        assert memory is not None
        n_lent = np.zeros((self._size, len(groups)), np.int64)
        for rank, keys in lent.items():
            n_lent[rank] = [len(some) * group.dim for some, group in zip(keys, groups, strict=True)]
        n_borrowed = np.stack([np.diff(b.start) * g.dim for b, g in zip(borrowed, groups, strict=True)], axis=1)
        message, at = np.empty(int(n_lent.sum()), np.float32), 0
        for rank in self._remote:
            for group, some in zip(groups, lent[rank], strict=True):
                out = message[at : at + len(some) * group.dim]
                memory.gather(some, group, 0, out.reshape(-1, group.dim))
                at += len(out)
        received, _ = alltoall("pull.rows", message, n_lent.sum(axis=1), n_borrowed.sum(axis=1))
        self._traffic.count("sent", "rows", message.nbytes)
        self._traffic.count("received", "rows", received.nbytes)
        if len(groups) == 1:
            return [received.reshape(-1, groups[0].dim)]
        parts = np.split(received, np.cumsum(n_borrowed)[:-1])  # by rank and group
        return [np.concatenate(parts[i :: len(groups)]).reshape(-1, group.dim) for i, group in enumerate(groups)]

    # --- the message of gradients: for each group, bits of its rows, their gradients, and accesses if counted --------

    def _returned_words(self, n_rows: Sequence[int]) -> list[int]:
        """float32 words of each group's part. n_rows: by group"""
        counted = self._tables.counts_accesses
        return [_words_of_bits(n) + n * (dim + counted) for n, dim in zip(n_rows, self._dims, strict=True)]

    def _write(
        self, message: np.ndarray, rank: int, borrowed: Sequence[AskedRows], given: Sequence[PickedRows]
    ) -> None:
        at = 0
        for asked, picked in zip(borrowed, given, strict=True):
            grad, rows = picked.grad, asked.in_order(rank, picked)
            n, dim, of_bits = len(rows), grad.values.shape[1], _words_of_bits(len(rows))
            is_there = rows >= 0
            message[at : at + of_bits] = _bits(is_there)
            at += of_bits
            _take(grad.values, rows, is_there, message[at : at + n * dim].reshape(n, dim))
            at += n * dim
            if grad.accesses is not None:
                _take(grad.accesses, rows, is_there, message[at : at + n].view(np.uint32))
                at += n

    def _read(self, message: np.ndarray, lent: Sequence[np.ndarray]) -> list[RowGrad]:
        grads, at = [], 0
        for keys, dim in zip(lent, self._dims, strict=True):
            n, of_bits = len(keys), _words_of_bits(len(keys))
            is_there = np.unpackbits(message[at : at + of_bits].view(np.uint8), count=n).view(bool)
            at += of_bits
            values = message[at : at + n * dim].reshape(n, dim)
            at += n * dim
            accesses = message[at : at + n].view(np.uint32) if self._tables.counts_accesses else None
            at += 0 if accesses is None else n
            grad = RowGrad(keys, values, accesses)
            grads.append(grad if is_there.all() else grad.select(is_there))
        return grads


def _words_of_bits(n: int) -> int:
    return -(-n // 32)


def _bits(values: np.ndarray) -> np.ndarray:
    """bool [n] as float32 words."""
    bits = np.zeros(4 * _words_of_bits(len(values)), np.uint8)
    packed = np.packbits(values)
    bits[: len(packed)] = packed
    return bits.view(np.float32)


def _take(values: np.ndarray, rows: np.ndarray, is_there: np.ndarray, out: np.ndarray) -> None:
    """out[i] = values[rows[i]], or 0. values: [rows, ...]; rows: int32 [n]; is_there: bool [n], of each row"""
    if is_there.all():
        np.take(values, rows, axis=0, out=out, mode="clip")  # (the mode without a copy of `out`)
        return
    out[...] = 0
    out[is_there] = values[rows[is_there]]
