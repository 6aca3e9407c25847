"""Seconds of a GRPO step over TRL's with transformers generation; SmolLM2 135M's shape, fp32.

8 prompts with 8 answers of 16 to 128 tokens; equal weights, prompts, answer lengths, rows per
forward pass and optimizer. Both take turns in one run. Set TRL_PYTHON to a Python that has trl
1.16.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from tests.bench.grpo_speed_job import GROUP, LONGEST, MODEL, PROMPTS, SHORTEST, write_job
from tests.bench.record import record
from tests.bench.turns import Contender, run_in_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="uncounted steps")
    parser.add_argument("--layers", type=int, help="fewer layers, for a short run")
    options = parser.parse_args()
    python = os.environ.get("TRL_PYTHON")
    if python is None:
        print("set TRL_PYTHON to a Python that has trl 1.16")
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        compare(
            Path(folder),
            python,
            threads=options.threads,
            rounds=options.rounds,
            warmup=options.warmup,
            layers=options.layers,
        )


def compare(
    folder: Path, python: str, *, threads: int, rounds: int, warmup: int, layers: int | None
) -> None:
    """Let both train in turns and record a row."""
    job = write_job(folder, steps=warmup + rounds, layers=layers)
    orrery = Contender("Orrery", "grpo_speed_engine")
    peer = Contender("TRL", "grpo_speed_trl", python=python)
    try:
        for number, each in enumerate((orrery, peer)):
            each.start(job, folder / str(number), threads=threads, helped=False)
        run_in_turns([orrery, peer], rounds=rounds, steps=1, warmup=warmup)
    finally:
        for each in (orrery, peer):
            each.kill()
    ratios = [theirs / own for theirs, own in zip(peer.turns, orrery.turns, strict=True)]
    by_cpu = [theirs / own for theirs, own in zip(peer.cpu, orrery.cpu, strict=True)]
    shortened = "" if layers is None else f"{layers} of 30 layers, "
    record(
        "finetuning",
        what=f"seconds of a GRPO step, TRL with transformers generation over Orrery, {MODEL}, "
        f"{shortened}{PROMPTS} prompts x {GROUP} answers of {SHORTEST} to {LONGEST} tokens, "
        f"{threads} threads, fp32",
        value=statistics.median(ratios),
        unit="times",
        figure="" if shortened else ">= 4",
        spread=[round(min(ratios), 4), round(max(ratios), 4)],
        by_cpu_time=round(statistics.median(by_cpu), 4),
        step_s=round(statistics.median(orrery.steps), 2),
        theirs_s=round(statistics.median(peer.steps), 2),
        phases={
            name: round(statistics.median(values[warmup:]), 2)
            for name, values in orrery.summary["phases"].items()
            if values[warmup:]
        },
        their_phases={
            name: round(statistics.median(values[warmup:]), 2)
            for name, values in peer.summary["phases"].items()
        },
        answer_tokens=orrery.summary["tokens"],
        their_computed_tokens=peer.summary["computed"],
        turns=f"{rounds} of 1 step after {warmup} uncounted",
        peers={"trl": "1.16.0"},
    )


if __name__ == "__main__":
    main()
