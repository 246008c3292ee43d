"""What a user writes: `Compression.dct(keep=0.01).then(Compression.int8)`. Validated here, carried out elsewhere.

A selector says which elements travel, a value coder in how many bits (`fp16`, `bf16`, `int8`, or one that is
registered). One of each can be chained, the selector first. Dense gradients take the selectors of `DENSE_SELECTORS`,
rows all but `dct`. `dct_mp` is the published rule, and so is `dct` (DCT-DP) with `drift=math.inf`; by default `dct`
also finds a threshold again when the share sent has drifted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from gba_hvd.compression import value_codec
from gba_hvd.errors import BadInput, refuse_unknown

DENSE_SELECTORS = ("topk", "dct")
SELECTORS = ("topk", "dct", "ternary_ef", "dct_mp")
WITH_THRESHOLD = SELECTORS[1:]
_THRESHOLD = ("keep", "eta", "refresh_every", "drift")
_SETTINGS = {
    "topk": ("keep", "eta"),
    **dict.fromkeys(WITH_THRESHOLD, _THRESHOLD),
    "dct_mp": (*_THRESHOLD, "per_table"),
}  # of the others: none
_DRIFT = {"dct_mp": math.inf}  # default; of the others:
_DRIFT_OF_OTHERS = 2.0
_SYNONYMS = {"dct_dp": "dct", "top_k": "topk", "half": "fp16", "float16": "fp16", "bfloat16": "bf16"}
MIN_ELEMENTS = 256  # smaller tensors go dense (as in the public code of DCT)


@dataclass(frozen=True)
class Spec:
    """A compressor's settings.

    selector:      "" (every element), "topk", "dct", "ternary_ef" or "dct_mp"
    keep:          share of each tensor's elements that is sent, in (0, 1]; the paper's 1 - eta
    refresh_every: steps for which a threshold is used at most, the paper's L; not of topk. A refresh for drift counts
                   from 0 again: with a finite drift the limit may never be reached, and then it has no effect
    drift:         the threshold is also refreshed when the share sent leaves keep / drift to keep * drift; not of topk
    values:        "none" (as they are), "fp16", "bf16", "int8", or a coder that is registered
    is_forced:     compress also where the bytes saved do not pay
    per_table:     a threshold for each table, not one for all of a dimension; of dct_mp only
    """

    selector: str = ""
    keep: float = 1.0
    refresh_every: int = 1
    drift: float = 2.0
    values: str = "none"
    is_forced: bool = False
    per_table: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.keep, Real) or not 0 < self.keep <= 1:
            raise BadInput(f"keep is the share of elements that is sent, in (0, 1]; got {self.keep!r}")
        n = self.refresh_every
        if not isinstance(n, Real) or not 1 <= n < math.inf or int(n) != n:
            raise BadInput(f"refresh_every is a number of steps, at least 1; got {self.refresh_every!r}")
        if not isinstance(self.drift, Real) or not self.drift > 1:
            raise BadInput(f"drift is a number above 1 (math.inf: only refresh_every counts), got {self.drift!r}")
        if not isinstance(self.per_table, bool) or (self.per_table and self.selector != "dct_mp"):
            raise BadInput(f"per_table is true or false, and true of dct_mp only; got {self.per_table!r}")
        value_codec.coder(self.values)

    def then(self, other: Spec) -> Spec:
        """First this selector, then that value coder. Raises BadInput for anything else."""
        if not isinstance(other, Spec):
            got = getattr(other, "__name__", repr(other))
            raise BadInput(
                f"{self}.then() takes a value coder of gba_hvd.Compression, such as gba_hvd.Compression.int8 (or "
                f"{', '.join(value_codec.names()[1:])} by Compression.by_name), got {got}"
            )
        if not self.selector or self.values != "none" or other.selector:
            raise BadInput(
                f"{self} and then {other}: chain a selector ({', '.join(SELECTORS)}) with one value coder "
                f"({', '.join(value_codec.names()[1:])}), in this order"
            )
        return replace(self, values=other.values, is_forced=self.is_forced or other.is_forced)

    def always(self) -> Spec:
        """The same, also where it does not pay."""
        return replace(self, is_forced=True)

    @property
    def selects(self) -> bool:
        """Not every element is sent."""
        return bool(self.selector) and self.keep < 1

    @property
    def pools(self) -> bool:
        """The rows of a bag are pooled where they are, and their sum travels."""
        return self.selector == "dct_mp"

    @property
    def is_none(self) -> bool:
        return not self.selector and self.values == "none"

    @property
    def exactly(self) -> str:
        """In words, with what `str` leaves out: workers that differ in it would run different collectives."""
        return f"{self}.always()" if self.is_forced else str(self)

    def __str__(self) -> str:
        if not self.selector:
            return self.values
        more = ""
        if self.selector in WITH_THRESHOLD:
            usual = _DRIFT.get(self.selector, _DRIFT_OF_OTHERS)
            drift = "" if self.drift == usual else f", drift={self.drift:g}"
            more = f", refresh_every={self.refresh_every}{drift}{', per_table' if self.per_table else ''}"
        coder = "" if self.values == "none" else f".then({self.values})"
        return f"{self.selector}(keep={self.keep:g}{more}){coder}"


class Compression:
    """The compressors, in Horovod's idiom: `compression=gba_hvd.Compression.fp16`."""

    none = Spec()
    fp16 = Spec(values="fp16")
    bf16 = Spec(values="bf16")
    int8 = Spec(values="int8")

    @staticmethod
    def topk(keep: float | None = None, *, eta: float | None = None) -> Spec:
        """The largest elements of each tensor, found again at every step; the residual is added to the next.

        keep: share of the elements that is sent, by default 0.01; or eta, the share that is not sent. Raises BadInput
        for both, here and in the others.
        """
        return Spec("topk", _keep_of(keep, eta, 0.01))

    @staticmethod
    def dct(
        keep: float | None = None, refresh_every: int = 1000, *, drift: float = 2.0, eta: float | None = None
    ) -> Spec:
        """Dynamic communication thresholding of dense gradients (DCT-DP, arXiv 2010.08899): elements at or above a
        threshold that is seldom found; the residual is added to the next gradient.

        keep: share of the elements that is sent, by default 0.01; or eta, the paper's share that is not sent.
        refresh_every: the paper's L. drift: not in the paper. Between refreshes the share sent follows the gradient's
        scale; beyond this factor the threshold is found again, and L starts over: so L is a limit, which may never be
        reached. math.inf: as in the paper.
        """
        return Spec("dct", _keep_of(keep, eta, 0.01), refresh_every, drift)

    @staticmethod
    def dct_mp(
        keep: float | None = None,
        refresh_every: int = 1000,
        *,
        drift: float = math.inf,
        eta: float | None = None,
        per_table: bool = False,
    ) -> Spec:
        """The same paper's rule for embeddings (DCT-MP), for `row_compression`: of the activations that travel, those
        elements with |a| at or above a threshold; of their gradients the same elements. No error feedback.

        The rows of a `Bag` are pooled by the host that has them, for each sample. keep: by default 0.05; or eta, the
        share that is not sent. drift: see `dct`. per_table: a threshold for each table, not one for all of
        a dimension, by which a table of small rows may send nothing.
        """
        return Spec("dct_mp", _keep_of(keep, eta, 0.05), refresh_every, drift, per_table=per_table)

    @staticmethod
    def ternary_ef(
        keep: float | None = None, refresh_every: int = 1000, *, drift: float = 2.0, eta: float | None = None
    ) -> Spec:
        """For `row_compression`: rows as three levels (-s, 0, s), an s for each row; of their gradients the
        elements at or above a threshold, with error feedback.

        keep: by default 0.02; or eta, the share that is not sent. drift: see `dct`. Our own rule, of no paper.
        """
        return Spec("ternary_ef", _keep_of(keep, eta, 0.02), refresh_every, drift)

    @staticmethod
    def by_name(name: str, **settings: Any) -> Spec:
        """A compressor by name, for configuration files: `by_name("dct", keep=0.01)`.

        Raises BadInput for a name that is none, and for a setting that this compressor does not have.
        """
        refuse_unknown("compressor", name, (*value_codec.names(), *SELECTORS), _SYNONYMS)
        takes = _SETTINGS.get(name, ())
        if wrong := [setting for setting in settings if setting not in takes]:
            has = f"it has {', '.join(takes)}" if takes else "it has none"
            raise BadInput(f"compressor {name!r} has no setting {wrong[0]!r}: {has}")
        made: Spec = getattr(Compression, name)(**settings) if name in SELECTORS else Spec(values=name)
        return made


def _keep_of(keep: float | None, eta: float | None, usual: float) -> float:
    """The share that is sent; the paper's eta is the share that is not."""
    if eta is None:
        return usual if keep is None else keep
    if keep is not None:
        raise BadInput(f"eta={eta} and keep={keep}: give one of them, keep is 1 - eta")
    if not isinstance(eta, Real) or not 0 <= eta < 1:
        raise BadInput(f"eta is the share of elements that is not sent, in [0, 1); got {eta!r}")
    return round(1 - eta, 12)


def dense_spec_of(compression: Any) -> Spec:
    """What was given as `compression=`. Raises BadInput for anything that is none of ours, and for a rule for rows."""
    spec = _spec_of(compression, "compression")
    if spec.selector and spec.selector not in DENSE_SELECTORS:
        raise BadInput(
            f"compression={spec.selector} is a rule for rows: write it as row_compression=; dense gradients take "
            f"{' or '.join(DENSE_SELECTORS)}"
        )
    return spec


def row_spec_of(row_compression: Any) -> Spec:
    """The same of `row_compression=`."""
    spec = _spec_of(row_compression, "row_compression")
    if spec.selector == "dct":
        raise BadInput(
            "row_compression=dct: the name stood for a rule that is not the paper's. Write dct_mp for the "
            "published one (thresholded activations, the same mask for their gradients, no error feedback), or "
            f"ternary_ef for what dct did with rows before, such as gba_hvd.Compression.ternary_ef(keep={spec.keep:g})"
        )
    return spec


def _spec_of(given: Any, argument: str) -> Spec:
    if isinstance(given, Spec):
        return given
    if isinstance(given, str):
        return Compression.by_name(given)
    name = getattr(given, "__name__", type(given).__name__)
    if given in [getattr(Compression, selector) for selector in SELECTORS]:
        raise BadInput(f"{argument}={name} lacks its settings: write gba_hvd.Compression.{name}(keep=0.01)")
    example = "fp16" if argument == "compression" else "int8"
    raise BadInput(f"{argument} must be one of gba_hvd.Compression, such as gba_hvd.Compression.{example}; got {name}")
