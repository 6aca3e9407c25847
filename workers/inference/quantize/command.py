"""`python -m workers.inference.quantize --model M --to DIR --method awq`: compress a model.

Writes a model folder and a report with the perplexity of held-out text before and after.
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
from workers.contracts.wire.serving_reports import QUANTIZED, ArtifactRef, Quantized
from workers.inference.evaluate.likelihood import losses, split_windows
from workers.inference.evaluate.lines import read_items, read_texts
from workers.inference.model_loading import DTYPES, LoadedModel, default_device, load_model
from workers.inference.quantize.folder import REPORT, check_family, write_folder
from workers.inference.quantize.methods import BITS, METHODS, compress
from workers.inference.quantize.prune import pruned_spec
from workers.inference.quantize.replace_linears import group_for, linear_input_widths, weight_bytes
from workers.metrics.recorder import Recorder, last_attempt
from workers.models.text.assets import read_assets
from workers.models.weights.locations import locate_weights
from workers.runtime.exit_codes import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 64 with a message."""
    options = parser().parse_args(argv)
    try:
        report = quantize_model(options)
    except (UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 64
    print(
        f"{report.method}: perplexity {report.perplexity_before:.4f} to "
        f"{report.perplexity_after:.4f}, {report.bytes_before:,} bytes to {report.bytes_after:,}, "
        f"{report.path}"
    )
    return 0


def quantize_model(options: argparse.Namespace) -> Quantized:
    """Compress the model of `options`; an incomplete folder is removed.

    Raises UserError, ValueError, OSError.
    """
    began = time.perf_counter()
    to: Path = options.to
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to: {to} already exists and is not empty; give another folder")
    source = _source(options.model)
    loaded = load_model(
        source, precision=options.precision, device=default_device(), field="--model"
    )
    if loaded.tokenizer is None:
        raise UserError(
            "--model: it has no tokenizer, so no text can be read; put its tokenizer.json next to "
            "it"
        )
    check_family(loaded.spec, options.method)
    if not isinstance(
        next(loaded.decoder.blocks.children()).get_submodule("attn.o"), torch.nn.Linear
    ):
        raise UserError("--model: its weights are already quantized; give the original ones")
    calibration, held_out = _windows(options, loaded)
    before = perplexity(loaded, held_out)
    bytes_before = weight_bytes(loaded.decoder)
    group = group_for(linear_input_widths(loaded.decoder), options.group)
    spec = (
        pruned_spec(loaded.spec, neurons=options.neurons, heads=options.heads)
        if options.method == "prune"
        else None
    )
    compressed = compress(
        loaded.decoder, options.method, calibration, group=group, keep=options.keep, to=spec
    )
    temporary = to.with_name(f".{to.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        write_folder(
            loaded.decoder,
            compressed,
            temporary,
            method=options.method,
            group=group,
            assets=read_assets(locate_weights(source)),
        )
        reloaded = load_model(
            ModelSource(path=str(temporary.absolute())),
            precision=options.precision,
            device=default_device(),
        )
        result = Quantized(
            method=options.method,
            model=options.model,
            path=str(to),
            bits=BITS.get(options.method, 8.0 * DTYPES[options.precision].itemsize),
            group=group if BITS.get(options.method) == 4 else 0,
            perplexity_before=before,
            perplexity_after=perplexity(reloaded, held_out),
            bytes_before=bytes_before,
            bytes_after=weight_bytes(reloaded.decoder),
            tokens=sum(len(window) - 1 for window in held_out),
            calibration_tokens=sum(window.numel() for window in calibration),
            seconds=round(time.perf_counter() - began, 3),
        )
        report = {**result.to_dict(), "layers": compressed.layers}
        (temporary / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if to.exists():
            to.rmdir()
        temporary.rename(to)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    size = (to / REPORT).stat().st_size
    result = result.model_copy(
        update={"files": [ArtifactRef(name=REPORT, path=str(to / REPORT), bytes=size)]}
    )
    _record_event(options.dir, result)
    return result


def perplexity(loaded: LoadedModel, texts: Sequence[Sequence[int]]) -> float:
    """Perplexity of token windows, each scored as its own text."""
    window = max(map(len, texts))
    windows = list(split_windows([(text, 0) for text in texts], window=window, stride=window - 1))
    scored = sum(window.scored for window in windows)
    return math.exp(min(700.0, math.fsum(losses(loaded.decoder, windows)) / scored))


def _windows(
    options: argparse.Namespace, loaded: LoadedModel
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Calibration windows `[1, S]` spread over their text, and the first held-out windows."""
    assert loaded.tokenizer is not None
    length = min(options.window, loaded.spec.max_seq_len)
    data = DataSpec(preset="shakespeare")
    calibration_items = (
        read_items(options.calibrate, None, data, ())
        if options.calibrate
        else read_texts(data, held_out=False)
    )
    ids = [id for item in calibration_items for id in loaded.tokenizer.encode(item.text or "")]
    count = max(1, min(options.samples, len(ids) // length))
    starts = [number * max(0, len(ids) - length) // max(1, count - 1) for number in range(count)]
    device = next(loaded.decoder.parameters()).device
    calibration = [torch.tensor([ids[start : start + length]], device=device) for start in starts]
    items = read_items(options.evaluate, None, data, ())
    rest = [id for item in items for id in loaded.tokenizer.encode(item.text or "")]
    rest = rest[: options.tokens]
    held_out = [rest[start : start + length] for start in range(0, len(rest) - 1, length)]
    if not held_out or len(held_out[0]) < 2 or calibration[0].numel() < 1:
        raise UserError("--calibrate or --evaluate has too few tokens; give a longer text")
    return calibration, [window for window in held_out if len(window) > 1]


def _source(model: str) -> ModelSource:
    is_path = Path(model).exists() or "/" in model
    return ModelSource(path=model) if is_path else ModelSource(package=model)


def _record_event(directory: Path | None, result: Quantized) -> None:
    if directory is None:
        return
    folder = directory / "rank-0"
    attempt = int(os.environ.get("ORRERY_ATTEMPT") or 1 + last_attempt(folder / "events.jsonl"))
    recorder = Recorder(folder, run=os.environ.get("ORRERY_RUN", "local"), attempt=attempt, rank=0)
    data: dict[str, Any] = result.to_dict()
    recorder.event(QUANTIZED, **data)
    recorder.close()


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    arguments = argparse.ArgumentParser(
        prog="workers.inference.quantize", description="Make a model's weights smaller."
    )
    arguments.add_argument(
        "--model", required=True, help="folder, .gguf file or package with the weights"
    )
    arguments.add_argument("--to", type=Path, required=True, help="folder to create")
    arguments.add_argument("--method", choices=METHODS, required=True)
    arguments.add_argument(
        "--group", type=int, default=128, help="inputs with one scale, at most (default: 128)"
    )
    arguments.add_argument(
        "--keep", type=float, default=0.7, help="lowrank: share of numbers kept (default: 0.7)"
    )
    arguments.add_argument(
        "--neurons",
        type=float,
        default=0.2,
        help="prune: share of neurons removed (default: 0.2)",
    )
    arguments.add_argument(
        "--heads", type=float, default=0.0, help="prune: share of key-value heads (default: 0)"
    )
    arguments.add_argument(
        "--calibrate", help="text or JSON lines (default: Shakespeare's plays but the last tenth)"
    )
    arguments.add_argument(
        "--evaluate", help="held-out text or JSON lines (default: the last tenth)"
    )
    arguments.add_argument(
        "--samples", type=int, default=16, help="calibration windows (default: 16)"
    )
    arguments.add_argument(
        "--window", type=int, default=512, help="tokens of a window (default: 512)"
    )
    arguments.add_argument(
        "--tokens", type=int, default=4096, help="held-out tokens (default: 4,096)"
    )
    arguments.add_argument(
        "--precision",
        choices=sorted(DTYPES),
        default="fp32",
        help="of what is not quantized (default: fp32)",
    )
    arguments.add_argument(
        "--dir", type=Path, help="run directory for the event (default: none is written)"
    )
    return arguments
