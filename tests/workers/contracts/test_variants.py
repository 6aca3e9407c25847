"""What a benchmark's techniques mean: variants of one world and batch, and what is left out with
its reason.
"""

from __future__ import annotations

from typing import Any

import pytest

from workers.contracts.specs.benchmarks.techniques import (
    TECHNIQUES,
    as_training,
    steps_per_repeat,
    technique_problems,
)
from workers.contracts.specs.benchmarks.variants import Expansion, expand, total_steps
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.training_support import engine_problems


def spec_of(plan: dict[str, Any], *techniques: str, **body: Any) -> RunSpec:
    return RunSpec.from_dict(
        {"kind": "benchmark", "plan": plan, "benchmark": {"techniques": list(techniques), **body}}
    )


def named(result: Expansion) -> list[str]:
    return [each.name for each in result.variants]


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"dp": 2, "micro_batch_size": 2, "global_batch_size": 16},
        {"dp": 2, "zero": 3, "prefetch_layers": 1, "precision": "bf16", "global_batch_size": 8},
        {"pp": 2, "tp": 2, "sequence_parallel": True, "global_batch_size": 8},
        {"dp": 4, "dp_replicate": 2, "zero": 2},
    ],
)
def test_every_variant_is_legal_and_of_one_size(plan: dict[str, Any]) -> None:
    spec = spec_of(plan)
    result = expand(spec)
    base = result.variants[0].plan
    assert (
        len({(each.plan.to_json(), each.compiled, each.fused) for each in result.variants})
        == len(result.variants)
        > 1
    )
    assert len({each.id for each in result.variants}) == len(result.variants)
    for each in result.variants:
        assert (each.plan.world_size, each.plan.global_batch_size) == (
            base.world_size,
            base.global_batch_size,
        )
        assert (
            engine_problems(as_training(spec, each.plan, compiled=each.compiled, fused=each.fused))
            == []
        )
    assert all(each["reason"] and each["technique"] in TECHNIQUES for each in result.left_out)


def test_techniques_say_what_changes_and_what_cannot() -> None:
    two = {"dp": 2, "micro_batch_size": 2, "global_batch_size": 8}
    assert named(expand(spec_of(two, "zero", "accumulation"))) == [
        "base",
        "micro-batch 4 × 1",
        "micro-batch 1 × 4",
        "ZeRO 1",
        "ZeRO 2",
        "ZeRO 3",
    ]
    assert expand(spec_of(two, "collectives")).devices == ["collectives"]
    [alone] = expand(spec_of({}, "collectives")).left_out
    assert alone["reason"] == "one rank has no peers to communicate with"
    [flat] = expand(spec_of(two, "schedule")).left_out
    assert "one pipeline stage" in flat["reason"]
    piped = expand(spec_of({"pp": 2, "tp": 2, "global_batch_size": 8}, "schedule"))
    assert named(piped) == [
        "base",
        "naive",
        "gpipe",
        "interleaved_1f1b",
        "zb1p",
        "zbv",
        "dualpipev",
    ]
    [stashed] = piped.left_out
    assert (stashed["name"], stashed["reason"]) == (
        "pipedream",
        "pipedream can be combined with dp only, tp is 2",
    )
    assert [(each.name, each.compiled) for each in expand(spec_of(two, "compile")).variants] == [
        ("base", False),
        ("compiled blocks", True),
    ]
    assert [(each.name, each.fused) for each in expand(spec_of(two, "fused_kernels")).variants] == [
        ("base", True),
        ("plain torch operations", False),
    ]
    spec = spec_of(two, "zero", steps=7, warmup_steps=1, repeats=3)
    assert steps_per_repeat(spec.benchmark) == 4 and total_steps(spec) == 4 * 3 * 4  # type: ignore[arg-type]


def test_unknown_names_are_reported_with_the_nearest() -> None:
    result = technique_problems(spec_of({}, "recompte", "fused_kernel", "zero").benchmark)  # type: ignore[arg-type]
    assert [str(each) for each in result] == [
        "benchmark.techniques.0: 'recompte' is not a technique. Use recompute.",
        "benchmark.techniques.1: 'fused_kernel' is not a technique. Use fused_kernels.",
    ]
    assert engine_problems(spec_of({}, "recompte"))
