"""The command `python -m kernels.gate --arch sm_90`; `compile_check` does the work."""

import sys

from kernels.compile_check import main

if __name__ == "__main__":
    sys.exit(main())
