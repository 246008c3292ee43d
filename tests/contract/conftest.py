"""Each kind of store, as the tests of `recovery` have them."""

from __future__ import annotations

from tests.recovery.conftest import s3_options, store

__all__ = ["s3_options", "store"]
