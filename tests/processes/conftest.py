"""What the process tests share: how servers start, and the parameters that one worker alone arrives at."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from . import prefork
from .cluster import cluster


@pytest.fixture(scope="module", autouse=True)
def _forked_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Servers that a test starts from its own process are forked as those of jobs are, see `prefork`."""
    if request.node.get_closest_marker("processes") is None:  # tests of `cluster` itself start none
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", prefork.interpreter())
        yield


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """One worker, no Horovod, one shard, two epochs."""
    with cluster(tmp_path_factory.mktemp("alone"), n_shards=1, horovod=False) as job:
        return job.run(job.start_alone).arrays()
