"""`s3_server.py PORT BUCKET READY_FILE`: a server that speaks the S3 protocol, with one bucket, for a lab's hosts."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer

port, bucket, ready = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="0.0.0.0", port=port)
server.start()
settings = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}
client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **settings)
client.create_bucket(Bucket=bucket)
ready.touch()
threading.Event().wait()
