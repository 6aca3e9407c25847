"""Runs that a device of known habits would have measured, for tests of calibration."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from orchestrator.planner.calibration.measurements import Pair
from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from tests.orchestrator.planner.predicted import request
from workers.contracts.catalog.presets import preset


def requests(
    *, device: str = "a100-80g", using: str = "megatron", hidden: tuple[int, ...] = (1024, 2048)
) -> list[Request]:
    """Plans of small models on up to 16 devices, every axis but experts and context varied."""
    result = []
    for width, (tp, pp, dp), micro, recompute in product(
        hidden,
        [(1, 1, 8), (2, 2, 2), (4, 1, 2), (8, 1, 1), (2, 1, 8), (1, 4, 2)],
        (1, 2, 8),
        ("none", "full"),
    ):
        spec = preset("gpt3-175b").model_copy(
            update={
                "layers": 16,
                "hidden": width,
                "heads": 16,
                "kv_heads": 16,
                "head_dim": width // 16,
                "ffn": 4 * width,
            }
        )
        plan = {
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "micro_batch_size": micro,
            "global_batch_size": 8 * micro * dp,
            "recompute": recompute,
            "precision": "bf16",
        }
        result.append(request(spec, plan, device=device, seq_len=1024, using=using))
    return result


def measured(
    request_list: list[Request], truth: Mapping[str, float], *, noise: float = 0.0, seed: int = 0
) -> list[Pair]:
    """Step times under the parameters of `truth`, log-normal noise on each."""
    table = table_of(
        request_list,
        {**columns_for(request_list), **{name: np.asarray(value) for name, value in truth.items()}},
    )
    wobble = np.exp(noise * np.random.default_rng(seed).standard_normal(len(request_list)))
    times = table.column("step_time_s") * wobble
    return [
        (each, {"step_time_s": float(time)}) for each, time in zip(request_list, times, strict=True)
    ]


def errors(pairs: list[Pair], calibration: Calibration | None) -> Any:
    """Relative errors `(n,)` of predictions."""
    request_list = [each for each, _ in pairs]
    predicted = table_of(request_list, columns_for(request_list, calibration)).column("step_time_s")
    return predicted / np.array([numbers["step_time_s"] for _, numbers in pairs]) - 1


def shuffled(pairs: list[Pair], seed: int = 0) -> list[Pair]:
    return [pairs[row] for row in np.random.default_rng(seed).permutation(len(pairs))]
