"""Linears that compute with rounded weights: exactly the rounded model, with its gradients for the
full weights.
"""

from __future__ import annotations

import pytest
import torch

from tests.workers.models.block_shapes import SHAPES, built, gradients
from workers.contracts.specs.weight_rounding import group_for, linear_widths, sharded_widths
from workers.inference.quantize.replace_linears import linear_input_widths
from workers.models.moe.experts import StackedLinear
from workers.models.qat import fake_quantize, fake_quantized


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", SHAPES)
def test_computes_and_learns_as_the_rounded_model(name: str, kind: str) -> None:
    aware, retained = built(name), built(name)
    group = group_for(linear_widths(aware.spec))
    assert set(linear_widths(aware.spec)) == set(linear_input_widths(retained))
    assert set(sharded_widths(aware.spec)) <= set(linear_widths(aware.spec))
    fake_quantize(aware, kind, group=group)
    changed = 0
    for path, module in retained.named_modules():
        if path.startswith("blocks.") and isinstance(module, torch.nn.Linear | StackedLinear):
            full = module.weight.detach().clone()
            with torch.no_grad():
                module.weight.copy_(fake_quantized(full, kind, group))
            changed += int((module.weight != full).any())
    assert changed == len(linear_input_widths(retained)), "every linear of blocks is rounded"
    ours, theirs = gradients(aware, None), gradients(retained, None)
    assert torch.equal(ours["loss"], theirs["loss"])
    for each, result in ours.items():
        torch.testing.assert_close(
            result,
            theirs[each],
            rtol=1e-5,
            atol=1e-6,
            msg=lambda message, at=each: f"{at}: {message}",
        )
    assert dict(aware.named_parameters()).keys() == dict(retained.named_parameters()).keys()


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="Use int8 or int4"):
        fake_quantize(built("llama"), "fp8")
