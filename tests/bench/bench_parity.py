"""Differences of each technique, and of combinations, from one process; bytes of each ZeRO stage.

Trains a ragged model in fp32 for 20 steps (with experts: 12). A difference is the largest over all
steps of the loss, or over all weights at the end, relative to the tensor's largest number. Bytes of
each rank are compared with the stage's definition. Arguments select `parity` or `bytes`.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.record import record
from tests.workers.training.conftest import final_weights, make_spec, relative
from tests.workers.training.pool import Pool, Result, train_alone
from tests.workers.training.test_combined_parallelism import COMBINATIONS, FLAT, STEPS, spec
from tests.workers.training.test_eight_ranks import PLANS as EIGHT
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import preset
from workers.models.weights.parameter_shapes import weight_shapes
from workers.training.optim.zero1 import assign_owners

LAYERS = {**FLAT, "name": "layers", "layers": 4}
ALONE: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    *((FLAT, {"dp": 2, "zero": zero}, {}) for zero in range(4)),
    (FLAT, {"dp": 4, "zero": 3, "prefetch_layers": 1}, {}),
    (FLAT, {"offload": "optimizer"}, {}),
    (FLAT, {"offload": "nvme"}, {}),
    (FLAT, {"tp": 2}, {}),
    (FLAT, {"tp": 2, "sequence_parallel": True}, {}),
    *(
        (LAYERS, {"pp": 2, "schedule": schedule}, {})
        for schedule in ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev")
    ),
    (FLAT, {"cp": 2}, {}),
    *((FLAT, {"recompute": kind}, {}) for kind in ("selective", "full", "auto")),
    (FLAT, {"micro_batch_size": 4}, {}),
]
RANKS = (2, 4, 8)


def main(selected: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pools = {size: Pool(size, Path(folder) / f"store-{size}") for size in RANKS}
        try:
            if not selected or "parity" in selected:
                parity(pools, Path(folder))
            if not selected or "bytes" in selected:
                bytes_by_rank(pools, Path(folder))
        finally:
            for pool in pools.values():
                pool.close()


def parity(pools: dict[int, Pool], folder: Path) -> None:
    cases = [*ALONE, *COMBINATIONS, *((model, plan, {}) for model, plan in EIGHT)]
    references: dict[str, Result] = {}
    for number, (model, plan, more) in enumerate(cases):
        key = f"{model['name']} {more}"
        if key not in references:
            references[key] = _succeeded(
                train_alone(spec(model, {}, **more), folder / f"one-{number}")
            )
        reference, result = (
            references[key],
            _succeeded(_train(spec(model, plan, **more), pools, folder / f"{number}")),
        )
        steps = more.get("steps", STEPS)
        names = ", ".join(
            f"{name} {value}" for name, value in {**plan, **more}.items() if name != "steps"
        )
        loss = max(
            abs(a / b - 1)
            for a, b in zip(result.values("loss"), reference.values("loss"), strict=True)
        )
        record(
            "parity",
            what=f"loss, {model['name']}: {names}",
            value=loss,
            unit="of one process's",
            figure="<= 1e-5",
            digits=11,
            steps=steps,
        )
        expected, weights = final_weights(reference, steps), final_weights(result, steps)
        difference = max(
            relative(weights[name], expected[name])
            for name in expected.keys() - set(_undetermined(model, expected))
        )
        record(
            "parity",
            what=f"weights, {model['name']}: {names}",
            value=difference,
            unit="of the largest",
            figure="<= 1e-4",
            digits=11,
            steps=steps,
        )


def bytes_by_rank(pools: dict[int, Pool], folder: Path) -> None:
    """Bytes of weights, gradients and optimizer state of each rank of the 15M model.

    By definition a rank holds 4 bytes per number of weights and of gradients and 8 of AdamW's
    moments; ZeRO 1 divides the moments over the ranks, 2 the gradients too, 3 everything. Here ZeRO
    1 assigns full parameters, as ZeroRedundancyOptimizer does: `uneven` is what the fullest rank
    holds beyond an even part. ZeRO 2 shards the fp32 weights as well, as `fully_shard` does;
    `gathered_bytes` is what a rank holds in addition between the passes.
    """
    model = preset("llama-15m")
    full, sizes = (
        4 * parameter_count(model).total,
        [math.prod(shape) for shape in weight_shapes(model).values()],
    )
    for size in (2, 4):
        for zero in range(4):
            plan = {"dp": size, "zero": zero, "global_batch_size": size}
            document = make_spec("llama-15m", plan, steps=1, seq_len=16)
            result = _succeeded(pools[size].train(document, folder / f"bytes-{size}-{zero}"))
            share = {"params": size if zero >= 2 else 1, "grads": size if zero >= 2 else 1}
            both, loads = sum(full / share[name] for name in share), [0] * size
            assign_owners(sizes, loads)
            moments = (
                [8 * load for load in loads]
                if zero == 1
                else [2 * full / (size if zero else 1)] * size
            )
            names = ("params", "grads", "optimizer")
            held = [
                sum(result.values(f"memory/{name}_bytes", rank)[0] for name in names)
                for rank in range(size)
            ]
            difference = max(
                abs(actual / (both + own) - 1) for actual, own in zip(held, moments, strict=True)
            )
            uneven = max(held) / (both + sum(moments) / size) - 1 if zero else 0.0
            gathered = max(result.values("memory/buffers_bytes", rank)[0] for rank in range(size))
            record(
                "parity",
                # row name since version 0.1
                what=f"bytes of a rank, ZeRO {zero} on {size}: beside the definition",
                value=difference,
                unit="of it",
                figure="<= 0.01",
                held=held,
                uneven=round(uneven, 4),
                gathered_bytes=gathered,
            )


def _train(document: dict[str, Any], pools: dict[int, Pool], folder: Path) -> Result:
    plan = document["plan"]
    ranks = plan.get("dp", 1) * plan.get("tp", 1) * plan.get("pp", 1) * plan.get("cp", 1)
    return train_alone(document, folder) if ranks == 1 else pools[ranks].train(document, folder)


def _succeeded(result: Result) -> Result:
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    return result


def _undetermined(model: dict[str, Any], weights: dict[str, Any]) -> Iterator[str]:
    """Key biases without rotary positions: softmax cancels them.

    Their gradient is rounding error, which Adam amplifies.
    """
    yield from (
        name
        for name in weights
        if model.get("position") == "learned" and name.endswith("attn.k.bias")
    )


if __name__ == "__main__":
    main(sys.argv[1:])
