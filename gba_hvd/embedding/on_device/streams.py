"""The streams of a device: what this package asks of them, in one place, so that tests can follow it without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class Streams:
    """Of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def using(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """What is asked of the device in here is done in this stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def used_by(self, stream: torch.cuda.Stream, *tensors: Tensor) -> None:
        """Memory of these tensors, of another stream, is not used again before what this stream was asked so far."""
        for one in tensors:
            one.record_stream(stream)


def of(device: torch.device) -> Streams | None:
    """None: the device does one thing after the other, as a CPU does."""
    return Streams(device) if device.type == "cuda" else None
