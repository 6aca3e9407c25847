"""Seconds to copy trained weights to the sampler in place; SmolLM2 135M's shape, fp32."""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch

from tests.bench.record import record
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.finetuning.reinforcement import RolloutSpec
from workers.models.decoder import Decoder
from workers.models.weights.parameter_shapes import named_weights
from workers.posttraining.reinforcement.sampling.sampler import Sampler

MODEL = "smollm2-135m"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = preset(MODEL)
    trained = Decoder(shape)
    context: Any = SimpleNamespace(
        run=SimpleNamespace(
            model=shape,
            plan=SimpleNamespace(precision="fp32"),
            train=SimpleNamespace(objective="grpo"),
        ),
        world=SimpleNamespace(device=torch.device("cpu"), size=1),
        parallel=SimpleNamespace(weights=lambda: named_weights(trained), parts=[trained]),
    )
    sampler = Sampler(context, RolloutSpec(max_new_tokens=8), [], longest=16)
    # the first phase of sampling chooses the layout of the weights
    sampler.sync(0)
    sampler.sample([([1, 2, 3], 0)], answers=1, on_step=lambda: None)
    seconds = []
    for number in range(options.rounds):
        began = time.perf_counter()
        sampler.sync(number + 1)
        seconds.append(time.perf_counter() - began)
    record(
        "finetuning",
        what=f"weight sync in place, trainer to sampler, {MODEL}, {options.threads} threads, fp32",
        value=statistics.median(seconds),
        unit="s",
        figure="<= 0.3",
        spread=[round(min(seconds), 4), round(max(seconds), 4)],
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
