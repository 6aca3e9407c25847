"""Recorded messages and files of the previous release; see `release_0_1/README.md`."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.contracts.wire import envelope

FOLDER = Path(__file__).parent / "release_0_1"
KEYS = json.loads((FOLDER / "keys.json").read_text())
SECRET = bytes.fromhex(KEYS["secret"])
SCHEMAS = json.loads((FOLDER / "schemas.json").read_text())
FILES = json.loads((FOLDER / "run_directories.json").read_text())


@dataclass(frozen=True)
class Recorded:
    """One message as it was in Redis; `time` is when it was sent (Unix seconds)."""

    kind: str
    sender: str
    time: float
    text: str

    def body(self) -> dict[str, Any]:
        """The envelope's body, opened with the recorded key; for Celery the envelope in it."""
        text = self.text
        if self.kind.startswith("celery/"):
            text = json.loads(base64.b64decode(json.loads(text)["body"]))[0][0]
        kind = envelope.peek(text)[0]
        secret = {
            "join": envelope.join_token_parts(KEYS["token"])[1],
            "rendezvous": b"rendezvous 0b0e",
        }.get(kind, SECRET)
        return envelope.open_envelope(secret, text, kind=kind, now=self.time)


def _read() -> dict[str, Recorded]:
    rows = [json.loads(line) for line in (FOLDER / "messages.jsonl").read_text().splitlines()]
    return {
        row["kind"]: Recorded(row["kind"], row["from"], row["time"], row["text"]) for row in rows
    }


MESSAGES = _read()


def write_run_directories(home: Path) -> None:
    """Write the recorded files under a node's home."""
    for name, text in FILES.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
