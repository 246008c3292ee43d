"""Settings of the optimizer that are changed where nothing follows them: reported once, and no false alarm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gba_hvd
from gba_hvd.training.settings_watch import ChangedSettings, changes, own_settings, settings_of
from gba_hvd.update_rules import RULES, takes_over

from .test_parameter_watch import Clicks, Model

L = torch.optim.lr_scheduler


class Warnings(gba_hvd.Callback):
    def __init__(self) -> None:
        self.reported: list[tuple[str, str]] = []

    def on_event(self, event: gba_hvd.Event) -> None:
        if event.level == "warning":
            self.reported.append((event.kind, event.message))


def warnings_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, touch: Callable[[Any], Any], rows: Any = None
) -> list[tuple[str, str]]:
    """touch: given the optimizer, makes a scheduler, or what is called after each step."""
    monkeypatch.setenv("GBA_HVD_SHARD_DIR", str(folder))
    monkeypatch.setenv("GBA_HVD_GRACE_S", "0")
    torch.manual_seed(1)
    rows = rows or gba_hvd.Adam(lr=0.1, betas=(0.8, 0.9))
    tables = gba_hvd.EmbeddingTables({"user": (10, 4)}, optimizer=rows, n_shards=2)
    model = Model(tables)
    dense = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = gba_hvd.DistributedOptimizer(dense, tables, global_batch=8, micro_batch=4)
    own = {name: optimizer.param_groups[-1][name] for name in ("betas", "eps", "weight_decay") if hasattr(rows, name)}
    assert own == {name: getattr(rows, name) for name in own}
    made = touch(optimizer)
    scheduler = {"scheduler": made} if isinstance(made, L.LRScheduler) else {}
    state, received = gba_hvd.elastic.TorchState(model, optimizer, epoch=0, **scheduler), Warnings()
    state.register_callbacks([received])
    state.on_step(made.step if scheduler else made)
    for batch in gba_hvd.batches(Clicks(), state):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
        loss.backward()
        optimizer.step(loss=loss)
    assert state.engine.progress.step == 8
    in_use = [{**one, "eps": 0.5} for one in state.engine.model.dense_settings]
    for _ in range(2):
        state.engine.reports.dense_settings("gba", state.engine.model.dense_settings)
    assert received.reported == [one for one in received.reported if one[0] == "row_settings_not_followed"]
    for _ in range(2):
        state.engine.reports.dense_settings("gba", in_use)
    *of_rows, (kind, text) = received.reported
    saved = state.training_state.state_dict()
    for name in own:
        saved["optimizer"]["param_groups"][-1][name] = 0.25  # as of other rows
    state.training_state.load_state_dict(saved)
    assert own == {name: optimizer.param_groups[-1][name] for name in own}, "a resume brings none back"
    assert kind == "dense_settings_not_followed" and "group 0: eps=1e-08 is set and 0.5 is used" in text
    state.close()
    return of_rows


def weight_decay(optimizer: Any) -> Callable[[], None]:
    def set_it() -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5

    return set_it


@pytest.mark.parametrize(
    ("touch", "words"),
    [
        (lambda o: L.OneCycleLR(o, max_lr=0.05, total_steps=20), "betas="),
        (weight_decay, "weight_decay=0.5 is set and 0.0 is used"),
    ],
)
def test_rows_follow_the_learning_rate_alone_and_that_is_said_once(
    touch: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ((kind, text),) = warnings_of(tmp_path, monkeypatch, touch)
    assert kind == "row_settings_not_followed" and words in text and "Adam(...)" in text


@pytest.mark.parametrize(
    ("touch", "rows"),
    [
        (lambda o: L.OneCycleLR(o, max_lr=0.05, total_steps=20, cycle_momentum=False), None),
        (lambda o: L.LambdaLR(o, lambda n: 1 / (1 + n)), None),
        (lambda o: L.OneCycleLR(o, max_lr=0.05, total_steps=20), gba_hvd.SGD(lr=0.1)),  # rows without betas
    ],
)
def test_no_false_alarm(touch: Any, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert warnings_of(tmp_path, monkeypatch, touch, rows) == []


def test_servers_get_the_numbers_that_were_changed_and_get_them_again_when_changed_back():
    begun = {"betas": (0.9, 0.99), "eps": 0.5, "kind": "a"}
    changed = ChangedSettings([begun, begun], is_followed=True)
    assert changed.followed([begun, begun]) == []
    now = {**begun, "betas": (0.8, 0.99), "kind": "b"}
    assert changed.followed([begun, now]) == [{}, {"betas": (0.8, 0.99)}]
    assert changed.kept([begun, now]) == [{"kind": "a"}, {"kind": "a"}]
    assert changed.followed([begun, begun]) == [{}, {"betas": (0.9, 0.99)}]
    not_finite = {**begun, "eps": float("inf")}
    assert changed.followed([not_finite, begun])[0] == {} and changed.kept([not_finite])[0]["eps"] == 0.5


def test_a_rule_that_owns_the_momentum_keeps_all_settings_as_they_were():
    changed = ChangedSettings([{"momentum": 0.9}], is_followed=False)
    assert changed.followed([{"momentum": 0.5}]) == [] and changed.kept([{"momentum": 0.5}]) == [{"momentum": 0.9}]
    sgd, nadam = (kind([torch.zeros(1)], lr=0.1) for kind in (torch.optim.SGD, torch.optim.NAdam))
    assert [name for name in RULES if takes_over(name, sgd)] == [
        "dana_zero",
        "dana_slim",
        "dana_dc",
        "delayed_nesterov",
    ]
    assert not takes_over("delayed_nesterov", nadam)


def test_settings_are_compared_as_plain_values():
    names = ("lr", "betas", "eps", "fused")
    group = {"params": [], "lr": 1.0, "betas": [torch.tensor(0.5), 0.75], "eps": 1e-8, "initial_lr": 2.0}
    group["fused"] = True  # changes nothing that is computed
    assert settings_of(group, names) == {"betas": (0.5, 0.75), "eps": 1e-8}
    assert own_settings(gba_hvd.Adam(lr=1.0, betas=(0.5, 0.75)), names) == {"betas": (0.5, 0.75), "eps": 1e-8}
    assert changes(settings_of(group, names), own_settings(gba_hvd.Adam(lr=1.0), names)) == (
        "betas=(0.5, 0.75) is set and (0.9, 0.999) is used"
    )
    assert changes({}, {"eps": 1e-8}) == ""
