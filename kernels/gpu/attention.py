"""GPU cases of attention: checks of every path, then models' shapes against cuDNN, flash and
FlexAttention.

FLOPs count unmasked pairs: 4 · pairs · head dim forward (2 products), 2.5 times that backward (5
products).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels import runtime, tuning
from kernels.attention.api import attention, attention_varlen
from kernels.attention.triton_kernels.launch_tma import tma_why_not
from kernels.gpu.attention_checks import BF16, FP16, FP32, Shape, check, check_packed, make_bounds
from kernels.gpu.cases import Bench, Cases, Check, Work


def _sdpa(
    shape: Shape, tensors: tuple[Tensor, Tensor, Tensor], kernel: str
) -> Callable[[], Tensor]:
    """torch's SDPA restricted to one kernel, on [B, H, S, D] views of the same tensors."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in tensors)
    which = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[kernel]

    def call() -> Tensor:
        with sdpa_kernel(which):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
            )

    call()
    return call


def _flex(shape: Shape, tensors: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (x.transpose(1, 2) for x in tensors)
    width = shape.window

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (j > i - width) if width else j <= i

    def capped(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return shape.softcap * torch.tanh(score / shape.softcap)

    mask = None
    if shape.causal or width:
        mask = create_block_mask(
            seen, None, None, shape.queries, shape.keys or shape.queries, device=q.device
        )
    fast: Any = torch.compile(flex_attention)
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": shape.heads != shape.kv_heads}
    if shape.softcap:
        options["score_mod"] = capped
    return lambda: fast(q, k, v, **options)


def _varlen_of_torch(shape: Shape, tensors: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    """torch's FlashAttention-2 with its window; dense here."""
    return lambda: attention(*tensors, **shape.options, backend="flash")  # type: ignore[return-value]


def _peers(
    shape: Shape, tensors: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    if shape.softcap:
        return {"flex": lambda: _flex(shape, tensors)}
    if shape.window:
        return {
            "flex": lambda: _flex(shape, tensors),
            "torch varlen": lambda: _varlen_of_torch(shape, tensors),
        }
    peers: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "cudnn": lambda: _sdpa(shape, tensors, "cudnn"),
        "flash": lambda: _sdpa(shape, tensors, "flash"),
    }
    return (
        peers
        if shape.d != (shape.dv or shape.d)
        else {**peers, "flex": lambda: _flex(shape, tensors)}
    )


def _forward(
    shape: Shape, backend: str | None = "own", tma: bool = False
) -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        tensors = shape.tensors(device)
        if tma and (why := tma_why_not(*tensors, shape.spec)) is not None:
            raise RuntimeError(f"the sm_90 kernel does not support this shape: {why}")

        def ours() -> object:
            with tuning.override("attention_forward", tma=tma) if tma else torch.no_grad():
                return attention(*tensors, **shape.options, backend=backend)

        return Work(
            ours, dict(_peers(shape, tensors)), shape.bytes(False), shape.flops(False), "tensor"
        )

    return make


def _backward(shape: Shape, backend: str | None = "own") -> Callable[[torch.device], Work]:
    def make(device: torch.device) -> Work:
        tensors = shape.tensors(device, grad=True)
        out = attention(*tensors, **shape.options, backend=backend)
        assert isinstance(out, Tensor)

        def back(result: Tensor) -> Callable[[], object]:
            grad = torch.randn_like(result)
            return lambda: torch.autograd.grad(result, tensors, grad, retain_graph=True)

        def peer(
            make_call: Callable[[], Callable[[], Tensor]],
        ) -> Callable[[], Callable[[], object]]:
            return lambda: back(make_call()())

        peers = {name: peer(made) for name, made in _peers(shape, tensors).items()}
        return Work(back(out), peers, shape.bytes(True), shape.flops(True), "tensor")

    return make


def _packed(
    lengths: list[int], heads: int, kv_heads: int, backward: bool
) -> Callable[[torch.device], Work]:
    """Packed documents, causal: own against FlashAttention-2 ragged and FlexAttention with a
    document mask.
    """

    def make(device: torch.device) -> Work:
        cu, _, (longest, _) = make_bounds([(n, n) for n in lengths], device)
        total = sum(lengths)
        q = torch.randn(total, heads, 128, device=device, dtype=BF16, requires_grad=backward)
        k, v = (
            torch.randn(total, kv_heads, 128, device=device, dtype=BF16, requires_grad=backward)
            for _ in range(2)
        )

        def call(backend: str) -> Callable[[], Any]:
            return lambda: attention_varlen(
                q, k, v, cu, cu, longest, longest, causal=True, backend=backend
            )

        def flex() -> Callable[[], Any]:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            document = torch.repeat_interleave(torch.arange(len(lengths), device=device), cu.diff())
            mask = create_block_mask(
                lambda b, h, i, j: (document[i] == document[j]) & (j <= i),
                None,
                None,
                total,
                total,
                device=device,
            )
            fast: Any = torch.compile(flex_attention)
            first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
            return lambda: fast(*first, block_mask=mask, enable_gqa=heads != kv_heads)

        def timed(run: Callable[[], Any]) -> Callable[[], object]:
            if not backward:
                return run
            result = run()
            grad = torch.randn_like(result)
            return lambda: torch.autograd.grad(result, (q, k, v), grad, retain_graph=True)

        one = [Shape(1, n, heads, kv_heads, causal=True) for n in lengths]
        return Work(
            timed(call("own")),
            {"torch varlen": lambda: timed(call("flash")), "flex": lambda: timed(flex())},
            sum(s.bytes(backward) for s in one),
            sum(s.flops(backward) for s in one),
            "tensor",
        )

    return make


def _documents(total: int, seed: int = 0) -> list[int]:
    """Lengths as in a web crawl: log-normal, median 400 tokens, truncated to fill `total`."""
    made = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        draw = int(torch.randn((), generator=made).mul(1.1).add(6.0).exp())
        lengths.append(min(left, max(1, min(draw, 8192))))
    return lengths


DENSE = Shape(2, 4096, 16, 16, causal=True)  # B · S = 8k, hidden 2048
DENSE_64 = replace(DENSE, heads=32, kv_heads=32, d=64)
GROUPED, LONG = replace(DENSE, heads=32, kv_heads=8), Shape(1, 16384, 16, 16)
WINDOW, CAPPED = replace(DENSE, window=1024, queries=8192), replace(DENSE, softcap=30.0)
SMALL = Shape(2, 333, 4, 2, keys=471, causal=True)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": 100},
    "full": {},
}
PACKED = [(3, 3), (0, 40), (160, 170), (0, 0), (50, 0), (700, 933), (128, 128)]

CASES: Cases = [
    *(
        Check("attention", f"{backend} {name}", check(shape, backend))
        for backend in ("own", "flash")
        for name, shape in {
            "64": replace(SMALL, d=64),
            "128 grouped, keys before": SMALL,
            "128 full": replace(SMALL, causal=False),
            "128 fp16, queries that see nothing": replace(SMALL, keys=100, dtype=FP16),
            "128 window": replace(SMALL, window=77),
            "256": replace(SMALL, d=256),
            "80": replace(SMALL, d=80),
            "192/128": replace(SMALL, d=192, dv=128),
        }.items()
    ),
    Check("attention", "own 128 softcap", check(replace(SMALL, softcap=20.0), "own")),
    Check(
        "attention",
        "own 64 window and softcap",
        check(replace(SMALL, d=64, window=100, softcap=20.0), "own"),
    ),
    Check("attention", "own 64 fp32", check(replace(SMALL, d=64, dtype=FP32), "own")),
    Check("attention", "own 128 fp32", check(replace(SMALL, dtype=FP32), "own")),
    Check("attention", "own 192 window", check(replace(SMALL, d=192, window=77), "own")),
    Check("attention", "math 128 softcap", check(replace(SMALL, softcap=20.0), "math")),
    Check("attention", "cudnn 128", check(replace(SMALL, queries=512, keys=512), "cudnn")),
    Check(
        "attention",
        "efficient 128 fp32",
        check(replace(SMALL, queries=512, keys=512, dtype=FP32), "efficient"),
    ),
    *(
        Check("attention_varlen", f"{backend} {word}", check_packed(PACKED, options, backend))
        for backend in ("own", "flash")
        for word, options in MASKS.items()
    ),
    Check(
        "attention_varlen",
        "own softcap",
        check_packed(PACKED, {"softcap": 20.0, "causal": True}, "own"),
    ),
    *(
        Check("attention", f"own sm_90 variant {name}", check(shape, "own", tma=True))
        for name, shape in {
            "64 causal": replace(SMALL, d=64, queries=300, keys=512),
            "128 causal": replace(SMALL, queries=300, keys=512),
            "128 full, one sequence": replace(SMALL, batch=1, causal=False),
            "192/128": replace(SMALL, d=192, dv=128, queries=300, keys=512),
        }.items()
        if not torch.cuda.is_available() or runtime.arch() == "sm_90"
    ),
    Bench(
        "attention",
        "as called, 128 causal forward",
        _forward(DENSE, None),
        "attention-dispatch",
        1,
        "dispatched",
    ),
    Bench(
        "attention",
        "as called, 128 causal backward",
        _backward(DENSE, None),
        "attention-dispatch",
        1,
        "dispatched",
    ),
    *(
        Bench("attention", f"as called, {name}", make, "attention-dispatch", 4, "dispatched")
        for name, make in {
            "128 grouped causal forward": _forward(GROUPED, None),
            "128 grouped causal backward": _backward(GROUPED, None),
            "128 full forward, 16k": _forward(LONG, None),
        }.items()
    ),
    Bench("attention", "128 causal forward", _forward(DENSE), "attention-128-forward", 1),
    Bench(
        "attention",
        "128 causal forward, sm_90 variant",
        _forward(DENSE, tma=True),
        "attention-128-forward",
        1,
    ),
    Bench("attention", "128 causal backward", _backward(DENSE), "attention-128-backward", 1),
    Bench("attention", "64 causal forward", _forward(DENSE_64), "attention-64-forward", 1),
    Bench(
        "attention",
        "64 causal forward, sm_90 variant",
        _forward(DENSE_64, tma=True),
        "attention-64-forward",
        1,
    ),
    Bench("attention", "window 1024 forward", _forward(WINDOW), "attention-window", 2),
    Bench("attention", "window 1024 backward", _backward(WINDOW), "attention-window", 2),
    Bench("attention", "softcap forward", _forward(CAPPED), "attention-softcap", 2),
    Bench("attention", "softcap backward", _backward(CAPPED), "attention-softcap", 2),
    Bench(
        "attention_varlen",
        "documents forward",
        _packed(_documents(32768), 32, 8, False),
        "attention-varlen",
        2,
    ),
    Bench(
        "attention_varlen",
        "documents backward",
        _packed(_documents(32768), 32, 8, True),
        "attention-varlen",
        2,
    ),
    Bench("attention", "128 full forward, 16k", _forward(LONG)),
    Bench("attention", "128 full forward, 16k, sm_90 variant", _forward(LONG, tma=True)),
    Bench("attention", "128 grouped causal forward", _forward(GROUPED)),
    Bench("attention", "128 grouped causal backward", _backward(GROUPED)),
    Bench(
        "attention",
        "192/128 causal forward",
        _forward(Shape(1, 4096, 32, 32, 192, 128, causal=True)),
    ),
    Bench(
        "attention",
        "192/128 causal forward, sm_90 variant",
        _forward(Shape(1, 4096, 32, 32, 192, 128, causal=True), tma=True),
    ),
    Bench(
        "attention",
        "192/128 causal backward",
        _backward(Shape(1, 4096, 32, 32, 192, 128, causal=True)),
    ),
    Bench("attention", "256 causal forward", _forward(Shape(2, 4096, 8, 8, 256, causal=True))),
    Bench("attention", "256 causal backward", _backward(Shape(2, 4096, 8, 8, 256, causal=True))),
    Bench("attention", "64 causal backward", _backward(DENSE_64)),
]
