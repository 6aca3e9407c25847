"""Bytes per kind of collective: what the planner says against what real gloo ranks hand over, to the byte."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.planner import ask

pytestmark = pytest.mark.flow
ROOT = Path(__file__).resolve().parents[4]

LLAMA = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 80, "vocab": 50, "max_seq_len": 16}
RAGGED = {**LLAMA, "layers": 3, "ffn": 82, "vocab": 51, "qk_norm": True}
TIED = {**LLAMA, "tie_embeddings": True, "norm": "layernorm", "bias": "all", "position": "learned", "gated_mlp": False,
        "activation": "gelu"}  # fmt: skip
MOE = {**LLAMA, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 32}}
LATENT = {**LLAMA, "kv_heads": 4, "attention": "mla", "mla": {"q_lora_rank": 12, "kv_lora_rank": 16,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}}  # fmt: skip
WHOLE_HEADS = {**LLAMA, "kv_heads": 4}

CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("dp", 2, LLAMA, {"dp": 2, "zero": 0, "global_batch_size": 6}),
    ("dp", 2, LLAMA, {"dp": 2, "zero": 1, "global_batch_size": 4}),
    ("dp", 2, LLAMA, {"dp": 2, "zero": 2, "global_batch_size": 4}),
    ("dp", 2, LLAMA, {"dp": 2, "zero": 3, "global_batch_size": 4, "recompute": "full"}),
    ("dp", 4, RAGGED, {"dp": 4, "zero": 3}),
    ("dp", 2, TIED, {"dp": 2, "zero": 3}),
    ("tp", 2, WHOLE_HEADS, {"tp": 2, "global_batch_size": 3}),
    ("tp", 2, WHOLE_HEADS, {"tp": 2, "sequence_parallel": True, "micro_batch_size": 2, "global_batch_size": 4}),
    ("pp", 2, LLAMA, {"pp": 2, "schedule": "1f1b", "global_batch_size": 4}),
    ("pp", 3, RAGGED, {"pp": 3, "schedule": "gpipe", "global_batch_size": 3}),
    ("pp", 2, {**LLAMA, "layers": 4}, {"pp": 2, "schedule": "interleaved_1f1b", "global_batch_size": 4}),
    ("ep", 2, MOE, {"dp": 2, "ep": 2, "global_batch_size": 4}),
    ("cp", 2, TIED, {"cp": 2, "zero": 1, "global_batch_size": 2}),
    ("cp", 2, LATENT, {"cp": 2, "recompute": "selective"}),
    ("cp", 2, LLAMA, {"cp": 2, "zero": 3, "recompute": "full", "global_batch_size": 2}),
    ("cp", 4, RAGGED, {"dp": 2, "cp": 2, "zero": 2, "global_batch_size": 4}),
]


def predicted(model: dict[str, Any], plan: dict[str, Any], devices: int) -> dict[str, int]:
    line = {"model": model, "plan": plan, "cluster": {"devices_per_node": devices}, "workload": {"seq_len": 16}}
    [answer] = ask.estimate([line])
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
def test_what_is_not_counted_is_said_to_be_unknown(model: dict[str, Any], plan: dict[str, Any], framework: str) -> None:
    line = {"model": model, "plan": plan, "cluster": {"devices_per_node": 2}, "workload": {"seq_len": 16},
            "framework": framework}  # fmt: skip
    [answer] = ask.estimate([line])
    assert answer["ok"] and answer["collectives"] is None, answer


@functools.cache
def measured(ranks: int) -> dict[int, list[dict[str, float]]]:
    """By case, then by rank: all cases of as many ranks, in one start of them."""
    mine = {number: case for number, case in enumerate(CASES) if case[1] == ranks}
    asked = json.dumps([{"axis": c[0], "model": c[2], "plan": c[3], "seq_len": 16} for c in mine.values()])
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m",
             "tests.orchestrator.planner.collectives.program", asked]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("COUNTED ")), None)
    assert line, done.stderr[-3000:]
    by_rank = json.loads(line.removeprefix("COUNTED "))
    return {number: [found[index] for found in by_rank] for index, number in enumerate(mine)}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number][3].values())))
def test_bytes_of_a_step_are_exact(number: int) -> None:
    axis, ranks, model, plan = CASES[number]
    says, found = predicted(model, plan, ranks), measured(ranks)[number]
    data = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    axes = {"dp": data, "cp": (*data, "send"), "pp": ("send",), "ep": ("all_to_all",),
            "tp": ("all_reduce", "all_gather", "reduce_scatter")}[axis]  # fmt: skip
    for kind in axes:
        assert max(rank[kind] for rank in found) == says[kind], (kind, says, found)
    if axis == "dp":
        assert all(rank == found[0] for rank in found)
