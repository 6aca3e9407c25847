"""`python -m workers.launcher.engines.job`: what jobs start that were submitted before the move.

Such jobs may wait in Slurm or Kueue during an upgrade. Removed in the release after 0.2.
"""

from __future__ import annotations

import sys

from workers.launcher.cluster_engines.job import main

if __name__ == "__main__":
    sys.exit(main())
