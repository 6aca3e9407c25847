"""A benchmark on two ranks: variants train the same, failures are rows, a second attempt does not
measure twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import FULL
from tests.workers.training.conftest import TINY
from tests.workers.training.pool import Pool, read_lines
from workers.contracts.specs.benchmarks.variants import BASE

SPEC: dict[str, Any] = {
    "kind": "benchmark",
    "model": dict(TINY),
    "plan": {"dp": 2, "micro_batch_size": 1, "global_batch_size": 4},
    "benchmark": {
        "techniques": ["accumulation", "recompute", "fused_kernels", "zero", "axes", "collectives"],
        "steps": 2,
        "warmup_steps": 1,
        "repeats": 2,
        "seq_len": 16,
        "seed": 3,
    },
}
# their training is compared in test_recompute.py and test_zero.py; each technique keeps a variant
LEFT_OUT = (
    set()
    if FULL
    else {
        "recompute: recompute auto",
        "zero: ZeRO 1",
        "zero: ZeRO 2",
    }
)


def ranks(spec: dict[str, Any], directory: str, breaks: str = "") -> dict[str, Any]:
    """In a rank of the pool: runs the benchmark; the variant `breaks` runs out of memory."""
    import os

    from workers.runtime.environment import read_environment
    from workers.training.benchmark import collectives, repeat, runner
    from workers.training.benchmark.accept import accept_benchmark

    class Broken(repeat.Repeat):
        def train(self, world: Any, samples: Any) -> Any:
            if self.run.plan.recompute == breaks:
                raise MemoryError("no room for it")
            return super().train(world, samples)

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = read_environment(Path(directory), env={name: os.environ[name] for name in names})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Repeat", Broken)
        patch.setattr(collectives, "_CPU_SIZES", collectives._CPU_SIZES[:5])  # to 1 MiB
        accepted = accept_benchmark(spec)
        variants = accepted.expansion.variants
        variants[:] = [each for each in variants if each.id not in LEFT_OUT]
        outcome = runner.run_benchmark(accepted, environment)
    return {"class": outcome.exit_class, "reason": outcome.reason, "step": outcome.step}


def test_variants_train_alike_and_a_failing_one_is_a_row(
    pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    call = "tests.workers.training.test_benchmark:ranks"
    outcomes = pools(2).call(call, spec=SPEC, directory=str(tmp_path), breaks="full")
    assert [each["class"] for each in outcomes] == ["ok", "ok"], outcomes
    results_of_ranks = json.loads((tmp_path / "benchmark.json").read_text())
    rows = {row["id"]: row for row in results_of_ranks["rows"]}
    failed = rows.pop("recompute: recompute full")
    assert (
        failed["state"] == "failed"
        and failed["message"] == "out of memory: no room for it (rank 0)"
    )
    received = {BASE, "accumulation", "recompute", "fused_kernels", "zero", "axes"}
    assert {row["technique"] for row in rows.values()} == received
    for name, row in rows.items():
        assert row["state"] == "measured", row
        assert row["deviation"] <= 1e-5, name
        assert (
            row["low_s"] <= row["step_time_s"] <= row["high_s"]
            and row["steps"] == 2
            and len(row["turns_s"]) == 2
        )
        assert row["samples_per_s"] > 0 and row["peak_bytes"] > 0
    assert rows["zero: ZeRO 3"]["memory"]["params"] < rows[BASE]["memory"]["params"]
    assert (
        rows["accumulation: micro-batch 2 × 1"]["memory"]["activations"]
        > rows[BASE]["memory"]["activations"]
    )

    links = results_of_ranks["measured_devices"]["collectives"]
    kinds = {row["kind"] for row in links["rows"]}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}
    assert links["link"]["where"] == "intra" and links["link"]["bytes_per_s"] > 1e6
    events = read_lines(tmp_path / "rank-0" / "events.jsonl")
    assert [each["data"]["id"] for each in events if each["type"] == "benchmark_result"].count(
        BASE
    ) == 1
    points = read_lines(tmp_path / "rank-0" / "points.jsonl")
    assert [point["step"] for point in points] == list(range(1, 2 * 2 * len(rows) + 1))

    outcomes = pools(2).call(call, spec=SPEC, directory=str(tmp_path))
    assert [each["class"] for each in outcomes] == ["ok", "ok"]
    assert len(read_lines(tmp_path / "rank-0" / "points.jsonl")) == len(points)
    again = json.loads((tmp_path / "benchmark.json").read_text())
    assert again["rows"] == results_of_ranks["rows"]
