"""Routed experts against a loop over tokens, capacity by hand, and what evens the load."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels import explain
from kernels.dispatch import clear_records
from workers.contracts.specs.model import ModelSpec
from workers.models.initialize import initialize
from workers.models.layers.documents import Documents
from workers.models.moe.balance_control import Balancer
from workers.models.moe.experts import drop_beyond_capacity
from workers.models.moe.layer import RoutedMlp

SIZES = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 24, "vocab": 61, "max_seq_len": 64}


def routed(**moe) -> RoutedMlp:
    spec = ModelSpec.from_dict(
        {**SIZES, "bias": "all", "moe": {"experts": 6, "top_k": 2, "expert_ffn": 8, **moe}}
    )
    assert spec.moe is not None
    layer = RoutedMlp(spec, spec.moe)
    initialize(layer, layers=1, seed=1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return layer


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("shared", [0, 2])
def test_experts_one_token_at_a_time(shared, x):
    layer = routed(shared_experts=shared).eval()
    weights, chosen, _ = layer.router(x)
    wanted = torch.zeros_like(x)
    for place in torch.cartesian_prod(torch.arange(3), torch.arange(20)).tolist():
        token = x[tuple(place)]
        for weight, expert in zip(
            weights[tuple(place)], chosen[tuple(place)].tolist(), strict=True
        ):
            part = {name: getattr(layer.experts, name) for name in ("gate", "up", "down")}
            gate, up = (
                part[n].weight[expert] @ token + part[n].bias[expert] for n in ("gate", "up")
            )
            inner = torch.nn.functional.silu(gate) * up
            wanted[tuple(place)] += weight * (
                part["down"].weight[expert] @ inner + part["down"].bias[expert]
            )
        if layer.shared is not None:
            wanted[tuple(place)] += layer.shared(token)
    torch.testing.assert_close(layer(x), wanted, atol=1e-4, rtol=1e-5)


def test_every_expert_has_a_gradient_though_it_saw_no_token(x):
    layer = routed().train()
    layer(x[:1, :1]).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert layer.experts.up.weight.grad.flatten(1).norm(dim=1).count_nonzero() == 2


@pytest.mark.parametrize(
    "moe",
    [
        {"shared_experts": 1},
        {"capacity": 0.5, "aux_loss": 0.5},
        {
            "scoring": "sigmoid",
            "groups": 3,
            "groups_per_token": 2,
            "bias_update": 0.1,
            "routed_scale": 2.5,
        },
    ],
    ids=["shared", "capacity", "groups"],
)
def test_kernels_gate_permute_and_multiply_as_the_pieces_do(moe, x, monkeypatch):
    """By the kernels' references, which stand where a GPU's kernels would; outside training too."""
    layer, result, reported = routed(**moe), [], []
    layer.balance.gradient_scale = 0.3
    if layer.router.choice_bias is not None:
        layer.router.choice_bias.copy_(torch.linspace(0, 0.4, 6))
    for backend in ("", "reference"):
        monkeypatch.setenv("KERNELS_BACKEND", backend)
        clear_records()
        layer.zero_grad()
        given = x.clone().requires_grad_()
        out = layer.train()(given)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        assert all(each is not None for each in gradients)
        with torch.no_grad():
            answer = layer.eval()(x)
        result.append([out.detach(), given.grad, answer, *gradients])
        reported.append({str(row["op"]): row["backend"] for row in explain()})
    clear_records()
    for one, other in zip(*result, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    assert {"moe_gate", "moe_permute", "grouped_matmul"} <= reported[0].keys() and set(
        reported[0].values()
    ) == {"torch"}
    assert reported[0].keys() | {"moe_unpermute"} == reported[1].keys() and set(
        reported[1].values()
    ) == {"reference"}


def test_first_choices_and_early_tokens_stay_within_capacity():
    # 4 tokens, 2 each of 3 experts: ceil(8 / 3) = 3
    chosen = torch.tensor([[[0, 1], [0, 1], [1, 0], [0, 2]]])
    assert drop_beyond_capacity(chosen, experts=3, capacity=1.0).tolist() == [
        [[0, 1], [0, 1], [1, 3], [0, 2]]
    ]
    assert drop_beyond_capacity(chosen, experts=3, capacity=0.3).tolist() == [
        [[0, 3], [3, 3], [1, 3], [3, 2]]
    ]


def test_capacity_counts_per_document():
    chosen = torch.randint(0, 3, (2, 17, 2), generator=torch.Generator().manual_seed(5))
    documents = Documents(((0, 1, 9), (0, 4)), 17, torch.device("cpu"))
    result = drop_beyond_capacity(chosen, experts=3, capacity=0.7, documents=documents)
    for row, starts in enumerate(documents.starts):
        for start, stop in pairwise((*starts, 17)):
            alone = drop_beyond_capacity(chosen[row : row + 1, start:stop], experts=3, capacity=0.7)
            assert torch.equal(result[row : row + 1, start:stop], alone)
    assert not torch.equal(result, drop_beyond_capacity(chosen, experts=3, capacity=0.7))


def test_capacity_drops_in_training_alone(x):
    layer = routed(capacity=0.2)
    assert not torch.equal(layer.train()(x), layer.eval()(x))
    torch.testing.assert_close(layer(x), routed().eval()(x))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_bias_evens_the_load(scoring, x):
    layer = routed(bias_update=0.01, scoring=scoring).train()
    balancer = Balancer([layer], layer.moe)
    violations = []
    for _ in range(150):
        layer(x).sum().backward()
        reported = balancer.take(x.device).tolist()
        assert sum(reported[:6]) == 3 * 20 * 2
        violations.append(balancer.values(reported, sequences=3)["moe/max_violation"])
        balancer.update(reported)
    assert violations[0] > 0.5
    assert sum(violations[-20:]) / 20 < 0.5 * violations[0]


def test_the_auxiliary_loss_evens_the_load_and_is_one_when_even(x):
    # a direction that all tokens share favors a few experts
    layer, x = routed(aux_loss=1.0).train(), x + 1
    balancer = Balancer([layer], layer.moe)
    balancer.scale_gradients(1 / 3)
    optimizer = torch.optim.SGD([layer.router.weight], lr=0.3)
    reported = []
    for _ in range(150):
        optimizer.zero_grad()
        (layer(x).sum() * 0).backward()
        reported.append(balancer.values(balancer.take(x.device).tolist(), sequences=3))
        optimizer.step()
    assert reported[0]["moe/max_violation"] > 2 * reported[-1]["moe/max_violation"]
    assert reported[0]["moe/aux_loss"] > reported[-1]["moe/aux_loss"] == pytest.approx(1.0, abs=0.1)


def test_nothing_is_counted_outside_training(x):
    layer = routed(aux_loss=1.0).eval()
    layer(x).sum().backward()
    assert not Balancer([layer], layer.moe).take(x.device).any()
