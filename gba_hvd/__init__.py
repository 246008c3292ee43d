"""Train click models with Horovod: allreduce or an asynchronous parameter server, switched live, with shared tables."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gba_hvd.errors import BadInput, GbaError, NonFiniteGradient, ShardMemoryError, StateMismatch
from gba_hvd.gc_pause import gc_paused

if TYPE_CHECKING:
    from gba_hvd import elastic
    from gba_hvd.batch import Bag, Batch
    from gba_hvd.batches import batches
    from gba_hvd.between_epochs import others_wait
    from gba_hvd.callbacks import Callback, Event, Job, StepRecord
    from gba_hvd.compression import Compression
    from gba_hvd.convert import convert
    from gba_hvd.embedding.features import Feature, Table
    from gba_hvd.embedding.row_optimizers import SGD, Adagrad, Adam, RowAdagrad
    from gba_hvd.embedding.tables import EmbeddingTables
    from gba_hvd.evaluation import Task, evaluate
    from gba_hvd.faults import FaultSchedule
    from gba_hvd.hogwild import hogwild
    from gba_hvd.losses import in_batch_softmax, sampled_softmax
    from gba_hvd.metrics.ranking import RetrievalScores
    from gba_hvd.metrics.scores import Scores, TaskScores
    from gba_hvd.optimizer import DistributedOptimizer
    from gba_hvd.retrieval import evaluate_retrieval
    from gba_hvd.serving.follower import Follower, Update
    from gba_hvd.serving.load import OpenModel, load_for_inference, open_model
    from gba_hvd.serving.log_model import LogModel
    from gba_hvd.serving.save import SavedModel, export_model, save_model
    from gba_hvd.switching.callback import GBACallback
    from gba_hvd.torch_optimizers import register_optimizer
    from gba_hvd.tracking import MLflowCallback, ProgressLine

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "BadInput",
    "Bag",
    "Batch",
    "Callback",
    "Compression",
    "DistributedOptimizer",
    "EmbeddingTables",
    "Event",
    "FaultSchedule",
    "Feature",
    "Follower",
    "GBACallback",
    "GbaError",
    "Job",
    "LogModel",
    "MLflowCallback",
    "NonFiniteGradient",
    "OpenModel",
    "ProgressLine",
    "RetrievalScores",
    "RowAdagrad",
    "SavedModel",
    "Scores",
    "ShardMemoryError",
    "StateMismatch",
    "StepRecord",
    "Table",
    "Task",
    "TaskScores",
    "Update",
    "batches",
    "convert",
    "elastic",
    "evaluate",
    "evaluate_retrieval",
    "export_model",
    "hogwild",
    "in_batch_softmax",
    "load_for_inference",
    "open_model",
    "others_wait",
    "register_optimizer",
    "sampled_softmax",
    "save_model",
]

# Imported when they are first used: a server, a command or a process that only reads settings needs few of them.
_IN = {
    "batch": ("Bag", "Batch"),
    "batches": ("batches",),
    "between_epochs": ("others_wait",),
    "callbacks": ("Callback", "Event", "Job", "StepRecord"),
    "compression": ("Compression",),
    "convert": ("convert",),
    "embedding.features": ("Feature", "Table"),
    "embedding.row_optimizers": ("SGD", "Adagrad", "Adam", "RowAdagrad"),
    "embedding.tables": ("EmbeddingTables",),
    "evaluation": ("Task", "evaluate"),
    "faults": ("FaultSchedule",),
    "hogwild": ("hogwild",),
    "losses": ("in_batch_softmax", "sampled_softmax"),
    "metrics.scores": ("Scores", "TaskScores"),
    "optimizer": ("DistributedOptimizer",),
    "metrics.ranking": ("RetrievalScores",),
    "retrieval": ("evaluate_retrieval",),
    "serving.log_model": ("LogModel",),
    "serving.follower": ("Follower", "Update"),
    "serving.load": ("OpenModel", "load_for_inference", "open_model"),
    "serving.save": ("SavedModel", "export_model", "save_model"),
    "switching.callback": ("GBACallback",),
    "torch_optimizers": ("register_optimizer",),
    "tracking": ("MLflowCallback", "ProgressLine"),
}
_MODULE = {name: module for module, names in _IN.items() for name in names}


def _imported(module: str) -> ModuleType:
    with gc_paused():
        return import_module(f"gba_hvd.{module}")


class _Package(ModuleType):
    """This package. A function and a module are called `batches`, others `hogwild`: the attribute is the function."""

    def __getattr__(self, name: str) -> Any:
        if name in _MODULE:
            found = getattr(_imported(_MODULE[name]), name)
            setattr(self, name, found)
            return found
        if not name.startswith("_") and find_spec(f"gba_hvd.{name}") is not None:
            return _imported(name)
        raise AttributeError(f"module 'gba_hvd' has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _IN and name in _MODULE and isinstance(value, ModuleType):  # the module has just been imported
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
