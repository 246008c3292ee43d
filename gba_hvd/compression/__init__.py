"""Fewer bytes for the gradients: which elements are sent, in how many bits, and where the residuals wait.

`spec` is what a user writes. `thresholds` selects the elements, `index_codec` and `value_codec` encode their positions
and values, `sparse_message` puts both into bytes and reads them back, checked. `error_feedback` stores the residuals.
`dense_exchange` carries the dense gradients of an allreduce step, `dense_push` those of an asynchronous mode,
`dense_deltas` the values that come back; `bypass` decides whether compressing pays. `row_codec`, `row_exchange`,
`row_push` and `row_residuals` do the same for rows; `activation_codec` and `activation_exchange` for DCT-MP.
"""

from __future__ import annotations

from gba_hvd.compression.spec import Compression, Spec

__all__ = ["Compression", "Spec"]
