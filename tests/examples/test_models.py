"""The models compute what their papers say, on tables that a plain tensor stands in for."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from ctr.dcn import CrossNet, DCNv2
from ctr.deepfm import DeepFM
from ctr.dlrm import DLRM
from ctr.mlp import mlp
from gba_hvd import SGD, EmbeddingTables
from gba_hvd.batch import Bag, Batch

FIELDS = {"user": 50, "item": 20, "hour": 24}
DIM, N_DENSE, B = 4, 3, 8


class PlainTables(EmbeddingTables):
    """Tables of fixed random rows in this process alone."""

    def __init__(self, columns: int) -> None:
        super().__init__({name: (rows, columns) for name, rows in FIELDS.items()}, optimizer=SGD(lr=0.1))
        generator = torch.Generator().manual_seed(1)
        self.weights = {
            n: torch.randn(rows, columns, generator=generator).requires_grad_() for n, rows in FIELDS.items()
        }

    def stacked(self, ids: Mapping[str, Tensor | Bag]) -> Tensor:
        return torch.stack(
            [self.weights[name][column] for name, column in ids.items() if isinstance(column, Tensor)], dim=1
        )


def a_batch(n_dense: int = N_DENSE, n: int = B) -> Batch:
    generator = torch.Generator().manual_seed(2)
    return Batch(
        ids={name: torch.randint(rows, (n,), generator=generator) for name, rows in FIELDS.items()},
        dense=torch.randn(n, n_dense, generator=generator),
        label=torch.ones(n),
    )


def without_deep_part(model: DeepFM) -> DeepFM:
    nn.init.zeros_(model.out.weight)
    return model


def test_deepfm_adds_the_linear_term_and_the_products_of_all_pairs() -> None:
    tables, batch = PlainTables(DIM + 1), a_batch()
    model = without_deep_part(DeepFM(tables, n_dense=N_DENSE, hidden=(8,)))
    assert model.dense_weight is not None
    nn.init.normal_(model.dense_weight)
    nn.init.constant_(model.bias, 0.3)
    rows = tables.stacked(batch.ids)
    vectors, weights = rows[..., :DIM], rows[..., DIM]
    pairs = torch.stack([(vectors[:, i] * vectors[:, j]).sum(1) for i, j in combinations(range(len(FIELDS)), 2)]).sum(0)
    torch.testing.assert_close(model(batch), 0.3 + weights.sum(1) + batch.dense @ model.dense_weight + pairs)


def test_deepfm_leaves_the_linear_weights_out_of_the_deep_part() -> None:
    model = DeepFM(PlainTables(DIM + 1), n_dense=N_DENSE, hidden=(8,))
    first = model.deep[0]
    assert isinstance(first, nn.Linear) and first.in_features == len(FIELDS) * DIM + N_DENSE


def test_dlrm_hands_on_the_bottom_output_and_the_products_of_all_pairs() -> None:
    tables, batch = PlainTables(DIM), a_batch()
    model = DLRM(tables, n_dense=N_DENSE, bottom=(8,), hidden=(16,))
    seen: list[Tensor] = []
    model.top.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(batch)
    assert model.bottom is not None
    bottom = model.bottom(batch.dense)
    vectors = torch.cat([bottom.unsqueeze(1), tables.stacked(batch.ids)], dim=1)
    products = [(vectors[:, i] * vectors[:, j]).sum(1) for i, j in combinations(range(len(FIELDS) + 1), 2)]
    torch.testing.assert_close(seen[0], torch.cat([bottom, torch.stack(products, dim=1)], dim=1))


def test_dlrm_without_numeric_fields_has_no_bottom_mlp() -> None:
    model = DLRM(PlainTables(DIM), hidden=(16,), interaction="cat")
    assert model.bottom is None
    assert model(a_batch(n_dense=0)).shape == (B,)


def test_a_cross_layer_multiplies_the_input_with_a_linear_map_of_the_state() -> None:
    net, x0 = CrossNet(5, n_layers=2), torch.randn(3, 5)
    x1 = x0 * net.layers[0](x0) + x0
    torch.testing.assert_close(net(x0), x0 * net.layers[1](x1) + x1)


@pytest.mark.parametrize("structure", ["parallel", "stacked"])
def test_dcn_feeds_the_mlp_beside_or_below_the_cross_layers(structure: str) -> None:
    tables, batch = PlainTables(DIM), a_batch()
    model = DCNv2(tables, n_dense=N_DENSE, hidden=(16,), structure=structure)  # type: ignore[arg-type]
    x = torch.cat([tables.stacked(batch.ids).flatten(1), batch.dense], dim=1)
    crossed = model.cross(x)
    joined = torch.cat([crossed, model.deep(x)], dim=1) if structure == "parallel" else model.deep(crossed)
    torch.testing.assert_close(model(batch), model.out(joined).squeeze(1))


@pytest.mark.parametrize("n_dense", [0, N_DENSE], ids=["no numeric fields", "numeric fields"])
@pytest.mark.parametrize("build", [DeepFM, DLRM, DCNv2])
def test_one_logit_per_sample_and_gradients_for_every_parameter_and_row_used(
    build: type[nn.Module], n_dense: int
) -> None:
    torch.manual_seed(0)
    tables = PlainTables(DIM + (build is DeepFM))
    model, batch = build(tables, n_dense=n_dense, hidden=(16, 8), batch_norm=True, dropout=0.1), a_batch(n_dense)
    logits = model(batch)
    assert logits.shape == (B,)
    nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(weights.grad is not None and weights.grad.abs().sum() > 0 for weights in tables.weights.values())


def test_the_mlp_normalises_before_the_activation_and_drops_after_it() -> None:
    kinds = [type(layer) for layer in mlp(5, (4, 3), batch_norm=True, dropout=0.5)]
    assert kinds == 2 * [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout]
    assert [type(layer) for layer in mlp(5, (4,))] == [nn.Linear, nn.ReLU]


@pytest.mark.parametrize(("build", "setting"), [(DLRM, "interaction"), (DCNv2, "structure")])
def test_an_unknown_way_of_joining_is_refused(build: type[nn.Module], setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be .* got 'sideways'"):
        build(PlainTables(DIM), **{setting: "sideways"})
