"""Streams for tests without a GPU: operations are done at once, and it is followed which of them a GPU could swap.

Each stream, and the host, has a vector clock. Two operations on one storage, of which one writes, are a race unless one
of them is known to come after the other: by its stream's order, by `wait_stream`, an event, or the host's waiting.
Memory that one stream has allocated and another one uses must have been given to `used_by`, as `record_stream` is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]  # by stream: so many of its operations are done before


def join(clock: Clock, other: Clock) -> None:
    for name, n in other.items():
        clock[name] = max(clock.get(name, 0), n)


class FollowedStream:
    def __init__(self, name: str, host: Clock) -> None:
        self.name, self.clock, self._host = name, dict(host), host

    def wait_stream(self, other: FollowedStream) -> None:
        join(self.clock, other.clock)

    def wait_event(self, event: FollowedEvent) -> None:
        join(self.clock, event.clock)

    def synchronize(self) -> None:
        join(self._host, self.clock)


class FollowedEvent:
    def __init__(self, streams: FollowedStreams) -> None:
        self.clock: Clock = {}
        self._streams = streams

    def record(self, stream: FollowedStream | None = None) -> None:
        self.clock = dict((stream or self._streams.current()).clock)

    def synchronize(self) -> None:
        join(self._streams.host, self.clock)


class FollowedStreams(TorchDispatchMode):
    """In place of `streams.Streams`, for operations within `with`. races, not_kept: what was found, in words

    written: the stream of each operation that wrote to memory that was there before, and the operation's name
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: Clock = {}
        self.races: list[str] = []
        self.written: list[tuple[str, str]] = []
        self._streams = [FollowedStream("first", self.host)]
        self._using = [self._streams[0]]
        self._storages: dict[int, Any] = {}  # kept, so that no address is used twice
        self._made_by: dict[int, str] = {}
        self._writes: dict[int, tuple[str, int, str]] = {}
        self._reads: dict[int, dict[str, tuple[int, str]]] = {}
        self._used: set[tuple[int, str, str]] = set()
        self._kept: set[tuple[int, str]] = set()

    # --- as `streams.Streams` ---

    def new(self) -> FollowedStream:
        self._streams.append(FollowedStream(f"stream {len(self._streams)}", self.host))
        return self._streams[-1]

    def current(self) -> FollowedStream:
        return self._using[-1]

    @contextlib.contextmanager
    def using(self, stream: FollowedStream) -> Iterator[None]:
        self._using.append(stream)
        yield
        self._using.pop()

    def event(self) -> FollowedEvent:
        return FollowedEvent(self)

    def used_by(self, stream: FollowedStream, *tensors: Tensor) -> None:
        self._kept |= {(self._place(one), stream.name) for one in tensors}

    # --- what was found ---

    @property
    def not_kept(self) -> list[str]:
        return sorted(
            f"{op} in {name} uses memory of {self._made_by[place]}"
            for place, name, op in self._used
            if (place, name) not in self._kept
        )

    def host_reads(self, tensor: Tensor) -> bool:
        """Whether what was written to it is known to be there for the host."""
        name, n, _ = self._writes.get(self._place(tensor), ("", 0, ""))
        return self.host.get(name, 0) >= n

    def _place(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage
        return storage.data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, op = func._schema, func._schema.name
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in schema.arguments if kwargs and a.name in kwargs]
        out = func(*args, **(kwargs or {}))
        if any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
            return out  # a view reads nothing
        stream, writes, reads = self.current(), set[int](), set[int]()
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            places = {self._place(one) for one in tree_leaves(value) if isinstance(one, Tensor) and one.numel()}
            (writes if is_written else reads).update(places)
        if writes:
            self.written.append((stream.name, op))
        made = {self._place(one) for one in tree_leaves(out) if isinstance(one, Tensor) and one.numel()}
        made -= writes | reads
        self._made_by |= dict.fromkeys(made, stream.name)
        if op == "aten::_local_scalar_dense":  # the host reads
            assert isinstance(args[0], Tensor)
            if not self.host_reads(args[0]):
                self.races.append(f"the host reads what {self._writes[self._place(args[0])][2]} writes")
            return out
        join(stream.clock, self.host)
        stream.clock[stream.name] = now = stream.clock.get(stream.name, 0) + 1
        for place in writes | reads:
            if self._made_by.get(place, stream.name) != stream.name:
                self._used.add((place, stream.name, op))
            self._compare(stream, op, *self._writes.get(place, (stream.name, 0, "")))
        for place in writes:
            for name, (n, before) in self._reads.get(place, {}).items():
                self._compare(stream, op, name, n, before)
        for place in reads:
            self._reads.setdefault(place, {})[stream.name] = now, op
        self._writes |= dict.fromkeys(writes | made, (stream.name, now, op))
        return out

    def _compare(self, stream: FollowedStream, op: str, name: str, n: int, before: str) -> None:
        if stream.clock.get(name, 0) < n:
            self.races.append(f"{op} in {stream.name} does not wait for {before} in {name}")
