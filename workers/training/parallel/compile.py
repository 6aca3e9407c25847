"""Compiles blocks by `torch.compile`, and watches compilation as a phase.

All blocks of a kind share compiled code, so a deep model compiles once. Does not depend on
sharding, casts or copies, which wrap what is compiled here.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from workers.contracts.specs.plan import ParallelPlan
from workers.models.decoder import Decoder
from workers.models.layers.attention import AttentionBase
from workers.models.layers.documents import Documents
from workers.models.layers.mla import LatentAttention
from workers.models.linear_variants import variant_of
from workers.models.moe.layer import RoutedMlp
from workers.models.wrapped import Inner, wrapped
from workers.runtime.exit_codes import UserError
from workers.training.numerics.cpu_matmul import KERNELS
from workers.training.recompute.selective import PRODUCTS

BACKEND = "inductor"


class Compiled:
    """The wrapper of a module that is compiled if gradients are enabled, else eager.

    Validation and text samples have other lengths than training; each would be compiled again.
    `selective`: the compiled code recomputes all but matrix products.
    """

    def __init__(self, *, drops: bool, selective: bool) -> None:
        self.selective = selective
        # torch's own generator, for the masks of an eager run
        self.options: Any = {"fallback_random": True} if drops and BACKEND == "inductor" else None
        self._compiled: Callable[..., Tensor] | None = None

    def __call__(self, module: nn.Module, inner: Inner, /, *args: Any) -> Tensor:
        """The module's output."""
        if not torch.is_grad_enabled():
            eager: Tensor = inner(*args)
            return eager
        if self._compiled is None:  # `inner` is the same method at every call
            plain = _selective(inner) if self.selective else inner
            self._compiled = torch.compile(
                plain, dynamic=False, backend=BACKEND, options=self.options
            )
        return self._compiled(*args)


def apply_compile(decoder: Decoder, plan: ParallelPlan) -> None:
    """Compile the blocks of a meta-built part, before anything wraps them.

    A block is compiled as one if its shapes are static. Under tensor parallelism attention and MLP
    are compiled separately, without the redistribution between them. Routed experts, whose shapes
    depend on the tokens, stay eager between compiled code, as do some attention cores
    (`exclude_attention`). Selective recomputation is compiled with the block.
    """
    import torch._dynamo.config
    from torch._dynamo.decorators import skip

    for kernel in KERNELS:
        skip(kernel)
    # earlier attempts in this process count toward the recompilation limit
    torch._dynamo.reset()
    # a block's gradients come together: DDP's buckets need no graph breaks
    torch._dynamo.config.optimize_ddp = False
    drops = bool(decoder.spec.dropout)
    selective = plan.recompute == "selective"
    for layer, block in decoder.blocks.items():
        places: list[tuple[nn.Module, str]] = [(decoder.blocks, layer)]
        if plan.tp > 1:
            places = [(block, "attn")]
            if not isinstance(block.mlp, RoutedMlp):
                places.append((block, "mlp"))
        elif isinstance(block.mlp, RoutedMlp):
            # one class for all layers, or each would be compiled again
            block.mlp = variant_of(block.mlp, EagerRoutedMlp)
        for parent, name in places:
            compiled = Compiled(drops=drops, selective=selective)
            parent.register_module(name, wrapped(parent.get_submodule(name), compiled))


def exclude_attention(decoder: Decoder, *, always: bool) -> None:
    """Run attention eagerly, between compiled code: to packed documents, or `always`."""
    cores = [
        each for each in decoder.modules() if isinstance(each, AttentionBase | LatentAttention)
    ]
    if cores:  # one function for all, or each would be compiled again
        shared = _eager(cores[0].attend) if always else _eager_with_documents(cores[0].attend)
        for each in cores:
            each.attend = shared


def _eager(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    eager: Callable[..., Tensor] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return eager


class EagerRoutedMlp(RoutedMlp):
    """Routed experts between compiled code: their shapes depend on the tokens."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """See `RoutedMlp.forward`."""
        return super().forward(x, documents)


def _eager_with_documents(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    eager = _eager(plain)

    def attend(*heads: Tensor, documents: Documents | None = None, **how: Any) -> Tensor:
        if documents is None:
            return plain(*heads, **how)
        return eager(*heads, documents=documents, **how)

    return attend


def _selective(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Save outputs of matrix products, as `recompute.selective` does for eager blocks."""
    contexts = partial(create_selective_checkpoint_contexts, list(PRODUCTS))

    def selective(*args: Any) -> Tensor:
        out: Tensor = checkpoint(plain, *args, use_reentrant=False, context_fn=contexts)
        return out

    return selective


def refuse_uncompilable(device: torch.device, precision: str) -> None:
    """Raises UserError if this machine cannot compile at this precision."""
    if device.type == "cpu" and precision == "fp16":
        message = (
            "fp16 products on a CPU are computed in fp32 per operator, which compiled blocks "
            "do not support"
        )
        raise UserError(f"train.compile: {message}. Use precision bf16, or compile false.")
    with warnings.catch_warnings():  # torch's own, while its code generator loads
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")
    missing = _missing_on_cpu() if device.type == "cpu" else _missing_on_cuda()
    if missing is not None:
        raise UserError(f"train.compile: {missing} Otherwise, set train.compile to false.")


def _missing_on_cpu() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return (
            "torch.compile generates C++ on a CPU, but no C++ compiler is installed. Install "
            "g++, or set CXX=/path/to/one."
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        message = (
            "torch.compile builds modules for this Python on a CPU, but its headers are not "
            f"at {header}"
        )
        return f"{message}. Install python{sysconfig.get_python_version()}-dev."
    return None


def _missing_on_cuda() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return (
            "torch.compile generates Triton kernels for a GPU, but triton is not installed. "
            "Install it."
        )
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "Triton builds its launchers with a C compiler, but none is installed. Install gcc."
    return None


class Compilation:
    """Watches torch's compilation in this process: enters phase `compile`, and sums its seconds.

    `phase` returns the loop's phase, `enter` sets it.
    """

    def __init__(self, phase: Callable[[], str], enter: Callable[[str], None]) -> None:
        self._phase, self._enter = phase, enter
        self._before = ""
        self._began_s = 0.0
        self._seconds, self._pieces = 0.0, 0

    def __enter__(self) -> Compilation:
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_: Any) -> None:
        from torch._dynamo.callback import callback_handler

        callback_handler.remove_start_callback(self._begin)
        callback_handler.remove_end_callback(self._end)

    @property
    def taken(self) -> dict[str, Any] | None:
        """Seconds and number of compiled graphs (a backward pass is its own); None if none."""
        return {"seconds": self._seconds, "pieces": self._pieces} if self._pieces else None

    def _begin(self, _: Any) -> None:
        self._before, self._began_s = self._phase(), time.perf_counter()
        self._enter("compile")

    def _end(self, _: Any) -> None:
        self._seconds += time.perf_counter() - self._began_s
        self._pieces += 1
        self._enter(self._before)
