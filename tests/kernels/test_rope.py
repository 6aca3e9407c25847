"""apply_rope's reference against complex numbers and fp64 autograd, bad arguments, and the cache
write on a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import apply_rope, write_kv
from kernels.rotary import reference


def test_the_reference_rotates_complex_numbers() -> None:
    x, angle = (
        torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 4, dtype=torch.float64),
    )
    turned = (
        torch.view_as_complex(x[..., :8].unflatten(-1, (4, 2)))
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    expected = torch.cat((torch.view_as_real(turned).flatten(-2), x[..., 8:]), -1)
    torch.testing.assert_close(reference.rotate(x, angle.cos(), angle.sin(), True), expected)
    for interleaved in (False, True):
        there = reference.rotate(x, angle.cos(), angle.sin(), interleaved)
        torch.testing.assert_close(
            reference.rotate(there, angle.cos(), angle.sin(), interleaved, inverse=True), x
        )
        assert torch.autograd.gradcheck(
            lambda t, i=interleaved: reference.rotate(t, angle.cos(), angle.sin(), i), x
        )


def test_with_a_cache_it_rotates_and_writes() -> None:
    q, k, v = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    cos, sin = torch.randn(5, 4), torch.randn(5, 4)
    slots, positions = torch.tensor([[2, -1, 0]]), torch.tensor([4, 0, 1])
    mine, theirs = torch.zeros(2, 2, 2, 2, 8), torch.zeros(2, 2, 2, 2, 8)
    turned: Any = apply_rope(q, k, cos, sin, positions, (v, *mine, slots))
    expected: Any = apply_rope(q, k, cos, sin, positions)
    write_kv(expected[1], v, *theirs, slots)
    torch.testing.assert_close((turned, mine), (expected[0], theirs))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.ones(2, 8)}, ValueError, "q has 2 dimensions"),
        ({"k": torch.ones(3, 1, 9)}, ValueError, "k has shape"),
        ({"k": torch.ones(3, 1, 8).half()}, TypeError, "Cast one"),
        ({"cos": torch.ones(4, 5), "sin": torch.ones(4, 5)}, ValueError, "at most half"),
        ({"cos": torch.ones(2, 4), "sin": torch.ones(2, 4)}, ValueError, "extend the table"),
        ({"sin": torch.ones(4, 3)}, ValueError, "sin has shape"),
        (
            {"positions": torch.tensor([0, 1, 4])},
            ValueError,
            "positions range from 0 to 4; cos has 0 to 3",
        ),
        ({"positions": torch.tensor([0.0, 1, 2])}, TypeError, "positions is float32"),
        ({"positions": torch.tensor([0, 1])}, ValueError, "positions has shape"),
        (
            {"cache": (torch.ones(3, 1, 8), *torch.ones(2, 1, 2, 1, 8), torch.tensor([0, 1, 2]))},
            ValueError,
            "slots contain 2",
        ),
        ({"q": torch.ones(3, 2, 8, device="meta")}, ValueError, "k is on cpu"),
    ],
)
def test_bad_arguments_raise_errors_that_name_them(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {"q": torch.ones(3, 2, 8), "k": torch.ones(3, 1, 8)}
    good |= {"cos": torch.ones(4, 4), "sin": torch.ones(4, 4)}
    apply_rope(**good)
    with pytest.raises(error, match=message):
        apply_rope(**{**good, **change})
