"""The picture of `gba-hvd bench recovery --experiments pls`: the loss of AUC over the portion of lost samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra

from . import experiments

_COLOURS = {"cpr_full": "#2c6fbb", "cpr_mfu": "#c0392b"}
_NAMES = {"cpr_full": "all rows at each save", "cpr_mfu": "MFU, r = 1/8"}
_GRID, _INK = "#dddddd", "#333333"


def draw(found: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """A panel for each data set. found: of `experiments.table`. Raises BadInput where it cannot be written."""
    with extra("plots", "matplotlib", "plots need"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(found), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (title, lines) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for name, colour in _COLOURS.items():
            mine = [line for line in lines if line["recovery"] == name]
            pls, lost = [line["pls"] for line in mine], [-line["vs_none"] for line in mine]
            panel.errorbar(
                pls, lost, yerr=[line["error"] or 0.0 for line in mine], color=colour, marker="o", markersize=4,
                linewidth=1.4, elinewidth=0.8, capsize=2, label=_NAMES[name],
            )  # fmt: skip
        panel.axhline(0, color=_INK, linewidth=0.8)
        panel.set_title(f"{title}; {experiments.CURVE_H:g} h between failures", fontsize=10, color=_INK)
        panel.set_xlabel("portion of lost samples (PLS)")
        panel.grid(color=_GRID, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("AUC lost against no failure")
    try:
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no format
        raise BadInput(f"{file}: the plot cannot be written here: {error}") from error
