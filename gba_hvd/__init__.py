"""Train click models with Horovod: allreduce or an asynchronous parameter server, switched live, with shared tables."""

from __future__ import annotations

from gba_hvd import elastic
from gba_hvd.batch import Bag, Batch
from gba_hvd.batches import batches
from gba_hvd.callbacks import Callback, Event, Job, StepRecord
from gba_hvd.compression import Compression
from gba_hvd.embedding.row_optimizers import SGD, Adagrad, Adam, RowAdagrad
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput, GbaError, NonFiniteGradient, ShardMemoryError, StateMismatch
from gba_hvd.evaluation import evaluate
from gba_hvd.faults import FaultSchedule
from gba_hvd.hogwild import hogwild
from gba_hvd.metrics import Scores
from gba_hvd.optimizer import DistributedOptimizer
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
    "GBACallback",
    "GbaError",
    "Job",
    "MLflowCallback",
    "NonFiniteGradient",
    "ProgressLine",
    "RowAdagrad",
    "Scores",
    "ShardMemoryError",
    "StateMismatch",
    "StepRecord",
    "batches",
    "elastic",
    "evaluate",
    "hogwild",
    "register_optimizer",
]
