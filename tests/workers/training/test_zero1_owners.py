"""ZeRO-1 beside tensor parallelism: the numbers of one process, whatever the rule; each parameter
has one owner.
"""

from __future__ import annotations

import pytest
import torch

from tests.workers.training.zero1_ranks import SHAPES, draw
from workers.contracts.specs.run_bodies import OptimizerSpec
from workers.training.optim import build_optimizer
from workers.training.optim.zero1 import assign_owners

HERE = "tests.workers.training.zero1_ranks"
RULES = {
    "adamw": {"name": "adamw", "lr": 0.01},
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    "lion": {"name": "lion", "lr": 1e-3, "weight_decay": 0.1},
    "adafactor": {"name": "adafactor", "lr": 3e-2, "weight_decay": 0.1},
    "muon": {"name": "muon", "lr": 2e-2, "scalar_lr": 3e-3},
    "adamw8bit": {"name": "adamw8bit", "lr": 3e-3},
}


def alone(rule):
    parameters = {name: each.requires_grad_() for name, each in draw(0).items()}
    optimizer = build_optimizer(parameters, OptimizerSpec.from_dict(rule), shard_state=False)
    for step in range(5):
        for name, gradient in draw(10 + step).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: each.detach() for name, each in parameters.items()}


@pytest.mark.parametrize("rule", RULES)
def test_dealt_over_dp_and_sharded_over_tp(rule, pools):
    ranks = pools(4).call(f"{HERE}:split_beside_tensor_parallel", rule=RULES[rule])
    want = alone(RULES[rule])
    # columns that are sharded keep fp32 moments, in 8 bits they are rounded
    loose = {"blocks.0.b"} if rule == "adamw8bit" else set()
    for rank in ranks:
        for name, weight in rank["weights"].items():
            tolerance = 2e-3 if name in loose else 1e-6
            torch.testing.assert_close(torch.tensor(weight), want[name], rtol=1e-5, atol=tolerance)
    owned = {tuple(rank["place"]): rank["mine"] for rank in ranks}
    for tp in (0, 1):
        assert sorted(owned[0, tp] + owned[1, tp]) == sorted(SHAPES), "each has one owner"
        assert owned[0, tp] and owned[1, tp]
    assert owned[0, 0] == owned[0, 1] and owned[1, 0] == owned[1, 1], (
        "the same one on every tensor-parallel rank"
    )


def test_largest_first_to_the_emptiest():
    loads = [0, 0, 0]
    assert assign_owners([1, 7, 4, 4, 2], loads) == [2, 0, 1, 2, 1]
    assert loads == [7, 6, 5]
    assert assign_owners([2], loads) == [2], (
        "a second group of parameters goes where the first left room"
    )


def test_deals_as_torchs_zero_redundancy_optimizer_does(pools):
    [dealt, *_] = pools(2).call(f"{HERE}:torchs_partition")
    assert dealt == assign_owners([torch.Size(shape).numel() for shape in SHAPES.values()], [0, 0])
