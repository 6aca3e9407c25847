"""Files that the planner's commands read and write: request lines, measurements, calibrations.

Knows no formula.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from orchestrator.planner.calibration.result import Calibration
from orchestrator.planner.requests import parse
from workers.contracts.base import problem


class Unusable(ValueError):
    """A file or an argument that a command cannot work with: which, why, what to do next."""


def lines_of(path: str) -> list[Any]:
    """Each line's JSON, or a Problem where it is none; empty lines are left out.

    `-` is standard input.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise Unusable(
            f"{path} cannot be read ({error.strerror}); give the path of a file of JSON lines"
        ) from None
    found = []
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if not line.strip():
            continue
        try:
            found.append(parse(line.decode("utf-8")))
        except UnicodeDecodeError as error:
            found.append(
                problem("", f"the line is not UTF-8 text ({error.reason})", "JSON in UTF-8")
            )
    return found


def calibration_of(path: str) -> Calibration:
    """A calibration as `manage.py calibrate` wrote it."""
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise Unusable(
            f"{path} cannot be read ({error.strerror}); `manage.py calibrate` writes one"
        ) from None
    except (ValueError, RecursionError):
        raise Unusable(f"{path} is not JSON; `manage.py calibrate` writes a calibration") from None
    try:
        return Calibration.from_dict(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unusable(
            f"{path} is not a calibration ({error}); `manage.py calibrate` writes one"
        ) from None


def write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unusable(
            f"{path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None
