"""From the ids of a batch to the rows to fetch: one `Lookup` for each feature, in any of the forms that ids come in.

What is decided here is which ids belong to which row of the result and to which sample, padding left out. The rest of
the forward pass sees bags of keys only: a feature that is not pooled is a bag of one id, or none, for every position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gba_hvd import kernels
from gba_hvd.batch import Bag
from gba_hvd.errors import BadInput

Ids = Mapping[str, Tensor | Bag]
_DTYPES = (torch.int64, torch.int32)
HALF = (torch.bfloat16, torch.float16)  # what weights may be, beside float32


class IdOutside(BadInput):
    """An id that its table has no row for.

    sample: which of the batch; None: the ids are of no batch. where: what else is known of it, in words
    """

    def __init__(self, found: str, position: int, sample: int | None, hint: str) -> None:
        super().__init__(found, position, sample, hint)
        self._found, self._position, self.sample, self._hint = found, position, sample, hint
        self.where = ""

    def __str__(self) -> str:
        at = f"at position {self._position}" if self.sample is None else f"in sample {self.sample} of the batch"
        return f"{self._found} {at}{self.where}{self._hint}"


@dataclass(frozen=True)
class Source:
    """A feature, and where its rows are: those of a table with keys first_key to first_key + n_rows - 1.

    n_rows: 0: the table is hashed, and any id has a key. group: of tables, by number. pooling: None: not pooled.
    padding_key: of the id that is left out
    """

    feature: str
    table: str
    group: int
    first_key: int
    n_rows: int
    pooling: str | None
    padding_key: int | None

    def __str__(self) -> str:
        return f"table {self.table!r}" if self.feature == self.table else f"feature {self.feature!r} of {self.table!r}"


@dataclass(frozen=True)
class PlainFields:
    """Fields of one group whose ids need no more than a check and an offset. first_key, n_rows: int64 [F]"""

    group: int
    first_key: np.ndarray
    n_rows: np.ndarray


def plain_fields(sources: Sequence[Source]) -> PlainFields | None:
    """None for fields of several groups, hashed tables, features that are not pooled, and padding."""
    groups = {source.group for source in sources}
    if len(groups) != 1 or any(not s.n_rows or s.padding_key is not None or s.pooling is None for s in sources):
        return None
    starts, sizes = zip(*((source.first_key, source.n_rows) for source in sources), strict=True)
    return PlainFields(groups.pop(), np.array(starts, np.int64), np.array(sizes, np.int64))


@dataclass(frozen=True)
class Lookup:
    """A feature of a micro-batch as bags of keys, without padding.

    keys:      int64 [n]
    offsets:   int64 [m + 1]  which keys are of each row of the result
    by_sample: int64 [B + 1]  which are of each sample
    weights:   float32 [n], or None
    pooling:   "sum", "mean" or "max" of each bag
    shape:     of the result, without its last dimension
    ragged:    offsets [B + 1] of a result that is a jagged nested tensor, or None
    is_bag:    samples may have several ids, which are summed or averaged
    kept:      int64 [n], where the keys with weights stand among those of the Bag; None: all are here
    """

    source: Source
    keys: np.ndarray
    offsets: np.ndarray
    by_sample: np.ndarray
    weights: Tensor | None
    pooling: str
    shape: tuple[int, ...]
    ragged: Tensor | None = None
    is_bag: bool = False
    kept: np.ndarray | None = None

    @property
    def n_samples(self) -> int:
        return len(self.by_sample) - 1

    def factors(self) -> np.ndarray | None:
        """float32 [n], what each row of a sum or mean is multiplied by; None: 1"""
        weights = None if self.weights is None else self.weights.detach().contiguous().numpy()
        if self.pooling != "mean":
            return weights
        counts = np.diff(self.offsets)
        share = np.repeat(np.float32(1) / np.maximum(counts, 1).astype(np.float32), counts)
        return share if weights is None else weights * share

    @property
    def shape_of_rows(self) -> tuple[int, ...]:
        """Shape of the result without its last dimension; [n] of a ragged one."""
        return self.shape if self.ragged is None else (len(self.offsets) - 1,)

    def result(self, rows: Tensor, moved: dict[int, Tensor] | None = None) -> Tensor:
        """What the model gets, of float32 [m, dim].

        moved: copies of `ragged` on another device, by its id: results with the same one have the same shape for torch
        """
        if self.ragged is not None:
            cuts = self.ragged
            if cuts.device != rows.device:
                moved = {} if moved is None else moved
                cuts = moved.setdefault(id(cuts), cuts.to(rows.device))
            return torch.nested.nested_tensor_from_jagged(rows, cuts)
        return rows if len(self.shape) == 1 else rows.view(*self.shape, rows.shape[1])


def is_row_of_each(source: Source, ids: Tensor | Bag) -> bool:
    """Whether each id becomes a row of the result: none is padding, and none are pooled."""
    if not isinstance(ids, Tensor) or ids.is_nested or source.padding_key is not None:
        return False
    return source.pooling is None or ids.ndim == 1


def look_up(source: Source, ids: Tensor | Bag) -> Lookup:
    """Raises BadInput naming table and feature for ids of another type, dtype or shape, and an id outside its table."""
    if isinstance(ids, Bag):
        return _of_bag(source, ids)
    if not isinstance(ids, Tensor):
        raise BadInput(
            f"{source}: ids must be a tensor of int64 or int32, or a gba_hvd.Bag, got {type(ids).__name__}"
            f"{hint_of_strings(ids)}"
        )
    return _of_nested(source, ids) if ids.is_nested else _of_tensor(source, ids)


def sample_of_ids(ids: Tensor) -> Callable[[int], int]:
    """The sample that has the id at a position of `ids.reshape(-1)`."""
    per_sample = max(1, ids[:1].numel() if ids.ndim else 1)
    return lambda position: position // per_sample


def ends_of_tables(sources: Sequence[Source], lengths: Sequence[int]) -> list[int]:
    """Where the keys of some lookups, one after the other, end that are of one table. lengths: keys of each lookup

    All are one part where the lookups of a table do not follow each other.
    """
    ends: list[int] = np.cumsum(lengths).tolist()
    last = [i for i, one in enumerate(sources) if i + 1 == len(sources) or sources[i + 1].table != one.table]
    if len({sources[i].table for i in last}) < len(last):
        return ends[-1:]
    return [ends[i] for i in last]


def _of_tensor(source: Source, ids: Tensor) -> Lookup:
    _check(source, ids, "ids must be int64 or int32")
    is_pooled = source.pooling is not None
    if is_pooled and not 1 <= ids.ndim <= 2:
        raise BadInput(
            f"{source}: pooled ids must be [B] or [B, L], got {list(ids.shape)}; gba_hvd.Feature(table, pooling=None) "
            "takes ids of any shape and gives each its row"
        )
    n_samples = ids.shape[0] if ids.ndim else 1
    cuts = np.arange(n_samples + 1) * (ids.numel() // max(1, n_samples))
    keys, before = _keys(source, ids.reshape(-1), cuts)
    by_sample = cuts if before is None else before[cuts]
    if not is_pooled:
        offsets = np.arange(len(keys) + 1) if before is None else before
        return Lookup(source, keys, offsets, by_sample, None, "sum", tuple(ids.shape))
    is_bag = ids.ndim == 2 and source.pooling != "max"
    return Lookup(source, keys, by_sample, by_sample, None, str(source.pooling), (n_samples,), is_bag=is_bag)


def _of_bag(source: Source, bag: Bag) -> Lookup:
    values, weights = bag.values, bag.weights
    if not isinstance(values, Tensor) or values.is_nested or values.ndim != 1:
        raise BadInput(f"{source}: values of a Bag must be int64 [n], got {_what(values)}{hint_of_strings(values)}")
    _check(source, bag.offsets, "offsets must be int64 [B]")
    if bag.offsets.ndim != 1:
        raise BadInput(f"{source}: offsets must be int64 [B], got {_what(bag.offsets)}")
    n = values.numel()
    if weights is not None:
        if weights.dtype not in (torch.float32, *HALF) or weights.shape != (n,):
            raise BadInput(f"{source}: weights must be float32 [{n}], or bfloat16 or float16, got {_what(weights)}")
        if source.pooling in (None, "max"):
            how = "is not pooled" if source.pooling is None else "is pooled by its maximum"
            raise BadInput(
                f"{source} {how}, so the weights of its Bag would be ignored: leave them out, or pool by "
                "'sum' or 'mean'"
            )
        weights = weights.float()
    cuts = np.empty(len(bag.offsets) + 1, np.int64)
    cuts[:-1], cuts[-1] = bag.offsets.numpy(), n
    ragged = torch.from_numpy(cuts) if source.pooling is None else None
    return _ragged(source, values, cuts, weights, ragged)


def _of_nested(source: Source, ids: Tensor) -> Lookup:
    if ids.layout != torch.jagged or ids.ndim != 2:
        raise BadInput(
            f"{source}: nested ids must have layout torch.jagged and two dimensions, got {ids.layout} with {ids.ndim}; "
            "make them with torch.nested.nested_tensor(list_of_ids, layout=torch.jagged)"
        )
    nested: Any = ids  # torch does not declare what a jagged tensor has beyond a tensor
    cuts = nested.offsets()
    if nested.lengths() is not None or nested._ragged_idx != 1:
        raise BadInput(f"{source}: nested ids must be contiguous, [B, j] with ragged j: call .contiguous() on them")
    offsets = cuts.numpy().astype(np.int64, copy=False)
    return _ragged(source, nested.values(), offsets, None, cuts if source.pooling is None else None)


def _ragged(source: Source, values: Tensor, cuts: np.ndarray, weights: Tensor | None, ragged: Tensor | None) -> Lookup:
    """cuts: int64 [B + 1], where each sample's values start, and their number."""
    n = values.numel()
    if cuts[0] != 0 or cuts[-1] != n or (cuts[1:] < cuts[:-1]).any():
        got = f"{cuts[0]} to {cuts[-2]}" if len(cuts) > 1 else "none"
        raise BadInput(
            f"{source}: offsets must start at 0, never fall, and end at {n}, the number of values, or before; got {got}"
        )
    keys, before = _keys(source, values, cuts)
    kept = None
    if weights is not None and before is not None and len(keys) < n:
        kept = np.flatnonzero(np.diff(before))
        weights = weights[torch.from_numpy(kept)]
    by_sample = cuts if before is None else before[cuts]
    shape = (len(cuts) - 1,)
    if ragged is not None:
        offsets = np.arange(len(keys) + 1) if before is None else before
        return Lookup(source, keys, offsets, by_sample, None, "sum", shape, ragged)
    is_bag = source.pooling != "max"
    return Lookup(source, keys, by_sample, by_sample, weights, str(source.pooling), shape, None, is_bag, kept)


def _keys(source: Source, ids: Tensor, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """(keys int64 [n] of the ids that are no padding, int64 [len(ids) + 1]: how many of them come before each id)

    The second is None where no id is padding. cuts: int64 [B + 1], which ids are of each sample
    """
    keys = np.empty(ids.numel(), np.int64)
    fill_keys(source, ids, keys, lambda position: int(np.searchsorted(cuts, position, "right")) - 1)
    if source.padding_key is None:
        return keys, None
    kept = keys != source.padding_key
    before = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(kept, out=before[1:])
    return keys[kept], before


def fill_keys(source: Source, ids: Tensor, out: np.ndarray, sample_of: Callable[[int], int] | None = None) -> None:
    """The keys of ids [n], padding among them. sample_of: the sample that has the id at a position, of a batch's ids.

    Raises BadInput for ids of another dtype, and `IdOutside`.
    """
    _check(source, ids, "ids must be int64 or int32")
    numbers = np.ascontiguousarray(ids.numpy(), np.int64)
    if not source.n_rows:
        if (bad := kernels.fill_hashed_keys(numbers, out)) >= 0:
            hint = (
                " stands for no value in int64 data, and has no row: map it to another id, or name that as padding_idx"
            )
            raise IdOutside(f"{source}: id {numbers[bad]}", bad, sample_of and sample_of(bad), hint)
        return
    bad = kernels.fill_keys(numbers, source.first_key, source.n_rows, out)
    if bad >= 0:
        is_hash = not 0 <= numbers[bad] < 2**31
        found = f"table {source.table!r} has rows 0 to {source.n_rows - 1}, got id {numbers[bad]}"
        if source.feature != source.table:
            found += f" in feature {source.feature!r},"
        hint = "; make the table larger or map the id (gba-hvd data prepare does)"
        if is_hash:
            hint += ", or take ids of 64 bits, such as hashes, with gba_hvd.Table(keys='hash64')"
        raise IdOutside(found, bad, sample_of and sample_of(bad), hint)


def _check(source: Source, numbers: Tensor, expected: str) -> None:
    if numbers.dtype not in _DTYPES or numbers.layout != torch.strided:
        viewed = "; view hashes as int64: ids.view(torch.int64)" if numbers.dtype == torch.uint64 else ""
        raise BadInput(f"{source}: {expected}, got {_what(numbers)}{viewed}")
    if numbers.device.type != "cpu":
        raise BadInput(
            f"{source}: ids must be on the CPU, where the tables are, got {numbers.device}: leave them out of what "
            "moves a batch to the GPU"
        )


def hint_of_strings(values: Any) -> str:
    """What to do with ids that are strings; empty for others."""
    if not _has_strings(values):
        return ""
    return (
        "; strings become ids of a hashed table (gba_hvd.Table(keys='hash64')) with "
        "torch.from_numpy(gba_hvd.data.hashing.hash_strings(pyarrow.array(...)).view(numpy.int64))"
    )


def _has_strings(values: Any) -> bool:
    if isinstance(values, (str, bytes, Tensor)):
        return not isinstance(values, Tensor)
    try:
        found = np.asarray(values)
    except (TypeError, ValueError):  # lists of different lengths
        return isinstance(values, (list, tuple)) and any(map(_has_strings, values))
    return found.dtype.kind in "US" or (found.dtype == object and found.ndim > 0 and any(map(_has_strings, found.flat)))


def _what(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def pooled_elsewhere(lookup: Lookup, keys: np.ndarray, offsets: np.ndarray, factors: np.ndarray | None) -> Lookup:
    """The lookup when other hosts have pooled their rows: keys of rows and of activations, and their factors."""
    weights = None if factors is None else torch.from_numpy(factors)
    return replace(lookup, keys=keys, offsets=offsets, by_sample=offsets, weights=weights, pooling="sum", kept=None)


def same_ids(one: Tensor | Bag, other: Tensor | Bag) -> bool:
    """Whether two values of a feature are the same ids, cut and weighted in the same way."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.is_nested != other.is_nested:
            return False
        if one.is_nested:
            a, b = cast(Any, one), cast(Any, other)
            return torch.equal(a.values(), b.values()) and torch.equal(a.offsets(), b.offsets())
        return torch.equal(one, other)
    if one.values is other.values and one.offsets is other.offsets and one.weights is other.weights:
        return True
    if not torch.equal(one.values, other.values) or not torch.equal(one.offsets, other.offsets):
        return False
    if one.weights is None or other.weights is None:
        return one.weights is other.weights
    return torch.equal(one.weights, other.weights)
