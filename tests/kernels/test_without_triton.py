"""Without triton every module imports, and every operation works through its reference or torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import sys
sys.modules["triton"] = None
import importlib, pkgutil
import torch, kernels
assert not kernels.runtime.HAS_TRITON
for info in pkgutil.walk_packages(kernels.__path__, "kernels."):
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)
assert not {"triton.language", "pydantic", "django"} & set(sys.modules)
x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8)
kernels.rms_norm(x, w).sum().backward()
assert x.grad is not None
(record,) = kernels.explain()
assert record["backend"] == "torch" and "triton is not installed" in record["reason"], record
"""


def test_everything_imports_and_works() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
