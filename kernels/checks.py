"""Argument checks before any launch; each error names the argument, the problem and the remedy.

TypeError for wrong types (not a tensor, dtype), ValueError for shapes, devices and values. Does not
depend on any operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def tensor(name: str, x: object) -> None:
    """x must be a dense tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}.")
    if x.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {str(x.layout).removeprefix('torch.')}; it must be dense: "
            ".to_dense()."
        )


def dtype_in(name: str, x: torch.Tensor, allowed: Iterable[torch.dtype] = FLOATS) -> None:
    """x must be a tensor with one of the allowed dtypes."""
    tensor(name, x)
    allowed = tuple(allowed)
    if x.dtype not in allowed:
        text = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(
            f"{name} is {str(x.dtype).removeprefix('torch.')}; it must be one of: {text}. Cast "
            "it first."
        )


def same_dtype(**tensors: torch.Tensor) -> None:
    """All tensors must have the dtype of the first."""
    (first, first_tensor), *rest = tensors.items()
    tensor(first, first_tensor)
    for name, x in rest:
        tensor(name, x)
        if x.dtype != first_tensor.dtype:
            raise TypeError(
                f"{name} is {x.dtype} and {first} is {first_tensor.dtype}; they must be equal. "
                "Cast one "
                "of them."
            )


def same_device(**tensors: torch.Tensor | None) -> None:
    """All tensors must be on the device of the first; None is skipped."""
    present = [(name, x) for name, x in tensors.items() if x is not None]
    first, first_tensor = present[0]
    tensor(first, first_tensor)
    for name, x in present[1:]:
        tensor(name, x)
        if x.device != first_tensor.device:
            raise ValueError(
                f"{name} is on {x.device} and {first} on {first_tensor.device}; move them to one "
                "device."
            )


def dims(name: str, x: torch.Tensor, *counts: int) -> None:
    """x must have one of these numbers of dimensions."""
    tensor(name, x)
    if x.dim() not in counts:
        text = " or ".join(str(n) for n in counts)
        raise ValueError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; it must have {text}."
        )


def shape(name: str, x: torch.Tensor, expected: tuple[int | None, ...], meaning: str = "") -> None:
    """x must have the expected shape; None stands for any size. `meaning` names the dimensions."""
    tensor(name, x)
    matches = x.dim() == len(expected) and all(
        e is None or e == s for s, e in zip(x.shape, expected, strict=True)
    )
    if not matches:
        text = ", ".join("any" if e is None else str(e) for e in expected)
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be ({text}){meaning and ' = ' + meaning}."
        )


def non_empty(name: str, x: torch.Tensor, dim: int) -> None:
    """The dimension must not be empty."""
    if x.shape[dim] < 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; dimension {dim} must not be empty.")


def contiguous_last(name: str, x: torch.Tensor) -> None:
    """The last dimension of x must have stride 1."""
    if x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {x.stride(-1)} along its last dimension; it must be 1: "
            ".contiguous()."
        )


def contiguous(name: str, x: torch.Tensor) -> None:
    """x must be contiguous; for tensors that are written in place."""
    if not x.is_contiguous():
        raise ValueError(
            f"{name} with shape {tuple(x.shape)} and strides {x.stride()} must be contiguous."
        )


def not_expanded(name: str, x: torch.Tensor) -> None:
    """x, which is written in place, must not be expanded (several elements in one memory
    location).
    """
    if any(step == 0 and size > 1 for size, step in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(
            f"{name} with shape {tuple(x.shape)} and strides {x.stride()} is expanded; .clone() it "
            "first."
        )


def pair(name: str, value: object) -> None:
    """The value must be a pair."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be a pair of tensors, not {type(value).__name__}.")


def integer_dtype(name: str, x: torch.Tensor) -> None:
    """x must be int32 or int64."""
    dtype_in(name, x, (torch.int32, torch.int64))


def integer(
    name: str, value: int | None, minimum: int | None = 1, maximum: int | None = None
) -> None:
    """The value must be an integer within these bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {value!r}.")
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"in {minimum} to {maximum}"
        raise ValueError(f"{name} is {value}; it must be {bounds}.")


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient is recorded for any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def boolean(name: str, value: object) -> None:
    """The value must be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}.")


def splits(value: int | None, maximum: int = 256) -> None:
    """Splits of a sum over programs, or None to choose them automatically."""
    if value is not None:
        integer("num_splits", value, 1, maximum)


def positive(name: str, value: float, *, finite: bool = True) -> None:
    """The number must be positive, and finite unless `finite` is False."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}.")
    if not value > 0:
        raise ValueError(f"{name} is {value}; it must be positive.")
    if finite and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be finite.")


def softcap(value: float) -> None:
    """A cap on scores or logits: positive, or 0 for none."""
    if isinstance(value, torch.Tensor) or value != 0:
        positive("softcap", value)


def window(value: int | None) -> None:
    """The value must be the number of keys that a query sees, its own included, or None for all."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"window must be an integer number of keys or None, not {value!r}.")
    if value < 1:
        raise ValueError(
            f"window is {value}; it must be at least 1 (a query sees itself), or None for no "
            "window."
        )


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """The value must be one of the allowed values."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(
            f"{name} is {value!r}; it must be one of: {', '.join(repr(a) for a in allowed)}."
        )
