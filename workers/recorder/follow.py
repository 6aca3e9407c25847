"""The command `python -m workers.recorder.follow`; `orrery_follow` does the work and is what an
installation has.
"""

import sys

from workers.recorder.orrery_follow import main

if __name__ == "__main__":
    sys.exit(main())
