"""Rows and their gradients between the hosts of an allreduce step, compressed. In place of `modes.whole_rows`.

    pull   keys by alltoall, rows back by alltoall; asker and owner keep what was lent
    send   gradients by alltoall, before the commit; they are decoded and checked when they arrive, and then held
    read   after the commit, which carries what each worker's rows took: all decide alike whether the next step's
           rows go compressed (`bypass`)

Between the ranks of one host nothing goes through here. What was lent belongs to one step: a step that is computed
again begins with another `pull`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from gba_hvd.comm.collectives import Alltoall, World
from gba_hvd.comm.traffic import Traffic
from gba_hvd.compression import row_codec as coding
from gba_hvd.compression.bypass import Bypass, StepTiming
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.embedding.bags import BagLookups
from gba_hvd.embedding.passes import PulledRows
from gba_hvd.embedding.row_gradients import RowGrad, distinct, with_access_column, without_access_column
from gba_hvd.embedding.tables import EmbeddingTables

N_NUMBERS = 3  # of each worker, with each commit: seconds of this step on the wire, beside it, and of the whole step


class RowExchange:
    """One worker's part in one world.

    alltoall: of all ranks of the world, see `World.alltoall`
    server: int32 [S], the rank that serves each shard. here: the ranks of this host.
    compresses: how this step's rows go; where they go as they are, the caller carries them.
    Owns what is lent and borrowed, by rank and group; uses the world, the tables and the worker's coder.
    """

    def __init__(
        self, coder: RowCoder, world: World, alltoall: Alltoall, tables: EmbeddingTables, server: np.ndarray,
        here: Sequence[int], traffic: Traffic,
    ) -> None:  # fmt: skip
        self._alltoall = alltoall
        self._world, self._tables, self._server, self._traffic = world, tables, server, traffic
        self._remote = [rank for rank in range(world.size) if rank not in here]
        self.coder = coder
        self._lent: dict[int, list[np.ndarray]] = {}
        self._borrowed: dict[int, list[np.ndarray]] = {}
        self._bypass = Bypass(["rows"], coder.spec.is_forced, "rows of other hosts", "a step's take")
        self.compresses = self._bypass.tensors_next()[0]
        self._wire_s = self._rows_s = 0.0  # of this step
        self.resume()

    def pull(self, keys: Sequence[np.ndarray], bags: BagLookups | None) -> None:
        """Fetch rows of other hosts: per group the keys this rank will use next. A collective.

        bags: the same with bags apart, None where their rows are fetched as all others
        """
        tables, layout = self._tables, self._tables.layout
        assert tables.local is not None and tables.memory is not None
        wanted = [coding.ascending(distinct(k[~tables.local[k % layout.n_shards]])[0]) for k in keys]
        owners = [self._server[w % layout.n_shards] for w in wanted]
        asked = {r: [w[o == r] for w, o in zip(wanted, owners, strict=True)] for r in self._remote}
        questions = {r: coding.sections(list(map(coding.write_keys, asked[r]))) for r in self._remote}
        answers = {}
        for rank, data in self._swap("pull.keys", "header", questions).items():
            parts, self._lent[rank] = [], []
            for group, part in zip(layout.groups, coding.split(data, len(layout.groups)), strict=True):
                theirs = coding.read_keys(part, layout.key_limit(group))
                rows = np.empty((len(theirs), group.dim), dtype=np.float32)
                tables.memory.gather(theirs, group, 0, rows)
                parts.append(coding.encode_rows(rows, self.coder.spec))
                self._lent[rank].append(theirs)
            answers[rank] = coding.sections(parts)
        found = [np.empty((len(w), g.dim), dtype=np.float32) for w, g in zip(wanted, layout.groups, strict=True)]
        for rank, data in self._swap("pull.rows", "rows", answers).items():
            self._borrowed[rank] = asked[rank]
            for number, (group, part) in enumerate(
                zip(layout.groups, coding.split(data, len(layout.groups)), strict=True)
            ):
                found[number][owners[number] == rank] = coding.decode_rows(part, len(asked[rank][number]), group.dim)
        for number, (mine, rows) in enumerate(zip(wanted, found, strict=True)):
            _, _, slots = distinct(mine)
            tables.remote[number] = PulledRows(mine, slots, rows)

    def send(self, grads: Sequence[RowGrad], extra: int) -> dict[int, list[RowGrad]]:
        """Give back the gradients of what was borrowed; returns what other hosts' ranks gave back: by rank, per group.

        grads: by group. extra: columns of them beyond a row's dimension; accesses, where they are counted, come on top.
        After the coder's `begin`. A collective.
        """
        remote, dims = {}, [group.dim for group in self._tables.layout.groups]
        counted = any(grad.accesses is not None for grad in grads)
        grads = [with_access_column(grad) for grad in grads]
        given_back = {rank: self._given_back(rank, grads) for rank in self._remote}
        for rank, data in self._swap("rows", "rows", given_back).items():
            lent = self._lent.pop(rank)
            parts = coding.split(data, len(lent))
            back = [coding.decode_row_gradients(*one, extra + counted) for one in zip(parts, lent, dims, strict=True)]
            remote[rank] = [without_access_column(grad) for grad in back] if counted else back
        return remote

    # --- whether it pays ---------------------------------------------------------------------------------------------

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What is done in here is part of what the step's rows take."""
        began_s = time.perf_counter()
        yield
        self._rows_s += time.perf_counter() - began_s

    def alltoall(
        self, name: str, words: np.ndarray, splits: np.ndarray, expected: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """That of all ranks, timed: while `measured`."""
        began_s = time.perf_counter()
        received = self._alltoall(name, words, splits, expected)
        self._wire_s += time.perf_counter() - began_s
        return received

    def resume(self) -> None:
        """Steps follow each other from now on."""
        self._ended_s = time.perf_counter()

    def write_timing(self, numbers: Tensor) -> None:
        """Before the commit: what this step's rows took here. numbers: [N_NUMBERS * world size], 0 so far"""
        now = time.perf_counter()
        mine = numbers[N_NUMBERS * self._world.rank :]
        mine[0], mine[1], mine[2] = self._wire_s, self._rows_s - self._wire_s, now - self._ended_s
        self._wire_s, self._rows_s, self._ended_s = 0.0, 0.0, now

    def read_timings(self, numbers: Tensor) -> None:
        """After the commit: everybody's numbers."""
        took = [StepTiming(*row) for row in numbers.reshape(self._world.size, N_NUMBERS).tolist()]
        decision = self._bypass.saw(self.compresses, took)
        if decision is not None and decision.changed:
            self.coder.decisions.append(decision)
        self.compresses = self._bypass.tensors_next()[0]

    # -----------------------------------------------------------------------------------------------------------------

    def _given_back(self, rank: int, grads: Sequence[RowGrad]) -> bytes:
        borrowed = self._borrowed.pop(rank)
        return coding.sections([self.coder.give_back(i, borrowed[i], grad) for i, grad in enumerate(grads)])

    def _swap(self, name: str, kind: str, messages: dict[int, bytes]) -> dict[int, np.ndarray]:
        """One alltoall; what came from each rank of other hosts, uint8 [n]. kind: what it counts as"""
        ranks = range(self._world.size)
        words = [np.frombuffer(messages.get(rank, b""), np.float32) for rank in ranks]
        received, counts = self.alltoall(name, np.concatenate(words), np.array([len(w) for w in words], dtype=np.int64))
        parts = np.split(received, np.cumsum(counts)[:-1])
        by_rank = {rank: parts[rank].view(np.uint8) for rank in self._remote}
        self._traffic.count("sent", kind, sum(map(len, messages.values())))
        self._traffic.count("received", kind, sum(map(len, by_rank.values())))
        return by_rank
