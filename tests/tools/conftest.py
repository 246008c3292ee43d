"""Small jobs and an S3 server as the other tests have them; no reaper, no settings from the environment."""

from __future__ import annotations

from tests.recovery.conftest import s3_options
from tests.unit.conftest import _no_keeper, _no_settings, make_tables, training

__all__ = ["_no_keeper", "_no_settings", "make_tables", "s3_options", "training"]
