"""What holds for every test: one thread per process, Horovod's cycle, no settings of who runs it, the same examples.

Markers, warnings as errors and the time-out per test are in pyproject.toml.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples every time, however busy the machine is: an example may take long, and so may making it.
settings.register_profile(
    "every test", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("every test")

# Horovod's processes ask each other for work a thousand times a second, which takes 6 % of a core each: two fifths of
# the processor time of a test's workers. Whoever sets another time tests with that.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")  # ms


# What has been collected lives as long as the tests. Looking through it for garbage again and again takes two fifths of
# the time of collecting it, and a tenth of that of `make test-fast`.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A shell starts its background jobs with SIGINT ignored, and so would be the processes of tests."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_settings_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings from the environment of whoever runs the tests must not decide what they find."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The row groups that were read, in this order: name of the file, number."""
    from gba_hvd.data import parquet_stream

    found, read_group = list[tuple[str, int]](), parquet_stream.read_group

    def counted(file: Any, group: int, *more: Any) -> Any:
        found.append((Path(file.url).name, group))
        return read_group(file, group, *more)

    monkeypatch.setattr(parquet_stream, "read_group", counted)
    return found
