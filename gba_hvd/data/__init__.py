"""Click logs: prepared from files (`prepare`, `ClickLog`), read from Parquet as they are (`ParquetStream`), or made up
(`SyntheticClickLog`, `SyntheticBehaviourLog`); and samples of any kind that are read in sequence (`ShardedStream`).

The flow: sources -> raw_rows -> checked_rows -> encoding -> store, then click_log reads. `recipe` defines the columns;
row_encoder encodes rows of a request as those of a store.
"""

from __future__ import annotations

from gba_hvd.extras import extra

with extra("data", "pyarrow", "gba_hvd.data needs"):
    from gba_hvd.data.behaviour import SyntheticBehaviourLog
    from gba_hvd.data.click_log import ClickLog
    from gba_hvd.data.parquet_stream import ParquetStream
    from gba_hvd.data.prepare import prepare
    from gba_hvd.data.recipe import Categorical, Hashed, Identity, Numeric, Recipe, SplitFiles, SplitShares, Vocabulary
    from gba_hvd.data.row_encoder import RowEncoder
    from gba_hvd.data.sharded_stream import ShardedStream
    from gba_hvd.data.synthetic import SyntheticClickLog

__all__ = [
    "Categorical",
    "ClickLog",
    "Hashed",
    "Identity",
    "Numeric",
    "ParquetStream",
    "Recipe",
    "RowEncoder",
    "ShardedStream",
    "SplitFiles",
    "SplitShares",
    "SyntheticBehaviourLog",
    "SyntheticClickLog",
    "Vocabulary",
    "prepare",
]
