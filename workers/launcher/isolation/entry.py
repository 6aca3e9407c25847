"""Starts an attempt's program under its user or in its container, as a plain file.

Reads `{env, umask}` from standard input: variables that submitters choose, such as LD_PRELOAD, are
neither on a command line nor in the environment of the programs that change the user or start the
container, which are root. Standard library only.
"""

import json
import os
import sys


def main() -> None:
    """Replace this process by the program that the arguments name."""
    start = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.umask(start["umask"])
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **start["env"]})


if __name__ == "__main__":
    main()
