"""Steps per hour of asynchronous against synchronous rollouts: 2 training and 2 rollout ranks.

A tiny model continues the alphabet from a letter: most answers are short, a fifth are long, as in
reasoning. Both modes start from the same weights and take the same prompts; they alternate over
seeds. `--model` and lengths decide how much of a synchronous step is generation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.record import record

ALPHABET = "".join(chr(code) for code in range(48, 122))
PROGRAM = "workers.posttraining.reinforcement.main"
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"staleness": {"max": 0, "correction": "none"}},
    "asynchronous": {"staleness": {"max": 2, "correction": "decoupled"}},
}
FIRST = 5  # steps before the measured ones


def prompts(folder: Path, seed: int) -> Path:
    """Letters whose answers are the rest of the alphabet: 4 of 5 are short."""
    generator = np.random.default_rng(seed)
    lines = []
    for _ in range(512):
        short = generator.random() < 0.8
        length = int(generator.integers(2, 9) if short else generator.integers(40, 73))
        rest = ALPHABET[-length:]
        lines.append({"prompt": rest[0] + ":", "completion": rest})
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def spec(path: Path, *, hidden: int, layers: int, **train: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "model": {
            "name": "alphabet",
            "layers": layers,
            "hidden": hidden,
            "heads": 4,
            "ffn": 4 * hidden,
            "vocab": 256,
            "max_seq_len": 128,
        },
        "data": {"path": str(path), "format": "prompt_completion"},
        "train": {"seq_len": 80, **train},
    }


def launch(module: str, made: dict[str, Any], folder: Path, ranks: int) -> None:
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(made))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(port), "-m", module]
    command += ["--spec", str(folder / "spec.json"), "--dir", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])


def points(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rank-0" / "points.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def measure(folder: Path) -> dict[str, float]:
    """Steps per hour, share of generation, reward of the last steps with its standard error."""
    every = points(folder)
    measured = every[FIRST:]
    seconds = measured[-1]["time"] - every[FIRST - 1]["time"]
    last = [each["values"]["reward/mean"] for each in every[-15:]]

    def mean(name: str) -> float:
        return statistics.mean(each["values"].get(name, 0.0) for each in measured)

    return {
        "steps_per_hour": 3600 * len(measured) / seconds,
        "generation_share": mean("generation_wait_s") * len(measured) / seconds,
        "reward": statistics.mean(last),
        "reward_error": statistics.stdev(last) / len(last) ** 0.5,
        "staleness": mean("staleness"),
        "interrupted": mean("staleness/interrupted"),
        "mismatch_kl": mean("mismatch/kl"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    shape = {"hidden": options.hidden, "layers": options.layers}
    MODES["asynchronous"]["staleness"]["max"] = options.staleness
    root = Path(tempfile.mkdtemp(prefix="orrery-bench-async-"))
    results: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    try:
        for seed in range(options.seeds):
            path = prompts(root, seed)
            start = spec(
                path,
                **shape,
                objective="sft",
                sft={"train_on": "completion", "packing": False},
                steps=options.sft_steps,
                seed=seed,
                optimizer={"name": "adamw", "lr": 0.003},
                checkpoint={"every_steps": options.sft_steps, "async": False},
                samples={"count": 0},
            )
            start["plan"] = {"micro_batch_size": 32, "global_batch_size": 32}
            launch("workers.training.main", start, root / f"sft-{seed}", 1)
            weights = root / f"sft-{seed}" / "checkpoints" / f"step-{options.sft_steps:08d}"
            order = list(MODES) if seed % 2 == 0 else list(reversed(MODES))
            for mode in order:
                grpo = {
                    "group_size": 8,
                    "prompts_per_step": 16,
                    "algorithm": "dr_grpo",
                    "rewards": [{"kind": "exact"}],
                    "rollout": {"max_new_tokens": 76, "sync": "separate", "devices": 2},
                    **MODES[mode],
                }
                made = spec(
                    path,
                    **shape,
                    objective="grpo",
                    grpo=grpo,
                    steps=options.steps,
                    seed=seed,
                    init_from={"path": str(weights)},
                    optimizer={"name": "adamw", "lr": options.lr},
                )
                made["plan"] = {"dp": 2, "micro_batch_size": 64, "global_batch_size": 128}
                folder = root / f"{mode}-{seed}"
                launch(PROGRAM, made, folder, 4)
                results[mode].append(measure(folder))
                print(mode, seed, json.dumps(results[mode][-1]), flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    speed = {
        mode: statistics.mean(each["steps_per_hour"] for each in rows)
        for mode, rows in results.items()
    }
    factor = speed["asynchronous"] / speed["synchronous"]
    print(f"steps per hour {speed}, factor {factor:.2f}")
    if options.no_record:
        return
    record(
        "finetuning",
        what="asynchronous against synchronous rollouts, steps per hour, 2 training and 2 rollout "
        f"ranks, hidden {options.hidden}, {options.layers} layers, staleness "
        f"{options.staleness}, answers of 2 to 73 tokens",
        value=factor,
        unit="x",
        figure=">= 1.5",
        results=results,
    )


if __name__ == "__main__":
    main()
