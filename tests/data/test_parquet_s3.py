"""`ParquetStream` on an object store: what it reads, and that an object which is written again is noticed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gba_hvd
from gba_hvd.data import ParquetStream
from tests.recovery.conftest import s3_options

__all__ = ["s3_options"]


@pytest.fixture
def write(s3_options: dict[str, Any]) -> Callable[[str, np.ndarray], str]:
    def write(name: str, rows: np.ndarray) -> str:
        fs = fsspec.filesystem("s3", **s3_options)
        fs.makedirs("clicks", exist_ok=True)
        with fs.open(f"clicks/{name}", "wb") as file:
            pq.write_table(pa.table({"user": rows, "click": rows % 2}), file, row_group_size=20)
        return f"s3://clicks/{name}"

    return write


@pytest.mark.slow
def test_objects_are_a_stream_and_a_new_version_is_another_one(
    write: Callable[[str, np.ndarray], str], s3_options: dict[str, Any]
) -> None:
    for number in range(3):
        write(f"day/part-{number}.parquet", np.arange(100 * number, 100 * number + 50))

    def opened(url: str = "s3://clicks/day") -> ParquetStream:
        return ParquetStream(url, ids=["user"], label="click", storage_options=s3_options)

    data = opened()
    assert len(data) == 150
    assert data.take(np.array([149, 0, 50])).ids["user"].tolist() == [249, 0, 100]
    assert opened("s3://clicks/day/*.parquet").order_digest == data.order_digest
    copy = pickle.loads(pickle.dumps(data))
    assert copy.take(np.array([60])).ids["user"].tolist() == [110]

    write("day/part-1.parquet", np.arange(100, 150)[::-1].copy())  # the same size
    with pytest.raises(gba_hvd.BadInput, match=r"part-1.parquet: the file has changed since the stream was opened"):
        copy.take(np.array([90]))
    assert opened().order_digest != data.order_digest
    fsspec.filesystem("s3", **s3_options).rm("clicks/day/part-2.parquet")
    with pytest.raises(gba_hvd.BadInput, match=r"part-2.parquet: the file is gone"):
        copy.take(np.array([149]))
