"""DCT-MP in an allreduce step: `row_exchange`, with activations and masks in place of rows and residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd import kernels
from gba_hvd.compression import activation_codec as coding
from gba_hvd.compression.activation_codec import ActivationThresholds
from gba_hvd.compression.row_codec import sections, split
from gba_hvd.compression.row_exchange import RowExchange
from gba_hvd.embedding import bags as pooling
from gba_hvd.embedding.bags import BagLookups, Borrowed, PooledBag, PoolRequest
from gba_hvd.embedding.passes import PulledRows
from gba_hvd.embedding.row_gradients import RowGrad, distinct


class ActivationExchange(RowExchange):
    """One worker's part in one world. Owns what it lent and borrowed, by rank and group, and the thresholds."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._thresholds = ActivationThresholds(self.coder.spec, len(self._tables.layout.tables))
        self._given: dict[int, list[Borrowed]] = {}
        self._taken: dict[int, list[Borrowed]] = {}

    def pull(self, keys: Sequence[np.ndarray], bags: BagLookups | None) -> None:
        """As `RowExchange.pull`; rows of bags are pooled by the ranks that serve them."""
        assert bags is not None and self._tables.local is not None
        layout = self._tables.layout
        owner = np.where(self._tables.local, -1, self._server)
        asked: list[list[tuple[np.ndarray, PoolRequest, np.ndarray]]] = []  # by group and rank
        left: list[list[PooledBag]] = []
        for group, single, fields in zip(layout.groups, bags.single, bags.bags, strict=True):
            first = group.rows_per_shard * layout.n_shards
            pooled, requests, activations = pooling.split(fields, owner, self._world.size, first)
            wanted = np.sort(distinct(single)[0])
            whose = owner[wanted % layout.n_shards]
            by_rank = [wanted[whose == rank] for rank in range(self._world.size)]
            asked.append(list(zip(by_rank, requests, activations, strict=True)))
            left.append(pooled)
        questions = {
            rank: sections([coding.write_request(own, request) for own, request, _ in (some[rank] for some in asked)])
            for rank in self._remote
        }
        answers = self._lend(self._swap("pull.keys", "header", questions))
        came = self._swap("pull.rows", "rows", answers)
        self._taken = {rank: [] for rank in came}
        for number, (group, pooled) in enumerate(zip(layout.groups, left, strict=True)):
            found: list[np.ndarray] = [np.empty(0, np.int64)]
            values: list[np.ndarray] = [np.empty((0, group.dim), np.float32)]
            n_sent = 0
            for rank, data in came.items():
                own, request, of_bags = asked[number][rank]
                mine = np.concatenate([own, of_bags])
                rows, indices = coding.decode(split(data, len(layout.groups))[number], len(mine), group.dim)
                self._taken[rank].append(Borrowed(mine, request, indices))
                found.append(mine)
                values.append(rows)
                n_sent += len(indices)
            all_keys, all_values = np.concatenate(found), np.concatenate(values)
            self.coder.received(number, n_sent, all_values.size)
            self._tables.remote[number] = PulledRows(all_keys, distinct(all_keys)[2], all_values, pooled)

    def send(self, grads: Sequence[RowGrad], extra: int) -> dict[int, list[RowGrad]]:
        """As `RowExchange.send`: of what was borrowed, the elements that were sent."""
        remote, groups = {}, self._tables.layout.groups
        counted = any(grad.accesses is not None for grad in grads)
        given_back = {
            rank: sections(
                [
                    coding.write_back(borrowed, grad, self.coder.spec, group.dim)
                    for borrowed, grad, group in zip(self._taken.pop(rank), grads, groups, strict=True)
                ]
            )
            for rank in self._remote
        }
        for rank, data in self._swap("rows", "rows", given_back).items():
            parts = zip(split(data, len(groups)), self._given.pop(rank), groups, strict=True)
            remote[rank] = [coding.read_back(part, lent, group.dim, extra, counted) for part, lent, group in parts]
        return remote

    def _lend(self, questions: dict[int, np.ndarray]) -> dict[int, bytes]:
        """By rank, what it asked for; kept with its mask until the gradients come."""
        layout, spec = self._tables.layout, self.coder.spec
        answers: dict[int, list[bytes]] = {rank: [] for rank in questions}
        self._given = {rank: [] for rank in questions}
        parts = {rank: split(data, len(layout.groups)) for rank, data in questions.items()}
        for number, group in enumerate(layout.groups):
            limit = group.rows_per_shard * layout.n_shards
            asked = {rank: coding.read_request(some[number], limit) for rank, some in parts.items()}
            lent = {
                rank: np.concatenate([self._rows(number, keys), request.pool(self._rows(number, request.distinct))])
                for rank, (keys, request) in asked.items()
            }
            masks = self._thresholds.masks_of(layout, number, list(asked.values()), list(lent.values()))
            for (rank, activations), indices in zip(lent.items(), masks, strict=True):
                answers[rank].append(coding.encode(activations, indices, spec))
                self._given[rank].append(coding.lent(*asked[rank], indices))
        return {rank: sections(some) for rank, some in answers.items()}

    def _rows(self, number: int, keys: np.ndarray) -> np.ndarray:
        """float32 [n, dim] of this rank's shards."""
        layout, memory = self._tables.layout, self._tables.memory
        assert memory is not None
        rows = np.empty((len(keys), layout.groups[number].dim), dtype=np.float32)
        kernels.gather_rows(memory.flat, layout.record_starts(keys, layout.groups[number]), 0, rows)
        return rows
