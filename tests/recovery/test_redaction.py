"""What is shown, stored or logged has no password in it."""

from __future__ import annotations

import pytest

from recovery.redaction import redacted, redacted_values


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://joe:hunter2@db:5432/mlflow", "postgresql://***@db:5432/mlflow"),
        ("https://joe:p@ss@host/x", "https://***@host/x"),
        ("looked in http://u:p@a/ and s3://k:s@b/c", "looked in http://***@a/ and s3://***@b/c"),
        ("https://host/blob?sv=1&sig=abc%3D&se=2", "https://host/blob?sv=1&sig=***&se=2"),
        ("http://host/?access_token=abc#top", "http://host/?access_token=***#top"),
        ("mssql://host/db?password=hunter2", "mssql://host/db?password=***"),
        ("s3://bucket/job@step/x and mail joe@home", "s3://bucket/job@step/x and mail joe@home"),
        ("sqlite:////tmp/a b/mlflow.db", "sqlite:////tmp/a b/mlflow.db"),
    ],
)
def test_credentials_of_urls_are_hidden_and_nothing_else(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


def test_settings_are_shown_without_their_secrets() -> None:
    values = {
        "url": "s3://k:s@bucket/job", "lr": 0.1, "tokenizer": "bert", "db": {"password": "hunter2", "port": 1},
        "storage_options": {"key": "AKIA", "secret": "xyz"}, "list": ["http://a:b@c"], "secret_key": "xyz",
    }  # fmt: skip
    assert redacted_values(values) == {
        "url": "s3://***@bucket/job", "lr": 0.1, "tokenizer": "bert", "db": {"password": "***", "port": 1},
        "storage_options": "***", "list": ["http://***@c"], "secret_key": "***",
    }  # fmt: skip
