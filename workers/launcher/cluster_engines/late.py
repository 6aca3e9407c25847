"""`python -m workers.launcher.cluster_engines.late`: sends what killed supervisors left in a home.

The control plane starts it where it sees the home of an engine, so late points need no further job.
Input: JSON `{"home": PATH, "left": [{"node": NAME, "run_dir": PATH}]}`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from workers.contracts.wire.cluster_engines.jobs import LATE_TOTAL_S
from workers.contracts.wire.node_messages import LeftSupervisor
from workers.launcher.maintenance import engine_home


def main() -> int:
    """Send what can be sent within `LATE_TOTAL_S`; always 0."""
    task = json.load(sys.stdin)
    left = [LeftSupervisor.from_dict(one) for one in task["left"]]
    engine_home.ship(Path(task["home"]), left, total_s=LATE_TOTAL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
