"""Unscaling, gradient norms and AdamW steps over many tensors in Triton, one chunk of a tensor at a
time.

`adamw_kernel` reads the results of `gradient_norm_kernel`, so clipping and skipping need no host
synchronization.
"""

from __future__ import annotations

from typing import Any

from kernels.jit import jit, tl
from kernels.optim.tensor_table import CHUNK
from kernels.shipped import ShippedKernel

BLOCK, WARPS = 2048, 8


@jit
def load_pointer(TABLE, index, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """The typed address in the table; marked as a multiple of 16 bytes if all are."""
    at = tl.load(TABLE + index).to(tl.pointer_type(KIND))
    if ALIGNED:
        # on the pointer: the compiler would lose a hint on the integer
        at = tl.multiple_of(at, 16)
    return at


@jit
def unscale_kernel(
    GRADS,
    SIZES,
    CHUNK_TENSOR,
    CHUNK_PLACE,
    INV_SCALE,
    NONFINITE,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk per program, in place; sets NONFINITE to 1 if a value is not finite."""
    tensor = tl.load(CHUNK_TENSOR + tl.program_id(0))
    first = tl.load(CHUNK_PLACE + tl.program_id(0)).to(tl.int64) * CHUNK
    grad = load_pointer(GRADS, tensor, KIND, ALIGNED) + first
    left = tl.load(SIZES + tensor) - first
    inv_scale = tl.load(INV_SCALE)
    bad = tl.zeros((BLOCK,), tl.int32)
    if left >= CHUNK:  # without masks, which would make loads narrow
        for start in range(0, CHUNK, BLOCK):
            at = grad + start + tl.arange(0, BLOCK)
            g = tl.load(at).to(tl.float32)
            bad |= (tl.abs(g) < float("inf")).to(tl.int32) ^ 1
            tl.store(at, (g * inv_scale).to(KIND))
    else:
        for start in range(0, CHUNK, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            g = tl.load(grad + offset, mask=offset < left, other=0.0).to(tl.float32)
            bad |= (tl.abs(g) < float("inf")).to(tl.int32) ^ 1
            tl.store(grad + offset, (g * inv_scale).to(KIND), mask=offset < left)
    if tl.max(bad, 0) > 0:
        tl.store(NONFINITE, 1.0)


@jit
def gradient_norm_kernel(
    GRADS,
    SIZES,
    CHUNK_TENSOR,
    CHUNK_PLACE,
    chunks,
    INV_SCALE,
    SQUARES,
    NONFINITE,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Chunks strided by the number of programs: the sum of squares of unscaled gradients, and 1 if
    one is not finite.
    """
    inv_scale = 1.0
    if INV_SCALE is not None:
        inv_scale = tl.load(INV_SCALE)
    squares = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        tensor = tl.load(CHUNK_TENSOR + chunk)
        first = tl.load(CHUNK_PLACE + chunk).to(tl.int64) * CHUNK
        grad = load_pointer(GRADS, tensor, KIND, ALIGNED) + first
        left = tl.load(SIZES + tensor) - first
        if left >= CHUNK:
            for start in range(0, CHUNK, BLOCK):
                g = tl.load(grad + start + tl.arange(0, BLOCK)).to(tl.float32)
                bad |= (tl.abs(g) < float("inf")).to(tl.int32) ^ 1
                g *= inv_scale
                squares += g * g
        else:
            for start in range(0, CHUNK, BLOCK):
                offset = start + tl.arange(0, BLOCK)
                g = tl.load(grad + offset, mask=offset < left, other=0.0).to(tl.float32)
                bad |= (tl.abs(g) < float("inf")).to(tl.int32) ^ 1
                g *= inv_scale
                squares += g * g
    tl.store(SQUARES + tl.program_id(0), tl.sum(squares, 0))
    tl.store(NONFINITE + tl.program_id(0), tl.max(bad, 0).to(tl.float32))


@jit
def one_minus_power(log_beta, steps):
    """1 - beta^steps to fp32 precision: by its series if the difference would cancel."""
    y = steps * log_beta
    series = -y * (
        1.0 + y / 2.0 * (1.0 + y / 3.0 * (1.0 + y / 4.0 * (1.0 + y / 5.0 * (1.0 + y / 6.0))))
    )
    return tl.where(y > -0.3, series, 1.0 - tl.exp(y))


@jit
def hash_bits(x):
    """A 32-bit hash of a 32-bit number (lowbias32 by C. Wellons): enough randomness for rounding,
    six operations.
    """
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@jit
def to_bf16_stochastically(x, key, offset):
    """x fp32 as bf16, randomly up or down so that its expectation is preserved; offset identifies
    the element, key the step.
    """
    noise = hash_bits(offset.to(tl.uint32) ^ key) >> 16
    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    rounded = bits.to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), rounded, x).to(tl.bfloat16)


@jit
def adamw_block(
    p,
    g,
    m,
    v,
    scale,
    decay_factor,
    rate,
    correction,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    key,
    offset,
    KIND: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """(parameter, both moments) after a step; all but the parameter are fp32. 1 - beta is passed
    in, because 1 - 0.999 computed in fp32 is off by 1e-5.
    """
    g = g.to(tl.float32) * scale
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + g * g * one_minus_beta2
    new = p.to(tl.float32) * decay_factor - rate * (m / (tl.sqrt(v) / correction + eps))
    if STOCHASTIC:
        return to_bf16_stochastically(new, key, offset), m, v
    else:
        return new.to(KIND), m, v


@jit
def adamw_kernel(
    TABLE,
    SIZES,
    CHUNK_TENSOR,
    CHUNK_PLACE,
    chunks,
    tensors,
    INV_SCALE,
    SQUARES,
    NONFINITE,
    parts,
    FOUND_INF,
    NORM,
    SKIPPED,
    TICKET,
    HYPER,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    log_beta1,
    log_beta2,
    eps,
    max_norm,
    seed,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Chunks of all parameters, strided by the number of programs.

    TABLE [5, tensors]: parameters, gradients, both moments, step counts. HYPER [2, tensors]:
    learning rates and weight decays. SQUARES and NONFINITE [parts] are the results of
    `gradient_norm_kernel` (None: no clipping, no skipping), FOUND_INF a further flag. The program
    that finishes last increments the step counts, after all others have read them.
    """
    scale = 1.0
    if INV_SCALE is not None:
        scale = tl.load(INV_SCALE)
    nonfinite = 0.0
    if FOUND_INF is not None:
        nonfinite = tl.load(FOUND_INF)
    part = tl.arange(0, BLOCK_PARTS)
    if NONFINITE is not None:
        nonfinite += tl.sum(tl.load(NONFINITE + part, mask=part < parts, other=0.0), 0)
    if SQUARES is not None:
        norm = tl.sqrt(tl.sum(tl.load(SQUARES + part, mask=part < parts, other=0.0), 0))
        if max_norm > 0:
            scale *= tl.minimum(1.0, max_norm / (norm + 1e-6))
        if tl.program_id(0) == 0:
            tl.store(NORM, norm)
    if tl.program_id(0) == 0:
        tl.store(SKIPPED, tl.where(nonfinite > 0, 1.0, 0.0))
    if nonfinite == 0:
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            tensor = tl.load(CHUNK_TENSOR + chunk)
            first = tl.load(CHUNK_PLACE + chunk).to(tl.int64) * CHUNK
            param = load_pointer(TABLE, tensor, PARAM, ALIGNED) + first
            grad = load_pointer(TABLE + tensors, tensor, GRAD, ALIGNED) + first
            mean = load_pointer(TABLE + 2 * tensors, tensor, tl.float32, ALIGNED) + first
            square = load_pointer(TABLE + 3 * tensors, tensor, tl.float32, ALIGNED) + first
            steps = tl.load(load_pointer(TABLE + 4 * tensors, tensor, tl.float32, False)) + 1.0
            lr = tl.load(HYPER + tensor)
            decay_factor = 1.0 - lr * tl.load(HYPER + tensors + tensor)
            rate = lr / one_minus_power(log_beta1, steps)
            correction = tl.sqrt(one_minus_power(log_beta2, steps))
            key = hash_bits(
                steps.to(tl.uint32) ^ hash_bits(tensor.to(tl.uint32) ^ tl.cast(seed, tl.uint32))
            )
            left = tl.load(SIZES + tensor) - first
            if left >= CHUNK:
                for start in range(0, CHUNK, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    p, m, v = adamw_block(
                        tl.load(param + at),
                        tl.load(grad + at),
                        tl.load(mean + at),
                        tl.load(square + at),
                        scale,
                        decay_factor,
                        rate,
                        correction,
                        one_minus_beta1,
                        beta2,
                        one_minus_beta2,
                        eps,
                        key,
                        first + at,
                        PARAM,
                        STOCHASTIC,
                    )
                    tl.store(param + at, p)
                    tl.store(mean + at, m)
                    tl.store(square + at, v)
            else:
                for start in range(0, CHUNK, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    inside = at < left
                    p, m, v = adamw_block(
                        tl.load(param + at, mask=inside, other=0.0),
                        tl.load(grad + at, mask=inside, other=0.0),
                        tl.load(mean + at, mask=inside, other=0.0),
                        tl.load(square + at, mask=inside, other=0.0),
                        scale,
                        decay_factor,
                        rate,
                        correction,
                        one_minus_beta1,
                        beta2,
                        one_minus_beta2,
                        eps,
                        key,
                        first + at,
                        PARAM,
                        STOCHASTIC,
                    )
                    tl.store(param + at, p, mask=inside)
                    tl.store(mean + at, m, mask=inside)
                    tl.store(square + at, v, mask=inside)
    # all threads of this program have read the counts before it takes its ticket
    tl.debug_barrier()
    if tl.atomic_add(TICKET, 1) == tl.num_programs(0) - 1:
        tl.store(TICKET, 0)
        if nonfinite == 0:
            for start in range(0, tensors, BLOCK):
                index = start + tl.arange(0, BLOCK)
                at = tl.load(TABLE + 4 * tensors + index, mask=index < tensors, other=0)
                counts = at.to(tl.pointer_type(tl.float32))
                tl.store(
                    counts,
                    tl.load(counts, mask=index < tensors, other=0.0) + 1.0,
                    mask=index < tensors,
                )


def shipped(arch: str) -> list[ShippedKernel]:
    """Unscaling of bf16 and fp32, the norm, and steps of fp32 and of stochastically rounded bf16
    parameters.
    """
    tables = {
        "GRADS": "*i64",
        "TABLE": "*i64",
        "SIZES": "*i64",
        "CHUNK_TENSOR": "*i32",
        "CHUNK_PLACE": "*i32",
    }
    floats = dict.fromkeys(
        ("INV_SCALE", "SQUARES", "NONFINITE", "FOUND_INF", "NORM", "SKIPPED", "HYPER"), "*fp32"
    )
    numbers = dict.fromkeys(
        (
            "one_minus_beta1",
            "beta2",
            "one_minus_beta2",
            "log_beta1",
            "log_beta2",
            "eps",
            "max_norm",
        ),
        "fp32",
    )
    numbers |= {"seed": "i32"}
    counts = {"chunks": "i32", "tensors": "i32", "parts": "i32", "TICKET": "*i32"}
    signature = tables | floats | numbers | counts
    sizes: dict[str, Any] = {"ALIGNED": True, "CHUNK": CHUNK, "BLOCK": BLOCK}
    step = {"BLOCK_PARTS": 2048, "FOUND_INF": None}
    fp32 = {"PARAM": tl.float32, "GRAD": tl.float32, "STOCHASTIC": False}
    bf16 = {"PARAM": tl.bfloat16, "GRAD": tl.bfloat16, "STOCHASTIC": True}
    wide = ("ld.global.v4",)  # addresses from a table are known to be aligned

    def configuration(op: str, name: str, kernel: Any, flags: dict[str, Any]) -> ShippedKernel:
        return ShippedKernel(op, name, kernel, signature, flags | sizes, WARPS, expects=wide)

    return [
        configuration("unscale_", "fp32", unscale_kernel, {"KIND": tl.float32}),
        configuration("unscale_", "bf16", unscale_kernel, {"KIND": tl.bfloat16}),
        configuration("adamw", "measure", gradient_norm_kernel, {"KIND": tl.float32}),
        configuration("adamw", "step fp32", adamw_kernel, fp32 | step),
        configuration("adamw", "step bf16 stochastic", adamw_kernel, bf16 | step),
    ]
