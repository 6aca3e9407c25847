"""Losses and gradient norms of 50 GRPO steps against TRL 1.16 on the same recorded rollouts.

Set TRL_PYTHON to a Python that has trl 1.16. `--write` replaces the golden curve that
`tests/workers/posttraining/test_trl_curve.py` compares with, without TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.bench import grpo_job as job
from tests.bench.record import record
from tests.workers.posttraining.policy_ranks import run_policy
from workers.models.convert import main as convert

GOLDEN = Path(__file__).resolve().parents[1] / "workers/posttraining/golden/grpo_trl.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the golden curve")
    options = parser.parse_args()
    python = os.environ.get("TRL_PYTHON")
    if python is None:
        print("set TRL_PYTHON to a Python that has trl 1.16")
        return
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, rollouts = compare(Path(folder), python)
    gap = max(
        abs(one - other)
        for name in ("loss", "grad_norm")
        for one, other in zip(ours[name], theirs[name], strict=True)
    )
    if options.write:
        GOLDEN.parent.mkdir(exist_ok=True)
        golden = {"trl": "1.16.0", "rollouts": rollouts, **theirs}
        GOLDEN.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    record(
        "finetuning",
        what="largest difference of loss or gradient norm to TRL, 50 Dr. GRPO steps on recorded "
        "rollouts, fp32",
        value=gap,
        unit="",
        figure="<= 1e-4",
        peers={"trl": "1.16.0"},
    )


def compare(
    folder: Path, python: str
) -> tuple[dict[str, Any], dict[str, Any], list[list[dict[str, Any]]]]:
    """Both curves, and the rollouts by step."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in job.prompt_lines()))
    result = run_policy(None, job.recorded_spec(str(path)), folder / "ours")
    assert result.outcomes[0]["class"] == "ok", result.outcomes
    ours = {name: result.values(name) for name in ("loss", "grad_norm")}
    # the same initial weights: a run whose one update changes nothing
    initial = job.recorded_spec(str(path), 1)
    initial["train"] |= {"steps": 1, "optimizer": {"name": "sgd", "lr": 1e-30}}
    start = run_policy(None, initial, folder / "initial")
    convert([str(start.directory / "checkpoints/step-00000001"), str(folder / "base")])
    steps: list[list[dict[str, Any]]] = [[] for _ in range(job.STEPS)]
    for line in (folder / "ours/rank-0/rollouts.jsonl").read_text().splitlines():
        each = json.loads(line)
        names = ("prompt_id", "sample", "prompt_ids", "token_ids", "logprobs", "reward")
        steps[each["step"] - 1].append({name: each[name] for name in names})
    settings = {
        "rollouts": steps,
        "rows": job.PROMPTS * job.GROUP,
        "group": job.GROUP,
        "longest": job.LONGEST,
        "lr": job.LR,
        "betas": job.BETAS,
        "clip_norm": job.CLIP_NORM,
    }
    (folder / "job.json").write_text(json.dumps(settings))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([python, "-m", "tests.bench.grpo_trl", str(folder)], env=env, check=True)
    return ours, json.loads((folder / "trl.json").read_text()), steps


if __name__ == "__main__":
    main()
