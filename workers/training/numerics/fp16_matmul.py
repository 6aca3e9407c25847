"""fp16 on a CPU: operands and results in fp16, products in fp32, as tensor cores accumulate them.

A CPU multiplies fp16 matrices 5 to 20 times slower than fp32 ones (1024 x 288 x 768, one core: 48
to 195 ms against 9). Everything else, memory included, is fp16. Does not depend on models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# matrix products; attention's second result is the log-sum-exp, fp32 in fp16 kernels too
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        _aten.mv.default,
        _aten.dot.default,
        _aten._grouped_mm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default


class Fp16MatmulMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes matrix products of fp16 CPU tensors in fp32 and rounds once, forward and backward.

    Runs below autograd: tensors saved for the backward pass stay fp16. Products of DTensors arrive
    as those of their local shards.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(each, "to_local") for each in types):
            return NotImplemented
        if func not in _PRODUCTS or not any(_is_half(each) for each in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        wide = [_widened(each) for each in args]
        options = {name: _widened(each) for name, each in kwargs.items()}
        if options.get("out_dtype") is torch.float16:
            options["out_dtype"] = torch.float32
        result = func(*wide, **options)
        if isinstance(result, Tensor):
            return result.half()
        if func is _ATTENTION:
            return (result[0].half(), *result[1:])
        return tuple(_narrowed(each) for each in result)


def _is_half(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float16 and value.device.type == "cpu"


def _widened(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _narrowed(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) else value
