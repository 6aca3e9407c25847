"""Writes deploy/env.example from the settings' own table, so that the two cannot part."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from orchestrator.config.env import Env, variable  # noqa: E402

HEAD = """\
# Every setting of Orrery, with its default. Uncomment what you change.
# Made by `python tools/env_example.py`; a test compares the two.
"""
COMPOSE = """
# Used by deploy/compose.yaml only
# POSTGRES_PASSWORD=
# VALKEY_PASSWORD=
# NODE_TORCH=cpu

# Read by agents and supervisors on the nodes
# ORRERY_JOIN=
# ORRERY_PG_TIMEOUT_S=600
# Where optimizer states go that a plan offloads to disk (offload nvme): a fast local one; the attempt's folder else
# ORRERY_SCRATCH=

# Read by `make install` and `make up`: torch for cpu or cuda; what the machine has else
# ORRERY_TORCH=

# Read by the recorder in people's own programs, where init is not told: the server, a token, where it keeps what waits
# ORRERY_URL=
# ORRERY_TOKEN=
# ORRERY_SPOOL=~/.cache/orrery/spool
"""


def text() -> str:
    lines = [HEAD]
    for item in fields(Env):
        lines.append(
            f"# {item.metadata['says']}\n# "
            f"{variable(item.name)}={_shown(item.name, item.default)}\n"
        )
    return "\n".join(lines) + COMPOSE


def _shown(name: str, value: object) -> str:
    if name == "home":
        return "./var"
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    (ROOT / "deploy" / "env.example").write_text(text())
