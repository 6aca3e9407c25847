"""What the planner says of a run that answers requests, before it starts: first token, pace,
tokens/s, cache.

Pure but for the shape of weights, which `weights` looks up. Lengths that nobody knows yet are
assumed, and told.
"""

from __future__ import annotations

import math
from typing import Any, Final

from orchestrator.planner.serving import serving
from orchestrator.runs.submission.predict_training import Prediction
from orchestrator.runs.submission.target_hardware import Venue
from orchestrator.runs.submission.weights import shape_of
from workers.contracts import ModelSpec, ParallelPlan, RunSpec
from workers.contracts.specs.run_bodies import GenerateBody, ServeBody

PROMPT, OUTPUT = 256, 128  # tokens of a request, where only requests will tell
BLOCK: Final = 16  # tokens of a cache's block
# of the memory beside the weights the engine gives its cache this much (measured on its own start)
_CACHE_SHARE: Final = {"cpu": 0.4, "gpu": 0.85}
_KEPT: Final = ("ttft_s", "tpot_s", "tokens_per_s")
_MEMORY: Final = (
    "weights_bytes_per_device",
    "activations_bytes",
    "kv_room_bytes",
    "total_bytes",
    "capacity_bytes",
)


def predict_serving(spec: RunSpec, plan: ParallelPlan, venue: Venue) -> Prediction | None:
    """None for evaluate runs, and where the model's shape is not known.

    `fits` is about a single request.
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
    asked = _asked(shape, plan, venue, body.quantize, prompt, output)
    alone, full = (
        serving({**asked, "batch": plan.dp}),
        serving({**asked, "batch": max(seqs, plan.dp)}),
    )
    if not alone["ok"] or not full["ok"]:
        return None
    memory = {name: alone["memory"][name] for name in _MEMORY}
    device = venue.device(plan.world_size)
    document: dict[str, Any] = {
        "kind": "serving",
        "fits": bool(alone["fits"]),
        "alone": {name: alone[name] for name in _KEPT},
        "full": {"batch": full["batch"], **{name: full[name] for name in _KEPT}},
        "curve": [
            {name: each[name] for name in ("batch", *_KEPT)}
            for each in full["curve"]
            if each["batch"] <= 4 * seqs
        ],
        "kv_blocks": _blocks(body, shape, alone, device.memory_bytes, venue.entry.kind, seqs),
        "kv_bytes_per_token": alone["kv_bytes_per_token"],
        "prompt_len": prompt,
        "output_len": output,
        "bound": alone["bound"],
        "memory": memory,
        "host": {"host_bytes": 0},
        "device": venue.entry.name,
        "suggestions": alone.get("suggestions", []),
        "assumed": not venue.known,
    }
    return Prediction(document, document["fits"])


def _asked(
    shape: ModelSpec,
    plan: ParallelPlan,
    venue: Venue,
    quantize: str | None,
    prompt: int,
    output: int,
) -> dict[str, Any]:
    fp32 = plan.precision == "fp32"
    return {
        "model": shape,
        "cluster": venue.cluster(plan.world_size),
        "device": venue.device(plan.world_size),
        "prompt_len": prompt,
        "output_len": output,
        "tp": plan.tp,
        "pp": plan.pp,
        "replicas": plan.dp,
        "quantize": quantize or ("fp32" if fp32 else "none"),
        "kv_dtype": plan.precision if plan.precision in ("fp32", "bf16", "fp16") else "bf16",
        "block_size": BLOCK,
    }


def _blocks(
    body: GenerateBody | ServeBody,
    shape: ModelSpec,
    alone: dict[str, Any],
    memory_bytes: int,
    kind: str,
    seqs: int,
) -> int:
    """As many as are asked for, or as all sequences may fill and the memory beside the weights has
    room for.
    """
    if isinstance(body, ServeBody) and body.kv_blocks:
        return body.kv_blocks
    free_bytes = memory_bytes - alone["memory"]["weights_bytes_per_device"]
    held = (
        alone["memory"]["kv_bytes_per_sequence_device"] / alone["kv_bytes_per_sequence"]
    )  # a device's part of a token
    fits = int(
        free_bytes * _CACHE_SHARE.get(kind, 0.85) / (BLOCK * alone["kv_bytes_per_token"] * held)
    )
    return max(0, min(fits, seqs * math.ceil(shape.max_seq_len / BLOCK)))
