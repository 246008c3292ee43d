"""Whether bytes saved beside the rows are a training state; checked before rows are loaded, so that another checkpoint
can be taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recovery import state_codec
from recovery.errors import Damaged

_NEEDED = ("model", "optimizer", "values", "position", "callbacks")
_NEEDED_ASYNCHRONOUS = ("snapshot", "dense", "position")


def check_state(where: str, data: bytes) -> None:
    """Raises Damaged where `data` is not the encoded state of a `TrainingState`."""
    refuse_foreign_state(where, state_codec.decode(data, where))


def refuse_foreign_state(where: str, state: Any) -> None:
    """Raises Damaged where `state` is not that of a `TrainingState`, also one of an asynchronous mode."""
    parts: list[tuple[Any, Sequence[str]]] = [(state, _NEEDED)]
    if isinstance(state, dict) and "snapshot" in state:
        parts = [(state, _NEEDED_ASYNCHRONOUS), (state["snapshot"], _NEEDED)]
    for part, needed in parts:
        lacks = [name for name in needed if not isinstance(part, dict) or name not in part]
        if lacks:
            raise Damaged(
                f"{where}: its training state lacks {', '.join(lacks)}: another program wrote it, or it was altered; "
                "read it with what wrote it, go back to another checkpoint, or start over at another url or with "
                "resume=False"
            )
