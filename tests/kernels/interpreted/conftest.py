"""Fills allocations with NaN, so that elements which a kernel does not write show; clears cached
choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import dispatch, runtime


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned_tensor(*args: Any, **options: Any) -> torch.Tensor:
        x = make(*args, **options)
        with torch.no_grad():
            return x.fill_(float("nan") if x.dtype.is_floating_point else 77)

    return poisoned_tensor


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    # use_deterministic_algorithms also fills memory, but takes 20 s to import torch's compiler
    assert runtime.INTERPRET, "run with TRITON_INTERPRET=1; test_interpreted.py does"
    torch.manual_seed(0)
    dispatch.clear_records()
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
