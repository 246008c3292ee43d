"""The compressors of `bench compression`, by the short names that its contestants and their workers go by."""

from __future__ import annotations

from gba_hvd.compression import Compression

COMPRESSION = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "int8": Compression.int8,
    "topk": Compression.topk(0.01).then(Compression.fp16),
    "dct": Compression.dct(0.01).then(Compression.int8),
    "dct_mp": Compression.dct_mp(0.05).then(Compression.int8),
    "ternary_ef": Compression.ternary_ef(0.02, drift=1.25).then(Compression.int8),
}
