"""Writes deploy/env.example from the fields of `Env`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from orchestrator.config.env.read import variable  # noqa: E402
from orchestrator.config.env.retention_variables import RetentionVariables  # noqa: E402
from orchestrator.config.env.variables import Env  # noqa: E402

HEAD = """\
# Every setting of Orrery, with its default. Uncomment what you change.
# Written by `python tools/env_example.py`; a test compares the two.
"""
COMPOSE = """
# Used by deploy/compose.yaml only
# POSTGRES_PASSWORD=
# VALKEY_PASSWORD=
# NODE_TORCH=cpu

# Read by agents and supervisors on the nodes
# ORRERY_JOIN=
# ORRERY_PG_TIMEOUT_S=600
# After how many days without use the packages of script runs are deleted; 0: never
# ORRERY_ENVIRONMENT_DAYS=30
# The same for data sets that were read from the store
# ORRERY_DATASET_DAYS=30
# Fast local folder for optimizer states offloaded to disk (offload nvme);
# default: the attempt's folder
# ORRERY_SCRATCH=

# Read by `make install` and `make up`: torch for cpu or cuda; default: what the machine has
# ORRERY_TORCH=

# Read by the recorder if init gets no arguments: the server, a token, and the spool folder
# ORRERY_URL=
# ORRERY_TOKEN=
# ORRERY_SPOOL=~/.cache/orrery/spool
"""


def text() -> str:
    """The content of deploy/env.example."""
    lines = [HEAD]
    inherited = RetentionVariables.model_fields
    for name in sorted(Env.model_fields, key=lambda name: name in inherited):
        field = Env.model_fields[name]
        shown = _shown(name, field.default)
        lines.append(f"# {field.description}\n# {variable(name)}={shown}\n")
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
