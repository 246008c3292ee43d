"""What a push carries to each server: its part of the dense gradient, and the gradients of rows of its shards.

Nothing is sent here. What goes to servers of other hosts may be compressed; what that leaves behind waits in the
worker's residuals, and is settled here: a push is final for the worker, even if it is lost.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from gba_hvd.compression import activation_codec, row_push
from gba_hvd.compression.dense_exchange import DenseExchange
from gba_hvd.compression.dense_push import DensePush, Frame
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.embedding.passes import PulledRows
from gba_hvd.embedding.row_gradients import Packed, RowGrad, merge, pack_by_owner, with_contributors
from gba_hvd.ps.client import Reply
from gba_hvd.ps.messages import Ok
from gba_hvd.ps.worker.session import DenseParts, PsSession
from gba_hvd.shm.layout import Layout
from gba_hvd.update_rules.dana_slim import SlimWorker


class PushEncoder:
    """One worker's. Belongs to the training thread, all but `rows` and `timed`, which threads that share a replica
    call at once.

    slim: what rule "dana_slim" does to gradients before they are sent.
    compression: None where no server is on another host. rows_are_coded: whether rows of a server travel compressed, as
    of now
    """

    def __init__(
        self, session: PsSession, host: int, parts: DenseParts, layout: Layout, compression: DenseExchange | None,
        row_coder: RowCoder | None, rows_are_coded: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self._session, self._parts, self._layout = session, parts, layout
        self._shard_server = np.array(session.shard_servers, dtype=np.int32)
        is_remote = session.remote_servers(host)
        self._coded: DensePush | None = None
        if compression is not None:
            self._coded = DensePush(compression.feedback, parts.tensors, is_remote, compression.decisions)
        self._with_residuals = [  # servers whose rows may have residuals: a shard may have returned with them
            s for s, remote in enumerate(is_remote)
            if row_coder is not None and (remote or row_coder.has_residuals_for(self._shard_server == s))
        ]  # fmt: skip
        self._row_coder, self._row_coding, self._rows_are_coded = row_coder, threading.Lock(), rows_are_coded
        self.slim: SlimWorker | None = None

    @property
    def has_residual(self) -> bool:
        """Dense gradients are not always sent uncompressed."""
        return self._coded is not None

    def dense(self, flat: np.ndarray, step: int) -> list[Frame]:
        """For each server its part. flat: float32 [n], the gradient, computed with the values of `step`; it is used up.

        Raises as `Feedback.encode`; then this worker's residual and momentum are as they were.
        """
        slim = copy.copy(self.slim)  # its arrays are never written, only replaced
        if slim is not None:
            flat = slim.outgoing(flat, step)
        coded = self._coded
        frames = [Frame(part) for part in self._parts.split(flat)] if coded is None else coded.frames(flat)
        self.slim = slim
        return frames

    def rows(
        self, rows: Sequence[Sequence[RowGrad]], pulled: Sequence[PulledRows | None] = ()
    ) -> list[tuple[Any, bool]]:
        """For each server its row message, and whether that is compressed.

        rows: by group, of the tables of one micro-batch. pulled: what was fetched for it of other hosts
        """
        contributors = self._session.row_average != "global"
        grads = []
        for group, parts in zip(self._layout.groups, rows, strict=True):
            grad = RowGrad.none(group.dim, self._session.accesses)
            if parts:
                grad = merge([(part, 1.0) for part in parts])
            grads.append(with_contributors(grad) if contributors else grad)
        packed, coder = Packed.of(grads, self._shard_server, len(self._session.servers)), self._row_coder
        coded: dict[int, tuple[Any, bool]] = {}
        if coder is not None and coder.spec.pools:  # as they came: activations have no other way back
            for s in self._with_residuals:
                borrowed = [None if one is None else one.borrowed.get(s) for one in pulled]
                if borrowed and all(one is not None for one in borrowed):
                    mine = [one for one in borrowed if one is not None]
                    dims = [group.dim for group in self._layout.groups]
                    coded[s] = activation_codec.pack(packed.of_owner(s), mine, coder.spec, dims), True
        elif coder is not None:
            with self._row_coding:  # threads that share a replica share its residuals
                coder.begin()
                for s in self._with_residuals:
                    is_coded = self._rows_are_coded(s)
                    if is_coded:
                        coded[s] = row_push.pack(packed.of_owner(s), coder), True
                    elif coder.has_residuals:
                        own = coder.whole(packed.of_owner(s))
                        coded[s] = pack_by_owner(own, np.zeros_like(self._shard_server), 1)[0], False
                coder.settle()  # as with dense gradients: what is sent is final, even if the push is lost
        return [coded[s] if s in coded else (packed.message(s), False) for s in range(len(packed.words))]

    def timed(
        self, server: int, frame: Frame, on_reply: Callable[[Future[Reply]], None]
    ) -> Callable[[Future[Reply]], None]:
        """What to call with the answer to a dense frame that is sent now: it also shows how long the server took."""
        coded, sent_s = self._coded, time.perf_counter()
        if coded is None:
            return on_reply

        def answered(reply: Future[Reply]) -> None:
            if reply.exception() is None and isinstance(reply.result().body, Ok):
                coded.answered(server, frame, time.perf_counter() - sent_s)
            on_reply(reply)

        return answered
