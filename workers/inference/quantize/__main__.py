"""Entry point of `python -m workers.inference.quantize`; see `command`."""

import sys

from workers.inference.quantize.command import main

if __name__ == "__main__":
    sys.exit(main())
