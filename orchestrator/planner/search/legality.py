"""Which plans of a table are illegal, and why: `workers.contracts.plan_problems` for columns
instead of one plan.

Knows shapes and divisibility; nothing of memory or speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.inputs import SCHEDULE
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import INTERLEAVED, SPLIT_BACKWARD, V_SHAPED

Mask = NDArray[np.bool_]

_CODES = {
    name: tuple(SCHEDULE[each] for each in group)
    for name, group in (("v", V_SHAPED), ("interleaved", INTERLEAVED), ("split", SPLIT_BACKWARD))
}


def illegal(
    columns: Mapping[str, Any],
    *,
    model: ModelSpec | None,
    seq_len: int | None = None,
    devices: Any = None,
) -> dict[str, Mask]:
    """A mask of illegal plans for each reason that applies to any; a plan is legal where none of
    them is set.

    `columns` hold whole numbers that broadcast against each other: `dp tp pp cp ep zero
    sequence_parallel schedule
    virtual_stages micro_batch global_batch`, and optionally `dp_replicate` (0: none),
    `pipedream_only` (weight stashing
    or vertical sync are set), `budget_without_auto`, `stage_entries` and `stage_sum` of
    `stage_layers` (-1: none).
    Says the same as `plan_problems`, except that a plan may show several reasons where that stops
    at the first.
    """
    c = {name: np.asarray(value) for name, value in columns.items()}
    found = {**_batch_and_degrees(c, devices), **_schedule(c), **_sharding(c)}
    if model is not None:
        found |= {**_tensor(c, model), **_layers(c, model)}
    if seq_len is not None:
        found |= _sequence(c, seq_len, model)
    return {reason: np.asarray(mask, bool) for reason, mask in found.items() if np.any(mask)}


def _batch_and_degrees(c: dict[str, Any], devices: Any) -> dict[str, Any]:
    found = {
        "global_batch_size: does not divide by micro_batch_size x dp": c["global_batch"]
        % (c["micro_batch"] * c["dp"])
        != 0,
        "ep: does not divide dp x cp": (c["dp"] * c["cp"]) % c["ep"] != 0,
    }
    if devices is not None:
        found["dp: dp x tp x pp x cp is not the number of devices"] = (
            c["dp"] * c["tp"] * c["pp"] * c["cp"] != devices
        )
    if "dp_replicate" in c:
        copies = c["dp_replicate"]
        found["dp_replicate: does not divide dp"] = (copies > 0) & (
            c["dp"] % np.maximum(copies, 1) != 0
        )
    return found


def _schedule(c: dict[str, Any]) -> dict[str, Any]:
    code, virtual, pp = c["schedule"], c["virtual_stages"], c["pp"]
    folded, rounds = np.isin(code, _CODES["v"]), np.isin(code, _CODES["interleaved"])
    micro_batches = c["global_batch"] // (c["micro_batch"] * c["dp"])
    pipedream = code == SCHEDULE["pipedream"]
    wrong = np.where(folded, virtual != 2, np.where(rounds, virtual < 2, virtual != 1))
    found = {
        "virtual_stages: not what the schedule wants": wrong,
        "global_batch_size: micro-batches do not divide into equal rounds": rounds
        & (micro_batches % np.maximum(1, micro_batches // pp) != 0),
        "global_batch_size: too few micro-batches for dualpipev": (code == SCHEDULE["dualpipev"])
        & (micro_batches < 2 * pp),
        "zero: pipedream keeps versions of whole weights": pipedream & (c["zero"] > 0),
    }
    if "pipedream_only" in c:
        found["weight_stashing: it and vertical_sync belong to pipedream"] = ~pipedream & (
            c["pipedream_only"] > 0
        )
    return found


def _sharding(c: dict[str, Any]) -> dict[str, Any]:
    found = {
        "zero: 3 with a schedule that splits the backward pass": (c["zero"] == 3)
        & np.isin(c["schedule"], _CODES["split"])
        & (c["pp"] > 1)
    }
    if "budget_without_auto" in c:
        found["recompute_budget_bytes: steers recompute auto only"] = c["budget_without_auto"] > 0
    return found


def _tensor(c: dict[str, Any], model: ModelSpec) -> dict[str, Any]:
    tp = c["tp"]
    heads = model.mfa.heads if model.mfa else model.heads
    found = {"tp: does not divide the heads": heads % tp != 0}
    if model.attention == "softmax":
        apart = (model.kv_heads % tp != 0) & (tp % model.kv_heads != 0)
        found["tp: neither divides the key-value heads nor is divided by them"] = apart & (
            heads % tp == 0
        )
    widths = {"ffn": model.ffn} if model.moe_layers < model.layers else {}
    if model.moe:
        widths["expert_ffn"] = model.moe.expert_ffn
        if model.moe.shared_experts:
            widths["shared_ffn"] = model.moe.shared_width
    return found | {
        f"tp: does not divide {name}": width % tp != 0 for name, width in widths.items()
    }


def _layers(c: dict[str, Any], model: ModelSpec) -> dict[str, Any]:
    stages = c["pp"] * c["virtual_stages"]
    found = {"pp: more stages than layers": model.layers < stages}
    if model.moe is None:
        found["ep: the model has no experts"] = c["ep"] > 1
    else:
        found["ep: does not divide the experts"] = model.moe.experts % c["ep"] != 0
    if "stage_entries" in c:
        entries = c["stage_entries"]
        wrong = (entries != stages) | (c["stage_sum"] != model.layers)
        found["stage_layers: not the stages or not the layers of the model"] = (
            (entries >= 0) & wrong & (model.layers >= stages)
        )
    return found


def _sequence(c: dict[str, Any], seq_len: int, model: ModelSpec | None) -> dict[str, Any]:
    cp = c["cp"]
    found = {
        "cp: does not divide the sequence": seq_len % cp != 0,
        "sequence_parallel: tokens of a rank do not divide by tp": (c["sequence_parallel"] > 0)
        & (seq_len % cp == 0)
        & ((seq_len // cp) % c["tp"] != 0),
    }
    if model is not None and model.position == "learned" and seq_len > model.max_seq_len:
        found["seq_len: more tokens than learned positions"] = np.ones(np.shape(cp), bool)
    return found
