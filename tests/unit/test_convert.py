"""Converted modules return what torch's return, and what cannot be converted is refused with what to do."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import gba_hvd
from gba_hvd import BadInput, StateMismatch
from gba_hvd.convert import padding_rows, set_padding_rows
from gba_hvd.elastic.training_state import TrainingState
from gba_hvd.shm.shard_memory import ShardMemory
from tests.processes import adoptable

Convert = Callable[..., gba_hvd.EmbeddingTables]


@pytest.fixture
def convert(tmp_path: Path) -> Iterator[Convert]:
    """`gba_hvd.convert`, with the memory that the first sync would make."""
    made: list[gba_hvd.EmbeddingTables] = []

    def do(model: nn.Module, **how: Any) -> gba_hvd.EmbeddingTables:
        tables = gba_hvd.convert(model, gba_hvd.SGD(lr=0.1), n_shards=3, shard_dir=tmp_path, **how)
        tables.memory = ShardMemory.create_or_open(tmp_path, f"tables-{len(made)}", tables.layout, grace_s=0)
        tables.memory.initial = tables.initial_rows
        tables.memory.reserve([0, 1, 2])
        for shard in range(3):
            tables.memory.init_shard(shard, 0)
        made.append(tables)
        return tables

    yield do
    for tables in made:
        assert tables.memory is not None
        tables.memory.close()


def gradients(tables: gba_hvd.EmbeddingTables, name: str) -> Tensor:
    """All captured gradients of a table as a dense one."""
    table = next(t for t in tables.layout.tables if t.name == name)
    found = torch.zeros(table.n_rows, table.dim)
    for group, grads in enumerate(tables.take_gradients()):
        for grad in grads:
            for key, value in zip(grad.keys, grad.values, strict=True):
                owner, row = tables.layout.locate(int(key), group)
                if owner == name:
                    found[row] += torch.from_numpy(value)
    return found


def check(convert: Convert, module: nn.Module, *args: Any, **named: Any) -> None:
    """Same values and same gradients, of the rows and of what else has one."""
    plain, holder = copy.deepcopy(module), nn.ModuleDict({"m": module})
    tables = convert(holder)
    ours, theirs = holder["m"](*args, **named), plain(*args, **named)
    torch.testing.assert_close(ours, theirs)
    assert ours.dtype == torch.float32
    if not theirs.requires_grad:
        return
    factor = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    (ours * factor).sum().backward()
    weights = named.get("per_sample_weights")
    own = None if weights is None else weights.grad.clone()
    if weights is not None:
        weights.grad = None
    (theirs * factor).sum().backward()
    torch.testing.assert_close(gradients(tables, "m"), plain.weight.grad)
    if weights is not None:
        torch.testing.assert_close(own, weights.grad)


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4), (), (0,), (4, 0)])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_an_embedding_takes_ids_of_any_shape(convert: Convert, shape: tuple[int, ...], padding_idx: int | None) -> None:
    check(convert, nn.Embedding(9, 4, padding_idx=padding_idx), ids(*shape))


def test_ids_of_int32_do(convert: Convert) -> None:
    check(convert, nn.Embedding(9, 4), ids(6, dtype=torch.int32))


def test_a_padding_row_that_is_not_zero_is_returned_and_not_trained(convert: Convert) -> None:
    module = nn.Embedding(9, 4, padding_idx=2)
    nn.init.normal_(module.weight)
    check(convert, module, torch.tensor([[2, 5], [1, 2]]))


@pytest.mark.parametrize(("theirs", "mine"), [(1.0, 2.0), (1.0, 0.0), (0.0, 2.0)])
def test_a_padding_row_is_taken_over(convert: Convert, theirs: float, mine: float) -> None:
    """Another process, or a later launch, may have made the module with another one."""
    models = [nn.ModuleDict({"item": nn.Embedding(9, 4, padding_idx=2)}) for _ in range(2)]
    for model, value in zip(models, (theirs, mine), strict=True):
        nn.init.constant_(model["item"].weight, value)
        convert(model)
    sender, receiver = models
    set_padding_rows(receiver, padding_rows(sender))
    assert torch.equal(receiver["item"](torch.tensor([2])), torch.full((1, 4), theirs))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_bags_are_pooled_as_torch_does(
    convert: Convert, mode: str, padding_idx: int | None, include_last_offset: bool
) -> None:
    settings = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": include_last_offset}
    offsets = torch.tensor([0, 0, 4, 5, 9] if include_last_offset else [0, 0, 4, 5])
    check(convert, nn.EmbeddingBag(9, 4, **settings), ids(9), offsets)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_length_need_no_offsets(convert: Convert, mode: str) -> None:
    check(convert, nn.EmbeddingBag(9, 4, mode=mode), ids(5, 3))


@pytest.mark.parametrize("cut", [{"offsets": torch.tensor([0, 4])}, {}])
def test_bags_may_be_weighted(convert: Convert, cut: dict[str, Tensor]) -> None:
    values = ids(10) if cut else ids(5, 2)
    weights = torch.rand(values.shape, generator=torch.Generator().manual_seed(8)).requires_grad_()
    check(convert, nn.EmbeddingBag(9, 4, mode="sum", padding_idx=3), values, per_sample_weights=weights, **cut)


def test_the_last_offset_is_the_number_of_ids(convert: Convert) -> None:
    model = nn.ModuleDict({"m": nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=True)})
    convert(model)
    with pytest.raises(BadInput, match=r"must be the number of ids, 9; got \[7\]"):
        model["m"](ids(9), torch.tensor([0, 4, 7]))


class Mixed(nn.Module):
    """An embedding with a padding row that is not zero, and weighted bags, into a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.bag = nn.Embedding(9, 4, padding_idx=2), nn.EmbeddingBag(9, 4, mode="sum")
        nn.init.normal_(self.one.weight)
        self.weights, self.out = nn.Parameter(torch.rand(3, 2)), nn.Linear(8, 3)

    def forward(self, one: Tensor, bag: Tensor) -> Tensor:
        return self.out(torch.cat([self.one(one), self.bag(bag, per_sample_weights=self.weights)], dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("compile_", [False, True])
def test_a_model_in_another_dtype_gets_its_rows_in_that(
    convert: Convert, dtype: torch.dtype, order: str, compile_: bool
) -> None:
    torch._dynamo.reset()
    model = Mixed().to(dtype) if order == "before" else Mixed()
    plain = copy.deepcopy(model).to(dtype)
    tables = convert(model)
    model.to(dtype)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_ else model
    args = torch.tensor([2, 5, 5]), torch.tensor([[1, 2], [3, 3], [4, 8]])
    out, theirs = run(*args), plain(*args)
    tolerance = {"rtol": 2e-2, "atol": 2e-2}  # of torch's, which rounds the rows, and adds up gradients rounded
    torch.testing.assert_close(out, theirs, **tolerance)  # the dtype, too
    for one in (out, theirs):
        one.float().square().sum().backward()
    assert tables.captured[0].rows.dtype == torch.float32
    found = {"one": torch.zeros(9, 4), "bag": torch.zeros(9, 4)}
    for group, grads in enumerate(tables.take_gradients()):
        for grad in grads:
            for key, value in zip(grad.keys, grad.values, strict=True):
                owner, row = tables.layout.locate(int(key), group)
                found[owner][row] += torch.from_numpy(value)
    torch.testing.assert_close(found["one"], plain.one.weight.grad.float(), **tolerance)
    torch.testing.assert_close(found["bag"], plain.bag.weight.grad.float(), **tolerance)
    torch.testing.assert_close(model.weights.grad, plain.weights.grad, **tolerance)
    assert tables.rows("one", [5]).dtype == np.float32
    assert model.float().one(torch.tensor([5])).dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    "adopted", [adoptable.HISTORY, adoptable.BAGS, adoptable.ONE_TABLE], ids=["history", "bags", "one"]
)
def test_converted_models_compile_without_a_graph_break(convert: Convert, adopted: adoptable.Adoptable) -> None:
    torch._dynamo.reset()
    model, batch = adopted.make_model(), adopted.make_samples(16, 1).take(np.arange(16))
    tables = convert(model)
    explained = torch._dynamo.explain(model)(batch[0])
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons
    tables.drop_gradients()
    found: list[Any] = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        loss = adopted.loss_of(run, batch)
        loss.backward()
        found.append((loss, [captured.rows.grad for captured in tables.captured]))
        tables.drop_gradients()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.slow
def test_a_last_offset_that_is_not_the_number_of_ids_is_noticed_in_a_compiled_model(convert: Convert) -> None:
    torch._dynamo.reset()
    model = nn.ModuleDict({"m": nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=True)})
    convert(model)
    compiled = torch.compile(model["m"], backend="aot_eager", fullgraph=True)
    assert compiled(ids(9), torch.tensor([0, 4, 9])).shape == (2, 4)
    with pytest.raises(RuntimeError, match="m: with include_last_offset the last offset must be the number of ids"):
        compiled(ids(9), torch.tensor([0, 4, 7]))


@pytest.mark.processes  # the compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's default backend needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of
def test_a_converted_model_trains_with_the_default_backend_of_torch_compile(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    model = Mixed()
    tables = convert(model)
    args = torch.tensor([2, 5, 5]), torch.tensor([[1, 2], [3, 3], [4, 8]])
    found: list[Any] = []
    with torch._inductor.config.patch(compile_threads=1):  # type: ignore[attr-defined]
        for run in (model, torch.compile(model, fullgraph=True)):
            model.zero_grad()
            out = run(*args)
            torch.autograd.grad(out.sum(), model.out.weight, retain_graph=True)  # trains no rows
            (out**2).sum().backward()
            rows = [captured.rows.grad for captured in tables.captured]
            found.append((out, rows, [p.grad for p in model.parameters()]))
            tables.drop_gradients()
    torch.testing.assert_close(found[1], found[0])


def test_rows_of_a_converted_model_stay_float32_under_autocast(convert: Convert) -> None:
    model = Mixed()
    convert(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.one(torch.tensor([1])).dtype == torch.float32
        out = model(torch.tensor([2, 5, 5]), torch.tensor([[1, 2], [3, 3], [4, 8]]))
    assert out.dtype == torch.bfloat16


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(9, 4)
        self.item = nn.Sequential(nn.Embedding(5, 4, padding_idx=0))
        self.same_item = self.item[0]
        self.out = nn.Linear(8, 1)


def test_tables_have_the_paths_of_their_modules_and_rows_of_their_weights(convert: Convert) -> None:
    model = TwoTowers()
    weights = {"user": model.user.weight.detach().clone(), "item.0": model.item[0].weight.detach().clone()}
    tables = convert(model)
    assert {t.name: (t.n_rows, t.dim) for t in tables.layout.tables} == {"user": (9, 4), "item.0": (5, 4)}
    for name, weight in weights.items():
        np.testing.assert_array_equal(tables.rows(name, np.arange(len(weight))), weight)
    assert [name for name, _ in model.named_parameters()] == ["out.weight", "out.bias"]
    assert list(model.state_dict()) == ["out.weight", "out.bias"]
    assert model.same_item is model.item[0]
    assert isinstance(model.user, nn.Embedding)


def test_the_training_state_names_the_weights_that_tables_hold_as_the_model_had_them(convert: Convert) -> None:
    model: nn.Module = TwoTowers()
    names = {*model.state_dict()} - {"out.weight", "out.bias"}
    convert(model)
    found = TrainingState(SimpleNamespace(), model, None, [])._row_parameters()  # type: ignore[arg-type]
    assert found == {"user.weight": "user", "item.0.weight": "item.0", "same_item.weight": "item.0"}
    assert found.keys() == names
    model = nn.Embedding(9, 4)
    convert(model)
    state = TrainingState(SimpleNamespace(), model, None, [])  # type: ignore[arg-type]
    assert state._row_parameters() == {"weight": "embedding"}


def test_modules_with_one_weight_share_a_table(convert: Convert) -> None:
    model = nn.ModuleDict({"a": nn.Embedding(9, 4), "b": nn.EmbeddingBag(9, 4, mode="sum")})
    model["b"].weight = model["a"].weight
    tables = convert(model)
    assert [t.name for t in tables.layout.tables] == ["a"]
    torch.testing.assert_close(model["b"](torch.tensor([[3], [4]])), model["a"](torch.tensor([3, 4])))


def test_what_keep_names_stays_as_it_is(convert: Convert) -> None:
    model = TwoTowers()
    tables = convert(model, keep=["item"])
    assert [t.name for t in tables.layout.tables] == ["user"]
    assert "item.0.weight" in model.state_dict()
    others = convert(model)  # converted apart, with another optimizer
    assert [t.name for t in others.layout.tables] == ["item.0"]
    with pytest.raises(BadInput, match=r"has no nn\.Embedding or nn\.EmbeddingBag that is not converted yet"):
        convert(model)


def test_a_table_may_have_an_optimizer_of_its_own(convert: Convert) -> None:
    own = gba_hvd.Adagrad(lr=0.2)
    tables = convert(TwoTowers(), optimizers={"item.0": own})
    assert tables.tables["item.0"].optimizer == own
    assert tables.tables["user"].optimizer is None
    with pytest.raises(BadInput, match=r"'same_item', which is no table; the tables are user, item\.0"):
        convert(TwoTowers(), optimizers={"same_item": own})


def test_towers_that_are_converted_one_by_one_have_tables_of_different_names(tmp_path: Path) -> None:
    def towers(*prefixes: str) -> tuple[list[nn.Module], list[gba_hvd.EmbeddingTables]]:
        models: list[nn.Module] = [TwoTowers() for _ in prefixes]
        return models, [
            gba_hvd.convert(model, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path, prefix=prefix)
            for model, prefix in zip(models, prefixes, strict=True)
        ]

    def optimizer(models: list[nn.Module], tables: list[gba_hvd.EmbeddingTables]) -> Any:
        sgd = torch.optim.SGD(nn.ModuleList(models).parameters(), lr=0.1)
        return gba_hvd.DistributedOptimizer(sgd, tables, global_batch=4, micro_batch=2)

    with pytest.raises(BadInput, match=r"a table named 'user': rename one of them, which .* is its prefix="):
        optimizer(*towers("", ""))
    whole = optimizer(*towers("left", "right")).engine.model.tables
    assert list(whole.features) == ["left.user", "left.item.0", "right.user", "right.item.0"]
    own = gba_hvd.Adagrad(lr=0.2)
    named = gba_hvd.convert(TwoTowers(), own, optimizers={"a.user": gba_hvd.Adam(0.1)}, prefix="a", shard_dir=tmp_path)
    assert named.tables["a.user"].optimizer == gba_hvd.Adam(0.1)


def test_a_module_that_is_the_model_has_a_table(convert: Convert) -> None:
    tables = convert(nn.Embedding(9, 4))
    assert [t.name for t in tables.layout.tables] == ["embedding"]


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def parametrised() -> nn.Module:
    module = nn.Embedding(9, 4)
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    return module


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    model[1].weight = model[0].weight
    return model


def hooked() -> nn.Module:
    module = nn.Embedding(9, 4)
    module.weight.register_hook(lambda grad: 2 * grad)
    return module


def with_gradient() -> nn.Module:
    module = nn.Embedding(9, 4)
    module(torch.tensor([1])).sum().backward()
    return module


def padded_differently() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Embedding(9, 4), "b": nn.Embedding(9, 4, padding_idx=0)})
    model["b"].weight = model["a"].weight
    return model


REFUSED = {
    "max_norm rescales rows": lambda: nn.Embedding(9, 4, max_norm=1.0),
    "scale_grad_by_freq divides": lambda: nn.EmbeddingBag(9, 4, scale_grad_by_freq=True),
    "is frozen": lambda: nn.Embedding.from_pretrained(torch.ones(9, 4)),
    "is torch.float64, and rows are float32": lambda: nn.Embedding(9, 4, dtype=torch.float64),
    "on the meta device": lambda: nn.Embedding(9, 4, device="meta"),
    r"Scaled has a forward\(\) of its own": lambda: Scaled(9, 4),
    "remove the parametrisation": parametrised,
    r"is also 1.weight of Linear.* `h @ bad.0\(torch.arange\(n\)\).T` with n rows in place of bad.1": tied,
    "hooks on its gradient": hooked,
    "has a gradient": with_gradient,
    "have {'a': None, 'b': 0}": padded_differently,
    "Linear has no nn.Embedding": lambda: nn.Linear(2, 2),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_converted_is_refused_and_nothing_changes(convert: Convert, text: str) -> None:
    model = nn.ModuleDict({"first": nn.Embedding(3, 2), "bad": REFUSED[text]()})
    model = model if text != "Linear has no nn.Embedding" else nn.Linear(2, 2)
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    with pytest.raises(
        BadInput, match=text.replace("'a'", "'bad.a'").replace("'b'", "'bad.b'").replace("1.w", "bad.1.w")
    ):
        convert(model)
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == parameters
    assert "Converted" not in repr(model)


def test_a_tied_output_layer_of_looked_up_rows_has_the_gradient_of_the_weight(convert: Convert) -> None:
    module, hidden, n = nn.Embedding(9, 4), torch.randn(5, 4), torch.arange(9)
    plain = copy.deepcopy(module)
    tables = convert(nn.ModuleDict({"item": module}))
    losses = [
        nn.functional.cross_entropy((hidden + one(ids(5))) @ weight.T, torch.tensor([1, 0, 8, 1, 3]))
        for one, weight in ((plain, plain.weight), (module, module(n)))
    ]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients(tables, "item"), plain.weight.grad)


def test_of_modules_that_share_a_weight_keep_names_all_or_none(convert: Convert) -> None:
    def model() -> nn.Module:
        one = nn.ModuleDict({"item": nn.Embedding(9, 4), "hist": nn.EmbeddingBag(9, 4), "user": nn.Embedding(5, 4)})
        one["hist"].weight = one["item"].weight
        return one

    text = (
        r"item shares its weight with hist, which keep=\['hist'\] leaves .* keep both, with 'item' in keep, or neither"
    )
    with pytest.raises(BadInput, match=text):
        convert(model(), keep=["hist"])
    assert [t.name for t in convert(model(), keep=["hist", "item"]).layout.tables] == ["user"]


@pytest.mark.parametrize(("keep", "text"), [("user", "must be a list"), (["users"], "'users', which is no module")])
def test_a_bad_keep_is_refused(convert: Convert, keep: Any, text: str) -> None:
    with pytest.raises(BadInput, match=text):
        convert(TwoTowers(), keep=keep)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, weight, before: model.user.weight,
        lambda model, weight, before: nn.init.normal_(weight),
        lambda model, weight, before: before.zero_grad(),
        lambda model, weight, before: before.step(),
        lambda model, weight, before: torch.square(weight).sum(),
        lambda model, weight, before: sum(p.norm() for p in [weight]),
        lambda model, weight, before: model.user.reset_parameters(),
    ],
)
def test_the_old_weight_raises_wherever_it_is_used(convert: Convert, use: Callable[..., Any]) -> None:
    model = TwoTowers()
    weight, before = model.user.weight, torch.optim.Adam(model.parameters())
    convert(model)
    with pytest.raises(BadInput, match="moved to table 'user'"):
        use(model, weight, before)


def test_a_state_dict_is_loaded_before(convert: Convert) -> None:
    model = TwoTowers()
    state = model.state_dict()
    convert(model)
    with pytest.raises(BadInput, match=r"call model.load_state_dict\(\) before gba_hvd.convert"):
        model.load_state_dict(state, strict=False)
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: m["one"](torch.tensor([1.0])), "ids must be int64 or int32"),
        (lambda m: m["one"]([1]), "must be a tensor"),
        (lambda m: m["one"](torch.tensor([9])), "has rows 0 to 8, got id 9"),
        (lambda m: m["bag"](torch.tensor([1])), r"or \[n\] with offsets; got \[1\] and no offsets"),
        (lambda m: m["bag"](torch.tensor([[1]]), torch.tensor([0])), r"got \[1, 1\] and offsets"),
        (lambda m: m["bag"](torch.tensor([[1]]), None, torch.ones(1, 1)), "per_sample_weights need mode='sum'"),
    ],
)
def test_bad_arguments_are_named(convert: Convert, call: Callable[..., Any], text: str) -> None:
    model = nn.ModuleDict({"one": nn.Embedding(9, 4), "bag": nn.EmbeddingBag(9, 4)})
    convert(model)
    with pytest.raises(BadInput, match=text):
        call(model)


def test_a_copy_for_another_thread_looks_up_in_the_same_tables(convert: Convert) -> None:
    model = TwoTowers()
    tables = convert(model)
    other = copy.deepcopy(model, {id(tables): tables})
    torch.testing.assert_close(other.user(ids(4)), model.user(ids(4)))
    assert other.user.tables is tables


def test_tables_that_are_joined_still_have_their_ids_found_inside(tmp_path: Path) -> None:
    model = TwoTowers()
    users = gba_hvd.convert(model, gba_hvd.SGD(lr=0.1), keep=["item"], shard_dir=tmp_path)
    items = gba_hvd.convert(model, gba_hvd.Adagrad(lr=0.1), shard_dir=tmp_path)
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), [users, items], global_batch=4, micro_batch=2
    )
    whole = optimizer.engine.model.tables  # type: ignore[attr-defined]
    assert whole.looks_up_inside
    with whole.recording() as recorder:
        model.user(torch.tensor([3, 3, 1]))
        model.same_item(torch.tensor([0, 2]))
    assert recorder.n_lookups == 2
    assert sorted(len(keys) for lookups in recorder.keys for keys in lookups) == [1, 2]


class Clicked(nn.Module):
    """As `conftest.Clicker`, with embeddings of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.out = nn.Embedding(20, 4), nn.Embedding(7, 3), nn.Linear(9, 1)

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        rows = [self.user(batch.ids["user"]), self.item(batch.ids["item"]), batch.dense]
        logits: Tensor = self.out(torch.cat(rows, dim=1)).squeeze(1)
        return logits


def test_a_group_of_modules_that_were_converted_is_refused(tmp_path: Path) -> None:
    model = Clicked()
    tables = gba_hvd.convert(model, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path)

    def made(*groups: dict[str, Any]) -> Any:
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return gba_hvd.DistributedOptimizer(optimizer, tables, global_batch=4, micro_batch=2)

    dense, empty = {"params": list(model.out.parameters())}, {"params": list(model.user.parameters()), "lr": 0.3}
    text = (
        r"parameter group 1 of the optimizer \(lr 0.3\) is empty.* rows are trained by the row optimizer.* optimizers="
    )
    optimizer = made(dict(dense))
    with pytest.raises(BadInput, match=text) as refused:
        made(dict(dense), dict(empty))
    optimizer.engine.model.refuse_if_replaced()
    assert refused.tb is not None, "the optimizer that was refused is still there"
    with pytest.raises(BadInput, match=text):
        optimizer.add_param_group(dict(empty))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert made(dict(empty)), "a model without dense parameters has no other"


class Job:
    """A job that trains a converted model, for `workers.together`."""

    def __init__(self, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Clicked()
        folder.mkdir(exist_ok=True)
        self.tables = gba_hvd.convert(self.model, gba_hvd.Adagrad(lr=0.1), n_shards=5, shard_dir=folder)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = gba_hvd.DistributedOptimizer(optimizer, self.tables, global_batch=16, micro_batch=4)
        self.state = gba_hvd.elastic.TorchState(self.model, self.optimizer, epoch=0)

    def train(self, dataset: Any) -> None:
        for batch in gba_hvd.batches(dataset, self.state, seed=1):
            self.optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.label).backward()
            self.optimizer.step()

    def rows(self) -> dict[str, np.ndarray]:
        """Of this host; nan elsewhere."""
        found = {}
        for table in self.tables.layout.tables:
            ids, first_key = np.arange(table.n_rows), self.tables.layout.place_of_table[table.name][1]
            here = np.ones(len(ids), bool) if self.tables.local is None else self.tables.local[(first_key + ids) % 5]
            found[table.name] = np.full((table.n_rows, table.dim), np.nan, np.float32)
            found[table.name][here] = self.tables.rows(table.name, ids[here])
        return found


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., list[Job]]]:
    made: list[Job] = []

    def make(hosts: str, seeds: Any) -> list[Job]:
        new = [Job(tmp_path / host, seed) for host, seed in zip(hosts, seeds, strict=True)]
        made.extend(new)
        return new

    yield make
    for job in made:
        job.state.close()


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(20, 3), nn.Embedding(7, 3)

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        logits: Tensor = (self.user(batch.ids["user"]) * self.item(batch.ids["item"])).sum(1)
        return logits


class FactorsJob(Job):
    def __init__(self, folder: Path, **settings: Any) -> None:
        torch.manual_seed(1)
        self.model = Factors()
        folder.mkdir(exist_ok=True)
        self.tables = gba_hvd.convert(self.model, gba_hvd.SGD(lr=4.0), n_shards=5, shard_dir=folder)
        self.optimizer = gba_hvd.DistributedOptimizer(None, self.tables, global_batch=16, micro_batch=4, **settings)
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.state = gba_hvd.elastic.TorchState(self.model, self.optimizer, epoch=0, schedule=schedule)
        self.state.on_step(schedule.step)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_model_without_a_dense_part_trains_as_in_plain_torch(
    tmp_path: Path, workers: Any, clicks: Any, hosts: str, max_norm: float | None
) -> None:
    torch.manual_seed(1)
    plain, data = Factors(), clicks(48)
    optimizer = torch.optim.SGD(plain.parameters(), lr=4.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        batch = data.take(np.arange(16) + 16 * step)
        nn.functional.binary_cross_entropy_with_logits(plain(batch), batch.label).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), max_norm or 1e9)
        optimizer.step()
        schedule.step()
    jobs = [FactorsJob(tmp_path / host, max_norm=max_norm) for host in hosts]
    scores: list[Any] = []

    def train(job: FactorsJob) -> None:
        for batch in gba_hvd.batches(clicks(48), job.state, shuffle=False, forward=job.model):
            job.optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(job.model(batch), batch.label)
            loss.backward()
            job.optimizer.step(loss=loss)
        scores.append(gba_hvd.evaluate(job.model, clicks(48), job.state, forward=job.model).auc)

    workers.together(jobs, train)
    for name in ("user", "item"):
        found = np.array([job.rows()[name] for job in jobs])
        expected = plain.get_submodule(name).weight.detach().numpy()
        np.testing.assert_allclose(np.nanmax(found, axis=0), expected, rtol=1e-5, atol=1e-6, err_msg=name)
    assert scores[0] == scores[1] and [*jobs[0].model.parameters()] == []
    if hosts == "aa":
        gba_hvd.save_model(jobs[0].model, tmp_path / "saved")
        served = gba_hvd.load_for_inference(tmp_path / "saved")
        torch.testing.assert_close(served(data.take(np.arange(5))), plain(data.take(np.arange(5))).detach())
    for job in jobs:
        job.state.close()


def test_compression_of_dense_gradients_is_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has none: leave it out; row_compression is for those of rows"):
        FactorsJob(tmp_path, compression=gba_hvd.Compression.fp16)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aab", "abc"])
def test_hosts_fill_their_shards_from_the_model_and_train_as_one(
    workers: Any, jobs: Any, clicks: Any, hosts: str
) -> None:
    many, alone = jobs(hosts, [1] * 3), jobs("x", [1])
    workers.together(many, lambda job: job.train(clicks(50)))
    workers.together(alone, lambda job: job.train(clicks(50)))
    for name, reference in alone[0].rows().items():
        found = many[0].rows()[name]
        for job in many[1:]:
            found = np.where(np.isnan(found), job.rows()[name], found)
        np.testing.assert_allclose(found, reference, rtol=1e-5, atol=1e-6, err_msg=name)


def test_on_one_host_the_model_of_rank_0_counts(workers: Any, jobs: Any) -> None:
    unlike = jobs("aa", [1, 2])
    torch.manual_seed(1)
    reference = Clicked()
    workers.together(unlike, lambda job: job.state.sync())
    for job in unlike:
        np.testing.assert_array_equal(job.rows()["user"], reference.user.weight.detach())


def test_hosts_with_different_weights_are_refused(workers: Any, jobs: Any) -> None:
    for error in workers.outcomes(jobs("ab", [1, 2]), lambda job: job.state.sync()):
        assert isinstance(error, StateMismatch)
        assert "torch.manual_seed before the model is made" in str(error)
