"""What a plan follows from: measured or assumed costs, the job, and what is wanted. Nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recovery.errors import BadInput
from recovery.policies import SAVE_POLICIES

STRATEGIES = ("auto", "full", "partial")


@dataclass(frozen=True)
class Costs:
    """What saving and recovering takes, measured or assumed.

    save_s:         O_save if training stands still meanwhile: from the start of a save of all rows until it is durable
    load_s:         O_load of full recovery: loading all rows
    reschedule_s:   O_res: until a lost server has been replaced and training can resume
    partial_load_s: O_load of partial recovery: loading one server's rows; None: load_s, as CPR has it
    stall_share:    share of save_s for which training really stands still: 1 when it waits, little when saves
                    run beside it
    delta_share:    share of the bytes that change between two saves, None when it is not known
    partial_stall_s: for how long training stands still for a partial save; None: as its share of all bytes says
    """

    save_s: float
    load_s: float
    reschedule_s: float
    partial_load_s: float | None = None
    stall_share: float = 1.0
    delta_share: float | None = None
    partial_stall_s: float | None = None

    def __post_init__(self) -> None:
        seconds = (self.load_s, self.reschedule_s, self.partial_load_s or 0.0, self.partial_stall_s or 0.0)
        if not 0 < self.save_s < math.inf or not all(0 <= s < math.inf for s in seconds):
            raise BadInput(f"save_s must be above 0 and the other times not negative, got {self}")
        if not all(0 <= share <= 1 for share in (self.stall_share, self.delta_share or 0.0)):
            raise BadInput(
                f"stall_share and delta_share must be within 0 and 1, got {self.stall_share}, {self.delta_share}"
            )

    @classmethod
    def of_mapping(cls, values: Mapping[str, Any]) -> Costs:
        """From JSON, as a checkpoint's `about` has it under "costs", or a file; other keys are ignored."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if values.get(name) is not None}
        wrong = [f"{n}={v!r}" for n, v in known.items() if isinstance(v, bool) or not isinstance(v, int | float)]
        missing = [name for name in ("save_s", "load_s", "reschedule_s") if name not in known]
        if wrong or missing:
            raise BadInput(f"costs need seconds as numbers: missing {missing}, wrong {wrong}")
        return cls(**known)


@dataclass(frozen=True)
class JobProfile:
    """What a plan is for.

    n_bytes: of all records. total_s: how long the job (or what remains of it) trains. between_failures_s: mean time
    between failures of any one server of the job.
    """

    costs: Costs
    n_bytes: int
    n_servers: int
    between_failures_s: float
    total_s: float

    def __post_init__(self) -> None:
        if self.n_bytes < 1 or self.n_servers < 1:
            raise BadInput(f"a job has bytes and servers, got n_bytes={self.n_bytes}, n_servers={self.n_servers}")
        if not (0 < self.between_failures_s < math.inf and 0 < self.total_s < math.inf):
            raise BadInput(
                f"times must be above 0, got between_failures_s={self.between_failures_s}, total_s={self.total_s}"
            )


@dataclass(frozen=True)
class Objectives:
    """What is wanted.

    strategy:       "auto": what costs less; "full" or "partial": that
    target_pls:     portion of lost samples that is tolerable (CPR: 0.1 is typical)
    policy, r:      which rows a partial save takes, and how large a share of them (None: the plan picks it); ignored by
                    full recovery
    margin:         partial recovery must cost this share less than full recovery to be chosen ...
    leave_margin:   ... and is left when it costs more than this share less
    interval_band:  a new interval within this share of the one in force leaves it as it is
    max_interval_s: never longer between two rounds of saves: what the loss of the whole job may cost
    rebase_at:      partial saves on top of a base may have so many times its bytes before there is a new base. With inf
                    there never is one: rows are overwritten in the one checkpoint, which is what CPR's formulas count
    kept_bases:     checkpoints with all rows that are kept (for the cost of storage)
    price_per_gb_month, price_per_1000_puts: in any currency
    """

    strategy: str = "auto"
    target_pls: float = 0.1
    policy: str = "mfu"
    r: float | None = 0.125
    margin: float = 0.1
    leave_margin: float = 0.0
    interval_band: float = 0.25
    max_interval_s: float = math.inf
    rebase_at: float = 1.0
    kept_bases: int = 2
    price_per_gb_month: float = 0.0
    price_per_1000_puts: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.target_pls < 1:
            raise BadInput(f"target_pls is a portion of lost samples, above 0 and below 1, got {self.target_pls}")
        if self.r is not None and not 0 < self.r <= 1:
            raise BadInput(f"a partial save takes a share of the rows, above 0 and at most 1, got {self.r}")
        if not self.max_interval_s > 0:
            raise BadInput(f"the longest interval is a number of seconds above 0, got {self.max_interval_s}")
        if self.kept_bases < 1:
            raise BadInput(f"the number of checkpoints that are kept is at least 1, got {self.kept_bases}")
        if self.strategy not in STRATEGIES:
            raise BadInput(f"strategy {self.strategy!r} is not known: choose one of {', '.join(STRATEGIES)}")
        SAVE_POLICIES.get(self.policy)
        if not -1 < self.leave_margin <= self.margin < 1 or self.interval_band < 0:
            raise BadInput(
                "leave_margin must not be above margin (or plans would flip), both within -1 and 1, and interval_band "
                f"not negative, got {self.leave_margin}, {self.margin}, {self.interval_band}"
            )
        if min(self.price_per_gb_month, self.price_per_1000_puts) < 0 or self.rebase_at <= 0:
            raise BadInput(
                "prices must not be negative and rebase_at must be above 0, got "
                f"{self.price_per_gb_month}, {self.price_per_1000_puts}, {self.rebase_at}"
            )
