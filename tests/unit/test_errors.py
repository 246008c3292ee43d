"""Each error has the base that callers catch: one for all, one for checkpoints."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import gba_hvd
import recovery
from gba_hvd.errors import GbaError, HorovodMissing, ShardMemoryError, StateMismatch
from gba_hvd.ps.messages import Mismatch, NotFinite, ProtocolError, RefusalKind, TrainingFailed
from gba_hvd.ps.request_port import refused_by
from recovery.child.process import _portable
from recovery.errors import BadInput, Damaged, RecoveryError, StoreError

BESIDE_CHECKPOINTS = {BadInput, GbaError}
NEEDS_TRITON = "gba_hvd.embedding.on_device.fused_kernels"  # which builds of torch for a CPU do not install


def all_errors(base: type[Exception]) -> Iterator[type[Exception]]:
    for error in base.__subclasses__():
        yield error
        yield from all_errors(error)


def errors_of(package: str) -> set[type[Exception]]:
    """Of all modules of a package, those that come with an optional dependency included where it is installed."""
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name != NEEDS_TRITON:
            importlib.import_module(module.name)
    return {error for error in all_errors(GbaError) if error.__module__.startswith(package)}


def test_errors_of_checkpoints_are_recovery_errors_and_those_of_training_are_not() -> None:
    of_training = errors_of("gba_hvd")
    assert {HorovodMissing, ShardMemoryError, StateMismatch} < of_training
    assert not [error for error in of_training if issubclass(error, RecoveryError)]
    of_checkpoints = errors_of("recovery") - BESIDE_CHECKPOINTS
    assert {Damaged, StoreError} < of_checkpoints
    assert all(issubclass(error, RecoveryError) for error in of_checkpoints)


@pytest.mark.parametrize("error", [ShardMemoryError("no space"), GbaError("no server"), BadInput("r is 2")], ids=repr)
def test_a_handler_of_checkpoint_errors_passes_others_on(error: Exception) -> None:
    with pytest.raises(type(error)), contextlib.suppress(RecoveryError):
        raise error


def test_one_base_catches_the_errors_of_both_packages() -> None:
    assert gba_hvd.GbaError is recovery.ProjectError
    for error in (BadInput("r is 2"), Damaged("cut off"), ShardMemoryError("no space")):
        assert isinstance(error, gba_hvd.GbaError)


@pytest.mark.parametrize("error", [BadInput("r is 2"), Damaged("cut off")], ids=repr)
def test_an_error_on_purpose_leaves_the_saving_process_without_its_traceback(error: Exception) -> None:
    sent = _portable(error)
    assert (type(sent), str(sent)) == (type(error), str(error))
    assert not hasattr(sent, "__notes__")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ProtocolError("two frames"), "ProtocolError"),
        (NotFinite("w"), "NotFinite"),
        (Mismatch("40 samples here"), "mismatch"),
        (TrainingFailed("step 3"), "failed"),
        (GbaError("still being saved"), ""),
        (ValueError("of numpy"), ""),
    ],
    ids=repr,
)
def test_a_refusal_says_what_kind_of_error_it_was(error: Exception, kind: RefusalKind) -> None:
    assert refused_by(error).kind == kind
