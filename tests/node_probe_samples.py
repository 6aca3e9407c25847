"""Reports of node probes with plausible numbers."""

from __future__ import annotations

import time
from typing import Any

from workers.contracts.wire.maintenance.node_probe import NodeProbeReport

TINY: dict[str, Any] = {
    "name": "probe",
    "layers": 5,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 344,
    "vocab": 256,
    "max_seq_len": 128,
    "gated_mlp": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "position": "rope",
    "tie_embeddings": True,
}


def step(micro_batch: int, seconds: float, **more: Any) -> dict[str, Any]:
    plan = {"dp": 2, "zero": 1, "precision": "fp32", "micro_batch_size": micro_batch}
    plan["global_batch_size"] = 2 * micro_batch
    return {
        "model": TINY,
        "plan": plan,
        "seq_len": 128,
        "step_time_s": seconds,
        "slowest_s": 1.1 * seconds,
        "steps": 8,
        **more,
    }


def node_report(*, gflops: float = 100.0, slower: float = 1.0, **more: Any) -> NodeProbeReport:
    rates = [
        {"measure": "matmul", "setting": "512 x 512 x 512 fp32", "value": gflops * 1e9},
        {"measure": "memory", "setting": "copy of 64 MiB", "value": 12e9},
        {"measure": "host", "setting": "operation", "value": 4e-6},
        {"measure": "all_reduce", "setting": "4 MiB", "value": 1.5e9, "seconds": 2.8e-3},
    ]
    steps = [
        step(2, 0.04 * slower, peak_bytes=450_000_000),
        step(6, 0.10 * slower),
    ]
    document = {
        "kind": "cpu",
        "device": "cpu",
        "time": time.time(),
        "seconds": 8.0,
        "ranks": 2,
        "cores": 2,
        "rates": [{**rate, "ranks": 2} for rate in rates],
        "steps": steps,
        "link": {"where": "intra", "bytes_per_s": 1.5e9, "latency_s": 1e-4},
    }
    return NodeProbeReport.from_dict(document | more)
