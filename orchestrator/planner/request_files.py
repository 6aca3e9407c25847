"""Files that the planner's commands read and write: request lines, measurements, calibrations.

Does not depend on Django or formulas.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.request_parsing import parse_json_line
from workers.contracts.base import problem


class UnusableInput(ValueError):
    """A file or an argument that a command cannot use; says which, why, and what to do."""


def read_json_lines(path: str) -> list[Any]:
    """The JSON value of each line, or a Problem for an invalid line; skips empty lines.

    `-` is standard input. Raises UnusableInput.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UnusableInput(
            f"{path} cannot be read ({error.strerror}); give the path of a file of JSON lines"
        ) from None
    values = []
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if not line.strip():
            continue
        try:
            values.append(parse_json_line(line.decode("utf-8")))
        except UnicodeDecodeError as error:
            message = f"the line is not UTF-8 text ({error.reason})"
            values.append(problem("", message, "Use JSON in UTF-8."))
    return values


def read_calibration(path: str) -> Calibration:
    """A calibration as written by `manage.py calibrate`. Raises UnusableInput."""
    try:
        return Calibration.from_dict(json.loads(Path(path).read_bytes()))
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        reason = "is not JSON"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"is not a calibration ({error})"
    raise UnusableInput(f"{path} {reason}; `manage.py calibrate` writes one")


def write_text(path: str, text: str) -> None:
    """Writes a text file. Raises UnusableInput."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnusableInput(
            f"{path} cannot be written ({error.strerror}); name a file in an existing folder"
        ) from None
