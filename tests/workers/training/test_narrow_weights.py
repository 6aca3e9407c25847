"""Training with weights, gradients and updates in 16 bits (`params_dtype`), without fp32 copies."""

from __future__ import annotations

import pytest
import torch

from tests.orchestrator.planner.predicted import predicted
from tests.workers.training.conftest import TINY, final_weights, make_spec
from workers.contracts import RunSpec
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.train import OptimizerSpec
from workers.contracts.specs.training_support import engine_problems
from workers.models.weights.manifest import step_folder
from workers.training.optim import build_optimizer

BATCH = {"global_batch_size": 4, "micro_batch_size": 2}
STATES = ("params", "grads", "optimizer")
# one step's loss differs by 16-bit sums of gradients and, for bf16, by other random numbers
TOLERANCE = {"bf16": 5e-3, "fp16": 1e-3}


def narrow(dtype, **plan):
    return {**BATCH, "precision": dtype, "params_dtype": dtype, **plan}


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    """By dtype: fp32 weights, and 16-bit ones that are saved at steps 2 and 4."""
    results = {}
    for dtype in ("bf16", "fp16"):
        saved = {"checkpoint": {"every_steps": 2, "keep": 2, "async": False}}
        plans = {f"mixed {dtype}": {**BATCH, "precision": dtype}, dtype: narrow(dtype)}
        for name, plan in plans.items():
            more = saved if name == dtype else {}
            results[name] = train(make_spec(None, plan, **more), tmp_path_factory.mktemp("alone"))
    return results


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_losses_follow_fp32_weights(dtype, alone):
    result, mixed = alone[dtype], alone[f"mixed {dtype}"]
    assert result.outcomes[0]["class"] == "ok"
    assert result.values("loss") == pytest.approx(mixed.values("loss"), rel=TOLERANCE[dtype])
    weights = final_weights(result, 4)
    stored = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert {each.dtype for each in weights.values()} == {stored}


@pytest.mark.parametrize(("dtype", "zero"), [("bf16", 0), ("bf16", 3), ("fp16", 1), ("fp16", 2)])
def test_two_ranks_equal_one_and_the_planner_s_bytes(dtype, zero, alone, train, tmp_path):
    plan = narrow(dtype, dp=2, zero=zero)
    result = train(make_spec(None, plan), tmp_path)
    for name, factor in (("loss", 1), ("grad_norm", 10)):
        assert result.values(name) == pytest.approx(
            alone[dtype].values(name), rel=factor * TOLERANCE[dtype]
        )
    table = predicted(ModelSpec.from_dict(TINY), plan, device="cpu", seq_len=16)
    for name in STATES:
        measured = max(result.values(f"memory/{name}_bytes", rank)[-1] for rank in (0, 1))
        assert float(table[f"{name}_bytes"].max()) == pytest.approx(measured, rel=5e-3), name


def test_a_resumed_run_rounds_as_one_that_was_not_stopped(alone, train, tmp_path):
    folder = alone["bf16"].directory / "checkpoints" / step_folder(2)
    resumed = train(make_spec(None, narrow("bf16")), tmp_path / "same", ORRERY_RESUME=str(folder))
    assert resumed.values("loss") == alone["bf16"].values("loss")[2:]
    plan = {**BATCH, "precision": "bf16"}
    wider = train(make_spec(None, plan), tmp_path / "wider", ORRERY_RESUME=str(folder))
    assert wider.values("loss") == pytest.approx(resumed.values("loss"), rel=TOLERANCE["bf16"])


def test_replicas_round_equally():
    weights = []
    for rank in range(2):
        torch.manual_seed(rank)
        weight = torch.full((64, 8), 0.1, dtype=torch.bfloat16, requires_grad=True)
        optimizer = build_optimizer({"w": weight}, OptimizerSpec(lr=1e-4), shard_state=False)
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        weights.append(weight.detach())
    assert torch.equal(*weights)
    # a step is a tenth of the distance between two numbers: nearest rounding would make none
    moved = (weights[0] != weights[0].new_tensor(0.1)).float().mean()
    assert 0.2 < moved < 0.8
    assert weights[0].double().mean() == pytest.approx(0.1 - 3e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("plan", "train_body", "field"),
    [
        ({"precision": "fp32", "params_dtype": "bf16"}, {}, "plan.params_dtype"),
        ({"precision": "bf16", "params_dtype": "fp16"}, {}, "plan.params_dtype"),
        (narrow("bf16", grad_dtype="fp32"), {}, "plan.grad_dtype"),
        (narrow("bf16", offload="optimizer"), {}, "plan.params_dtype"),
        (narrow("bf16"), {"optimizer": {"name": "lion"}}, "train.optimizer.name"),
        (narrow("bf16"), {"freeze": ["embed*"]}, "plan.params_dtype"),
        (narrow("bf16", pp=2), {}, "plan.params_dtype"),
    ],
)
def test_refusals_name_the_field_and_a_remedy(plan, train_body, field):
    spec = make_spec({**TINY, "tie_embeddings": True}, plan, **train_body)
    problems = engine_problems(RunSpec.from_dict(spec))
    assert [item.field for item in problems] == [field]
    assert all(item.hint for item in problems)
    assert not engine_problems(
        RunSpec.from_dict(make_spec(None, narrow("bf16", grad_dtype="bf16")))
    )
