"""NF4 equals bitsandbytes' published numbers: levels, packing, error and bits per weight."""

from __future__ import annotations

import pytest
import torch

from workers.models.adapters.nf4 import quantize_nf4

# bitsandbytes 0.50
LEVELS = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105, 0.0]
LEVELS += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0]


def test_levels_are_stored_exactly_with_the_first_value_in_the_high_half() -> None:
    weight = torch.tensor(LEVELS * 4).view(1, 64)
    stored = quantize_nf4(weight, double=False)
    torch.testing.assert_close(stored.dequantize(torch.float32), weight, rtol=0, atol=1e-6)
    codes = [int(code) for code in stored.codes.flatten()[:8]]
    assert codes == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]


@pytest.mark.parametrize(("double", "bits"), [(False, 4.5), (True, 4.127)])
def test_error_and_bits_of_normal_weights(double: bool, bits: float) -> None:
    weight = torch.randn(512, 4096, generator=torch.Generator().manual_seed(0)) * 0.02
    stored = quantize_nf4(weight, double=double)
    error = (stored.dequantize(torch.float32) - weight).norm() / weight.norm()
    assert float(error) == pytest.approx(0.0920, abs=5e-4)
    tensors = (stored.codes, stored.scales, stored.groups, stored.mean)
    stored_bytes = sum(x.numel() * x.element_size() for x in tensors if x is not None)
    assert 8 * stored_bytes / weight.numel() == pytest.approx(bits, abs=5e-4)
