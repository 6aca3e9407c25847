"""`unscale_`: divides gradients by the loss scale in place and reports an overflow; one launch per
dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import checks, runtime, tuning
from kernels.dispatch import Candidate, choose
from kernels.jit import tl
from kernels.optim import reference
from kernels.optim.tensor_table import CHUNK, tables
from kernels.optim.triton_optim import BLOCK, WARPS, unscale_kernel

KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def unscale_(
    grads: Sequence[torch.Tensor],
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Multiplies each gradient by inv_scale in place; sets found_inf to 1 if one contains an
    infinity or NaN.

    grads: tensors of any shapes on one device, fp32, fp16 or bf16. inv_scale and found_inf: fp32,
    one element, on that device; found_inf is never reset to 0. Never synchronizes with the GPU.
    Raises TypeError or ValueError.
    """
    grads = list(grads)
    for name, x in (("inv_scale", inv_scale), ("found_inf", found_inf)):
        checks.dtype_in(name, x, (torch.float32,))
        if x.numel() != 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have one element.")
    for index, grad in enumerate(grads):
        checks.dtype_in(f"grads[{index}]", grad)
        checks.not_expanded(f"grads[{index}]", grad)
        checks.same_device(inv_scale=inv_scale, found_inf=found_inf, **{f"grads[{index}]": grad})
    if not grads:
        return
    gaps = next(
        (f"grads[{i}] is not contiguous" for i, g in enumerate(grads) if not g.is_contiguous()),
        None,
    )
    chosen = choose(
        "unscale_",
        {
            "dtype": " ".join(sorted({str(g.dtype).removeprefix("torch.") for g in grads})),
            "tensors": tuning.round_up(len(grads)),
        },
        [
            Candidate("own", runtime.why_not(inv_scale, *grads) or gaps),
            Candidate("torch"),
            Candidate("reference"),
        ],
        backend,
    )
    with torch.no_grad():
        if chosen.backend == "torch":
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        elif chosen.backend == "reference":
            reference.unscale_(grads, inv_scale, found_inf)
        else:
            _launch(grads, inv_scale, found_inf)


def _launch(grads: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    chunk, block = block_sizes()
    with runtime.device_guard(inv_scale):
        for table in tables([(g,) for g in grads if g.numel()], chunk):
            unscale_kernel[(table.chunks,)](
                table.addresses,
                table.sizes,
                table.chunk_tensor,
                table.chunk_place,
                inv_scale,
                found_inf,
                KIND=KINDS[table.dtypes[0]],
                ALIGNED=table.aligned,
                CHUNK=chunk,
                BLOCK=block,
                num_warps=WARPS,
            )


def block_sizes() -> tuple[int, int]:
    """(elements of a chunk, elements per step): small in the interpreter, so that tests cross their
    edges.
    """
    return (64, 16) if runtime.INTERPRET else (CHUNK, BLOCK)
