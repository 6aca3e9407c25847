"""The planner's prediction for an inference run at its submission: TTFT, TPOT, tokens/s, cache.

Reads weights' shapes through `weights`. Unknown request lengths are assumed and stated.
"""

from __future__ import annotations

import math
from typing import Any, Final

from orchestrator.planner.serving import serving
from orchestrator.runs.submission.prediction.training import Prediction
from orchestrator.runs.submission.target_hardware import TargetHardware
from orchestrator.runs.submission.weights import shape_of
from workers.contracts import ModelSpec, ParallelPlan, RunSpec
from workers.contracts.catalog.adapter_shapes import block_linears
from workers.contracts.specs.inference import DEFAULT_ADAPTER_RANK, GenerateBody, ServeBody

PROMPT, OUTPUT = 256, 128  # assumed tokens per request
BLOCK: Final = 16  # tokens per KV cache block
# share of the memory without weights that the engine gives to its cache (measured at its start)
_CACHE_SHARE: Final = {"cpu": 0.4, "gpu": 0.85}
_TIMES: Final = ("ttft_s", "tpot_s", "tokens_per_s")
_MEMORY: Final = (
    "weights_bytes_per_device",
    "activations_bytes",
    "kv_room_bytes",
    "total_bytes",
    "capacity_bytes",
)


def predict_serving(
    spec: RunSpec, plan: ParallelPlan, hardware: TargetHardware
) -> Prediction | None:
    """The prediction; None for evaluate runs and unknown model shapes.

    `fits` refers to a single request.
    """
    body, shape = spec.body, shape_of(spec.model)
    if shape is None or not isinstance(body, GenerateBody | ServeBody):
        return None
    output = min(
        body.max_new_tokens if isinstance(body, GenerateBody) else OUTPUT,
        max(1, shape.max_seq_len // 2),
    )
    prompt = max(1, min(PROMPT, shape.max_seq_len - output))
    seqs = body.max_seqs if isinstance(body, ServeBody) else 16
    request = _serving_request(shape, plan, hardware, body.quantize, prompt, output)
    alone, full = (
        serving({**request, "batch": plan.dp}),
        serving({**request, "batch": max(seqs, plan.dp)}),
    )
    if not alone["ok"] or not full["ok"]:
        return None
    memory = {name: alone["memory"][name] for name in _MEMORY}
    slots_bytes = _adapter_slot_bytes(body, shape, plan)
    memory["adapters_bytes"] = slots_bytes
    memory["kv_room_bytes"] = max(0, memory["kv_room_bytes"] - slots_bytes)
    memory["total_bytes"] += slots_bytes
    fits = bool(alone["fits"]) and memory["total_bytes"] <= memory["capacity_bytes"]
    device = hardware.device(plan.world_size)
    document: dict[str, Any] = {
        "kind": "serving",
        "fits": fits,
        "alone": {name: alone[name] for name in _TIMES},
        "full": {"batch": full["batch"], **{name: full[name] for name in _TIMES}},
        "curve": [
            {name: point[name] for name in ("batch", *_TIMES)}
            for point in full["curve"]
            if point["batch"] <= 4 * seqs
        ],
        "kv_blocks": _blocks(
            body, shape, alone, device.memory_bytes - slots_bytes, hardware.entry.kind, seqs
        ),
        "kv_bytes_per_token": alone["kv_bytes_per_token"],
        "prompt_len": prompt,
        "output_len": output,
        "bound": alone["bound"],
        "memory": memory,
        "host": {"host_bytes": 0},
        "device": hardware.entry.name,
        "suggestions": alone.get("suggestions", []),
        "assumed": not hardware.known,
    }
    return Prediction(document, document["fits"])


def _serving_request(
    shape: ModelSpec,
    plan: ParallelPlan,
    hardware: TargetHardware,
    quantize: str | None,
    prompt: int,
    output: int,
) -> dict[str, Any]:
    fp32 = plan.precision == "fp32"
    return {
        "model": shape,
        "cluster": hardware.cluster(plan.world_size),
        "device": hardware.device(plan.world_size),
        "prompt_len": prompt,
        "output_len": output,
        "tp": plan.tp,
        "pp": plan.pp,
        "replicas": plan.dp,
        "quantize": quantize or ("fp32" if fp32 else "none"),
        "kv_dtype": plan.precision if plan.precision in ("fp32", "bf16", "fp16") else "bf16",
        "block_size": BLOCK,
    }


def _adapter_slot_bytes(
    body: GenerateBody | ServeBody, shape: ModelSpec, plan: ParallelPlan
) -> int:
    """Bytes of the slots for adapters on the device with the most layers, at most.

    Of a linear that is sharded, one factor is replicated; this counts both.
    """
    if not isinstance(body, ServeBody) or not body.slots:
        return 0
    rank = -(-(body.adapter_rank or DEFAULT_ADAPTER_RANK) // 8) * 8
    layers = max(plan.layers_of_stages(shape.layers))
    widths = max(
        sum(outputs + inputs for outputs, inputs in block_linears(shape, layer).values())
        for layer in range(shape.layers)
    )
    itemsize = 4 if plan.precision == "fp32" else 2
    return body.slots * rank * layers * widths * itemsize


def _blocks(
    body: GenerateBody | ServeBody,
    shape: ModelSpec,
    alone: dict[str, Any],
    memory_bytes: int,
    kind: str,
    seqs: int,
) -> int:
    """The requested blocks, else as many as all sequences can fill and fit next to the weights."""
    if isinstance(body, ServeBody) and body.kv_blocks:
        return body.kv_blocks
    free_bytes = memory_bytes - alone["memory"]["weights_bytes_per_device"]
    device_share = alone["memory"]["kv_bytes_per_sequence_device"] / alone["kv_bytes_per_sequence"]
    fits = int(
        free_bytes
        * _CACHE_SHARE.get(kind, 0.85)
        / (BLOCK * alone["kv_bytes_per_token"] * device_share)
    )
    return max(0, min(fits, seqs * math.ceil(shape.max_seq_len / BLOCK)))
