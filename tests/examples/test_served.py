"""The builder of the example's models makes what the training script makes, without its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctr.build import build_model, build_tables
from ctr.config import load
from ctr.datasets import open_splits
from ctr.served import arguments_of, build, logged_model
from gba_hvd.errors import BadInput

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"


@pytest.mark.parametrize("kind", ["deepfm", "dlrm", "dcn"])
def test_click_models(kind: str) -> None:
    config = load(CONFIGS / "synthetic.yaml", [f"model.kind={kind}"])
    check(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["din", "dien"])
def test_sequence_models(name: str) -> None:
    check(load(CONFIGS / f"{name}.yaml"))


def check(config: object) -> None:
    splits = open_splits(config.data, config.reads_sequences)  # type: ignore[attr-defined]
    tables = build_tables(config, splits.train)  # type: ignore[arg-type]
    model = build_model(config, tables, splits.train)  # type: ignore[arg-type]
    made = build(**arguments_of(config, splits.train))  # type: ignore[arg-type]
    assert type(made) is type(model)
    mine, theirs = model.state_dict(), made.state_dict()
    assert {name: value.shape for name, value in mine.items()} == {name: value.shape for name, value in theirs.items()}
    assert made.tables.tables == tables.tables  # type: ignore[union-attr]
    assert made.tables.features == tables.features  # type: ignore[union-attr]
    assert made.tables.layout == tables.layout  # type: ignore[union-attr]


def test_a_youtube_dnn_needs_the_popularity_of_its_items() -> None:
    config = load(CONFIGS / "youtube_dnn.yaml")
    with pytest.raises(BadInput, match="popularity of its items"):
        build(config.as_dict(), {"user": 2, "item": 3}, 0)


@pytest.mark.slow
def test_the_settings_say_what_is_logged() -> None:
    config = load(CONFIGS / "synthetic.yaml", ["log_model.registered_model_name=ctr", "log_model.alias=best"])
    splits = open_splits(config.data)
    found = logged_model(config, splits.train)
    assert found is not None
    assert (found.name, found.registered_model_name, found.alias, found.activation) == ("ctr", "ctr", "best", "sigmoid")
    tables = build_tables(config, splits.train)
    found.check(build_model(config, tables, splits.train))
    assert logged_model(load(CONFIGS / "synthetic.yaml"), splits.train) is None


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("synthetic", "mlflow=false", "log_model: the model is logged with the run, and mlflow is off"),
        ("youtube_dnn", "seed=1", "log_model: a youtube_dnn is built with its training data"),
    ],
)
def test_a_model_that_cannot_be_logged_is_refused(name: str, override: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        load(CONFIGS / f"{name}.yaml", ["log_model.name=ctr", override])
