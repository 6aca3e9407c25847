"""An adapter's tensors of layers that Hugging Face joins into one, such as GPT-2's c_attn.

Low-rank updates of several layers with the same input are one update of higher rank: A one after
another, B block-diagonal. Does not read or write files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workers.models.errors import WeightsError

Parts = Mapping[str, Tensor]  # of one layer: lora_A, lora_B, lora_magnitude, ia3_l


def join(parts: Sequence[Parts | None], widths: Sequence[int], where: str) -> dict[str, Tensor]:
    """One layer's tensors from those of its parts, `widths` outputs each; None is not adapted.

    Raises WeightsError if the parts cannot be written as one.
    """
    present = [each for each in parts if each is not None]
    joined: dict[str, Tensor] = {}
    if any("lora_A" in each for each in present):
        joined["lora_A"] = torch.cat([each["lora_A"] for each in present])
        rows = []
        for number, (each, width) in enumerate(zip(parts, widths, strict=True)):
            blocks = [
                other["lora_B"] if other is each else torch.zeros(width, len(other["lora_A"]))
                for other in present
            ]
            rows.append(torch.cat(blocks, dim=1))
            if each is None and any("lora_magnitude" in other for other in present):
                raise WeightsError(
                    f"part {number} of {where} has no magnitudes, which PEFT has of the joined "
                    "layer only; adapt q, k and v, or none of them"
                )
        joined["lora_B"] = torch.cat(rows)
    for name, empty in (("lora_magnitude", 0.0), ("ia3_l", 1.0)):
        if any(name in each for each in present):
            joined[name] = torch.cat(
                [
                    torch.full((width,), empty) if each is None else each[name]
                    for each, width in zip(parts, widths, strict=True)
                ]
            )
    return joined
