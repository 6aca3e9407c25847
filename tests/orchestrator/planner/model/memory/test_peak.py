"""Peak memory: its lines and ranks, the verdict, peaks of real steps on fake tensors, and of
published runs.
"""

from __future__ import annotations

import numpy as np
import pytest

import orchestrator.planner.model.memory.peak  # noqa: F401  registers the terms
from orchestrator.planner.model.inputs import table_of
from orchestrator.planner.model.parameters import columns_for
from tests.matrix import pairwise
from tests.orchestrator.planner.model.memory.live_bytes import (
    peak_of_a_sharded_step,
    peak_of_a_step,
)
from tests.orchestrator.planner.predicted import predicted, request
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan

LINES = ("params", "grads", "optimizer", "activations", "logits", "buffers", "unattributed")


def total(*given, **more) -> float:
    """Without what a CPU's process holds besides tensors."""
    table = predicted(*given, **more)
    process = table["process_bytes"] if table["is_cpu"] == 1 else 0.0
    return float(table["total_bytes"][0] - process)


PLANS = [
    {"dp": 8, "zero": 3, "precision": "bf16", "micro_batch_size": 2},
    {
        "dp": 2,
        "tp": 4,
        "zero": 1,
        "precision": "bf16",
        "sequence_parallel": True,
        "recompute": "selective",
    },
    {"pp": 4, "tp": 2, "precision": "bf16", "global_batch_size": 16, "recompute": "full"},
    {"pp": 4, "schedule": "zbv", "precision": "bf16", "global_batch_size": 16},
    {"dp": 4, "cp": 2, "zero": 2, "precision": "fp16", "offload": "optimizer"},
]


@pytest.mark.parametrize(
    "using", ["orrery", "fsdp2", "megatron", "megatron-deepspeed", "llm-foundry", "deepspeed"]
)
@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda plan: "-".join(f"{k}{v}" for k, v in plan.items())
)
def test_lines_add_up_and_the_worst_rank_is_named(using, plan):
    table = predicted("llama2-7b", plan, using=using)
    ranks = plan.get("pp", 1)
    stages = [np.broadcast_to(table[f"{line}_bytes"], (ranks, 1)) for line in LINES]
    assert all((line >= 0).all() for line in stages)
    assert sum(stages) == pytest.approx(np.broadcast_to(table["stage_total_bytes"], (ranks, 1)))
    assert table["total_bytes"][0] == table["stage_total_bytes"].max()
    assert int(table["worst_stage"][0]) == int(table["stage_total_bytes"][:, 0].argmax())


def test_plans_mixed_in_one_table_are_as_plans_alone():
    request_list = [
        request(name, plan, using="megatron")
        for name in ("llama3-8b", "deepseek-v2")
        for plan in PLANS
    ]
    together = table_of(request_list, columns_for(request_list))
    alone = [table_of([each], columns_for([each])) for each in request_list]
    for name in ("total_bytes", "worst_stage", "headroom_bytes"):
        assert together[name] == pytest.approx([float(each[name][0]) for each in alone]), name


def test_what_saves_memory_saves_memory():
    plan = {"dp": 8, "precision": "bf16", "micro_batch_size": 2, "global_batch_size": 64}
    stages = [total("llama3-8b", {**plan, "zero": zero}, using="deepspeed") for zero in range(4)]
    assert sorted(stages, reverse=True) == stages
    saved = [
        total("llama3-8b", {**plan, "recompute": how}) for how in ("none", "selective", "full")
    ]
    assert sorted(saved, reverse=True) == saved
    fsdp = {**plan, "zero": 3}
    assert total("llama3-8b", {**fsdp, "offload": "all"}) < total(
        "llama3-8b", {**fsdp, "offload": "optimizer"}
    )
    assert total("llama3-8b", {**fsdp, "offload": "optimizer"}) < total("llama3-8b", fsdp)


def test_the_verdict_leaves_room_for_context_and_fragments():
    """405 billion parameters fit 1,024 devices and not 64; eight billion in fp32 states never fit
    one.
    """
    plan = {
        "tp": 8,
        "pp": 8,
        "zero": 1,
        "precision": "bf16",
        "sequence_parallel": True,
        "recompute": "full",
    }
    wide, narrow = ({**plan, "dp": dp, "global_batch_size": 256} for dp in (16, 1))
    for held, expected in ((wide, True), (narrow, False)):
        table = predicted("llama3-405b", held, seq_len=8192, using="megatron")
        assert bool(table["fits"][0]) is expected
        assert bool(table["headroom_bytes"][0] >= 0) is expected
    assert not predicted("llama3-8b", {"precision": "bf16"})["fits"][0]
    table = predicted("llama3-8b", {"dp": 8, "zero": 3, "precision": "bf16"})
    assert table["usable_bytes"] < 0.97 * table["capacity_bytes"]


SMALL = {
    "name": "small",
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 700,
    "vocab": 6000,
    "max_seq_len": 512,
}
GPT = {
    "bias": "all",
    "norm": "layernorm",
    "position": "learned",
    "gated_mlp": False,
    "activation": "gelu",
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("more", [{}, {"tie_embeddings": True}, GPT], ids=["untied", "tied", "gpt"])
def test_peak_of_the_engine_s_step(precision, more):
    """All storages alive at the worst moment of a step: the loss's backward pass, gradients of an
    earlier one there.
    """
    spec = ModelSpec.from_dict({**SMALL, **more})
    plan = {"precision": precision, "micro_batch_size": 4, "global_batch_size": 8}
    measured = peak_of_a_step(spec, ParallelPlan.model_validate(plan), 256)
    assert total(spec, plan, seq_len=256, device="cpu") == pytest.approx(measured, rel=5e-3)


@pytest.mark.parametrize(
    ("dp", "tied", "zero", "precision"),
    pairwise([4, 1], [True, False], [3, 2], ["bf16", "fp32"]),
)
def test_peak_of_a_fully_sharded_step(dp, tied, zero, precision):
    """Shards, gathered copies that stay, activations and loss; the prediction holds an earlier
    gradient as well.
    """
    spec = ModelSpec.from_dict({**SMALL, "tie_embeddings": tied})
    plan = {"dp": dp, "zero": zero, "precision": precision, "micro_batch_size": 4}
    plan["global_batch_size"] = 4 * dp
    measured = peak_of_a_sharded_step(spec, ParallelPlan.model_validate(plan), 256)
    table = predicted(spec, plan, seq_len=256, device="cpu")
    held = table["explained_bytes"] - table["grads_bytes"]
    assert float(held.max()) == pytest.approx(measured, rel=5e-3)


@pytest.mark.parametrize(
    ("model", "layers", "plan", "seq_len", "peak_bytes"),
    [
        ("llama3-70b", 12, {"dp": 4, "tp": 2, "global_batch_size": 16}, 4096, 65.15e9),
        ("llama3-70b", 12, {"dp": 4, "pp": 2, "global_batch_size": 32}, 4096, 71.46e9),
        ("llama3-405b", 4, {"tp": 8, "global_batch_size": 8}, 4096, 41.41e9),
        ("llama3-405b", 4, {"tp": 2, "cp": 4, "global_batch_size": 4}, 32768, 93.45e9),
    ],
)
def test_megatron_on_b200(model, layers, plan, seq_len, peak_bytes):
    """Peaks of Megatron-LM 0.14 on eight B200, of SimuMax (MooreThreads/SimuMax, docs/b200, release
    1.2); untuned.
    """
    spec = preset(model).model_copy(update={"layers": layers})
    laid = {"zero": 1, "precision": "bf16", "sequence_parallel": plan.get("tp", 1) > 1, **plan}
    using = {"name": "megatron", "fused_cross_entropy": True}
    assert total(spec, laid, seq_len=seq_len, device="b200-192g", using=using) == pytest.approx(
        peak_bytes, rel=0.02
    )


@pytest.mark.parametrize(
    ("hidden", "layers", "plan", "grad_dtype", "peak_gb"),
    [
        # one device's share of a pipeline, alone
        (14400, 8, {"tp": 8, "micro_batch_size": 1}, "fp16", 67),
        (14336, 72, {"dp": 8, "tp": 2, "pp": 24, "micro_batch_size": 2}, "fp16", 53),
        (12288, 106, {"dp": 8, "tp": 4, "pp": 12, "micro_batch_size": 4}, "fp32", 79),
        (14336, 72, {"dp": 32, "tp": 2, "pp": 6, "micro_batch_size": 2}, "fp16", None),
        (12288, 100, {"dp": 16, "tp": 4, "pp": 6, "micro_batch_size": 1}, "fp32", None),
    ],
)
def test_bloom_on_a100(hidden, layers, plan, grad_dtype, peak_gb):
    """Peaks, and runs that ended out of memory, of bigscience-workshop/bigscience,
    chronicles-prequel of tr11-176B-ml.

    Logs round to a gigabyte and show what the allocator reserves, which differs by 5 GB between
    like runs.
    """
    spec = ModelSpec.from_dict(
        {
            "name": "bloom",
            "layers": layers,
            "hidden": hidden,
            "heads": 64 if hidden != 14400 else 32,
            "ffn": 4 * hidden,
            "vocab": 250000,
            "max_seq_len": 2048,
            "gated_mlp": False,
            "activation": "gelu",
            "norm": "layernorm",
            "position": "none",
            "tie_embeddings": True,
            "bias": True,
        }
    )
    precision = "fp16" if grad_dtype == "fp16" else "bf16"
    laid = {
        "zero": 1,
        "precision": precision,
        "recompute": "full",
        "global_batch_size": 2048,
        **plan,
    }
    using = {"name": "megatron-deepspeed", "flash_attention": False, "grad_dtype": grad_dtype}
    table = predicted(spec, laid, device="a100-80g", using=using)
    assert bool(table["fits"][0]) is (peak_gb is not None)
    if peak_gb is not None:
        assert float(table["total_bytes"][0]) / 1e9 == pytest.approx(peak_gb, rel=0.06)
