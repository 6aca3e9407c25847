"""Parses the numbers of one line of a Megatron or torchtitan log.

Does not depend on files or sending.
"""

from __future__ import annotations

import datetime
import re
from typing import NamedTuple


class Numbers(NamedTuple):
    """The numbers of one line; `time` in Unix seconds, `tokens` cumulative."""

    step: int
    tokens: int | None
    time: float | None
    values: dict[str, float]


_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"

_MEGATRON_STEP = re.compile(r"iteration\s+(\d+)\s*/\s*\d+\s*\|(.*)")
_MEGATRON_VAL = re.compile(r"validation loss at iteration (\d+)[^|]*\|(.*)")
_MEGATRON_FIELD = re.compile(rf"\s*([^|:]+?)\s*:\s*({_NUMBER})\s*", re.IGNORECASE)
_MEGATRON = {
    "lm loss": ("loss", 1.0),
    "learning rate": ("lr", 1.0),
    "grad norm": ("grad_norm", 1.0),
    "loss scale": ("loss_scale", 1.0),
    "elapsed time per iteration (ms)": ("step_time_s", 1e-3),
    "throughput per GPU (TFLOP/s/GPU)": ("tflops_per_device", 1.0),
    "TFLOPs": ("tflops_per_device", 1.0),
    "lm loss value": ("val_loss", 1.0),
    "lm loss PPL": ("val_perplexity", 1.0),
}
_MEGATRON_SKIP = {"consumed samples", "consumed tokens", "global batch size"}

_TITAN = re.compile(r"(validate\s+)?step:\s*(\d+)\s+(.*\bloss:.*)")
_TITAN_FIELD = re.compile(rf"([A-Za-z_]\w*):\s*({_NUMBER})\s*(%|GiB)?", re.IGNORECASE)
_TITAN_NAMES = {
    "loss": ("loss", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "lr": ("lr", 1.0),
    "memory": ("memory/reserved_bytes", 2.0**30),
    "tps": ("tokens_per_s_per_device", 1.0),
    "wps": ("tokens_per_s_per_device", 1.0),
    "tflops": ("tflops_per_device", 1.0),
    "mfu": ("mfu", 0.01),
}


def megatron(line: str, seq_len: int = 0) -> Numbers | None:
    """Numbers of an iteration or validation line, None for any other line.

    Tokens are samples x `seq_len`.
    """
    match = _MEGATRON_STEP.search(line) or _MEGATRON_VAL.search(line)
    if not match:
        return None
    values: dict[str, float] = {}
    tokens = None
    for part in match[2].split("|"):
        field = _MEGATRON_FIELD.fullmatch(part)
        if not field:
            continue
        name, number = field[1], _number(field[2])
        if name == "consumed tokens" or (name == "consumed samples" and seq_len and tokens is None):
            tokens = int(number) if name == "consumed tokens" else int(number) * seq_len
        if name not in _MEGATRON_SKIP:
            known, factor = _MEGATRON.get(name, (f"megatron/{name.replace(' ', '_')}", 1.0))
            values[known] = number * factor
    return Numbers(int(match[1]), tokens, _stamp(line), values) if values else None


def torchtitan(line: str, seq_len: int = 0) -> Numbers | None:
    """Numbers of a `step:` or `validate step:` line, without tokens; None for any other line."""
    plain = _COLOR.sub("", line)
    match = _TITAN.search(plain)
    if not match:
        return None
    values = {}
    for name, number, _unit in _TITAN_FIELD.findall(match[3]):
        known, factor = _TITAN_NAMES.get(name, (f"torchtitan/{name}", 1.0))
        values["val_loss" if match[1] and known == "loss" else known] = _number(number) * factor
    if match[1]:  # speed and memory of a validation pass are not those of training
        values = {"val_loss": values["val_loss"]} if "val_loss" in values else {}
    return Numbers(int(match[2]), None, _stamp(plain), values) if values else None


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _stamp(line: str) -> float | None:
    """The line's own local time as Unix seconds."""
    match = _STAMP.search(line)
    if not match:
        return None
    try:
        return datetime.datetime.fromisoformat(f"{match[1]}T{match[2]}").timestamp()
    except ValueError:
        return None
