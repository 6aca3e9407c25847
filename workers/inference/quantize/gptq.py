"""GPTQ: rounds a weight column by column and compensates each error in the remaining columns.

Frantar et al., arXiv 2210.17323, algorithm 1; optionally with act-order.
Shapes: N outputs, K inputs, G groups along K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.inference.quantize.calibrate import damped
from workers.inference.quantize.linears import round_groups
from workers.models.hf.quantized_formats import Packed

BLOCK = 128


def gptq(
    weight_NK: Tensor,
    gram_KK: Tensor,
    *,
    group: int,
    act_order: bool = True,
    dtype: torch.dtype = torch.float16,
) -> Packed:
    """Quantize a weight to four bits with scales of `dtype`.

    Zeros are 1 to 15, as the published format v1 requires. Raises ValueError for a weight that is
    not finite.
    """
    weight, hessian = weight_NK.float().clone(), damped(gram_KK)
    inputs = weight.shape[1]
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else None
    if order is not None:
        weight, hessian = weight[:, order], hessian[order][:, order]
    inverse = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True
    )
    codes = torch.empty(inputs, weight.shape[0], dtype=torch.uint8, device=weight.device)
    scales, zeros = [], []
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        lost = torch.zeros(weight.shape[0], end - start, device=weight.device)
        for place in range(start, end):
            if place % group == 0:
                _, scale, zero = round_groups(weight[:, place : place + group], group, dtype=dtype)
                scales.append(scale[0])
                zeros.append(zero[0].clamp_min(1))
            column, scale, zero = weight[:, place], scales[-1].float(), zeros[-1].float()
            code = ((column / scale).round() + zero).clamp(0, 15)
            codes[place] = code.to(torch.uint8)
            error = (column - (code - zero) * scale) / inverse[place, place]
            weight[:, place:end] -= error.unsqueeze(1) * inverse[place, place:end].unsqueeze(0)
            lost[:, place - start] = error
        weight[:, end:] -= lost @ inverse[start:end, end:]
    return Packed("int4", codes, torch.stack(scales), torch.stack(zeros), group, order)
