"""Stores to test against: a dict, a folder, fsspec's memory, and a server that speaks the S3 protocol."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.storage.open import open_store
from recovery.storage.store import Store
from recovery.testing import RamStore

BUCKET = "checkpoints"


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Storage options of an S3 server on this machine, with one bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "test", "secret": "test", "endpoint_url": f"http://{host}:{port}"}
    try:
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=options["endpoint_url"],
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield options
    finally:
        server.stop()


@pytest.fixture
def ram() -> RamStore:
    return RamStore()


@pytest.fixture(params=["ram", "local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Each kind of store in turn, empty."""
    if request.param == "ram":
        return RamStore()
    if request.param == "local":
        return open_store(tmp_path / "store")
    if request.param == "memory":  # one global file system: a folder of its own
        return open_store(f"memory://{uuid.uuid4().hex}")
    options = request.getfixturevalue("s3_options")
    return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", timeout_s=50, tries=2, **options)
