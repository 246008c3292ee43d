"""What every registered class promises: suites of tests, to be inherited by the tests of a distribution.

    import pytest
    from gba_hvd.testing import RowOptimizerContract

    class TestMine(RowOptimizerContract):
        @pytest.fixture
        def row_optimizer(self):
            return Mine(lr=0.1)

Each suite has one abstract fixture, which gives the implementation under test. Needs pytest. docs/EXTENDING.md has the
interfaces.
"""

from __future__ import annotations

from gba_hvd.errors import MissingPackage

try:
    import pytest
except ModuleNotFoundError as error:
    text = "gba_hvd.testing needs pytest, which is not installed: pip install pytest"
    raise MissingPackage(text, name="pytest") from error

_SUITES = ("weightings", "rules", "coders", "row_optimizers", "policies", "stores")
pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in _SUITES))  # before they are imported

from gba_hvd.testing.coders import CoderContract  # noqa: E402
from gba_hvd.testing.policies import PolicyContract  # noqa: E402
from gba_hvd.testing.row_optimizers import RowOptimizerContract  # noqa: E402
from gba_hvd.testing.rules import RuleContract  # noqa: E402
from gba_hvd.testing.stores import StoreContract  # noqa: E402
from gba_hvd.testing.weightings import WeightingContract  # noqa: E402

__all__ = [
    "CoderContract",
    "PolicyContract",
    "RowOptimizerContract",
    "RuleContract",
    "StoreContract",
    "WeightingContract",
]
