"""`python -m workers.inference.quantize --model M --to DIR --method awq`: a smaller model in a
folder, and its report.

Texts in, a folder out: calibration text through the model, perplexity of held-out text before and
after.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from workers.contracts.specs.data import DataSpec
from workers.contracts.specs.model import ModelSource
from workers.contracts.wire.serving_reports import QUANTIZED, FileTold, Quantized
from workers.inference.evaluate.likelihood import losses, windows_of
from workers.inference.evaluate.lines import read_items, read_texts
from workers.inference.model_loading import DTYPES, LoadedModel, default_device, load_model
from workers.inference.quantize.folder import REPORT, check_family, write_folder
from workers.inference.quantize.methods import BITS, METHODS, smaller
from workers.inference.quantize.prune import narrower
from workers.inference.quantize.replace_linears import group_for, weight_bytes, widths_of
from workers.metrics.recorder import Recorder, last_attempt
from workers.models.text.assets import belongings
from workers.models.weights.locations import place_of
from workers.runtime.exits import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 64 with a sentence."""
    options = parser().parse_args(argv)
    try:
        told = quantize_model(options)
    except (UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 64
    print(
        f"{told.method}: perplexity {told.perplexity_before:.4f} to {told.perplexity_after:.4f}, "
        f"{told.bytes_before:,} bytes to {told.bytes_after:,}, {told.path}"
    )
    return 0


def quantize_model(options: argparse.Namespace) -> Quantized:
    """Raises UserError, ValueError, OSError; leaves no half a folder behind."""
    began = time.perf_counter()
    to: Path = options.to
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to: {to} is there already and not empty; give another folder")
    source = _source(options.model)
    loaded = load_model(source, precision=options.precision, device=default_device(), field="--model")
    if loaded.tokenizer is None:
        raise UserError(
            "--model: it came without a tokenizer, so no text can be read; put its tokenizer.json "
            "beside it"
        )
    check_family(loaded.spec, options.method)
    if not isinstance(
        next(loaded.decoder.blocks.children()).get_submodule("attn.o"), torch.nn.Linear
    ):
        raise UserError("--model: its weights are in few bits already; give those before")
    calibration, held_out = _windows(options, loaded)
    before = perplexity(loaded, held_out)
    bytes_before = weight_bytes(loaded.decoder)
    group = group_for(widths_of(loaded.decoder), options.group)
    spec = (
        narrower(loaded.spec, neurons=options.neurons, heads=options.heads)
        if options.method == "prune"
        else None
    )
    made = smaller(
        loaded.decoder, options.method, calibration, group=group, keep=options.keep, to=spec
    )
    beside = to.with_name(f".{to.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        write_folder(
            loaded.decoder,
            made,
            beside,
            method=options.method,
            group=group,
            belongings=belongings(place_of(source)),
        )
        again = load_model(
            ModelSource(path=str(beside.absolute())),
            precision=options.precision,
            device=default_device(),
        )
        told = Quantized(
            method=options.method,
            model=options.model,
            path=str(to),
            bits=BITS.get(options.method, 8.0 * DTYPES[options.precision].itemsize),
            group=group if BITS.get(options.method) == 4 else 0,
            perplexity_before=before,
            perplexity_after=perplexity(again, held_out),
            bytes_before=bytes_before,
            bytes_after=weight_bytes(again.decoder),
            tokens=sum(len(each) - 1 for each in held_out),
            calibration_tokens=sum(each.numel() for each in calibration),
            seconds=round(time.perf_counter() - began, 3),
        )
        report = {**told.to_dict(), "layers": made.layers}
        (beside / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if to.exists():
            to.rmdir()
        beside.rename(to)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    size = (to / REPORT).stat().st_size
    told = told.model_copy(
        update={"files": [FileTold(name=REPORT, path=str(to / REPORT), bytes=size)]}
    )
    _tell(options.dir, told)
    return told


def perplexity(loaded: LoadedModel, texts: Sequence[Sequence[int]]) -> float:
    """Of windows that are texts by themselves."""
    window = max(map(len, texts))
    windows = list(windows_of([(each, 0) for each in texts], window=window, stride=window - 1))
    return math.exp(
        min(
            700.0, math.fsum(losses(loaded.decoder, windows)) / sum(each.scored for each in windows)
        )
    )


def _windows(
    options: argparse.Namespace, loaded: LoadedModel
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Calibration windows `[1, S]`, spread over their text, and the first held-out ones."""
    assert loaded.tokenizer is not None
    length = min(options.window, loaded.spec.max_seq_len)
    data = DataSpec(preset="shakespeare")
    learned = (
        read_items(options.calibrate, None, data, ())
        if options.calibrate
        else read_texts(data, held_out=False)
    )
    ids = [each for item in learned for each in loaded.tokenizer.encode(item.text or "")]
    count = max(1, min(options.samples, len(ids) // length))
    starts = [number * max(0, len(ids) - length) // max(1, count - 1) for number in range(count)]
    device = next(loaded.decoder.parameters()).device
    calibration = [torch.tensor([ids[start : start + length]], device=device) for start in starts]
    items = read_items(options.evaluate, None, data, ())
    rest = [each for item in items for each in loaded.tokenizer.encode(item.text or "")][
        : options.tokens
    ]
    held_out = [rest[start : start + length] for start in range(0, len(rest) - 1, length)]
    if not held_out or len(held_out[0]) < 2 or calibration[0].numel() < 1:
        raise UserError("--calibrate and --evaluate want text of some tokens; give longer ones")
    return calibration, [each for each in held_out if len(each) > 1]


def _source(given: str) -> ModelSource:
    return (
        ModelSource(path=given)
        if Path(given).exists() or "/" in given
        else ModelSource(package=given)
    )


def _tell(directory: Path | None, told: Quantized) -> None:
    if directory is None:
        return
    folder = directory / "rank-0"
    attempt = int(os.environ.get("ORRERY_ATTEMPT") or 1 + last_attempt(folder / "events.jsonl"))
    recorder = Recorder(folder, run=os.environ.get("ORRERY_RUN", "local"), attempt=attempt, rank=0)
    data: dict[str, Any] = told.to_dict()
    recorder.event(QUANTIZED, **data)
    recorder.close()


def parser() -> argparse.ArgumentParser:
    told = argparse.ArgumentParser(
        prog="workers.inference.quantize", description="Make a model's weights smaller."
    )
    told.add_argument(
        "--model", required=True, help="folder, .gguf file or package with the weights"
    )
    told.add_argument("--to", type=Path, required=True, help="folder to be made")
    told.add_argument("--method", choices=METHODS, required=True)
    told.add_argument(
        "--group", type=int, default=128, help="inputs with one scale, at most (default: 128)"
    )
    told.add_argument(
        "--keep", type=float, default=0.7, help="lowrank: share of numbers kept (default: 0.7)"
    )
    told.add_argument(
        "--neurons",
        type=float,
        default=0.2,
        help="prune: share of neurons taken out (default: 0.2)",
    )
    told.add_argument(
        "--heads", type=float, default=0.0, help="prune: share of key-value heads (default: 0)"
    )
    told.add_argument(
        "--calibrate", help="text or JSON lines (default: Shakespeare's plays but the last tenth)"
    )
    told.add_argument("--evaluate", help="held-out text or JSON lines (default: the last tenth)")
    told.add_argument("--samples", type=int, default=16, help="calibration windows (default: 16)")
    told.add_argument("--window", type=int, default=512, help="tokens of a window (default: 512)")
    told.add_argument("--tokens", type=int, default=4096, help="held-out tokens (default: 4,096)")
    told.add_argument(
        "--precision", choices=sorted(DTYPES), default="fp32", help="of what stays (default: fp32)"
    )
    told.add_argument(
        "--dir", type=Path, help="run directory for the event (default: none is written)"
    )
    return told
