"""Launches as operators under dispatch modes, and plain calls without a mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kernels.operators import call_as_operator, operator


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator's name; replaces the outputs of the operators in `options`."""

    def __init__(self, options: dict[str, list[Tensor]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.options = options or {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.names.append(str(func))
        return (
            self.options[str(func)] if str(func) in self.options else func(*args, **(kwargs or {}))
        )


def _tripled(x: Tensor) -> list[Tensor]:
    return call_as_operator("tripled", (x, None), lambda: [x * 3, x + 1], flops=7)


def test_a_mode_sees_one_operator_and_may_replace_its_results() -> None:
    x = torch.ones(2)
    with _Seen() as seen:
        inputs = _tripled(x)
    assert (
        seen.names == ["kernels.tripled.default"]
        and inputs[0].tolist() == [3, 3]
        and inputs[1].tolist() == [2, 2]
    )
    with _Seen({"kernels.tripled.default": [x, x]}):
        again = _tripled(x)
    assert again[0] is x and again[1] is x
    with FlopCounterMode(display=False) as counted:
        _tripled(x)
    assert counted.get_total_flops() == 7
    assert operator("tripled") is torch.ops.kernels.tripled.default


def test_without_a_mode_the_launch_is_called_directly() -> None:
    call_as_operator("unseen", (), lambda: [torch.ones(1)])
    assert not hasattr(torch.ops.kernels, "unseen")
