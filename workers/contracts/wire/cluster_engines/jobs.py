"""What a job of another engine (Slurm) carries to its supervisors: who they are, where Redis is.

The launch order itself waits in Redis, sealed. Does not depend on the engine.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Annotated, Final

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.wire.node_messages import NodeName

# names of supervisors in an engine's jobs; no agent may join under such a name
IDENTITIES: Final = "engine"  # folder of a home, with a file per supervisor until its exit report
LATE_PROGRAM: Final = "workers.launcher.cluster_engines.late"
LATE_TOTAL_S: Final = 300.0  # how long that program tries to send
_MEMBER: Final = re.compile(r"\.job\d{1,18}\.\d+$", re.A)  # a number that databases store


def member_name(engine: str, attempt_id: int, node_rank: int) -> str:
    """The name under which the supervisor of this part of an attempt sends messages."""
    return f"{engine}.job{attempt_id}.{node_rank}"


def is_member_name(name: str) -> bool:
    """Whether the name is that of a supervisor in an engine's job."""
    return _MEMBER.search(name) is not None


class JobMember(WireContract):
    """A supervisor's identity; `secret` is in hexadecimal and valid for this attempt only."""

    name: NodeName
    secret: str
    redis: str


class JobTicket(WireContract):
    """The members of a job by node rank, and the folder that is their home.

    `home` may contain `$HOME` and `$USER`, which the job expands. `stop_grace_s`: how long ranks
    may save a checkpoint after the engine's SIGTERM.
    """

    home: str
    members: list[JobMember]
    stop_grace_s: Annotated[float, Field(ge=0)] = 20.0

    def to_text(self) -> str:
        """As text without quotes or blanks, for a shell script."""
        return base64.b64encode(json.dumps(self.to_dict()).encode()).decode()

    @classmethod
    def from_text(cls, text: str) -> JobTicket:
        """Raises ValueError for a text that `to_text` did not write."""
        return cls.from_dict(json.loads(base64.b64decode(text, validate=True)))
