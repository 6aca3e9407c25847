"""Entry point of `python -m workers.recorder.follow`; see `orrery_follow`."""

import sys

from workers.recorder.orrery_follow import main

if __name__ == "__main__":
    sys.exit(main())
