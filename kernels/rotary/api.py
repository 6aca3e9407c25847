"""`apply_rope`: argument checks, choice of implementation, and autograd for the Triton kernel.

The caller provides the tables of cosines and sines.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from kernels import checks, runtime, tuning
from kernels.dispatch import Candidate, cache_choice, cached_choice, call_key, choose
from kernels.operators import call_as_operator
from kernels.paged_kv.cache_write import check_places, write_kv
from kernels.rotary import reference
from kernels.rotary.triton_rope import Cache, launch


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    cache: Cache | None = None,
    *,
    interleaved: bool = False,
    check: bool = True,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotates queries and keys by their positions' angles; with a cache also writes keys and values
    to their slots.

    q [B, S, H, D] or [T, H, D], k the same with its own number of heads. cos, sin [positions, R],
    2R <= D: the first 2R dims are rotated, in pairs (i, i + R), or (2i, 2i + 1) if `interleaved`;
    the others stay. positions: int [B, S], [S] or [T]; None: 0, 1, … along S. Returns (q', k') in
    their shapes and dtype. With cache = (v, k_cache, v_cache, slots), as for `write_kv`, returns q'
    only: k' and v are written to the cache, and nothing has a gradient. `check=False` trusts
    positions and slots and never synchronizes with a GPU. Raises TypeError or ValueError before any
    launch. Source: RoFormer, arXiv 2104.09864, eq. 34.
    """
    key = None
    if backend is None and (not check or positions is None) and cache is None:
        key = call_key("apply_rope", (q, k, cos, sin, positions), interleaved)
    elif backend is None and not check:
        tensors = (q, k, cos, sin, positions, *(cache or ()))
        key = call_key("apply_rope with cache", tensors, interleaved, strides=True)
    chosen = cached_choice(key)
    if chosen is None:
        chosen = _choose(q, k, cos, sin, positions, cache, check, backend)
        cache_choice(key, chosen)
    return _rotate(chosen, q, k, cos, sin, positions, cache, interleaved)


def _choose(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    cache: Cache | None,
    check: bool,
    backend: str | None,
) -> str:
    """Checks the arguments; returns the backend."""
    needs_grad = _check(q, k, cos, sin, positions, cache, check)
    own = runtime.why_not(q, k, cos, sin, positions, *(cache or ()))
    if own is None and torch.float64 in (q.dtype, cos.dtype):
        own = "fp64 is not supported"
    if own is None and q.numel() == 0:
        own = "an input is empty"
    return choose(
        "apply_rope",
        {
            "dtype": q.dtype,
            "head_dim": q.shape[-1],
            "heads": tuning.round_up(q.shape[-2]),
            "cache": cache is not None,
            "grad": needs_grad,
        },
        [Candidate("own", own), Candidate("reference")],
        backend,
    ).backend


def _rotate(
    backend: str,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    cache: Cache | None,
    interleaved: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotated by the kernel or the reference."""
    length = q.shape[-3]
    q_THD, k_TGD = _tokens(q), _tokens(k)
    positions_T = None if positions is None else positions.expand(q.shape[:-2]).reshape(-1)
    if backend == "own":
        rotation_args = (cos.contiguous(), sin.contiguous(), positions_T, length, interleaved)
        if cache is not None:
            v, k_cache, v_cache, slots = cache
            flat = (_tokens(v), k_cache, v_cache, slots.reshape(-1))
            return launch(q_THD, k_TGD, *rotation_args, cache=flat)[0].view(q.shape)
        rotated = (
            _Rope.apply(q_THD, k_TGD, *rotation_args)
            if checks.needs_grad(q, k)
            else _launch_rotation(q_THD, k_TGD, *rotation_args)
        )
        return cast(torch.Tensor, rotated[0]).view(q.shape), cast(torch.Tensor, rotated[1]).view(
            k.shape
        )
    if positions_T is None:
        positions_T = torch.arange(length, device=q.device).repeat(q_THD.shape[0] // max(length, 1))
    angles = cos[positions_T.long()], sin[positions_T.long()]
    q_out = reference.rotate(q_THD, *angles, interleaved).to(q.dtype).view(q.shape)
    k_out = reference.rotate(k_TGD, *angles, interleaved).to(k.dtype).view(k.shape)
    if cache is None:
        return q_out, k_out
    v, k_cache, v_cache, slots = cache
    write_kv(k_out, v, k_cache, v_cache, slots, check=False)
    return q_out


class _Rope(torch.autograd.Function):
    """Saves the tables; gradients are rotated back."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor | None,
        length: int,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(cos, sin, positions)
        ctx.length, ctx.interleaved = length, interleaved
        q_out, k_out = _launch_rotation(q, k, cos, sin, positions, length, interleaved)
        return q_out, k_out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dq, dk = (_last_adjacent(g) for g in grads)
        cos, sin, positions = ctx.saved_tensors
        rotated = launch(dq, dk, cos, sin, positions, ctx.length, ctx.interleaved, inverse=True)
        return (*rotated, None, None, None, None, None)


def _launch_rotation(q: torch.Tensor, k: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    """Rotated queries and keys; `args` as for `launch`."""
    run = cast(Any, partial(launch, q, k, *args))
    return call_as_operator(
        "apply_rope", (q, k, *(x for x in args if isinstance(x, torch.Tensor))), run
    )


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """x [..., H, D] as [T, H, D] with contiguous rows; a view if strides allow it."""
    return _last_adjacent(x.reshape(-1, *x.shape[-2:]))


def _last_adjacent(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    cache: Cache | None,
    check: bool,
) -> bool:
    """Checks the arguments; returns whether a gradient is needed."""
    floats = (*checks.FLOATS, torch.float64)
    checks.dtype_in("q", q, floats)
    checks.dims("q", q, 3, 4)
    checks.shape(
        "k", k, (*q.shape[:-2], None, q.shape[-1]), "tokens as in q, any number of heads, head_dim"
    )
    checks.non_empty("q", q, -2)
    checks.non_empty("k", k, -2)
    checks.same_dtype(q=q, k=k)
    checks.dtype_in("cos", cos, floats)
    checks.dims("cos", cos, 2)
    checks.non_empty("cos", cos, 1)
    checks.shape("sin", sin, tuple(cos.shape), "(shape of cos)")
    checks.same_dtype(cos=cos, sin=sin)
    checks.same_device(q=q, k=k, cos=cos, sin=sin, positions=positions)
    if 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"cos has {cos.shape[1]} pairs; the heads have {q.shape[-1]} dims, so at most half as "
            "many."
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError(
            "cos or sin requires a gradient; angles have no gradient here: detach them."
        )
    if positions is None:
        if q.shape[-3] > cos.shape[0]:
            raise ValueError(
                f"q has {q.shape[-3]} positions and cos {cos.shape[0]}; extend the table."
            )
    else:
        checks.integer_dtype("positions", positions)
        if tuple(positions.shape) not in (tuple(q.shape[:-2]), (q.shape[-3],)):
            raise ValueError(
                f"positions has shape {tuple(positions.shape)}; it must be {tuple(q.shape[:-2])}, "
                "as q's."
            )
        if check and positions.numel() and not runtime.is_capturing(q):
            minimum, most = (int(x) for x in torch.aminmax(positions))
            if minimum < 0 or most >= cos.shape[0]:
                raise ValueError(
                    f"positions range from {minimum} to {most}; cos has 0 to {cos.shape[0] - 1}."
                )
    needs_grad = checks.needs_grad(q, k)
    if cache is not None:
        _check_cache(k, cache, check)
        if needs_grad or (torch.is_grad_enabled() and cache[0].requires_grad):
            raise ValueError(
                "cache was given and an input requires a gradient; a cache has no gradient: use "
                "no_grad()."
            )
    return needs_grad


def _check_cache(k: torch.Tensor, cache: Cache, check: bool) -> None:
    if not isinstance(cache, (tuple, list)) or len(cache) != 4:
        raise TypeError(
            f"cache is a {type(cache).__name__}; it must be a tuple (v, k_cache, v_cache, slots)."
        )
    v, k_cache, v_cache, slots = cache
    check_places(k, v, k_cache, v_cache, slots)
    checks.same_dtype(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    capacity = k_cache.shape[0] * k_cache.shape[1]
    if check and slots.numel() and not runtime.is_capturing(k) and int(slots.max()) >= capacity:
        raise ValueError(
            f"slots contain {int(slots.max())}; the cache has {capacity} slots, 0 to "
            f"{capacity - 1}."
        )
