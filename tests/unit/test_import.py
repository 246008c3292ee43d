"""What is imported when. Seconds depend on the machine (`gba-hvd bench import-time`), the list of modules does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module

import pytest

import gba_hvd

HEAVY = {
    "fsspec", "horovod", "matplotlib", "mlflow", "numba", "pandas", "pyarrow", "s3fs", "scipy",
}  # fmt: skip
PRINT_MODULES = "; import json, sys; print(json.dumps(sorted(sys.modules)))"
# Each name in a process of its own that has imported what takes long, since a circle of imports shows only where it is
# entered from the wrong side.
EACH_NAME_FIRST = """
import os, sys, traceback
import torch, numpy, msgspec, zmq
import gba_hvd
for name in gba_hvd.__all__:
    pid = os.fork()
    if pid == 0:
        try:
            getattr(gba_hvd, name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:
        sys.exit(f"{name} cannot be the first name that is used")
"""


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, env=dict(os.environ)
    ).stdout  # fmt: skip


def modules_after(statement: str) -> set[str]:
    return set(json.loads(run(statement + PRINT_MODULES)))


@pytest.mark.processes
def test_importing_the_package_imports_neither_torch_nor_its_own_modules():
    found = modules_after("import gba_hvd")
    assert not {name.partition(".")[0] for name in found} & {*HEAVY, "numpy", "torch", "zmq"}
    assert {name for name in found if name.startswith("gba_hvd.")} == {"gba_hvd.errors", "gba_hvd.gc_pause"}


@pytest.mark.slow
@pytest.mark.processes
def test_all_public_names_and_a_server_are_imported_without_what_is_optional_or_slow():
    found = modules_after("from gba_hvd import *; import gba_hvd.ps.server.server")
    assert {"torch", "gba_hvd.training.engine", "gba_hvd.ps.partition.partition"} <= found
    assert not {name.partition(".")[0] for name in found} & HEAVY


@pytest.mark.slow
@pytest.mark.processes
def test_each_public_name_can_be_the_first_one_that_is_used():
    run(EACH_NAME_FIRST)


@pytest.mark.slow
@pytest.mark.processes
def test_kernels_are_compiled_at_set_up_and_together():
    code = """
import gc, sys
import numba, numpy as np, torch, gba_hvd
from gba_hvd import kernels
from gba_hvd.compression import kernels as compression_kernels
tables = gba_hvd.EmbeddingTables({"t": (5, 2)}, gba_hvd.SGD(lr=0.1))
def compiled(module):
    return sum(isinstance(one, numba.core.dispatcher.Dispatcher) for one in vars(module).values())
assert not compiled(kernels)
def distributed(**more):
    gba_hvd.DistributedOptimizer(
        torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1), tables, global_batch=8, micro_batch=4, **more
    )
distributed()
assert compiled(kernels) > 20 and not compiled(compression_kernels)
assert "scipy.linalg" not in sys.modules and gc.isenabled()
assert np.allclose(numba.njit(lambda a: np.cov(np.dot(a, a)))(np.eye(3)), np.cov(np.eye(3)))  # as without this package
distributed(compression=gba_hvd.Compression.int8)
assert compiled(compression_kernels) > 10
"""
    run(code)


def test_a_function_and_a_module_of_one_name_do_not_shadow_each_other():
    for name in ("batches", "hogwild"):
        module = import_module(f"gba_hvd.{name}")
        setattr(gba_hvd, name, module)  # as the import of a module does, last
        assert getattr(gba_hvd, name) is getattr(module, name)


def test_public_names_are_listed_and_others_are_no_attributes():
    assert set(gba_hvd.__all__) <= set(dir(gba_hvd))
    assert all(getattr(gba_hvd, name) is not None for name in gba_hvd.__all__)
    assert not hasattr(gba_hvd, "batch_norm")
