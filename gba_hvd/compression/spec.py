"""What a user writes: `Compression.dct(keep=0.01).then(Compression.int8)`. Validated here, carried out elsewhere.

A selector says which elements travel (`topk`, `dct`), a value coder in how many bits (`fp16`, `bf16`, `int8`, or one
that is registered). One of each can be chained, the selector first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gba_hvd.compression import value_codec
from gba_hvd.errors import BadInput, refuse_unknown

SELECTORS = ("topk", "dct")
_SETTINGS = {"topk": ("keep",), "dct": ("keep", "refresh_every", "drift")}  # of the others: none
MIN_ELEMENTS = 256  # smaller tensors go dense (as in the public code of DCT)


@dataclass(frozen=True)
class Spec:
    """A compressor's settings.

    selector:      "" (every element), "topk" or "dct"
    keep:          share of each tensor's elements that is sent, in (0, 1]
    refresh_every: dct: steps for which a threshold is used
    drift:         dct: the threshold is also refreshed when the share sent leaves keep / drift to keep * drift
    values:        "none" (as they are), "fp16", "bf16", "int8", or a coder that is registered
    is_forced:     compress also where the bytes saved do not pay
    """

    selector: str = ""
    keep: float = 1.0
    refresh_every: int = 1
    drift: float = 2.0
    values: str = "none"
    is_forced: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise BadInput(f"keep is the share of elements that is sent, in (0, 1]; got {self.keep}")
        if self.refresh_every < 1 or int(self.refresh_every) != self.refresh_every:
            raise BadInput(f"refresh_every is a number of steps, at least 1; got {self.refresh_every}")
        if not self.drift > 1:
            raise BadInput(f"drift must be above 1 (math.inf: only refresh_every counts), got {self.drift}")
        value_codec.coder(self.values)

    def then(self, other: Spec) -> Spec:
        """First this selector, then that value coder."""
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
        if self.selector == "dct":
            drift = "" if self.drift == 2.0 else f", drift={self.drift:g}"
            more = f", refresh_every={self.refresh_every}{drift}"
        coder = "" if self.values == "none" else f".then({self.values})"
        return f"{self.selector}(keep={self.keep:g}{more}){coder}"


class Compression:
    """The compressors, in Horovod's idiom: `compression=gba_hvd.Compression.fp16`."""

    none = Spec()
    fp16 = Spec(values="fp16")
    bf16 = Spec(values="bf16")
    int8 = Spec(values="int8")

    @staticmethod
    def topk(keep: float = 0.01) -> Spec:
        """The largest elements of each tensor, found again at every step; the residual is added to the next."""
        return Spec("topk", keep)

    @staticmethod
    def dct(keep: float = 0.01, refresh_every: int = 1000, *, drift: float = 2.0) -> Spec:
        """Dynamic communication thresholding (arXiv 2010.08899): elements at or above a threshold that is seldom found.

        drift: not in the paper. Between refreshes the share sent follows the gradient's scale; beyond this factor the
        threshold is found again. math.inf: as in the paper.
        """
        return Spec("dct", keep, refresh_every, drift)

    @staticmethod
    def by_name(name: str, **settings: Any) -> Spec:
        """A compressor by name, for configuration files: `by_name("dct", keep=0.01)`.

        Raises BadInput for a name that is none, and for a setting that this compressor does not have.
        """
        refuse_unknown("compressor", name, (*value_codec.names(), *SELECTORS))
        takes = _SETTINGS.get(name, ())
        if wrong := [setting for setting in settings if setting not in takes]:
            has = f"it has {', '.join(takes)}" if takes else "it has none"
            raise BadInput(f"compressor {name!r} has no setting {wrong[0]!r}: {has}")
        made: Spec = getattr(Compression, name)(**settings) if name in SELECTORS else Spec(values=name)
        return made


def spec_of(compression: Any) -> Spec:
    """What was given as `compression=`. Raises BadInput for anything that is none of ours."""
    if isinstance(compression, Spec):
        return compression
    if isinstance(compression, str):
        return Compression.by_name(compression)
    name = getattr(compression, "__name__", type(compression).__name__)
    if compression in (Compression.topk, Compression.dct):
        raise BadInput(f"compression={name} lacks its settings: write gba_hvd.Compression.{name}(keep=0.01)")
    raise BadInput(f"compression must be one of gba_hvd.Compression, such as gba_hvd.Compression.fp16; got {name}")
