"""Whether a worker's device looks rows up by itself: decided at a lookup, reported once for each answer."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from gba_hvd.embedding.on_device.host_view import CannotRegister
from gba_hvd.embedding.on_device.rows import DeviceRows
from gba_hvd.shm.shard_memory import ShardMemory
from recovery.units import size


@dataclass(frozen=True)
class Decision:
    """text: a sentence. by_device: the device looks rows up; is_warning: something that was asked for is not done"""

    text: str
    by_device: bool
    is_warning: bool


class DeviceAccess:
    """One worker's. when: `Config.device_rows`; hot_rows: copies that the device keeps, of all tables together.

    applies: this worker is the only one that changes rows, and its device does it. Else each copy would be outdated by
    the next step, and none are kept. decisions: those that are not reported yet
    """

    def __init__(self, when: str, hot_rows: int) -> None:
        self._when, self._hot_rows = when, hot_rows
        self._memory: ShardMemory | None = None
        self._device: torch.device | None = None
        self._rows: DeviceRows | None = None
        self._reported: set[str] = set()
        self.applies = True
        self.decisions: list[Decision] = []

    def is_wanted(self, device: torch.device) -> bool:
        """Whether a model on this device has its rows looked up there, if they can be."""
        return self._when != "off" and (device.type != "cpu" or self._when == "on")

    def rows(self, memory: ShardMemory, device: torch.device, obstacle: str = "") -> DeviceRows | None:
        """What looks rows of this memory up on the device; None: the CPU does. obstacle: what prevents it, in words"""
        if not self.is_wanted(device):
            return None
        if device.type not in ("cpu", "cuda"):
            obstacle = f"{device} cannot read the host's memory"
        elif all(group.hashed is not None for group in memory.layout.groups):
            obstacle = "all tables are hashed"
        if obstacle:
            self._decide(f"{obstacle}: the CPU looks rows up and copies them to the model's device", by_device=False)
            return None
        if memory is not self._memory or device != self._device:
            self._open(memory, device)
        if self._rows is not None:
            self._rows.keep_copies(self.applies)
            if self._hot_rows and not self.applies:
                self._decide(f"{device} reads rows that other processes write, or the CPU", by_device=True)
        return self._rows

    @property
    def current(self) -> DeviceRows | None:
        """What looked rows up last, if it was the device."""
        return self._rows

    def forget(self) -> None:
        """Rows were written in another way than by a step's gradients, or went back to earlier ones."""
        if self._rows is not None:
            self._rows.forget()

    def close(self) -> None:
        """Let go of the memory. May be called twice; a lookup takes it again."""
        rows, self._rows, self._memory = self._rows, None, None
        if rows is not None:
            rows.close()

    @property
    def hit_share(self) -> float | None:
        """Of the distinct rows looked up so far, how many were read from the device's own memory; None: none are."""
        rows = self._rows
        if rows is not None and rows.keeps_copies and rows.copies_all:
            return 1.0
        return None if rows is None or not self._hot_rows or not rows.lookups else rows.hits / rows.lookups

    @torch.inference_mode(False)  # what is made here is written by later steps
    def _open(self, memory: ShardMemory, device: torch.device) -> None:
        self.close()
        self._memory, self._device, began_s = memory, device, time.perf_counter()
        copies = no_room = ""
        try:
            try:
                self._rows = DeviceRows(memory.flat, memory.layout, device, self._hot_rows)
            except torch.OutOfMemoryError as error:
                no_room = str(error)
            if no_room:  # (here the memory is no longer registered for the first try)
                copies = f"; there is no room for copies ({no_room})"
                self._rows = DeviceRows(memory.flat, memory.layout, device)
        except CannotRegister as error:
            text = (
                f"{error}: the CPU looks rows up and copies them. Memory on a disk cannot be registered, /dev/shm can"
            )
            self._decide(text, by_device=False)
            return
        assert self._rows is not None
        if self._rows.keeps_copies:
            which = "all" if self._rows.copies_all else "hot ones"
            copies = f", and keeps copies of {which} ({size(self._rows.n_bytes_of_copies)})"
            if why := self._rows.why_not_fused:
                copies += f"; torch's operators change them, which is slower ({why})"
        if hashed := [table.name for table in memory.layout.tables if table.hashed is not None]:
            copies += f"; hashed tables ({', '.join(hashed)}) are looked up by the CPU"
        took_s = time.perf_counter() - began_s
        text = f"{device} reads the rows in the host's memory ({memory.flat.nbytes / 2**30:.2f} GiB"
        self._decide(f"{text}, ready after {took_s:.1f} s){copies}", by_device=True, is_hot=self._rows.keeps_copies)

    def _decide(self, text: str, *, by_device: bool, is_hot: bool = False) -> None:
        if text in self._reported:
            return
        self._reported.add(text)
        is_unused = bool(self._hot_rows) and not is_hot
        if is_unused:
            text += "; hot_rows has no effect"
        self.decisions.append(Decision(text, by_device, is_unused))
