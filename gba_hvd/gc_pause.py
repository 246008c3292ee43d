"""Python's garbage collector, paused while modules are imported and kernels loaded.

That makes many objects, which all stay. Torch's are there already, and each collection looks at all of them: about an
eighth of the time to a worker's first step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """In any thread; where it is off already, it stays off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
