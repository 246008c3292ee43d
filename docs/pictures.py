"""The pictures of README.md: how the parts of a job are connected, and the page that `gba-hvd report` writes.

    python docs/pictures.py            # `make pictures`: both, into docs/img
    python docs/pictures.py diagram    # the first alone, at once

The report is that of a real job: `make demo` runs (3 minutes), then chromium takes the picture.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "img"
RUN = Path(tempfile.gettempdir()) / "demo"  # the page shows it
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MAX_BYTES = 200_000

FRAME, WORKER, MEMORY, SERVER = "#f4f6f9", "#dbe7fb", "#fdf0d0", "#dcefdc"


def diagram() -> str:
    """Two hosts with their workers, shard memory and servers, as SVG."""
    parts = [
        _arrow(362, 98, 538, 98, "allreduce: dense gradients", "all-to-all: rows (Gloo)", both=True),
        _arrow(362, 318, 538, 318, "leases, rows, pushes, steps", "(ZeroMQ, CURVE)", both=True),
    ]
    for name, left, server, reaper in (("host A", 20, 110, 40), ("host B", 540, 560, 810)):
        memory = ["shard memory, mapped by all workers", "rows: weights, optimizer slots, counter"]
        parts += [
            _box(left, 30, 340, 330, FRAME, [], name),
            *(_box(x, 60, 140, 74, WORKER, ["worker", "dense parameters,", "user's optimizer"])
              for x in (left + 20, left + 180)),
            _box(left + 20, 180, 300, 66, MEMORY, memory),
            _box(server, 292, 230, 52, SERVER, ["companion server", "asynchronous modes, checkpoints"]),
            _box(reaper, 292, 50, 52, FRAME, ["reaper"]),
            _arrow(left + 90, 134, left + 90, 180, both=True),
            _arrow(left + 250, 134, left + 250, 180, both=True),
            _arrow(server + 115, 246, server + 115, 292, both=True),
            _arrow(reaper + 25, 292, reaper + 25, 246),
            _arrow(server + 115, 344, server + 115, 404),
        ]  # fmt: skip
    store = "checkpoint store: a folder or any fsspec URL; the manifest is written last"
    parts.append(_box(20, 404, 860, 40, MEMORY, [store]))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 460" font-family="sans-serif" font-size="13">'
        '<rect width="900" height="460" fill="white"/><defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="8" markerHeight="8" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#444"/></marker>'
        f"</defs>{''.join(parts)}</svg>\n"
    )


def _box(x: int, y: int, width: int, height: int, fill: str, lines: Sequence[str], title: str = "") -> str:
    """A rectangle. lines: centred in it, the first one bold where there are several. title: at the upper left."""
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    bold = ' font-weight="bold"'
    text = "".join(
        f'<text x="{x + width / 2}" y="{first + 18 * i}" text-anchor="middle"'
        f"{bold if i == 0 < len(lines) - 1 else ''}>{escape(line)}</text>"
        for i, line in enumerate(lines)
    )
    head = f'<text x="{x + 10}" y="{y + 20}"{bold}>{escape(title)}</text>' if title else ""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="#888"/>{head}{text}'


def _arrow(x0: int, y0: int, x1: int, y1: int, above: str = "", below: str = "", both: bool = False) -> str:
    start = ' marker-start="url(#head)"' if both else ""
    middle = (x0 + x1) / 2
    words = [(above, y0 - 7), (below, y0 + 17)]
    return (
        f'<path d="M{x0} {y0}L{x1} {y1}" stroke="#444" stroke-width="1.4"{start} marker-end="url(#head)"/>'
        + "".join(
            f'<text x="{middle}" y="{y}" text-anchor="middle" font-size="11">{escape(text)}</text>'
            for text, y in words
            if text
        )
    )


def report(out: Path) -> None:
    """Run the demonstration, write the report of its MLflow run, and save the head of that page as a PNG."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit("no browser found to take the picture with: apt-get install -y chromium")
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{RUN}/mlflow.db"}
    subprocess.run([sys.executable, ROOT / "examples" / "demo.py", "--out", RUN], check=True, env=env)
    command = Path(sys.executable).with_name("gba-hvd")
    subprocess.run([command, "report", "demo", "--out", RUN / "report.html"], check=True, env=env)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # chromium refuses to have one as root
    size = ["--hide-scrollbars", "--window-size=1200,3000"]
    page = ["--headless", f"--screenshot={RUN}/report.png", f"file://{RUN}/report.html"]
    subprocess.run([browser, *sandbox, *size, *page], check=True, capture_output=True, timeout=120)
    Image.open(RUN / "report.png").convert("RGB").quantize(64).save(out, optimize=True)


def main(names: Sequence[str]) -> None:
    IMAGES.mkdir(exist_ok=True)
    if not names or "diagram" in names:
        (IMAGES / "architecture.svg").write_text(diagram())
    if not names or "report" in names:
        report(IMAGES / "report.png")
    for path in IMAGES.iterdir():
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
        assert path.stat().st_size < MAX_BYTES, "the limit for a picture is 200 kB"


if __name__ == "__main__":
    main(sys.argv[1:])
