"""Run a long build with its output in a log file and one line of progress on the screen.

Decided here: what a person sees while a build runs. What is built is in `build_horovod.py`.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

PLAIN_EVERY_S = 15.0
PLAIN_WIDTH = 160
REDRAW_EVERY_S = 0.5


def progress_line(elapsed_s: float, percent: int | None, last: str, width: int) -> str:
    """One line, at most `width` characters: time, percentage when the build prints one, its last line."""
    minutes, seconds = divmod(int(elapsed_s), 60)
    share = "    " if percent is None else f"{percent:3d}%"
    return f"  {minutes}:{seconds:02d} {share} {last}"[:width]


def last_step(text: str) -> tuple[int, str] | None:
    """The last step make announced: of `[ 42%] Building CXX object x.o` the 42 and the rest."""
    found = re.findall(r"^\s*\[\s*(\d{1,3})%\] *(.*\S)", text, re.MULTILINE)
    return (int(found[-1][0]), found[-1][1]) if found else None


def last_line(text: str) -> str | None:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


def run_shown(command: list[str], *, cwd: Path, env: dict[str, str], log: Path, screen: IO[str] | None = None) -> int:
    """Run `command` with all output in `log`; return its exit status. Interrupted, it stops the whole build."""
    screen = screen or sys.stdout
    with log.open("wb") as written:
        # Its own process group, because make's compilers must go too when the build is interrupted.
        child = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert child.stdout is not None
        try:
            _show(child, written, screen)
            return child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise
        finally:
            child.stdout.close()


def _show(child: subprocess.Popen[bytes], written: IO[bytes], screen: IO[str]) -> None:
    assert child.stdout is not None
    live = screen.isatty()
    every_s = REDRAW_EVERY_S if live else PLAIN_EVERY_S
    start = shown = time.monotonic()
    percent: int | None = None
    last = "starting"
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while True:
            if ready.select(timeout=REDRAW_EVERY_S):
                piece = os.read(child.stdout.fileno(), 1 << 16)
                if not piece:
                    break
                written.write(piece)
                written.flush()
                text = piece.decode(errors="replace")
                if step := last_step(text):
                    percent, last = step
                elif percent is None:  # before make starts there are no steps to show, afterwards all is noise
                    last = last_line(text) or last
            now = time.monotonic()
            if now - shown >= every_s:
                shown = now
                width = shutil.get_terminal_size().columns - 1 if live else PLAIN_WIDTH
                line = progress_line(now - start, percent, last, width)
                print(f"\r\033[K{line}" if live else line, end="" if live else "\n", file=screen, flush=True)
    if live:
        print("\r\033[K", end="", file=screen, flush=True)
