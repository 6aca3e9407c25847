"""Resolves pyproject's dependencies into requirements/run.lock and test.lock, with hashes, for
every platform.

Torch and triton stay out: tools/install.py chooses their wheels by machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = [
    "--universal",
    "--python-version=3.11",
    "--generate-hashes",
    "--override=requirements/overrides.txt",
    "--no-emit-package=torch",
    "--no-emit-package=triton",
    "--no-annotate",
    "--no-header",
    "--quiet",
]


def main() -> None:
    compile_lock("requirements/run.lock")
    compile_lock("requirements/test.lock", "--group=test", "--constraint=requirements/run.lock")
    compile_lock("requirements/mutation.lock", "--group=mutation", source=None)


def compile_lock(output: str, *more: str, source: str | None = "pyproject.toml") -> None:
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        *([source] if source else []),
        *COMMON,
        *more,
        "-o",
        output,
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    print(f"lock: {output}")


if __name__ == "__main__":
    main()
