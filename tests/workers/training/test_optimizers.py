"""Each update rule gives equal losses under every ZeRO stage, holds the right bytes, and resumes
under another plan.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.workers.training.conftest import final_weights, make_spec, relative
from workers.contracts.specs.train import OptimizerSpec
from workers.training.optim import build_optimizer, update
from workers.training.optim.blockwise import Blocks, codebook, dequantize, quantize
from workers.training.optim.newton_schulz import orthogonalize
from workers.training.optim.scaled_adamw import ScaledAdamW

# no width divides by 4 ranks
RAGGED = {
    "name": "ragged",
    "layers": 2,
    "hidden": 40,
    "heads": 4,
    "kv_heads": 1,
    "ffn": 50,
    "vocab": 257,
    "max_seq_len": 32,
}
RULES = {
    "lion": {"name": "lion", "lr": 1e-3, "weight_decay": 0.1},
    "adafactor": {"name": "adafactor", "lr": 3e-2, "weight_decay": 0.1},
    "muon": {"name": "muon", "lr": 2e-2, "scalar_lr": 3e-3},
    "adamw8bit": {"name": "adamw8bit", "lr": 3e-3},
}
BATCH = {"micro_batch_size": 2, "global_batch_size": 8}
STEPS = 8  # few: a state of 8 bits that falls to another code by rounding ends parity


def spec(rule, plan=None, steps=STEPS, **more):
    schedule = {"name": "constant", "warmup_steps": 2}
    return make_spec(
        RAGGED,
        {**BATCH, **(plan or {})},
        steps=steps,
        clip_norm=0.5,
        optimizer=RULES[rule],
        lr_schedule=schedule,
        **{"checkpoint": {"every_steps": STEPS, "async": False}, **more},
    )


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    return {rule: train(spec(rule), tmp_path_factory.mktemp(rule)) for rule in RULES}


@pytest.fixture(scope="module")
def full_precision(train, tmp_path_factory):
    """The run of `adamw8bit` with states of 32 bits."""
    whole = spec("adamw8bit")
    rule = {**RULES["adamw8bit"], "name": "adamw"}
    exact = {**whole, "train": {**whole["train"], "optimizer": rule}}
    return train(exact, tmp_path_factory.mktemp("adamw"))


# each rule over whole weights that are dealt out and over sharded ones; what does not look at the
# rule once
CASES = [(rule, {"dp": 2, "zero": zero}) for rule in RULES for zero in (1, 3)]
CASES += [("lion", {"dp": 2, "zero": 0}), ("adamw8bit", {"dp": 2, "zero": 2})]
CASES += [(rule, {"dp": 4, "dp_replicate": 2, "zero": 3}) for rule in ("adafactor", "muon")]


@pytest.mark.parametrize(
    ("rule", "plan"), CASES, ids=[f"{r}-{'-'.join(map(str, p.values()))}" for r, p in CASES]
)
def test_losses_of_one_process(rule, plan, alone, full_precision, train, tmp_path):
    result, one = train(spec(rule, plan), tmp_path), alone[rule]
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    assert result.values("loss") == pytest.approx(one.values("loss"), rel=1e-5)
    # a state next to a border of its 256 codes falls to either side, by the processor's rounding
    eight_bits = rule == "adamw8bit"
    norm = pytest.approx(one.values("grad_norm"), rel=1e-3 if eight_bits else 1e-4)
    assert result.values("grad_norm") == norm
    assert one.values("loss")[-1] < one.values("loss")[0] - 0.1
    theirs, ours = final_weights(one, STEPS), final_weights(result, STEPS)
    limit = 1e-4
    if eight_bits:  # less than the 256 codes themselves change the weights
        exact = final_weights(full_precision, STEPS)
        limit = max(relative(theirs[name], exact[name]) for name in exact)
    assert max(relative(ours[name], theirs[name]) for name in theirs) <= limit
    # every parameter has a gradient, and no more state than its share
    copies = plan.get("dp_replicate", 1 if plan["zero"] else 2)
    params, grads, state = (
        sum(result.values(f"memory/{name}_bytes", rank)[0] for rank in range(plan["dp"]))
        for name in ("params", "grads", "optimizer")
    )
    assert grads == params
    whole = copies * one.values("memory/optimizer_bytes")[0]
    # columns are whole on every rank
    more = 1.4 if rule == "adafactor" and plan["zero"] >= 2 else 1.0
    assert whole - 200 <= state <= more * whole + 200


@pytest.mark.parametrize(
    ("rule", "bytes_each"), [("lion", 4), ("adafactor", 0.18), ("muon", 6), ("adamw8bit", 2.3)]
)
def test_bytes_of_state(rule, bytes_each, alone):
    """Muon: 4, and 8 for embeddings, half of it here; 8 bits: 2, and a scale for each row of these
    narrow matrices.
    """
    params, state = (
        alone[rule].values(f"memory/{name}_bytes")[0] for name in ("params", "optimizer")
    )
    assert state / (params / 4) == pytest.approx(bytes_each, rel=0.15)


@pytest.mark.parametrize("rule", RULES)
def test_goes_on_under_another_plan(rule, alone, train, tmp_path):
    """Begun alone, resumed in shards, then dealt out."""
    checkpoint = {"every_steps": 20, "async": False}
    for steps, plan in ((3, {}), (5, {"dp": 2, "zero": 3}), (STEPS, {"dp": 2, "zero": 1})):
        result = train(spec(rule, plan, steps=steps, checkpoint=checkpoint), tmp_path)
        assert result.outcomes[0]["class"] == "ok", result.outcomes
    assert result.values("loss") == pytest.approx(alone[rule].values("loss"), rel=1e-5)


def steps_of(optimizer, parameters, *, count=5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for each in parameters:
            each.grad = torch.randn(each.shape, generator=generator)
        optimizer.step()
    return [each.detach() for each in parameters]


def model():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (30, 20),
        "blocks.0.a": (12, 20),
        "blocks.0.b": (3, 40, 20),
        "blocks.0.norm": (20,),
    }
    return {
        name: torch.randn(shape, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }


def test_adafactor_is_torchs():
    ours, theirs = model(), model()
    results = steps_of(
        build_optimizer(ours, OptimizerSpec.from_dict({**RULES["adafactor"]}), shard_state=False),
        ours.values(),
    )
    want = steps_of(
        torch.optim.Adafactor(theirs.values(), lr=3e-2, weight_decay=0.1), theirs.values()
    )
    for one, other in zip(results, want, strict=True):
        torch.testing.assert_close(one, other)


def test_clipping_and_unscaling_on_the_way_is_a_pass_of_its_own_before():
    ours, theirs = model(), model()
    gradients = {name: torch.randn(each.shape) * 64 for name, each in ours.items()}
    one = ScaledAdamW(ours.values(), lr=1e-2)
    other = torch.optim.AdamW(theirs.values(), lr=1e-2)
    norm = math.sqrt(sum(float(each.square().sum()) for each in gradients.values())) / 64
    for limit, scale in ((0.5, 64.0), (None, 64.0), (None, 1.0)):
        for parameters, optimizer in ((ours, one), (theirs, other)):
            for name, each in parameters.items():
                each.grad = (
                    gradients[name].clone() if each.ndim < 3 else gradients[name].mT.contiguous().mT
                )
            given = [each.grad for each in parameters.values()]
            update(optimizer, given, norm=norm, limit=limit, scale=scale)
        for name, each in ours.items():
            assert torch.equal(each.grad, gradients[name]), "the update scales, in one pass"
        torch.testing.assert_close(list(ours.values()), list(theirs.values()), rtol=1e-5, atol=1e-6)


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest():
    ours, theirs = model(), model()
    before = {name: each.detach().clone() for name, each in ours.items()}
    rule = OptimizerSpec.from_dict({"name": "muon", "lr": 0.02, "scalar_lr": 0.01})
    steps_of(build_optimizer(ours, rule, shard_state=False), ours.values())
    rest = torch.optim.AdamW(
        [theirs["embed.weight"], theirs["blocks.0.norm"]], lr=0.01, weight_decay=0.1
    )
    matrix = torch.optim.Muon([theirs["blocks.0.a"]], lr=0.02)

    class Both:
        def step(self):
            rest.step()
            matrix.step()

    steps_of(Both(), theirs.values())
    torch.testing.assert_close(ours["embed.weight"], theirs["embed.weight"])
    torch.testing.assert_close(ours["blocks.0.norm"], theirs["blocks.0.norm"])
    moved, want = (each["blocks.0.a"].detach() - before["blocks.0.a"] for each in (ours, theirs))
    assert float((moved - want).norm() / want.norm()) < 0.02, "torch's products are in bf16"
    assert bool((ours["blocks.0.b"] != before["blocks.0.b"]).all())


def test_orthogonal_stacks():
    stack = torch.randn(3, 40, 20, generator=torch.Generator().manual_seed(0))
    results = orthogonalize(stack, steps=5)
    for one, alone in zip(results, stack, strict=True):
        torch.testing.assert_close(one, orthogonalize(alone, steps=5))
    values = torch.linalg.svdvals(results)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_lion_by_hand():
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    rule = OptimizerSpec.from_dict(
        {"name": "lion", "lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.5}
    )
    optimizer = build_optimizer({"w": weight}, rule, shard_state=False)
    weight.grad = torch.tensor([4.0, -4.0])
    optimizer.step()  # moment 0 → 1, -1
    assert weight.tolist() == pytest.approx([0.95 - 0.1, -1.9 + 0.1])
    weight.grad = torch.tensor([-0.5, 3.0])
    optimizer.step()  # 0.5 · 1 − 0.5 · 0.5 > 0; −0.5 + 1.5 > 0
    assert weight.tolist() == pytest.approx([0.85 * 0.95 - 0.1, -1.8 * 0.95 - 0.1])


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [1, 80, 256, 600, 769])
def test_eight_bits_keep_large_numbers_within_a_hundredth(signed, columns):
    values = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns))
    values = (values if signed else values.square()) * torch.logspace(-9, 3, 7).unsqueeze(1)
    values[2] = 0
    blocks = Blocks(torch.empty(7, columns, dtype=torch.uint8), torch.empty(7, -(-columns // 256)))
    quantize(values, blocks, signed=signed)
    results = dequantize(blocks, signed=signed)
    assert bool((results[2] == 0).all())
    largest = values.abs().amax(dim=1, keepdim=True)
    assert float(((results - values).abs() / largest.clamp(min=1e-30)).max()) <= 0.0095
    if not signed:
        rest = torch.arange(7) != 2
        assert bool((results[rest] > 0).all()), "no second moment becomes zero"
    assert len(set(codebook(signed, torch.device("cpu")).values.tolist())) == (
        256 if signed else 255
    )


def test_eight_bits_follow_adamw(alone, full_precision):
    expected = full_precision.values("loss")
    assert alone["adamw8bit"].values("loss") == pytest.approx(expected, rel=2e-3)
    assert alone["adamw8bit"].values("loss") != expected
