"""Computes tokens and FLOPs per step from a run's spec and plan. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from workers.contracts.catalog.model_flops import training_flops_per_token
from workers.contracts.specs.run import RunSpec


def per_step(spec: Mapping[str, Any], plan: Mapping[str, Any] | None) -> dict[str, float]:
    """Return `{tokens, flops}` per training step; empty if spec and plan do not define them.

    Live points carry only their step; the browser places them on other axes with these factors.
    """
    train, batch = spec.get("train"), (plan or {}).get("global_batch_size")
    if not isinstance(train, dict) or not isinstance(batch, int) or spec.get("kind") != "train":
        return {}
    tokens = float(batch * int(train["seq_len"]))
    try:
        run = RunSpec.from_dict(spec)
    except (ValidationError, ValueError):
        return {"tokens": tokens}
    if run.trained_shape is None or run.train is None:
        return {"tokens": tokens}
    return {
        "tokens": tokens,
        "flops": tokens * training_flops_per_token(run.trained_shape, run.train),
    }
