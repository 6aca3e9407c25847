"""How far each technique, and many together, come from one process: fp32, 20 steps of a ragged
model (experts: 12), and
how many bytes each ZeRO stage holds on every rank beside what its definition says.

Distances are the largest over all steps of the loss, and over all weights at the end, each against
its tensor's largest
number. Arguments pick `parity` or `bytes`.
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


def main(wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pools = {size: Pool(size, Path(folder) / f"store-{size}") for size in RANKS}
        try:
            if not wanted or "parity" in wanted:
                parity(pools, Path(folder))
            if not wanted or "bytes" in wanted:
                bytes_by_rank(pools, Path(folder))
        finally:
            for pool in pools.values():
                pool.close()


def parity(pools: dict[int, Pool], folder: Path) -> None:
    cases = [*ALONE, *COMBINATIONS, *((model, plan, {}) for model, plan in EIGHT)]
    ones: dict[str, Result] = {}
    for number, (model, plan, more) in enumerate(cases):
        key = f"{model['name']} {more}"
        if key not in ones:
            ones[key] = _ended(train_alone(spec(model, {}, **more), folder / f"one-{number}"))
        one, result = (
            ones[key],
            _ended(_trained(spec(model, plan, **more), pools, folder / f"{number}")),
        )
        steps = more.get("steps", STEPS)
        names = ", ".join(
            f"{name} {value}" for name, value in {**plan, **more}.items() if name != "steps"
        )
        loss = max(
            abs(a / b - 1) for a, b in zip(result.values("loss"), one.values("loss"), strict=True)
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
        theirs, ours = final_weights(one, steps), final_weights(result, steps)
        weights = max(
            relative(ours[name], theirs[name])
            for name in theirs.keys() - set(_unseen(model, theirs))
        )
        record(
            "parity",
            what=f"weights, {model['name']}: {names}",
            value=weights,
            unit="of the largest",
            figure="<= 1e-4",
            digits=11,
            steps=steps,
        )


def bytes_by_rank(pools: dict[int, Pool], folder: Path) -> None:
    """The 15M model. By definition a rank holds 4 bytes a number of weights and gradients and 8 of
    AdamW's moments;
    ZeRO 1 divides the moments over the ranks, 2 the gradients too, 3 all of it. Here ZeRO 1 deals
    whole parameters, as
    ZeroRedundancyOptimizer does: `uneven` is what the fullest rank holds beyond an even part. ZeRO
    2 shards the fp32
    weights as well, as `fully_shard` does; `gathered_bytes` is what lies beside them between the
    passes.
    """
    model = preset("llama-15m")
    whole, sizes = (
        4 * parameter_count(model).total,
        [math.prod(shape) for shape in weight_shapes(model).values()],
    )
    for size in (2, 4):
        for zero in range(4):
            plan = {"dp": size, "zero": zero, "global_batch_size": size}
            made = make_spec("llama-15m", plan, steps=1, seq_len=16)
            result = _ended(pools[size].train(made, folder / f"bytes-{size}-{zero}"))
            share = {"params": size if zero >= 2 else 1, "grads": size if zero >= 2 else 1}
            both, loads = sum(whole / share[name] for name in share), [0] * size
            assign_owners(sizes, loads)
            moments = (
                [8 * load for load in loads]
                if zero == 1
                else [2 * whole / (size if zero else 1)] * size
            )
            names = ("params", "grads", "optimizer")
            held = [
                sum(result.values(f"memory/{name}_bytes", rank)[0] for name in names)
                for rank in range(size)
            ]
            apart = max(
                abs(each / (both + own) - 1) for each, own in zip(held, moments, strict=True)
            )
            uneven = max(held) / (both + sum(moments) / size) - 1 if zero else 0.0
            gathered = max(result.values("memory/buffers_bytes", rank)[0] for rank in range(size))
            record(
                "parity",
                what=f"bytes of a rank, ZeRO {zero} on {size}: beside the definition",
                value=apart,
                unit="of it",
                figure="<= 0.01",
                held=held,
                uneven=round(uneven, 4),
                gathered_bytes=gathered,
            )


def _trained(made: dict[str, Any], pools: dict[int, Pool], folder: Path) -> Result:
    plan = made["plan"]
    ranks = plan.get("dp", 1) * plan.get("tp", 1) * plan.get("pp", 1) * plan.get("cp", 1)
    return train_alone(made, folder) if ranks == 1 else pools[ranks].train(made, folder)


def _ended(result: Result) -> Result:
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    return result


def _unseen(model: dict[str, Any], weights: dict[str, Any]) -> Iterator[str]:
    """Without rotation softmax does not see a bias of keys: its gradient is rounding alone, which
    Adam blows up.
    """
    yield from (
        name
        for name in weights
        if model.get("position") == "learned" and name.endswith("attn.k.bias")
    )


if __name__ == "__main__":
    main(sys.argv[1:])
