"""The quantisation command; see `command`."""

import sys

from workers.inference.quantize.command import main

if __name__ == "__main__":
    sys.exit(main())
