"""Context extension of RoPE: linear, dynamic, Llama 3's and YaRN's scaling of frequencies.

Does not depend on tables, heads or sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.contracts.specs.model import Rope, RopeScaling


def scaled_frequencies(rope: Rope, rotary_dim: int, *, length: int, max_seq_len: int) -> Tensor:
    """Frequencies `[rotary_dim / 2]` in radians per position for `length` tokens, all in fp32."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    wave: Tensor = rope.theta**exponent
    scaling = rope.scaling
    if scaling is None:
        return 1.0 / wave
    if scaling.name == "linear":
        return 1.0 / wave / scaling.factor
    if scaling.name == "llama3":
        return _llama3(1.0 / wave, scaling)
    original = scaling.original_max_seq_len or max_seq_len
    if scaling.name == "dynamic":
        longer: Tensor = (
            _dynamic_theta(rope.theta, scaling.factor, rotary_dim, length, original) ** exponent
        )
        return 1.0 / longer
    return _yarn(wave, rope, scaling, rotary_dim, original)


def rotary_amplitude(scaling: RopeScaling | None) -> float:
    """Factor on cosines and sines: YaRN's temperature (arXiv 2309.00071, eq. 22), 1 otherwise."""
    if scaling is None or scaling.name != "yarn":
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_mscale(scaling.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature with coefficient `mscale` (DeepSeek's code)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _dynamic_theta(
    theta: float, factor: float, rotary_dim: int, length: int, original: int
) -> float:
    """NTK-aware theta that grows with the sequence once it is longer than the original context."""
    longest = max(length, original)
    return float(
        theta * (factor * longest / original - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))
    )


def _llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide long wavelengths by `factor`, with a linear ramp to short ones (Llama 3.1's code)."""
    original = scaling.original_max_seq_len or 8192
    wavelength = 2 * math.pi / frequency
    ramp = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    unscaled = ramp.clamp(0, 1)
    return (1 - unscaled) * frequency / scaling.factor + unscaled * frequency


def _yarn(wave: Tensor, rope: Rope, scaling: RopeScaling, rotary_dim: int, original: int) -> Tensor:
    """Dims with more than `beta_fast` rotations in the original context keep frequency 1 / `wave`.

    With fewer than `beta_slow` it is divided by `factor`, with a linear ramp over the dims
    between (arXiv 2309.00071, section 3.2).
    """

    def dim_with_rotations(times: float) -> float:
        return rotary_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dim_with_rotations(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_with_rotations(scaling.beta_slow)), rotary_dim - 1)
    width = high - low if high != low else 0.001
    unscaled = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * wave) * (1 - unscaled) + 1.0 / wave * unscaled
