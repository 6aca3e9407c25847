"""Bytes per kind of collective: what the planner says against what real gloo ranks hand over, to
the byte.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestrator.planner import api
from tests.workers.training.pool import Pool

pytestmark = pytest.mark.flow
RANKS = 4

LLAMA = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 80,
    "vocab": 50,
    "max_seq_len": 16,
}
RAGGED = {**LLAMA, "layers": 3, "ffn": 82, "vocab": 51, "qk_norm": True}
TIED = {
    **LLAMA,
    "tie_embeddings": True,
    "norm": "layernorm",
    "bias": "all",
    "position": "learned",
    "gated_mlp": False,
    "activation": "gelu",
}
MOE = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32}}
LATENT = {
    **LLAMA,
    "kv_heads": 4,
    "attention": "mla",
    "mla": {
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}
WHOLE_HEADS = {**LLAMA, "kv_heads": 4}

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dp", LLAMA, {"dp": 4, "zero": 0, "global_batch_size": 12}),
    ("dp", LLAMA, {"dp": 4, "zero": 1, "global_batch_size": 8}),
    ("dp", LLAMA, {"dp": 4, "zero": 2, "global_batch_size": 8}),
    ("dp", LLAMA, {"dp": 4, "zero": 3, "global_batch_size": 8, "recompute": "full"}),
    ("dp", LLAMA, {"dp": 4, "dp_replicate": 2, "zero": 2, "global_batch_size": 16}),
    ("dp", LLAMA, {"dp": 4, "dp_replicate": 2, "zero": 3, "global_batch_size": 16}),
    ("dp", RAGGED, {"dp": 4, "zero": 3}),
    ("dp", TIED, {"dp": 4, "zero": 3}),
    ("tp", WHOLE_HEADS, {"tp": 2, "global_batch_size": 3}),
    (
        "tp",
        WHOLE_HEADS,
        {"tp": 4, "sequence_parallel": True, "micro_batch_size": 2, "global_batch_size": 4},
    ),
    ("pp", LLAMA, {"pp": 2, "schedule": "1f1b", "global_batch_size": 4}),
    ("pp", {**RAGGED, "layers": 5}, {"pp": 4, "schedule": "gpipe", "global_batch_size": 3}),
    (
        "pp",
        {**LLAMA, "layers": 4},
        {"pp": 2, "schedule": "interleaved_1f1b", "global_batch_size": 4},
    ),
    ("ep", MOE, {"dp": 2, "ep": 2, "global_batch_size": 4}),
    ("cp", TIED, {"cp": 4, "zero": 1, "global_batch_size": 2}),
    ("cp", LATENT, {"cp": 4, "recompute": "selective"}),
    ("cp", LLAMA, {"dp": 2, "cp": 2, "zero": 3, "recompute": "full", "global_batch_size": 4}),
    ("cp", RAGGED, {"dp": 2, "cp": 2, "zero": 2, "global_batch_size": 4}),
]


def predicted(model: dict[str, Any], plan: dict[str, Any], devices: int) -> dict[str, int]:
    line = {
        "model": model,
        "plan": plan,
        "cluster": {"devices_per_node": devices},
        "workload": {"seq_len": 16},
    }
    [answer] = api.estimate([line])
    return {name.removesuffix("_bytes"): value for name, value in answer["collectives"].items()}


@pytest.mark.parametrize(
    ("model", "plan", "framework"),
    [
        (LLAMA, {"dp": 2}, "megatron"),
        (MOE, {"cp": 2}, "orrery"),
        (LLAMA, {"dp": 2, "offload": "optimizer"}, "orrery"),
        (MOE, {"dp": 2, "ep": 2, "zero": 3}, "orrery"),
    ],
)
def test_uncounted_collectives_are_marked_unknown(
    model: dict[str, Any], plan: dict[str, Any], framework: str
) -> None:
    line = {
        "model": model,
        "plan": plan,
        "cluster": {"devices_per_node": 2},
        "workload": {"seq_len": 16},
        "framework": framework,
    }
    [answer] = api.estimate([line])
    assert answer["ok"] and answer["collectives"] is None, answer


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, float]]]:
    """By case, then by rank: all in one start of as many ranks as the largest wants."""
    pool = Pool(RANKS, tmp_path_factory.mktemp("pool") / "store")
    try:
        request_list = [
            {"axis": axis, "model": model, "plan": plan, "seq_len": 16}
            for axis, model, plan in CASES
        ]
        by_rank = pool.call(
            "tests.orchestrator.planner.model.communication.collective_program:counts",
            request_list=request_list,
        )
    finally:
        pool.close()
    return [list(result) for result in zip(*by_rank, strict=True)]


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number][2].values()))
)
def test_bytes_of_a_step_are_exact(number: int, measured: list[list[dict[str, float]]]) -> None:
    axis, model, plan = CASES[number]
    degrees = [plan.get(name, 1) for name in ("dp", "tp", "pp", "cp")]
    counted, result = predicted(model, plan, math.prod(degrees)), measured[number]
    data = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    axes = {
        "dp": data,
        "cp": (*data, "send"),
        "pp": ("send",),
        "ep": ("all_to_all",),
        "tp": ("all_reduce", "all_gather", "reduce_scatter"),
    }[axis]
    for kind in axes:
        assert max(rank[kind] for rank in result) == counted[kind], (kind, counted, result)
    if axis == "dp":
        assert all(rank == result[0] for rank in result)
