"""Whether a worker's device looks rows up by itself: decided at a lookup, reported once for each answer."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from gba_hvd.embedding.on_device.host_view import CannotRegister
from gba_hvd.embedding.on_device.rows import DeviceRows
from gba_hvd.shm.shard_memory import ShardMemory


@dataclass(frozen=True)
class Decision:
    """text: a sentence; hot_rows_unused: what was asked for and is not done"""

    text: str
    hot_rows_unused: bool = False


class DeviceAccess:
    """One worker's. when: `Config.device_rows`; hot_rows: copies that the device keeps, of all tables together.

    decisions: those that are not reported yet
    """

    def __init__(self, when: str, hot_rows: int) -> None:
        self._when, self._hot_rows = when, hot_rows
        self._memory: ShardMemory | None = None
        self._device: torch.device | None = None
        self._rows: DeviceRows | None = None
        self._last = ""
        self.decisions: list[Decision] = []

    def rows(self, memory: ShardMemory, device: torch.device, several_hosts: bool) -> DeviceRows | None:
        """What looks rows of this memory up on the device; None: the CPU does."""
        if self._when == "off" or (device.type == "cpu" and self._when != "on"):
            return None
        if several_hosts:
            self.close()
            self._decide("rows are on several hosts, so the CPU looks them up and copies them to the GPU")
            return None
        if memory is not self._memory or device != self._device:
            self._open(memory, device)
        return self._rows

    @property
    def opened(self) -> DeviceRows | None:
        """What looked rows up last, if it was the device."""
        return self._rows

    def forget(self) -> None:
        """Rows were written in another way than by a step's gradients, or went back to earlier ones."""
        if self._rows is not None:
            self._rows.forget()

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        rows, self._rows, self._memory = self._rows, None, None
        if rows is not None:
            rows.close()

    @property
    def hit_share(self) -> float | None:
        """Of the distinct rows looked up so far, how many were read from the device's own memory; None: none are."""
        rows = self._rows
        return None if rows is None or not self._hot_rows or not rows.lookups else rows.hits / rows.lookups

    def _open(self, memory: ShardMemory, device: torch.device) -> None:
        self.close()
        self._memory, self._device, began_s = memory, device, time.perf_counter()
        try:
            self._rows = DeviceRows(memory.flat, memory.layout, device, self._hot_rows)
        except (CannotRegister, torch.OutOfMemoryError) as error:
            self._decide(f"{error}: the CPU looks rows up and copies them to the GPU")
            return
        took_s, copies = time.perf_counter() - began_s, ""
        if self._hot_rows:
            copies = f", and keeps copies of hot ones ({self._rows.hot_bytes / 2**20:.0f} MiB)"
        text = f"{device} reads the rows in the host's memory ({memory.flat.nbytes / 2**30:.2f} GiB"
        self._decide(f"{text}, registered in {took_s:.1f} s){copies}", is_done=True)

    def _decide(self, text: str, is_done: bool = False) -> None:
        if text == self._last:
            return
        self._last = text
        if self._hot_rows and not is_done:
            text += f"; hot_rows={self._hot_rows} has no effect"
        self.decisions.append(Decision(text, bool(self._hot_rows) and not is_done))
