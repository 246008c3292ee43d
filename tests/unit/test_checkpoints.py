"""Which checkpoints a job can go on from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd import BadInput, Compression
from gba_hvd.checkpoints import Checkpoints

DCT, INT8 = Compression.dct(0.1), Compression.dct(0.1).then(Compression.int8)


def checkpoints(spec: Any, **batches: int) -> Checkpoints:
    compression = None if spec is None else SimpleNamespace(spec=spec)
    engine: Any = SimpleNamespace(**{"global_batch": 16, "micro_batch": 4, **batches}, compression=compression)
    callback: Any = SimpleNamespace(config=SimpleNamespace(policy="full"))
    made: Any = Checkpoints(engine, callback)
    made._store = SimpleNamespace(url="file:///runs")
    found: Checkpoints = made
    return found


def about(spec: Any) -> dict[str, Any]:
    """What a job with this compressor saves."""
    told = {"global_batch": 16, "micro_batch": 4}
    return told if spec is None else {**told, "compression": checkpoints(spec)._compressor}


@pytest.mark.parametrize(
    ("saved", "mine"),
    [(None, None), (DCT, DCT), (INT8, INT8.always()), (None, DCT), (Compression.none, DCT), (None, Compression.fp16)],
    ids=str,
)
def test_a_checkpoint_of_the_same_compressor_fits_and_so_does_one_of_none(saved: Any, mine: Any) -> None:
    checkpoints(mine).check_fits(about(saved))


@pytest.mark.parametrize(
    ("saved", "mine"), [(DCT, None), (DCT, INT8), (Compression.fp16, Compression.bf16), (INT8, DCT)], ids=str
)
def test_a_checkpoint_of_another_compressor_is_refused(saved: Any, mine: Any) -> None:
    with pytest.raises(BadInput) as caught:
        checkpoints(mine).check_fits(about(saved))
    said = str(caught.value)
    assert f"at file:///runs is of a job with compression={saved}, this one has {mine or 'none'}: what was not" in said
    assert f"would be lost; go on with {saved}, or start anew" in said


@pytest.mark.parametrize("name", ["global_batch", "micro_batch"])
def test_a_checkpoint_of_other_batches_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"is of a job with {name}=(16|4), this one has 32"):
        checkpoints(None, **{name: 32}).check_fits(about(None))
