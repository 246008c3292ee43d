"""What to do when MLflow does not take a record, how long to wait, and which process reports for a run.

Decisions only, each with its reason; `sender.py` carries them out.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class DeliveryAction(enum.Enum):
    RETRY = "retry"  # the record is good, the server is not: later
    DROP = "drop"  # this record will never be taken: count it, report it, continue
    STOP = "stop"  # nothing will be taken until a person acts: keep the spool


@dataclass(frozen=True)
class DeliveryVerdict:
    action: DeliveryAction
    reason: str


_REFUSED = frozenset(
    {"INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST", "MALFORMED_REQUEST", "REQUEST_LIMIT_EXCEEDED"}
)


def decide(error: BaseException, run_is_active: bool | None) -> DeliveryVerdict:
    """What an exception of an MLflow call means for the record that was being sent.

    `run_is_active`: None when not known (the server could not be asked).
    Refusals name their cause in `error_code`; everything else (connection refused, time-out, 5xx, wrong password,
    SQLite busy) says nothing about the record, so it is kept.
    """
    what = first_line(error)
    if run_is_active is False:
        return DeliveryVerdict(
            DeliveryAction.STOP,
            "the run was deleted in MLflow (`mlflow runs restore` brings it back; where its experiment was deleted, "
            f"`mlflow experiments restore`): {what}",
        )
    if isinstance(error, ModuleNotFoundError):
        return DeliveryVerdict(DeliveryAction.STOP, f"{what}: pip install {error.name}")
    if getattr(error, "error_code", None) in _REFUSED:
        return DeliveryVerdict(DeliveryAction.DROP, what)
    return DeliveryVerdict(DeliveryAction.RETRY, what)


def backoff_s(failures: int, ending: bool) -> float:
    """0.5 s, doubled per failure up to 30 s; at the end of a job, when a person waits, up to 1 s."""
    return float(min(0.5 * 2 ** min(failures, 10), 1.0 if ending else 30.0))


def may_report(own: str, current: str | None) -> bool:
    """Whether the process with stamp `own` reports for the run that is tagged with `current`.

    A stamp is "<ms since 1970 at which it became chief>:<spool name>". The latest chief reports; earlier ones only
    deliver what they still hold.
    """
    if not current or own == current:
        return True
    return _ms(own) > _ms(current)


def _ms(stamp: str) -> int:
    head = stamp.partition(":")[0]
    return int(head) if head.isdigit() else 0


def first_line(error: BaseException) -> str:
    """Of its text, and of the database's, which says why. MLflow passes on what SQLAlchemy says of it at length."""
    lines = str(error).strip().splitlines()
    of_database = next((line for line in lines if re.match(r"\(\w+\.\w*Error\) ", line)), "")
    if of_database and of_database != lines[0]:
        lines[0] = of_database
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."
