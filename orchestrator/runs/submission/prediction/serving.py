"""The planner's prediction for an inference run at its submission: TTFT, TPOT, tokens/s, cache.

Reads weights' shapes through `weights`. Unknown request lengths are assumed and stated.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

from orchestrator.planner.model.terms import Table
from orchestrator.planner.serving import ServingRequest, serving
from orchestrator.planner.serving.all_terms import SERVING
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
_UNKNOWN_DRAFT: Final = (
    "The draft model's memory is not counted: the shape of its weights cannot be read here."
)
_TIMES: Final = ("ttft_s", "tpot_s", "tokens_per_s")
_MEMORY: Final = (
    "weights_bytes_per_device",
    "activations_bytes",
    "kv_room_bytes",
    "total_bytes",
    "capacity_bytes",
)


class _Draft(NamedTuple):
    """A draft model's memory."""

    weights_bytes: int = 0
    kv_bytes_per_token: float = 0.0


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
    request = _serving_request(shape, plan, hardware, body, prompt, output)
    alone, full = (
        serving({**request, "batch": plan.dp}),
        serving({**request, "batch": max(seqs, plan.dp)}),
    )
    if not alone["ok"] or not full["ok"]:
        return None
    memory = {name: alone["memory"][name] for name in _MEMORY}
    slots_bytes = _adapter_slot_bytes(body, shape, plan)
    draft = _draft_memory(body, plan, request)
    memory["adapters_bytes"] = slots_bytes
    memory["weights_bytes_per_device"] += draft.weights_bytes
    memory["kv_room_bytes"] = max(0, memory["kv_room_bytes"] - slots_bytes - draft.weights_bytes)
    memory["total_bytes"] += slots_bytes
    fits_without_draft = alone["fits"] and memory["total_bytes"] <= memory["capacity_bytes"]
    tokens = alone["kv_bytes_per_sequence"] / alone["kv_bytes_per_token"]
    memory["total_bytes"] += draft.weights_bytes + round(tokens * draft.kv_bytes_per_token)
    fits = bool(fits_without_draft) and memory["total_bytes"] <= memory["capacity_bytes"]
    suggestions = alone.get("suggestions", [])
    if fits_without_draft and not fits:
        suggestions = ["a smaller draft model, or none"]
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
            body,
            shape,
            alone,
            draft,
            device.memory_bytes - slots_bytes,
            hardware.entry.kind,
            seqs,
        ),
        "kv_bytes_per_token": _kv_bytes_per_token(body, shape, alone) + draft.kv_bytes_per_token,
        "prompt_len": prompt,
        "output_len": output,
        "bound": alone["bound"],
        "memory": memory,
        "host": {"host_bytes": 0},
        "device": hardware.entry.name,
        "suggestions": suggestions,
        "assumed": not hardware.known,
    }
    if body.draft is not None and shape_of(body.draft) is None:
        document["notes"] = [_UNKNOWN_DRAFT]
    return Prediction(document, document["fits"])


def _serving_request(
    shape: ModelSpec,
    plan: ParallelPlan,
    hardware: TargetHardware,
    body: GenerateBody | ServeBody,
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
        "quantize": body.quantize or ("fp32" if fp32 else "none"),
        "kv_dtype": body.kv_cache_dtype
        or (plan.precision if plan.precision in ("fp32", "bf16", "fp16") else "bf16"),
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


def _kv_bytes_per_token(
    body: GenerateBody | ServeBody, shape: ModelSpec, alone: dict[str, Any]
) -> float:
    """Of the model on all ranks; a quantized cache has two fp32 scales per layer and head."""
    scales = 8 * shape.layers * shape.kv_heads if body.kv_cache_dtype else 0
    return float(alone["kv_bytes_per_token"]) + scales


def _draft_memory(
    body: GenerateBody | ServeBody, plan: ParallelPlan, request: dict[str, Any]
) -> _Draft:
    """A draft model's memory on the first rank of each replica, which alone holds it, whole."""
    shape = shape_of(body.draft) if body.draft is not None else None
    if shape is None:
        return _Draft()
    fp32 = plan.precision == "fp32"
    types = {"quantize": "fp32" if fp32 else "none", "kv_dtype": "fp32" if fp32 else "bf16"}
    # columns, not an answer: the model's requests may exceed the draft's context
    sizes = ServingRequest.model_validate({**request, **types, "model": shape}).columns()
    table = Table({**sizes, "batch": 1.0}, 1, SERVING)
    return _Draft(round(float(table["weights_bytes"])), float(table["kv_bytes_per_token"]))


def _blocks(
    body: GenerateBody | ServeBody,
    shape: ModelSpec,
    alone: dict[str, Any],
    draft: _Draft,
    memory_bytes: int,
    kind: str,
    seqs: int,
) -> int:
    """The requested blocks, else as many as all sequences can fill and fit next to the weights."""
    if isinstance(body, ServeBody) and body.kv_blocks:
        return body.kv_blocks
    free_bytes = memory_bytes - alone["memory"]["weights_bytes_per_device"] - draft.weights_bytes
    device_share = alone["memory"]["kv_bytes_per_sequence_device"] / alone["kv_bytes_per_sequence"]
    per_token = _kv_bytes_per_token(body, shape, alone) * device_share + draft.kv_bytes_per_token
    fits = int(free_bytes * _CACHE_SHARE.get(kind, 0.85) / (BLOCK * per_token))
    return max(0, min(fits, seqs * math.ceil(shape.max_seq_len / BLOCK)))
