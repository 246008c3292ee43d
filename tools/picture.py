"""What the pictures of commands have in common: a figure without a screen, its file, and plain axes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra

GRID, INK = "#dddddd", "#333333"


@contextlib.contextmanager
def picture(file: Path, width: float, height: float, letters: int = 10) -> Iterator[Any]:
    """A figure of so many inches, written when it is done; the same file each time. The name's ending says the format.

    letters: their usual size. Raises MissingPackage, and BadInput when it cannot be written.
    """
    with extra("plots", "matplotlib", "plots need"):
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "gba-hvd", "font.size": letters}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        try:
            figure.savefig(file, dpi=130, metadata={"Date": None} if file.suffix == ".svg" else None)
        except (OSError, ValueError) as error:  # ValueError: an ending that is no format
            raise BadInput(f"{file}: the plot cannot be written here: {error}") from error


def plain(axes: Iterable[Any], size: int | None = None) -> None:
    """A light grid, no box, and a legend in letters of this size where there is something to name."""
    for axis in axes:
        axis.grid(color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=size)
