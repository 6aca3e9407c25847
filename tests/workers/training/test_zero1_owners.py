"""ZeRO-1 with tensor parallelism: each parameter has one owner, and updates equal one process."""

from __future__ import annotations

import pytest
import torch

from tests.workers.training.zero1_ranks import SHAPES, draw
from workers.contracts.specs.train import OptimizerSpec
from workers.training.optim import build_optimizer
from workers.training.optim.zero1 import assign_owners

RANKS = "tests.workers.training.zero1_ranks"
RULES = {
    "adamw": {"name": "adamw", "lr": 0.01},
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    "lion": {"name": "lion", "lr": 1e-3, "weight_decay": 0.1},
    "adafactor": {"name": "adafactor", "lr": 3e-2, "weight_decay": 0.1},
    "muon": {"name": "muon", "lr": 2e-2, "scalar_lr": 3e-3},
    "adamw8bit": {"name": "adamw8bit", "lr": 3e-3},
}


def update_alone(rule):
    parameters = {name: tensor.requires_grad_() for name, tensor in draw(0).items()}
    optimizer = build_optimizer(parameters, OptimizerSpec.from_dict(rule), shard_state=False)
    for step in range(5):
        for name, gradient in draw(10 + step).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("rule", RULES)
def test_states_sharded_over_dp_with_weights_over_tp(rule, pools):
    ranks = pools(4).call(f"{RANKS}:update_with_tensor_parallel", rule=RULES[rule])
    expected = update_alone(RULES[rule])
    # matrices that are sharded by columns have fp32 moments; one process rounds them to 8 bits
    loose = {"blocks.0.b"} if rule == "adamw8bit" else set()
    for rank in ranks:
        for name, weight in rank["weights"].items():
            tolerance = 2e-3 if name in loose else 1e-6
            torch.testing.assert_close(
                torch.tensor(weight), expected[name], rtol=1e-5, atol=tolerance
            )
    owned = {tuple(rank["position"]): rank["owned"] for rank in ranks}
    for tp in (0, 1):
        assert sorted(owned[0, tp] + owned[1, tp]) == sorted(SHAPES), "one owner per parameter"
        assert owned[0, tp] and owned[1, tp]
    assert owned[0, 0] == owned[0, 1] and owned[1, 0] == owned[1, 1], (
        "the same owner on every tensor-parallel rank"
    )


def test_the_largest_parameter_goes_to_the_least_loaded_rank_first():
    loads = [0, 0, 0]
    assert assign_owners([1, 7, 4, 4, 2], loads) == [2, 0, 1, 2, 1]
    assert loads == [7, 6, 5]
    assert assign_owners([2], loads) == [2], "a second group continues with the loads of the first"


def test_owners_equal_those_of_torchs_zero_redundancy_optimizer(pools):
    [owners, *_] = pools(2).call(f"{RANKS}:torch_owners")
    assert owners == assign_owners([torch.Size(shape).numel() for shape in SHAPES.values()], [0, 0])
