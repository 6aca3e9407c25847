"""Bytes of parameters, gradients and optimizer states: papers' tables, what torch holds, alone and
over real ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import orchestrator.planner.model.memory.model_states  # noqa: F401  registers the terms
from tests.matrix import pairwise
from tests.orchestrator.planner.interchange.shapes import CONFIGS
from tests.orchestrator.planner.predicted import predicted
from tests.workers.training.conftest import TINY, make_spec
from tests.workers.training.pool import Pool
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.training.setup.fake_ranks import describe_fake_ranks
from workers.training.setup.spec_loading import accept

STATES = ("params", "grads", "optimizer")
WITHIN = 1e-3
"""Of the bytes torch holds; its step counters, four bytes a tensor, are not predicted."""


def states(
    model: str | ModelSpec, plan: dict[str, Any] | None = None, **more: Any
) -> dict[str, float]:
    """Bytes by kind on the rank that holds the most."""
    table = predicted(model, plan, **more)
    return {name: float(table[f"{name}_bytes"].max()) for name in STATES}


def gpt(layers: int, hidden: int, heads: int, **more: Any) -> ModelSpec:
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
    }
    return preset("gpt3-175b").model_copy(update={**sizes, "ffn": 4 * hidden, **more})


@pytest.mark.parametrize(
    ("ranks", "zero", "gigabytes"),
    [
        (64, 0, 120),
        (64, 1, 31.4),
        (64, 2, 16.6),
        (64, 3, 1.88),
        (4, 1, 52.5),
        (16, 2, 21.6),
        (1024, 3, 0.12),
    ],
)
def test_zero_table_1(ranks, zero, gigabytes):
    """arXiv 1910.02054: 7.5 billion parameters hold 16P, 4P + 12P/n, 2P + 14P/n (not 4P + 16P/n),
    16P/n.
    """
    model, plan = gpt(36, 4096, 32), {"dp": ranks, "zero": zero, "precision": "fp16"}
    held, number = (
        states(model, plan, using="deepspeed"),
        float(predicted(model)["stage_params"].max()),
    )
    assert 7.5 * sum(held.values()) / number == pytest.approx(gigabytes, abs=0.05)


def test_megatron_distributed_optimizer():
    """Megatron-LM's functional test gpt3_7b, tp 4 on 8 devices: 20.63 GB measured, 6P + 12P/2
    nearly all of it.
    """
    plan = {"dp": 2, "tp": 4, "zero": 1, "precision": "bf16"}
    held = states(gpt(32, 4096, 32, tie_embeddings=False), plan, using="megatron")
    assert sum(held.values()) / 1e9 == pytest.approx(20.63, rel=5e-3)


@pytest.mark.parametrize(
    ("switches", "each"),
    [
        ({"name": "megatron"}, (2, 4, 12)),
        ({"name": "deepspeed"}, (2, 2, 12)),
        ({"name": "deepspeed", "master_weights": False}, (2, 2, 4)),
        ({"name": "deepspeed", "optimizer": "adam8bit"}, (2, 2, 6)),
        ({"name": "deepspeed", "optimizer": "lion"}, (2, 2, 8)),
        ({"name": "deepspeed", "optimizer": "sgd"}, (2, 2, 4)),
        ({"name": "fsdp2"}, (4, 4, 8)),
    ],
)
def test_bytes_per_parameter(switches, each):
    held, number = (
        states("llama3-8b", {"precision": "bf16"}, using=switches),
        preset_size("llama3-8b"),
    )
    assert tuple(value / number for value in held.values()) == pytest.approx(each)


@pytest.mark.parametrize("offload", ["none", "optimizer", "all", "nvme"])
def test_offload_takes_states_off_the_device(offload):
    """ZeRO-Offload (arXiv 2101.06840): optimizer states and gradients leave first, then weights as
    well.
    """
    plan = {"dp": 8, "zero": 2, "precision": "bf16", "offload": offload}
    held, number = states("llama3-8b", plan, using="deepspeed"), preset_size("llama3-8b")
    left = {
        "none": (2, 2 / 8, 12 / 8),
        "optimizer": (2, 0, 0),
        "all": (0, 0, 0),
        "nvme": (0, 0, 0),
    }[offload]
    assert tuple(value / number for value in held.values()) == pytest.approx(left)


def test_hybrid_sharding_divides_by_a_copy_s_ranks():
    whole, hybrid = ({"dp": 16, "zero": 3, "dp_replicate": copies} for copies in (1, 4))
    assert states("llama3-8b", hybrid)["optimizer"] == pytest.approx(
        4 * states("llama3-8b", whole)["optimizer"]
    )


def test_pipedream_stashes_a_version_for_each_micro_batch_under_way():
    """Harlap et al.

    2018 (arXiv 1806.03377), section 3.3: stage i of p keeps p - i versions; vertical sync all p.
    """
    plan = {"pp": 4, "schedule": "pipedream", "global_batch_size": 8, "weight_stashing": True}
    stashed, plain = (
        predicted("llama2-7b", {**plan, "weight_stashing": each}) for each in (True, False)
    )
    assert (stashed["params_bytes"] / plain["params_bytes"])[:, 0].tolist() == [4, 3, 2, 1]
    synced = predicted("llama2-7b", {**plan, "vertical_sync": True})
    assert (synced["params_bytes"] / plain["params_bytes"])[:, 0].tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize(
    "name",
    [
        "llama3-405b",
        "llama2-70b",
        "gpt2-xl-1.5b",
        "qwen3-32b",
        "qwen3-30b-a3b",
        "mixtral-8x7b",
        "deepseek-v2",
        "deepseek-v3",
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_whole_models_as_torch_holds_them(name, dtype):
    """Architectures as transformers builds them, on the meta device, AdamW's states made by its own
    first step.
    """
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]))
    module.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    using = {"name": "fsdp2", "params_dtype": dtype, "master_weights": False}
    assert states(name, {"precision": dtype}, using=using) == pytest.approx(
        held_by(module, optimizer), rel=WITHIN
    )


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimizers_that_treat_matrices_apart(name):
    decoder = Decoder(preset("llama-tiny"))
    matrices = [p for p in decoder.blocks.parameters() if p.ndim == 2]
    others = [p for p in decoder.parameters() if all(p is not each for each in matrices)]
    used = [torch.optim.Adafactor(decoder.parameters())]
    if name == "muon":
        used = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    held = held_by(decoder, *used)
    assert states("llama-tiny", using={"name": "orrery", "optimizer": name}) == pytest.approx(
        held, rel=5e-3
    )


ODD = {**TINY, "hidden": 72, "ffn": 200, "heads": 6, "kv_heads": 3, "vocab": 259, "qk_norm": True}
WITH_BIASES = {
    **ODD,
    "bias": "all",
    "norm": "layernorm",
    "position": "learned",
    "gated_mlp": False,
    "qk_norm": False,
}


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(3, tmp_path_factory.mktemp("pool") / "store")
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("zero", "model", "precision"),
    pairwise([0, 1, 2, 3], [ODD, WITH_BIASES], ["fp32", "bf16"]),
)
def test_the_engine_s_own_count_on_three_ranks(three_ranks, tmp_path, model, precision, zero):
    """DDP, ZeroRedundancyOptimizer and `fully_shard`, by a number of ranks that divides nothing."""
    plan = {"dp": 3, "zero": zero, "precision": precision, "global_batch_size": 3}
    result = three_ranks.train(make_spec(model, plan, steps=1), tmp_path)
    measured = [result.points(rank)[0]["values"] for rank in range(3)]
    worst = {name: max(values[f"memory/{name}_bytes"] for values in measured) for name in STATES}
    assert states(ModelSpec.from_dict(model), plan, device="cpu") == pytest.approx(
        worst, rel=WITHIN
    )


def test_tensor_parallel_shards_of_four_ranks(tmp_path):
    """DTensor's column and row splits, sharded once more by `fully_shard`, on a vocabulary that
    nothing divides.
    """
    spec = ModelSpec.from_dict({**ODD, "heads": 4, "kv_heads": 2, "head_dim": 18, "qk_norm": False})
    pool = Pool(4, tmp_path / "store")
    try:
        held = pool.call(
            "tests.orchestrator.planner.model.memory.tensor_ranks:held_after_an_update",
            model=spec.to_dict(),
            tp=2,
        )
    finally:
        pool.close()
    assert len(held) == 4
    worst = {name: max(each[name] for each in held) for name in STATES}
    assert states(spec, {"dp": 2, "tp": 2, "zero": 3}, using="fsdp2") == pytest.approx(
        worst, rel=WITHIN
    )


@pytest.mark.parametrize(
    "plan", [{"tp": 4, "dp": 2}, {"tp": 4, "dp": 2, "zero": 3}, {"tp": 2, "dp": 4, "zero": 3}]
)
def test_key_value_heads_fewer_than_tensor_ranks(plan):
    """The engine stores all of them on every rank; other frameworks copy the rank's own."""
    given = {**ODD, "heads": 4, "kv_heads": 2, "head_dim": 18, "qk_norm": False, "ffn": 84}
    run = accept(make_spec(given, {**plan, "global_batch_size": 8}, steps=1))
    worst = max(rank["parameter_bytes"] for rank in describe_fake_ranks(run, 8)["ranks"])
    spec = ModelSpec.from_dict(given)
    assert states(spec, plan)["params"] == pytest.approx(worst, rel=WITHIN)
    own = states(spec, {**plan, "zero": 0}, using="fsdp2")["params"]
    whole = states(spec, {**plan, "zero": 0})["params"]
    assert (own < whole) == (plan["tp"] > 2)


def preset_size(name: str) -> float:
    return float(predicted(name)["stage_params"].max())


def held_by(module: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, float]:
    """Bytes after an update with gradients of zero."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    state = [
        x
        for each in optimizers
        for entry in each.state.values()
        for x in entry.values()
        if torch.is_tensor(x)
    ]
    parameters = list(module.parameters())
    held = {
        "params": parameters,
        "grads": [p.grad for p in parameters if p.grad is not None],
        "optimizer": state,
    }
    return {
        name: float(sum(x.numel() * x.element_size() for x in tensors))
        for name, tensors in held.items()
    }
