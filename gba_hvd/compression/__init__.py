"""Fewer bytes for the gradients: what is sent, in how many bits, and where the rest waits.

`spec` is what a user writes. `selection` says which elements travel, `places` and `values` how their positions and
values are written, `message` puts both into bytes and reads them back, checked. `feedback` keeps what was not sent.
`exchange` carries the dense gradients of an allreduce step, `push` those of an asynchronous mode, `mirror` what comes
back; `bypass` decides whether that pays. `rows`, `row_exchange`, `row_push` and `row_rests` do the same for rows.
"""

from __future__ import annotations

from gba_hvd.compression.spec import Compression, Spec

__all__ = ["Compression", "Spec"]
