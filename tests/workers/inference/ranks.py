"""What a rank of a pool does in the tests of inference over several ranks: the command itself, on a
model that no one
trained but whose layers all matter."""

from __future__ import annotations

from workers.inference.main import main
from workers.models import initialize


def command(spec: str, directory: str) -> int:
    """The exit code. The test's own process calls it too: it is left as it was."""
    usual, initialize.STD = initialize.STD, 0.3
    try:
        return main(["--spec", spec, "--dir", directory])
    finally:
        initialize.STD = usual
