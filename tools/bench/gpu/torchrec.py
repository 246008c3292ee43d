"""fbgemm's batched tables, on which TorchRec is built, as UVM_CACHING: rows in managed memory, a cache on the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..harness import dlrm
from .clicks import Clicks
from .training import NotRun, Setting, Training, adagrad, plain_step

RULES = {"adagrad": "EXACT_ADAGRAD", "row_adagrad": "EXACT_ROWWISE_ADAGRAD"}
_OF_CACHE = "linearize_cache_indices"  # an operator that only builds for CUDA have there


def training(setting: Setting, clicks: Clicks) -> Training:
    """Raises NotRun where there is no GPU, or no fbgemm for it."""
    if torch.device(setting.device).type != "cuda":
        raise NotRun(f"UVM_CACHING needs a GPU, and --device is {setting.device}")
    try:
        import fbgemm_gpu.split_table_batched_embeddings_ops_training  # type: ignore[import-not-found]  # noqa: F401

        has_cuda = torch._C._dispatch_has_kernel_for_dispatch_key(f"fbgemm::{_OF_CACHE}", "CUDA")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:  # (or its operators do not fit this torch)
        raise NotRun(f"fbgemm_gpu cannot be imported: {type(error).__name__}: {error}") from error
    if not has_cuda:
        raise NotRun("fbgemm_gpu is installed here without CUDA (fbgemm_gpu-cpu)")
    return training_at(setting, clicks, "MANAGED_CACHING")


def training_at(setting: Setting, clicks: Clicks, location: str) -> Training:
    """location: of the rows, a name of fbgemm's `EmbeddingLocation`."""
    tables = tables_at(setting, location)
    dense_part = setting.dense()
    optimizer = adagrad(dense_part)  # fbgemm updates the rows in the backward pass
    n_bags = dlrm.N_TABLES * clicks.batch
    offsets = torch.arange(0, (n_bags + 1) * clicks.bag, clicks.bag, device=setting.device)

    def logits_of(ids: Tensor, dense: Tensor) -> Tensor:
        rows = tables(ids.view(-1), offsets).view(clicks.batch, dlrm.N_TABLES, setting.dim)
        return dense_part(dense, rows, [])  # type: ignore[no-any-return]

    return Training(plain_step(setting, clicks, optimizer, logits_of), lambda: {"host_bytes": host_bytes(tables)})


def tables_at(setting: Setting, location: str) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # type: ignore[import-not-found]
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    on_gpu = torch.device(setting.device).type == "cuda"
    device = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    shape = (setting.n_rows, setting.dim, EmbeddingLocation[location], device)
    tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [shape] * dlrm.N_TABLES,
        optimizer=EmbOptimType[RULES[setting.rule]],
        learning_rate=dlrm.LEARNING_RATE,
        eps=dlrm.EPS,
        pooling_mode=PoolingMode.SUM,
        cache_load_factor=min(1.0, setting.hot_rows / (dlrm.N_TABLES * setting.n_rows)),
        device=torch.device(setting.device),
    )
    tables.init_embedding_weights_uniform(-setting.spread, setting.spread)
    return tables


def host_bytes(tables: Any) -> int:
    """Of rows and optimizer slots in managed or in host memory."""
    names = ("weights_uvm", "weights_host", "momentum1_uvm", "momentum1_host")
    parts = [part for name in names if (part := getattr(tables, name, None)) is not None]
    return sum(part.numel() * part.element_size() for part in parts)
