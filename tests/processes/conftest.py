"""What the process tests share: the parameters that one worker alone arrives at."""

from __future__ import annotations

import numpy as np
import pytest

from .cluster import cluster


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """One worker, no Horovod, one shard, two epochs."""
    with cluster(tmp_path_factory.mktemp("alone"), n_shards=1, horovod=False) as job:
        return job.run(job.start_alone).arrays()
