"""Wrapped modules: order of wrappers, names of parameters, and modules that cannot be wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workers.models.wrapped import Inner, Wrapped, wrapped, wrapper_of


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, inner: Inner, /, x: Tensor) -> Tensor:
        out: Tensor = inner(x) * self.factor
        return out


class Shifted:
    def __call__(self, module: nn.Module, inner: Inner, /, x: Tensor) -> Tensor:
        assert isinstance(module, Wrapped)
        out: Tensor = inner(x) + 1.0
        return out


def test_the_last_wrapper_is_outermost_and_parameters_stay_the_same():
    plain = nn.Linear(3, 2)
    before = plain(torch.ones(3))
    expected = before * 2.0 + 1.0
    once = wrapped(plain, Scaled(2.0))
    both = wrapped(once, Shifted())
    assert both is once and isinstance(both, nn.Linear) and both.weight is plain.weight
    assert list(both.state_dict()) == ["weight", "bias"]
    assert torch.equal(both(torch.ones(3)), expected)
    scaled = wrapper_of(both, Scaled)
    assert scaled is not None and scaled.factor == 2.0
    assert wrapper_of(plain, Scaled) is None, "the module itself is unchanged"
    assert torch.equal(plain(torch.ones(3)), before)


def test_modules_of_a_class_share_their_variant():
    first, second = (wrapped(nn.Linear(3, 2), Shifted()) for _ in range(2))
    assert type(first) is type(second)


def test_a_sharded_module_is_not_replaced():
    sharded: Any = nn.Linear(3, 2)
    sharded.unshard = lambda: None
    with pytest.raises(TypeError, match=r"Linear was wrapped after fully_shard; wrap it before"):
        wrapped(sharded, Shifted())
