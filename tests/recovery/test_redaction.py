"""What is shown, stored or logged has no password in it."""

from __future__ import annotations

import pytest
from gba_hvd_tools.launch.command_line import Launch

from recovery.redaction import redacted, redacted_command, redacted_values


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://joe:hunter2@db:5432/mlflow", "postgresql://***@db:5432/mlflow"),
        ("https://joe:p@ss@host/x", "https://***@host/x"),
        ("looked in http://u:p@a/ and s3://k:s@b/c", "looked in http://***@a/ and s3://***@b/c"),
        ("https://host/blob?sv=1&sig=abc%3D&se=2", "https://host/blob?sv=1&sig=***&se=2"),
        ("http://host/?access_token=abc#top", "http://host/?access_token=***#top"),
        ("mssql://host/db?password=hunter2", "mssql://host/db?password=***"),
        ("s3://AKIA:ab/x+y@minio/b", "s3://***@minio/b"),
        ("http://host:5000/a@b", "http://host:5000/a@b"),
        (
            "E: no; password=x12; host=h AWS_SECRET_ACCESS_KEY=y",
            "E: no; password=***; host=h AWS_SECRET_ACCESS_KEY=***",
        ),
        ("ConnectionError: password=x#&y, again", "ConnectionError: password=***, again"),
        ('{"a": {"apiKey": "x y"}, "lr": 1}', '{"a": {"apiKey": "***"}, "lr": 1}'),
        ("dsn=\"host=h password='it is'\"", "dsn=\"host=h password='***'\""),
        ("train.py --token abc --n-tokens 5", "train.py --token *** --n-tokens 5"),
        ("Authorization: Bearer abc.def0", "Authorization: Bearer ***"),
        ("no: token=eyJhbGciOi0.x, again", "no: token=***, again"),
        ('{"a":{"password":"x","b":[1]},"token":{"dim":16}}', '{"a":{"password":"***","b":[1]},"token":{"dim":16}}'),
        ('{"password": null, "x": 1}', '{"password": null, "x": 1}'),
        ("token=cols(16), auth: float32, tokens=12k", "token=cols(16), auth: float32, tokens=12k"),
        ("s3://b/data/token=a/pass=1/part-0.parquet", "s3://b/data/token=a/pass=1/part-0.parquet"),
        ("password: not given", "password: not given"),
        ("GBA_HVD_KEY=0123abc GBA_HVD_KEY_FILE=/k", "GBA_HVD_KEY=*** GBA_HVD_KEY_FILE=/k"),
        ("token: 812 is ahead, author=joe PWD=/home/joe", "token: 812 is ahead, author=joe PWD=/home/joe"),
        ("table 'auth': rows, pad_token='[PAD]'", "table 'auth': rows, pad_token='[PAD]'"),
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


def test_whatever_has_a_secret_name_is_hidden() -> None:
    values = {
        "credentials": {"pass": "x"}, "db_pass": "x", "passphrase": "x", "private_key": {"pem": "x"}, "auth": "x",
        "pw": "x", "dbPassword": "x", "bearer": "x", "tokens": ["x"], "sas": "x", "db.credentials.id_of": "x",
        "AWS_SECRET_ACCESS_KEY": "x", "apiKey": "x", "client_secret": "x", "password": 1234,
    }  # fmt: skip
    assert redacted_values(values) == dict.fromkeys(values, "***")


def test_names_of_machine_learning_stay_readable() -> None:
    values = {
        "tokens_per_batch": 512, "author": "joe", "authority": "x", "n_tokens": "512", "token_dim": 8, "max_tokens": 4,
        "secretary": "a", "pwd": "/home/joe", "pass_through": True, "passes": 3, "auto": True, "tokens": 100, "pass": 2,
        "use_auth": "true", "token": {"dim": 8, "kind": "x"}, "pad_token": "[PAD]", "key": "user_id", "main_key": "i",
        "tokenizer": "bert", "password_file": "/x", "compass": "x", "signature": None, "use_secret": True,
    }  # fmt: skip
    assert redacted_values(values) == values


def test_a_command_is_shown_without_its_secrets() -> None:
    argv = [
        "train.py",
        "--dsn-password",
        "a b",
        "--db-url",
        "postgresql://u:p@h/db?api_key=x",
        "--token=x",
        "--lr",
        "1",
    ]
    shown = ["train.py", "--dsn-password", "***", "--db-url", "postgresql://***@h/db?api_key=***", "--token=***"]
    assert redacted_command(argv) == [*shown, "--lr", "1"]


def test_the_launchers_line_has_no_secrets() -> None:
    launch = Launch(("python", "train.py", "--db-url", "postgresql://u:p@h/db"), {"OMP_NUM_THREADS": "1"}, ())
    assert launch.words == "OMP_NUM_THREADS=1 python train.py --db-url 'postgresql://***@h/db'"
