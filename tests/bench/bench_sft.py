"""Tokens/s of LoRA fine-tuning over TRL with PEFT; SmolLM2 135M's shape, fp32, two threads.

Same weights, rows, rank, targets, AdamW and clipping; both take turns in one run. Adapters start
from different random A, so that only the first losses (B = 0) must agree. Set REFERENCES to a
folder with trl 1.16 and peft 0.21; without it the peer must be installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
from pathlib import Path

from tests.bench.record import record
from tests.bench.sft_job import BATCH, MODEL, RANK, SEQ_LEN, write_job
from tests.bench.turns import Contender, run_in_turns

STEPS, WARMUP = 2, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    references = os.environ.get("REFERENCES")
    if references is None and importlib.util.find_spec("trl") is None:
        print("trl and peft are not installed: set REFERENCES to a folder that holds them")
        return
    if references is not None:
        os.environ["PYTHONPATH"] = references
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), threads=options.threads, rounds=options.rounds)


def compare(folder: Path, *, threads: int, rounds: int) -> None:
    """Let both train in turns and record a row."""
    job = write_job(folder, steps=WARMUP + rounds * STEPS)
    orrery, peer = Contender("Orrery", "sft_engine"), Contender("TRL with PEFT", "sft_trl")
    try:
        for number, each in enumerate((orrery, peer)):
            each.start(job, folder / str(number), threads=threads, helped=False)
        run_in_turns([orrery, peer], rounds=rounds, steps=STEPS, warmup=WARMUP)
    finally:
        for each in (orrery, peer):
            each.kill()
    first = [each.summary["losses"][0] for each in (orrery, peer)]
    assert abs(first[0] / first[1] - 1) < 1e-3, f"the first losses differ: {first}"
    ratios = [theirs / own for theirs, own in zip(peer.turns, orrery.turns, strict=True)]
    by_cpu = [theirs / own for theirs, own in zip(peer.cpu, orrery.cpu, strict=True)]
    tokens = BATCH * SEQ_LEN
    record(
        "finetuning",
        what=f"tokens/s of LoRA SFT, Orrery over TRL with PEFT, {MODEL}, {threads} threads, fp32",
        value=statistics.median(ratios),
        unit="times",
        figure=">= 2.0",
        spread=[round(min(ratios), 4), round(max(ratios), 4)],
        by_cpu_time=round(statistics.median(by_cpu), 4),
        tokens_per_s=round(tokens / statistics.median(orrery.steps), 1),
        theirs=round(tokens / statistics.median(peer.steps), 1),
        batch=BATCH,
        seq_len=SEQ_LEN,
        rank=RANK,
        turns=f"{rounds} of {STEPS} steps",
        first_losses=[round(loss, 5) for loss in first],
        peers=_peers(),
    )


def _peers() -> dict[str, str]:
    from importlib.metadata import distributions

    where = [os.environ["REFERENCES"]] if "REFERENCES" in os.environ else None
    matches = distributions(path=where) if where else distributions()
    return {each.name: each.version for each in matches if each.name in ("trl", "peft")}


if __name__ == "__main__":
    main()
