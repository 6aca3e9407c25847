"""Legal plans for all presets, and a short way to export one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from orchestrator.planner.interchange import Exported, export
from workers.contracts import ClusterSpec, ModelSpec, ParallelPlan, plan_problems
from workers.contracts.catalog.presets import PRESETS

Case = tuple[ModelSpec, ParallelPlan, ClusterSpec, int]


def write(
    kind: str, model: str | ModelSpec = "llama3-8b", *, seq_len: int = 4096, **plan: Any
) -> Exported:
    """Exports a plan on nodes of up to eight devices, bf16 by default."""
    chosen = ParallelPlan.from_dict({"precision": "bf16", **plan})
    world = chosen.world_size
    cluster = ClusterSpec(
        device="h100-80g", nodes=max(1, world // 8), devices_per_node=min(8, world)
    )
    spec = PRESETS[model] if isinstance(model, str) else model
    return export(kind, model=spec, plan=chosen, cluster=cluster, seq_len=seq_len)


def legal_cases(count: int, seed: int) -> Iterator[Case]:
    """`count` random legal plans over all presets, schedules, stages, offloads and precisions."""
    rng = random.Random(seed)
    models = list(PRESETS.values())
    while count:
        model, seq_len = rng.choice(models), rng.choice([512, 1024])
        values: dict[str, Any] = {
            "dp": rng.choice([1, 2, 4, 8]),
            "tp": rng.choice([1, 1, 2, 4]),
            "pp": rng.choice([1, 1, 2, 4]),
            "cp": rng.choice([1, 1, 2]),
            "ep": rng.choice([1, 1, 2, 4]),
            "zero": rng.randrange(4),
            "sequence_parallel": rng.random() < 0.6,
            "offload": rng.choice(["none", "none", "none", "optimizer", "all", "nvme"]),
            "recompute": rng.choice(["none", "selective", "full", "auto"]),
            "precision": rng.choice(["fp32", "bf16", "bf16", "fp16", "fp8"]),
            "schedule": rng.choice(
                [
                    "naive",
                    "gpipe",
                    "1f1b",
                    "interleaved_1f1b",
                    "zb1p",
                    "zbv",
                    "dualpipev",
                    "pipedream",
                ]
            ),
            "micro_batch_size": rng.choice([1, 2]),
        }
        values["global_batch_size"] = (
            values["dp"] * values["micro_batch_size"] * rng.choice([1, 2, 4, 8, 16])
        )
        if values["dp"] > 2 and rng.random() < 0.3:
            values["dp_replicate"] = 2
        for name, choice in (
            ("grad_dtype", "bf16"),
            ("params_dtype", "bf16"),
            ("prefetch_layers", 2),
        ):
            if rng.random() < 0.1:
                values[name] = choice
        if rng.random() < 0.1:
            values["loss_scale"] = {"initial": 1000.0, "growth_interval": 500, "growth": 3.0}
        plan = ParallelPlan.from_dict(values)
        world = plan.world_size
        cluster = ClusterSpec(
            device="h100-80g", nodes=max(1, world // 8), devices_per_node=min(8, world)
        )
        if not plan_problems(plan, model=model, seq_len=seq_len, devices=cluster.devices):
            count -= 1
            yield model, plan, cluster, seq_len
