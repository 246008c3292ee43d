"""Several tasks in one evaluation, its masks and metrics, and retrieval: on one, two and three workers the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gba_hvd
from gba_hvd import BadInput, Bag, StateMismatch, Task
from gba_hvd.errors import GbaError
from gba_hvd.metrics.grouped_auc import grouped_auc
from gba_hvd.metrics.scores import exact_auc
from tests.unit.thread_world import EventLog, Workers


@dataclass(frozen=True)
class Shown(gba_hvd.Batch):
    """Impressions: whether each was clicked and bought, and how many stars it got."""

    click: Any = None
    bought: Any = None
    stars: Any = None


class Impressions:
    def __init__(self, n: int, seed: int = 4) -> None:
        rng = np.random.default_rng(seed)
        self.user, self.item = rng.integers(0, 20, n), rng.integers(0, 7, n)
        self.click = (rng.random(n) < 0.4).astype(np.float32)
        self.bought = self.click * (rng.random(n) < 0.5).astype(np.float32)
        self.stars = rng.integers(1, 6, n).astype(np.float32)

    def __len__(self) -> int:
        return len(self.user)

    def take(self, rows: np.ndarray) -> Shown:
        ids: dict[str, Any] = {"user": torch.from_numpy(self.user[rows]), "item": torch.from_numpy(self.item[rows])}
        click, bought, stars = (torch.from_numpy(values[rows]) for values in (self.click, self.bought, self.stars))
        return Shown(ids, torch.zeros(len(rows), 0), click, click=click, bought=bought, stars=stars)


class Towers(nn.Module):
    """Outputs of few whole numbers, so that many are equal."""

    def __init__(self, embed: Any, returns: str = "tensor") -> None:
        super().__init__()
        self.embed, self.returns = embed, returns

    def forward(self, batch: Shown) -> Any:
        self.embed(batch.ids)
        user, item = batch.ids["user"], batch.ids["item"]
        assert isinstance(user, Tensor) and isinstance(item, Tensor)
        ctr, cvr, stars = ((user + item) % 5 - 2.0), ((user * item) % 4 - 2.0), (user % 3 + item % 4).float()
        if self.returns == "mapping":
            return {"stars": stars[:, None], "cvr": cvr, "ctr": ctr}
        return (ctr, cvr, stars) if self.returns == "tuple" else torch.stack([ctr, cvr, stars], dim=1)


TASKS = {
    "ctr": Task(label=lambda b: b.click, metrics=["auc", "logloss", "gauc"], group=lambda b: b.ids["user"]),
    "cvr": Task(label=lambda b: b.bought, where=lambda b: b.click),
    "stars": Task(label=lambda b: b.stars, metrics=["mae", "mse", "rmse"]),
}


def check(scores: dict[str, gba_hvd.TaskScores], data: Impressions) -> None:
    """Against numpy."""
    model = Towers(lambda ids: None)
    ctr, cvr, stars = model(data.take(np.arange(len(data)))).numpy().T
    assert list(scores) == ["ctr", "cvr", "stars"] and list(scores["ctr"].values) == ["auc", "logloss", "gauc"]
    groups = grouped_auc(ctr, data.click, data.user)
    assert scores["ctr"]["auc"] == exact_auc(ctr, data.click)
    assert scores["ctr"]["gauc"] == groups.gauc
    assert (scores["ctr"].n_groups, scores["ctr"].n_groups_left_out) == (groups.n_groups, groups.n_groups_left_out)
    assert scores["ctr"]["logloss"] == pytest.approx(np.logaddexp(0, np.where(data.click == 1, -ctr, ctr)).mean())
    clicked = data.click == 1
    assert scores["cvr"]["auc"] == exact_auc(cvr[clicked], data.bought[clicked])
    assert [scores[name].n for name in scores] == [len(data), int(clicked.sum()), len(data)]
    errors = (stars - data.stars).astype(float)
    assert scores["stars"]["mse"] == pytest.approx((errors**2).mean(), rel=1e-12)
    assert scores["stars"]["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-12)
    assert all(one.exact and not one.note for one in scores.values())


@pytest.mark.slow
@pytest.mark.parametrize("returns", ["tensor", "tuple", "mapping"])
@pytest.mark.parametrize(("n_workers", "n"), [(1, 50), (2, 50), (3, 50), (3, 13)])
def test_tasks_have_their_own_outputs_labels_masks_and_metrics(
    workers: Workers, on_host: Any, n_workers: int, n: int, returns: str
) -> None:
    """13 samples in batches of 7: two workers have one batch each, the third has none."""
    jobs, data = [on_host("ab"[i % 2]) for i in range(n_workers)], Impressions(n)

    def evaluate(job: Any) -> Any:
        model = Towers(job.tables, returns)
        return gba_hvd.evaluate(model, data, job.state, batch=7, activation="sigmoid", tasks=TASKS)

    results = workers.together(jobs, evaluate)
    check(results[0], data)
    assert all(result == results[0] for result in results)


def test_metrics_without_tasks_are_of_the_one_output(training: Any, clicks: Any) -> None:
    job, data = training(), clicks(50)
    whole = gba_hvd.evaluate(job.model, data, job.state, activation="sigmoid")
    assert isinstance(whole, gba_hvd.Scores)
    found = gba_hvd.evaluate(
        job.model, data, job.state, activation="sigmoid", metrics=["gauc", "auc"], group=lambda b: b.ids["user"]
    )
    assert isinstance(found, gba_hvd.TaskScores) and list(found.values) == ["gauc", "auc"]
    assert found["auc"] == whole.auc and found.n_groups > 0
    with pytest.raises(KeyError, match="'mse' was not asked for: this evaluation has gauc, auc"):
        found["mse"]
    rated = gba_hvd.evaluate(job.model, data, job.state, metrics=["mse"])
    outputs = job.model(data.take(np.arange(50))).detach().numpy().astype(float)
    assert rated["mse"] == pytest.approx(((outputs - data.label) ** 2).mean(), rel=1e-6)


def test_modules_that_were_not_training_are_not_afterwards(training: Any, clicks: Any) -> None:
    job = training()
    job.model.frozen, job.model.trained = nn.Dropout().eval(), nn.Dropout()
    gba_hvd.evaluate(job.model, clicks(20), job.state, activation="sigmoid")
    assert (job.model.training, job.model.frozen.training, job.model.trained.training) == (True, False, True)


def test_outputs_are_picked_by_number_by_name_and_by_a_function(training: Any) -> None:
    job, data = training(), Impressions(30)
    picks: dict[str, Any] = {"number": 1, "function": lambda out: out[1]}
    tasks = {name: Task(label=lambda b: b.bought, output=pick) for name, pick in picks.items()}
    found = gba_hvd.evaluate(Towers(job.tables, "tuple"), data, job.state, activation="sigmoid", tasks=tasks)
    named = {"named": Task(label=lambda b: b.bought, output="cvr")}
    found |= gba_hvd.evaluate(Towers(job.tables, "mapping"), data, job.state, activation="sigmoid", tasks=named)
    columns = {"column": Task(label=lambda b: b.bought, output=1)}
    found |= gba_hvd.evaluate(Towers(job.tables), data, job.state, activation="sigmoid", tasks=columns)
    assert len({(one["auc"], one["logloss"]) for one in found.values()}) == 1 and len(found) == 4


def test_a_task_without_samples_has_no_figures_and_a_reason(training: Any) -> None:
    job, data = training(), Impressions(30)
    tasks = {
        "never": Task(label=lambda b: b.bought, output=0, where=lambda b: b.click < 0),
        "stars": Task(label=lambda b: b.stars, output=1, where=lambda b: b.click < 0, metrics=["mse"]),
        "alone": Task(label=lambda b: b.click, output=0, metrics=["gauc"], group=lambda b: torch.arange(len(b))),
    }
    found = gba_hvd.evaluate(Towers(job.tables), data, job.state, batch=30, activation="sigmoid", tasks=tasks)
    assert math.isnan(found["never"]["auc"]) and "0 positive and 0 negative" in found["never"].note
    assert math.isnan(found["stars"]["mse"]) and found["stars"].note == "no samples"
    assert math.isnan(found["alone"]["gauc"]) and "each of these 30 has one" in found["alone"].note
    assert found["alone"].n_groups_left_out == 30


def test_probabilities_of_one_task_are_not_taken_for_logits_by_any_worker(workers: Workers, on_host: Any) -> None:
    jobs = [on_host("a"), on_host("b")]
    tasks = {
        "ctr": Task(label=lambda b: b.click, output=0),
        "cvr": Task(label=lambda b: b.bought, output=lambda out: torch.sigmoid(out[:, 1])),
        "said": Task(label=lambda b: b.bought, output=lambda out: torch.sigmoid(out[:, 1]), activation="none"),
    }
    for result in workers.outcomes(
        jobs, lambda job: gba_hvd.evaluate(Towers(job.tables), Impressions(30), job.state, tasks=tasks)
    ):
        assert isinstance(result, BadInput) and "all outputs of 'cvr' of the first batch lie in [0, 1]" in str(result)


def test_workers_with_other_metrics_are_noticed(workers: Workers, on_host: Any, clicks: Any) -> None:
    jobs = [on_host("a"), on_host("a")]

    def evaluate(job: Any) -> Any:
        metrics = ["mse"] if job is jobs[0] else ["auc"]
        return gba_hvd.evaluate(job.model, clicks(30), job.state, metrics=metrics)  # type: ignore[arg-type]

    for result in workers.outcomes(jobs, evaluate):
        assert isinstance(result, StateMismatch) and "disagree about the tasks and metrics to evaluate" in str(result)


def test_an_activation_that_no_task_uses_is_a_warning_and_the_epoch_is_not_lost(training: Any) -> None:
    job, events = training(), []
    tasks = {"a": Task(output=0, label=lambda b: b.click, activation="sigmoid")}
    expected = gba_hvd.evaluate(Towers(job.tables), Impressions(30), job.state, tasks=tasks)
    job.state.engine.reports.emit = lambda event, only_here=False: events.append(event)
    for _ in range(2):
        assert expected == gba_hvd.evaluate(
            Towers(job.tables), Impressions(30), job.state, tasks=tasks, activation="none"
        )
    assert [(event.kind, event.level) for event in events] == [("activation_idle", "warning")]
    assert "activation='none' has no effect: every task has its own" in events[0].message


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"metrics": ["auc", "mse"]}, "are of clicks and .* of ratings, with other labels. Make two tasks"),
        ({"metrics": "auc"}, "must be a sequence of names"),
        ({"metrics": ["acc"]}, "'acc'"),
        ({"metrics": ["auc", "auc"]}, "asked for twice"),
        ({"metrics": ["gauc"]}, "metric 'gauc' needs group="),
        ({"group": lambda b: b.ids["user"]}, "group= is for metric 'gauc'"),
        ({"tasks": {"a": Task()}, "label": lambda b: b.label}, "label with tasks= would have no effect"),
        ({"tasks": {}}, "tasks= is empty"),
        ({"tasks": {"a": 3}}, "which 'a' is not"),
        (
            {"tasks": {"a": Task(), "b": Task()}},
            r"which output is that of task 'a'\? Got a tensor \[4, 3\], for 2 tasks",
        ),
        ({}, r"which output is that\? Got a tensor \[4, 3\], for one task"),
        ({"tasks": {"a": Task(output="ctr")}}, r"output='ctr' of task 'a', but the model returned a tensor \[4, 3\]"),
        ({"tasks": {"a": Task(output=7)}}, "output=7 of task 'a', but the model returned"),
        ({"tasks": {"a": Task(output=lambda out: out)}}, r"output of task 'a' must be a tensor \[B\], got a tensor"),
        (
            {"tasks": {"a": Task(output=0), "b": Task(output=1)}},
            r"which label is that of task 'a'\? Got a tensor \[4\]",
        ),
        ({"tasks": {"a": Task(output=0, label=lambda b: b.stars)}}, "a label of task 'a' must be 0 or 1, got"),
        ({"tasks": {"a": Task(output=0, label=lambda b: b.click[:2])}}, "got 4 outputs, 2 labels"),
        ({"tasks": {"a": Task(output=0, where=lambda b: b.stars)}}, "true or false, or 0 or 1, for each sample"),
        ({"tasks": {"a": Task(output=0, where=lambda b: b.click[:1])}}, "has 1 values for 4 samples"),
        (
            {"tasks": {"a": Task(output=0, metrics=["gauc"], group=lambda b: b.click)}},
            "a group of task 'a' must be a whole number, got torch.float32",
        ),
        ({"batch": 0}, "batch must be a whole number of samples, 1 or more, got 0"),
    ],
)
def test_what_has_no_effect_or_is_ambiguous_is_refused(training: Any, how: dict[str, Any], message: str) -> None:
    job = training()
    with pytest.raises(BadInput, match=message):
        gba_hvd.evaluate(Towers(job.tables), Impressions(30), job.state, **how)


class WithPlaces(Impressions):
    def place_of(self, row: int) -> str:
        return f"shelf {row // 10}, box {row % 10}"


class InFiles(Impressions):
    def files_of(self, rows: np.ndarray) -> str:
        return ", ".join(f"{row // 10}.bin" for row in rows.tolist())


@pytest.mark.parametrize(("label", "shown"), [(0.9999999, "0.9999999"), (2.0, "2"), (float("nan"), "nan")])
def test_a_wrong_label_is_shown_with_all_its_decimals(training: Any, label: float, shown: str) -> None:
    job, data = training(), Impressions(30)
    data.click[12] = label
    with pytest.raises(BadInput, match=f"must be 0 or 1, got {shown} "):
        gba_hvd.evaluate(Towers(job.tables), data, job.state, tasks={"ctr": Task(output=0, label=lambda b: b.click)})


@pytest.mark.parametrize(
    ("kind", "place"), [(Impressions, ""), (WithPlaces, ": shelf 1, box 7"), (InFiles, r": 1\.bin")]
)
def test_a_wrong_label_is_named_by_its_sample_and_its_place(training: Any, kind: Any, place: str) -> None:
    job, data = training(), kind(30)
    data.user[:] = 1
    data.user[11:15] = 2
    data.click[[12, 17, 18, 25]] = 2
    message = rf"must be 0 or 1, got 2 \(sample 17 of the evaluated dataset{place}\) in 2 of 6 samples of a batch"
    tasks = {"ctr": Task(output=0, label=lambda b: b.click, where=lambda b: b.ids["user"] == 1)}
    with pytest.raises(BadInput, match=message):
        gba_hvd.evaluate(Towers(job.tables), data, job.state, batch=10, activation="sigmoid", tasks=tasks)


@pytest.mark.parametrize("settings", [{"metrics": ["mse"], "activation": "none"}, {"activation": "tanh"}])
def test_a_task_refuses_an_activation_that_does_not_fit(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="activation"):
        Task(**settings)


# --- retrieval -------------------------------------------------------------------------------------------------------


class Numbered:
    """Users or items by number. Their vectors have few whole numbers, so many scores are equal."""

    def __init__(self, n: int, seed: int, n_items: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.vectors = rng.integers(-1, 2, (n, 3)).astype(np.float32)
        self.relevant = [rng.integers(0, max(1, n_items + 2), rng.integers(0, 4)) for _ in range(n)]
        self.seen = [rng.integers(0, max(1, n_items), rng.integers(0, 6)) for _ in range(n)]

    def __len__(self) -> int:
        return len(self.vectors)

    def take(self, rows: np.ndarray) -> Any:
        ids: dict[str, Any] = {"user": torch.from_numpy(rows % 20), "item": torch.from_numpy(rows % 7)}
        return Listed(ids, torch.from_numpy(self.vectors[rows]), torch.zeros(len(rows)), numbers=rows, of=self)


@dataclass(frozen=True)
class Listed(gba_hvd.Batch):
    numbers: Any = None
    of: Any = None

    def bag(self, name: str) -> Bag:
        lists = [torch.as_tensor(getattr(self.of, name)[row], dtype=torch.int64) for row in self.numbers]
        starts = np.cumsum([0, *map(len, lists)])[:-1]
        return Bag(torch.cat(lists), torch.from_numpy(starts))


def by_loops(users: Numbered, items: Numbered, k: int) -> tuple[float, float]:
    recalls, ndcgs = [], []
    for user in range(len(users)):
        relevant = set(users.relevant[user].tolist())
        scores = items.vectors @ users.vectors[user]
        order = sorted(range(len(items)), key=lambda i: (-scores[i], i))
        hits = [i in relevant for i in order if i not in set(users.seen[user].tolist())][:k]
        if relevant:
            recalls.append(sum(hits) / len(relevant))
            ideal = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(relevant))))
            ndcgs.append(sum(hit / math.log2(rank + 2) for rank, hit in enumerate(hits)) / ideal)
    return float(np.mean(recalls)), float(np.mean(ndcgs))


def retrieve(job: Any, users: Numbered, items: Numbered, **how: Any) -> gba_hvd.RetrievalScores:
    def vectors(batch: Any) -> Tensor:
        job.tables(batch.ids)  # rows of other hosts are there
        dense: Tensor = batch.dense
        return dense

    how = {"relevant": lambda b: b.bag("relevant"), "seen": lambda b: b.bag("seen"), "k": (1, 5, 100), **how}
    how = {"query_vectors": vectors, "item_vectors": vectors, **how}
    return gba_hvd.evaluate_retrieval(job.model, users, items, job.state, batch=7, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_workers", "n_users", "n_items"), [(1, 25, 31), (2, 25, 31), (3, 25, 31), (3, 5, 10), (2, 30, 5)]
)
def test_a_retrieval_finds_the_same_on_any_number_of_workers(
    workers: Workers, on_host: Any, n_workers: int, n_users: int, n_items: int
) -> None:
    """With batches of 7, in some cases workers have no users, or no items."""
    jobs = [on_host("ab"[i % 2]) for i in range(n_workers)]
    users, items = Numbered(n_users, 1, n_items), Numbered(n_items, 2)
    results = workers.together(jobs, lambda job: retrieve(job, users, items))
    for k in (1, 5, 100):
        recall, ndcg = by_loops(users, items, k)
        assert results[0].recall[k] == pytest.approx(recall, rel=1e-12)
        assert results[0].ndcg[k] == pytest.approx(ndcg, rel=1e-12)
    assert all(result == results[0] for result in results)
    assert results[0].n + results[0].n_left_out == n_users and results[0].n_items == n_items


def test_items_have_ids_of_their_own_and_queries_one_item_each(workers: Workers, on_host: Any) -> None:
    jobs, users, items = [on_host("a"), on_host("a")], Numbered(20, 1), Numbered(12, 2)
    users.relevant = [np.array([(3 * user) % 12]) for user in range(20)]
    users.seen = [np.empty(0, np.int64)] * 20
    recall, ndcg = by_loops(users, items, 4)
    how = {
        "item_ids": lambda b: torch.from_numpy(100 + 2 * b.numbers), "k": 4, "seen": None,
        "relevant": lambda b: torch.from_numpy(100 + 2 * ((3 * b.numbers) % 12)),
    }  # fmt: skip
    for result in workers.together(jobs, lambda job: retrieve(job, users, items, **how)):
        assert (result.recall[4], result.ndcg[4]) == (pytest.approx(recall), pytest.approx(ndcg))
    how["item_ids"] = lambda b: torch.from_numpy(b.numbers // 2)
    for outcome in workers.outcomes(jobs, lambda job: retrieve(job, users, items, **how)):
        assert isinstance(outcome, BadInput) and "item 0 is more than once in the item dataset" in str(outcome)


def test_retrieving_from_different_items_is_noticed(workers: Workers, on_host: Any) -> None:
    jobs = [on_host("a"), on_host("a")]
    sizes = dict(zip(map(id, jobs), (30, 31), strict=True))
    for result in workers.outcomes(jobs, lambda job: retrieve(job, Numbered(9, 1), Numbered(sizes[id(job)], 2))):
        assert isinstance(result, StateMismatch) and "disagree about the items to rank: by rank [30, 31]" in str(result)


def lists(batch: Any, name: str) -> list[Tensor]:
    return [torch.as_tensor(getattr(batch.of, name)[row], dtype=torch.int64) for row in batch.numbers]


def padded(batch: Any, name: str) -> Tensor:
    return nn.utils.rnn.pad_sequence(lists(batch, name), batch_first=True, padding_value=-7)


def jagged(batch: Any, name: str) -> Tensor:
    return torch.nested.nested_tensor(lists(batch, name), layout=torch.jagged)


@pytest.mark.parametrize("form", [padded, jagged])
def test_lists_of_items_may_be_padded_or_jagged(training: Any, form: Any) -> None:
    job, users, items = training(), Numbered(25, 1, 31), Numbered(31, 2)
    expected = retrieve(job, users, items)
    how = {"relevant": lambda b: form(b, "relevant"), "seen": lambda b: form(b, "seen"), "padding": -7}
    assert retrieve(job, users, items, **how) == expected
    empty = Numbered(3, 1)
    empty.relevant = empty.seen = [np.empty(0, np.int64)] * 3
    assert retrieve(job, empty, items, **how).n_left_out == 3


def test_relevant_items_that_were_seen_are_counted_and_warned_of_once(workers: Workers, on_host: Any) -> None:
    reported = EventLog()
    jobs, users, items = [on_host("a"), on_host("a")], Numbered(4, 1), Numbered(12, 2)
    jobs[0].state.register_callbacks([reported])
    users.relevant = [np.array([1, 2])] * 4
    users.seen = [np.array([2, 2, 5])] * 4

    def twice(job: Any) -> list[gba_hvd.RetrievalScores]:
        return [retrieve(job, users, items, k=20) for _ in range(2)]

    for results in workers.together(jobs, twice):
        assert [(found.n_seen, found.recall[20]) for found in results] == [(4, 0.5)] * 2
    (warned,) = reported.of("relevant_seen")
    assert warned.level == "warning" and "4 relevant items are also in `seen`" in warned.message


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [1, 3])
def test_reading_ahead_finds_the_same(workers: Workers, on_host: Any, clicks: Any, n_workers: int) -> None:
    """Fewer batches than workers among them: 25 users in batches of 7, 12 items."""
    jobs = [on_host("ab"[i % 2]) for i in range(n_workers)]
    users, items, data = Numbered(25, 1, 12), Numbered(12, 2), clicks(50)

    def find(job: Any, **how: Any) -> tuple[Any, ...]:
        scores = gba_hvd.evaluate(job.model, data, job.state, batch=8, activation="sigmoid", **how)
        return retrieve(job, users, items, **how), scores

    plain, ahead = (workers.together(jobs, lambda job, n=n: find(job, prefetch=n)) for n in (None, 2))
    assert plain == ahead


def test_a_dataset_that_fails_while_it_is_read_ahead_fails_the_evaluation(training: Any, clicks: Any) -> None:
    job, data = training(), clicks(50)

    class Broken:
        def __len__(self) -> int:
            return 50

        def take(self, rows: np.ndarray) -> Any:
            if 30 in rows:
                raise OSError("no such page")
            return data.take(rows)

    with pytest.raises(OSError, match="no such page"):
        gba_hvd.evaluate(job.model, Broken(), job.state, batch=8, activation="sigmoid", prefetch=2)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"k": 0}, "k must be whole numbers, 1 or more, got 0"),
        ({"k": ()}, "k is empty"),
        ({"k": (5, 5)}, "twice"),
        (
            {"query_vectors": lambda b: b.label},
            r"query_vectors must return a float tensor \[B, d\], got torch.float32 \[",
        ),
        ({"item_vectors": lambda b: b.dense[:, :2]}, "vectors of queries have 3 values, those of items 2"),
        ({"item_ids": np.arange(12)}, "item_ids must be a function that gets a batch, .*, got ndarray"),
        ({"item_ids": lambda b: b.label}, "item_ids must be an int64 tensor with one dimension"),
        ({"relevant": lambda b: torch.zeros(2).long()}, "relevant has 2 queries, query_vectors 7, of one batch"),
        (
            {"seen": lambda b: Bag(torch.zeros(2).long(), torch.zeros(7).long(), torch.ones(2))},
            "weights of a Bag from seen",
        ),
        ({"seen": lambda b: Bag(torch.zeros(2).long(), 7 - torch.arange(7))}, "offsets of seen must ascend"),
        ({"seen": lambda b: Bag(torch.zeros(9).long(), torch.arange(2, 9))}, r"must ascend from 0 .* got \[2, 3, 4"),
        ({"relevant": lambda b: torch.zeros(7, 2)}, "relevant must be an int64 tensor"),
        ({"relevant": lambda b: torch.zeros(7, 2, 2).long()}, "relevant must be an int64 tensor"),
        ({"seen": lambda b: torch.nested.nested_tensor([torch.arange(2)] * 7)}, "must be .* with layout torch.jagged"),
        ({"collate_fn": list}, "collate_fn would not be called"),
        ({"num_workers": -1}, "num_workers must be a whole number"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_vectors_and_ids_that_do_not_fit_are_refused(training: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        retrieve(training(), Numbered(20, 1, 12), Numbered(12, 2), **how)


def test_a_retrieval_within_a_step_is_refused(training: Any, clicks: Any) -> None:
    job = training()
    for _ in gba_hvd.batches(clicks(50), job.state):
        with pytest.raises(GbaError, match=r"evaluate_retrieval\(\) only between steps.* that changed state.step"):
            retrieve(job, Numbered(20, 1, 12), Numbered(12, 2))
        break


def test_a_map_style_dataset_is_evaluated_as_it_is_trained(training: Any, clicks: Any) -> None:
    job, data = training(), clicks(50)

    class Samples:
        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> int:
            return index

    found = gba_hvd.evaluate(
        job.model, Samples(), job.state, collate_fn=lambda numbers: data.take(np.array(numbers)), activation="sigmoid"
    )
    assert found == gba_hvd.evaluate(job.model, data, job.state, activation="sigmoid")
    with pytest.raises(BadInput, match="collate_fn would not be called"):
        gba_hvd.evaluate(job.model, data, job.state, collate_fn=list)
