"""`convert`: the `nn.Embedding` and `nn.EmbeddingBag` modules of a model become lookups in shared tables.

What is converted, what is refused and what its table is called is decided here. The modules stay where they are and
change their class, so every reference to one, registered or not, is to the converted module. Their old weights raise
when they are used, so nothing trains or reads a copy that no longer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gba_hvd.batch import Bag
from gba_hvd.embedding.features import Feature, Table
from gba_hvd.embedding.lookups import HALF
from gba_hvd.embedding.module_placement import FollowsModule
from gba_hvd.embedding.row_optimizers import SGD, RowOptimizer
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput

_ROOT = "embedding"  # the table of a model that is itself an `nn.Embedding`


def convert(
    model: nn.Module,
    optimizer: RowOptimizer,
    *,
    optimizers: Mapping[str, RowOptimizer] = MappingProxyType({}),
    keep: Sequence[str] = (),
    prefix: str = "",
    n_shards: int | None = None,
    shard_dir: Any = None,
) -> EmbeddingTables:
    """Move every `nn.Embedding` and `nn.EmbeddingBag` of a model into shared tables, in place.

        model     = DIN(...)                                       # any module, its own code unchanged
        tables    = gba_hvd.convert(model, gba_hvd.RowAdagrad(lr=0.05))
        optimizer = gba_hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), tables, ...)

    Afterwards the modules take the same arguments and return the same values, on the device of their ids and in the
    dtype of the model: rows of a model in bfloat16 or float16, before or after convert, are float32 in memory only.
    Each table is called like the path of its module (`embedding.embed_dict.item`); modules that share a weight share a
    table, of the first one's path. Rows start from the modules' weights, those of rank 0; a checkpoint that is
    resumed wins. `model.parameters()` and `state_dict()` have the rows no more: make the optimizer, and load a
    `state_dict`, in that order: load, convert, optimizer.

    optimizer: of the rows. It changes only rows that a step looks up. `torch.optim.Adam` on an `nn.Embedding` also
    moves all other rows, by their decaying moments; `gba_hvd.Adam` does not, like `torch.optim.SparseAdam`. `SGD`
    without momentum and `Adagrad` are the same in both.
    optimizers: of some tables, by name, in place of `optimizer`.
    keep: paths of modules that stay as they are, dense parameters of each worker, each with all below it. Of modules
    that share a weight it names all or none.
    n_shards, shard_dir: as `EmbeddingTables` takes them.

    Each worker keeps the initial weights in its own memory, as the modules did. A table that is too large for that is
    one for `EmbeddingTables`, whose rows are made where they are stored.

    Raises BadInput where the model has no such module, or one that cannot be converted: its weight is also used by
    another module, is frozen, parametrised or float64, it has `max_norm` or `scale_grad_by_freq`, or a `forward`
    of its own. Each message says what to do. Nothing is changed then.
    """

    def named(path: str) -> str:
        return f"{prefix}.{path}" if prefix else path

    found = dict(_selected(model, keep))
    if not found:
        raise BadInput(
            f"{type(model).__name__} has no nn.Embedding or nn.EmbeddingBag that is not converted yet"
            + (f", beside what keep={list(keep)} leaves" if keep else "")
            + ": if it looks rows up by other means, call gba_hvd.EmbeddingTables in its forward pass instead"
        )
    for path, module in found.items():
        if why := _why_not(module):
            raise BadInput(f"convert: {path}: {why}, or leave it as it is with keep=[{path!r}]")
    _refuse_other_uses(model, found, keep)
    by_weight: dict[int, dict[str, nn.Embedding | nn.EmbeddingBag]] = {}
    for path, module in found.items():
        by_weight.setdefault(id(module.weight), {})[path] = module
    sizes: dict[str, Table] = {}
    features: dict[str, Feature] = {}
    for some in by_weight.values():
        path, first = next(iter(some.items()))
        table = named(path)
        _refuse_different_padding(some)
        own = optimizers.get(table)
        sizes[table] = Table(first.num_embeddings, first.embedding_dim, optimizer=own, padding_idx=first.padding_idx)
        for path, module in some.items():
            features[named(path)] = Feature(table, module.mode if isinstance(module, nn.EmbeddingBag) else None)
    if unknown := [name for name in optimizers if name not in sizes]:
        raise BadInput(f"convert: optimizers name {unknown[0]!r}, which is no table; the tables are {', '.join(sizes)}")
    tables = EmbeddingTables(sizes, optimizer, features=features, n_shards=n_shards, shard_dir=shard_dir)
    tables.looks_up_inside = True
    for some in by_weight.values():
        path, first = next(iter(some.items()))
        table, weight = named(path), cast(nn.Parameter, first.weight)
        tables.assign(table, np.arange(first.num_embeddings), weight.detach().float().cpu().numpy())
        for path, module in some.items():
            _become(module, tables, named(path))
        _retire(weight, table)
    return tables


def convert_without_rows(model: nn.Module, names: Mapping[str, tuple[str, str]]) -> EmbeddingTables:
    """Convert modules whose rows, those of padding too, come from elsewhere; their own weights are dropped.

    names: by path of the module, its feature and its table. Raises BadInput for a path that is no `nn.Embedding` or
    `nn.EmbeddingBag`.
    """
    sizes: dict[str, Table] = {}
    features: dict[str, Feature] = {}
    modules: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
    by_path = dict(model.named_modules())
    for path, (feature, table) in names.items():
        module = by_path.get(path)
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or isinstance(module, _Converted):
            raise BadInput(
                f"{type(model).__name__} has no nn.Embedding or nn.EmbeddingBag at {path!r}, as the saved model has"
            )
        modules[path] = module
        sizes.setdefault(table, Table(module.num_embeddings, module.embedding_dim, padding_idx=module.padding_idx))
        features[feature] = Feature(table, module.mode if isinstance(module, nn.EmbeddingBag) else None)
    tables = EmbeddingTables(sizes, SGD(lr=0.0), features=features)
    weights = {id(module.weight): (module.weight, names[path][1]) for path, module in modules.items()}
    for path, module in modules.items():
        _become(module, tables, names[path][0])
    for weight, table in weights.values():
        _retire(cast(nn.Parameter, weight), table)
    return tables


def is_converted(module: nn.Module) -> bool:
    return isinstance(module, _Converted)


def padding_rows(model: nn.Module) -> dict[str, Tensor]:
    """What converted modules return at `padding_idx`, [dim], by table; those without an entry return zeros.

    No step changes it. It is part of the training state, since each process has it of its own copy of the module.
    """
    modules = [module for module in model.modules() if isinstance(module, ConvertedEmbedding)]
    return {module.weight_table: module.padding_row for module in modules if module.padding_row is not None}


def set_padding_rows(model: nn.Module, rows: Mapping[str, Tensor]) -> None:
    """The inverse of `padding_rows`."""
    for module in model.modules():
        if isinstance(module, ConvertedEmbedding):
            row = rows.get(module.weight_table)
            module.padding_row = None if row is None else row.to(module.device, module.dtype)


class _Converted(FollowsModule):
    """What both kinds of converted modules have in common: a feature of `tables`, of the path of the module."""

    feature: str
    tables: EmbeddingTables

    def _apply(self, fn: Callable[[Tensor], Tensor], *rest: Any, **named: Any) -> Self:
        super()._apply(fn, *rest, **named)
        self.tables.device = self.device
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raises BadInput for False: rows of all converted modules are frozen together."""
        if not requires_grad:
            raise BadInput(
                f"{self.feature}: a converted module cannot be frozen by itself. Freeze all with "
                "tables.requires_grad_(False) on what gba_hvd.convert returned; one table for the whole training with "
                "optimizers={name: gba_hvd.SGD(lr=0.0)}; one for a while by tables of its own: call convert twice, "
                "first with keep=[its module], and give DistributedOptimizer the list of both"
            )
        return super().requires_grad_()

    @property
    def weight(self) -> Tensor:
        _moved(self.feature)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}weight" in state_dict:
            raise BadInput(
                f"the state_dict has {prefix}weight, and the rows of that module are in shared tables by now: "
                "call model.load_state_dict() before gba_hvd.convert(model, ...)"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.tables.note_loaded()

    def _rows(self, ids: Tensor | Bag) -> Tensor:
        return self.tables({self.feature: ids})[self.feature].to(self.dtype)  # type: ignore[no-any-return]

    def _on_cpu(self, ids: Tensor) -> Tensor:
        if not isinstance(ids, Tensor):
            raise BadInput(f"{self.feature}: ids must be a tensor of int64 or int32, got {type(ids).__name__}")
        return ids.detach().cpu()


class ConvertedEmbedding(_Converted, nn.Embedding):  # type: ignore[override]
    """An `nn.Embedding` whose rows are in shared memory; `convert` makes it.

    padding_row: what positions with `padding_idx` return, [dim]; None: zeros
    """

    padding_row: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """[*, dim], in the dtype of the model, of int64 or int32 [*].

        Positions with `padding_idx` fetch no row and get no gradient.
        """
        ids = self._on_cpu(input)
        rows = self._rows(ids).to(input.device)
        if self.padding_row is None or self.padding_idx is None:
            return rows
        is_padding = torch.eq(input, self.padding_idx).unsqueeze(-1)
        return torch.where(is_padding, self.padding_row.to(input.device), rows)


class ConvertedEmbeddingBag(_Converted, nn.EmbeddingBag):  # type: ignore[override]
    """An `nn.EmbeddingBag` whose rows are in shared memory; `convert` makes it."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """[B, dim], in the dtype of the model, of int64 or int32 [B, L], or [n] with `offsets` [B].

        per_sample_weights: float32, bfloat16 or float16, of the shape of `input`; with mode "sum"
        """
        ids, weights = self._on_cpu(input), per_sample_weights
        if weights is not None and (weights.shape != ids.shape or self.mode != "sum"):
            raise BadInput(
                f"{self.feature}: per_sample_weights need mode='sum' and the shape of the ids, {list(ids.shape)}; got "
                f"mode={self.mode!r} and {list(weights.shape)}"
            )
        if (ids.ndim == 1) != (offsets is not None):
            got = "offsets" if offsets is not None else "no offsets"
            raise BadInput(f"{self.feature}: ids are [B, L], or [n] with offsets; got {list(ids.shape)} and {got}")
        if offsets is None and weights is None:
            return self._rows(ids).to(input.device)
        if offsets is None:
            starts = torch.arange(ids.shape[0]) * ids.shape[1]
        else:
            starts = self._on_cpu(offsets).long()
        values, weights = ids.reshape(-1), None if weights is None else weights.reshape(-1).cpu()
        if offsets is not None and self.include_last_offset:
            self._check_last(starts, len(values))
            starts = starts[:-1]
        return self._rows(Bag(values, starts, weights)).to(input.device)

    def _check_last(self, starts: Tensor, n: int) -> None:
        what = f"{self.feature}: with include_last_offset the last offset must be the number of ids"
        if torch.compiler.is_compiling():  # a check in the graph: a decision by a value would break it
            torch._assert_async(starts[-1] == n, what)
        elif not len(starts) or int(starts[-1]) != n:
            raise BadInput(f"{what}, {n}; got {starts[-1:].tolist()}")


class _RetiredWeight(nn.Parameter):
    """The weight that a converted module had. Using it in any way raises, with what to do instead."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        names = [
            one.__dict__["gba_hvd_table"]
            for one in _flat([*args, *(kwargs or {}).values()])
            if isinstance(one, _RetiredWeight)
        ]
        _moved(names[0] if names else "?")

    def __deepcopy__(self, memo: dict[int, Any]) -> _RetiredWeight:
        return self


def _moved(table: str) -> NoReturn:
    raise BadInput(
        f"this weight was moved to table {table!r} by gba_hvd.convert, and is no parameter any more. Make optimizers "
        "after convert, from model.parameters(), and initialise or load weights before it; "
        f"tables.rows({table!r}, ids) reads rows. A loss that uses the weight itself, such as an L2 penalty, can use "
        "the looked-up rows instead, or the row optimizer's weight_decay"
    )


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    for one in args:
        if isinstance(one, (list, tuple)):
            yield from _flat(one)
        else:
            yield one


def _selected(model: nn.Module, keep: Sequence[str]) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Path and module, each once. Raises BadInput for an entry of `keep` that is no module of the model."""
    if isinstance(keep, str):
        raise BadInput(f"convert: keep must be a list of module paths, such as [{keep!r}], got the string {keep!r}")
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    if unknown := [path for path in keep if path not in paths]:
        raise BadInput(f"convert: keep names {unknown[0]!r}, which is no module of {type(model).__name__}")
    kept = {id(below) for path in keep for below in model.get_submodule(path).modules()}
    for path, module in model.named_modules():
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not isinstance(module, _Converted)
        if is_embedding and id(module) not in kept:
            assert isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            yield path or _ROOT, module


def _why_not(module: nn.Embedding | nn.EmbeddingBag) -> str:
    """Why a module cannot be converted, and what to do; empty if it can."""
    kind: type[nn.Module] = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    if type(module).forward is not kind.forward:
        return (
            f"{type(module).__name__} has a forward() of its own, which a lookup in shared tables would not run: make "
            f"it a module that has an nn.{kind.__name__} and calls it"
        )
    if parametrize.is_parametrized(module) or not isinstance(module._parameters.get("weight"), nn.Parameter):
        return (
            "its weight is computed from other parameters (parametrize, weight_norm), and rows are trained one by one: "
            "remove the parametrisation"
        )
    weight = module.weight
    if weight.is_meta:
        return "its weight is on the meta device and has no values: initialise it first"
    if weight.dtype not in (torch.float32, *HALF):
        return f"its weight is {weight.dtype}, and rows are float32: convert model.float()"
    if not weight.requires_grad:
        return "its weight is frozen, and rows of tables are trained: set weight.requires_grad_(True)"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "its weight has hooks on its gradient, which would not run: remove them"
    if weight.grad is not None:
        return "its weight has a gradient, which would be lost: call zero_grad() first"
    if module.max_norm is not None:
        return (
            "max_norm rescales rows while they are looked up, and workers look up rows that others write: set "
            "max_norm=None (weight_decay of a row optimizer keeps weights small, nothing bounds them; with keep each "
            "worker rescales a copy of its own, so that is for one worker)"
        )
    if module.scale_grad_by_freq:
        return (
            "scale_grad_by_freq divides a row's gradient by its count in one worker's batch, so the result would "
            "depend on the number of workers: set it to False"
        )
    return ""


def _refuse_other_uses(model: nn.Module, found: Mapping[str, nn.Module], keep: Sequence[str]) -> None:
    converted = {id(module) for module in found.values()}
    weights = {id(module._parameters["weight"]): path for path, module in found.items()}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if id(module) not in converted and id(parameter) in weights:
                own = weights[id(parameter)]
                if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):  # one that stays
                    raise BadInput(
                        f"convert: {own} shares its weight with {path}, which keep={list(keep)} leaves as it is, and "
                        f"one weight is either a table's or a dense parameter: keep both, with {own!r} in keep, or "
                        "neither"
                    )
                raise BadInput(
                    f"convert: the weight of {own} is also {path}.{name} of {type(module).__name__}, which multiplies "
                    "by all rows and not by looked-up ones: look them up, as in a tied output layer "
                    f"`h @ {own}(torch.arange(n)).T` with n rows in place of {path} (all of them are trained in each "
                    f"step), untie them, or leave it as it is with keep=[{own!r}]"
                )


def _refuse_different_padding(modules: Mapping[str, nn.Embedding | nn.EmbeddingBag]) -> None:
    found = {path: module.padding_idx for path, module in modules.items()}
    if len(set(found.values())) > 1:
        raise BadInput(
            f"convert: modules that share a weight become one table with one padding_idx, and these have {found}: give "
            "them the same"
        )


def _become(module: nn.Embedding | nn.EmbeddingBag, tables: EmbeddingTables, feature: str) -> None:
    weight, kind = module.weight.detach(), type(module)
    ours: type[nn.Module] = ConvertedEmbedding if isinstance(module, nn.Embedding) else ConvertedEmbeddingBag
    if isinstance(module, nn.Embedding):
        row = None if module.padding_idx is None else weight[module.padding_idx]
        # Of a module whose weight was set after it was made: torch returns that row, and never trains it.
        module.register_buffer("padding_row", row.clone() if row is not None and row.any() else None, persistent=False)
    del module._parameters["weight"]
    module.__class__ = ours if kind in (nn.Embedding, nn.EmbeddingBag) else type(kind.__name__, (ours, kind), {})
    # Not as a submodule: the tables have no parameters or buffers, and are not copied, moved or saved with the model.
    object.__setattr__(module, "tables", tables)
    object.__setattr__(module, "feature", feature)
    object.__setattr__(module, "weight_table", tables.features[feature].table)
    object.__setattr__(module, "dtype", weight.dtype)
    if weight.device.type != "meta":
        object.__setattr__(module, "device", weight.device)
        tables.device = weight.device


def _retire(weight: nn.Parameter, table: str) -> None:
    """Free the weight's memory, and make any use of it raise."""
    weight.data = torch.empty(0)
    weight.__dict__["gba_hvd_table"] = table
    weight.__class__ = _RetiredWeight
