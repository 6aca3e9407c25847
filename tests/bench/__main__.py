"""`make bench`: runs each tests/bench/bench_*.py in its own process.

`ARGS="ingest sockets"` selects some of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(selected: list[str]) -> int:
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    unknown = [name for name in selected if f"bench_{name}" not in names]
    if unknown:
        print(
            f"no such benchmark: {', '.join(unknown)}; available: "
            f"{', '.join(n.removeprefix('bench_') for n in names)}"
        )
        return 2
    failed = []
    for name in names:
        if selected and name.removeprefix("bench_") not in selected:
            continue
        print(f"== {name.removeprefix('bench_')}", flush=True)
        if subprocess.run([sys.executable, "-m", f"tests.bench.{name}"]).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
