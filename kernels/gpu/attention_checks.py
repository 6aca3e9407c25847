"""Correctness checks of attention on a GPU: each path against the dense formula in float64.

Plain torch at the same dtype determines the allowed error. Times nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import tuning
from kernels.attention.api import attention, attention_varlen
from kernels.attention.reference import reference, visible_QK
from kernels.attention.spec import AttentionSpec, make_spec
from kernels.attention.triton_kernels.launch_tma import tma_why_not
from kernels.dispatch import BackendUnavailable
from kernels.gpu.cases import Compared, compare

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Lengths = list[tuple[int, int]]  # queries and keys of each sequence


@dataclass(frozen=True)
class Shape:
    """A dense batch and the options of its call."""

    batch: int
    queries: int
    heads: int
    kv_heads: int
    d: int = 128
    dv: int = 0
    keys: int = 0
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = BF16

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `attention`."""
        return {"causal": self.causal, "window": self.window or None, "softcap": self.softcap}

    @property
    def spec(self) -> AttentionSpec:
        """The specification of the call."""
        return make_spec(self.d, self.causal, self.window or None, None, self.softcap)

    @property
    def pairs(self) -> int:
        """Unmasked query-key pairs of one head."""
        q, k = self.queries, self.keys or self.queries
        if not self.causal and not self.window:
            return q * k
        positions = range(k - q, k)
        return sum(min(max(p + 1, 0), self.window or k) for p in positions)

    def flops(self, backward: bool) -> int:
        """FLOPs of the forward or backward pass."""
        products = (
            (3 * self.d + 2 * (self.dv or self.d)) if backward else (self.d + (self.dv or self.d))
        )
        return 2 * self.batch * self.heads * self.pairs * products

    def bytes(self, backward: bool) -> int:
        """Bytes if each operand is read or written once."""
        k, dv = self.keys or self.queries, self.dv or self.d
        q_like = self.queries * self.heads * (self.d + dv)
        k_like = k * self.kv_heads * (self.d + dv)
        return self.dtype.itemsize * self.batch * (q_like + k_like) * (2 if backward else 1)

    def tensors(self, device: torch.device, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v."""
        k, dv = self.keys or self.queries, self.dv or self.d
        sizes = (
            (self.queries, self.heads, self.d),
            (k, self.kv_heads, self.d),
            (k, self.kv_heads, dv),
        )
        q, k_, v = (
            torch.randn(self.batch, *s, device=device, dtype=self.dtype, requires_grad=grad)
            for s in sizes
        )
        return q, k_, v


def check(
    shape: Shape, backend: str | None, tma: bool = False
) -> Callable[[torch.device], list[Compared]]:
    """Output, log-sum-exp and gradients against the dense formula in float64; torch's rounding sets
    the tolerance.
    """

    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(shape.queries)
        tensors = shape.tensors(device, grad=True)
        weights = torch.randn(
            shape.batch, shape.queries, shape.heads, shape.dv or shape.d, device=device
        )
        lse_weights = torch.randn(shape.batch, shape.heads, shape.queries, device=device)

        def results(call: Callable[..., Any], dtype_: torch.dtype) -> list[Tensor]:
            leaves = [x.detach().to(dtype_).requires_grad_() for x in tensors]
            result = call(*leaves)
            out, lse = result if isinstance(result, tuple) else (result, None)
            loss = (out.double() * weights).sum()
            if lse is not None:
                loss = loss + torch.where(lse.isfinite(), lse, 0.0).double().mul(lse_weights).sum()
            return [out, *([] if lse is None else [lse]), *torch.autograd.grad(loss, leaves)]

        with_lse = backend in ("own", "math")
        spec = shape.spec

        def formula(q: Tensor, k: Tensor, v: Tensor) -> Any:
            out, lse = reference(q, k, v, spec)
            return (out, lse) if with_lse else out

        # plain torch in this dtype, rounded after every step
        def rounding(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return _plain_torch(q, k, v, spec, with_lse)

        if tma:
            why = tma_why_not(*tensors, spec)
            if why is not None:
                raise RuntimeError(f"the sm_90 kernel does not support this check: {why}")

        def called(*x: Tensor) -> Any:
            return attention(*x, **shape.options, return_lse=with_lse, backend=backend)

        try:
            with tuning.override("attention_forward", tma=tma):
                ours = results(called, shape.dtype)
        except BackendUnavailable as missing:
            if backend == "own":
                raise
            # torch's own kernel, which this machine may lack
            return [Compared(f"not available: {missing}", 0.0, 0.0)]
        exact = results(formula, torch.float64)
        plain = results(rounding, shape.dtype)
        names = ["out", *(["lse"] if with_lse else []), "dq", "dk", "dv"]
        return [compare(*four, floor=1e-5) for four in zip(names, ours, exact, plain, strict=True)]

    return run


def _plain_torch(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, with_lse: bool) -> Any:
    group = q.shape[2] // k.shape[2]
    first, keys, values = (
        x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    )
    scores = first @ keys.mT * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    visible = visible_QK(q.shape[1], k.shape[1], spec, q.device)
    blind = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible & ~blind, -torch.inf)
    out = (scores.softmax(-1).masked_fill(blind, 0.0) @ values).transpose(1, 2)
    return (
        (out, scores.float().logsumexp(-1).masked_fill(blind[:, 0], -torch.inf))
        if with_lse
        else out
    )


def check_packed(
    lengths: Lengths, options: dict[str, Any], backend: str
) -> Callable[..., list[Compared]]:
    """A check of packed sequences by one backend."""

    def run(device: torch.device) -> list[Compared]:
        torch.manual_seed(len(lengths))
        cu_q, cu_k, longest = make_bounds(lengths, device)
        q = torch.randn(int(cu_q[-1]), 8, 128, device=device, dtype=BF16)
        k, v = torch.randn(2, int(cu_k[-1]), 2, 128, device=device, dtype=BF16)
        weights = torch.randn_like(q)

        def results(dtype_: torch.dtype, by: str) -> list[Tensor]:
            leaves = [x.to(dtype_).requires_grad_() for x in (q, k, v)]
            a, b, c = leaves
            out = attention_varlen(
                a, b, c, cu_q, cu_k, longest[0], longest[1], **options, backend=by
            )
            assert isinstance(out, Tensor)
            return [out, *torch.autograd.grad((out * weights.to(dtype_)).sum(), leaves)]

        exact = results(torch.float64, "reference")
        try:
            ours = results(BF16, backend)
        except BackendUnavailable as missing:
            if backend == "own":
                raise
            return [Compared(f"not available: {missing}", 0.0, 0.0)]
        # bf16 results of exact sums: allow four times that
        rounded = [x.to(BF16) for x in results(FP32, "reference")]
        names = ["out", "dq", "dk", "dv"]
        return [
            compare(*four, factor=4.0, floor=8e-3)
            for four in zip(names, ours, exact, rounded, strict=True)
        ]

    return run


def make_bounds(lengths: Lengths, device: torch.device) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """(cu_q, cu_k, (longest queries, longest keys)) of the lengths."""
    both = torch.tensor(lengths, dtype=torch.int32)
    cu = torch.cat([both.new_zeros(1, 2), both.cumsum(0, dtype=torch.int32)]).to(device)
    return (
        cu[:, 0].contiguous(),
        cu[:, 1].contiguous(),
        (int(both[:, 0].max()), int(both[:, 1].max())),
    )
