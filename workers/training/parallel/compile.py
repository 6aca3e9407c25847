"""Blocks compiled by `torch.compile`, each by itself; what compiling takes is told as a phase and
an event.

One piece of code serves all blocks of a kind, so a deep model compiles once. Does not know shards,
casts or copies:
they are put around what is compiled here.
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
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from workers.contracts.specs.plan import ParallelPlan
from workers.models.decoder import Decoder
from workers.models.layers.attention import AttentionBase
from workers.models.layers.documents import Documents
from workers.models.layers.mla import LatentAttention
from workers.models.moe.layer import RoutedMlp
from workers.runtime.exits import UserError
from workers.training.numerics.cpu_products import KERNELS
from workers.training.recompute.selective import PRODUCTS

BACKEND = "inductor"


class Compiled:
    """In place of a forward method: compiled where gradients are wanted, as it was elsewhere.

    Validation and texts come in other lengths than training, each of which would be compiled anew.
    """

    def __init__(self, plain: Callable[..., Tensor], *, drops: bool) -> None:
        self.plain = plain
        # torch's own generator, so that masks are those of an eager run
        options: Any = {"fallback_random": True} if drops and BACKEND == "inductor" else None
        self.compiled: Callable[..., Tensor] = torch.compile(
            plain, dynamic=False, backend=BACKEND, options=options
        )

    def __call__(self, *args: Any) -> Tensor:
        return self.compiled(*args) if torch.is_grad_enabled() else self.plain(*args)


def apply_compile(decoder: Decoder, plan: ParallelPlan) -> None:
    """Compile the blocks of a meta-built part, before anything is laid around them.

    A block is one piece where its shapes are settled. Under tensor parallelism attention and MLP
    are a piece each, what
    travels between them stays outside. Routed experts, whose shapes follow the tokens, run as they
    are between compiled
    pieces (`exclude_attention`: some attention cores, too). With recompute `selective` the rule is part of
    a piece.
    """
    import torch._dynamo.config
    from torch._dynamo.decorators import skip

    for kernel in KERNELS:
        skip(kernel)
    # an earlier run of this process counts towards the limit of versions of one piece
    torch._dynamo.reset()
    # a block's gradients come together: nothing to cut by buckets
    torch._dynamo.config.optimize_ddp = False
    drops = bool(decoder.spec.dropout)
    for block in decoder.blocks.values():
        routed = isinstance(block.mlp, RoutedMlp)
        pieces: list[Any] = [block]
        if plan.tp > 1:
            pieces = [block.attn] if routed else [block.attn, block.mlp]
        elif routed:
            # one class for all layers, or each would be a version of its own
            block.mlp.__class__ = _AsItIs
        for piece in pieces:
            plain = _selective(piece.forward) if plan.recompute == "selective" else piece.forward
            piece.forward = Compiled(plain, drops=drops)


def exclude_attention(decoder: Decoder, *, always: bool) -> None:
    """Attention to packed documents runs as it is, between compiled pieces; with `always` attention
    does.
    """
    cores = [each for each in decoder.modules() if isinstance(each, AttentionBase | LatentAttention)]
    if cores:  # one for all, or each would be a version of its own
        shared = _as_it_is(cores[0].attend) if always else _but_for_documents(cores[0].attend)
        for each in cores:
            each.attend = shared


def _as_it_is(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    kept: Callable[..., Tensor] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept


class _AsItIs(RoutedMlp):
    forward = _as_it_is(RoutedMlp.forward)


def _but_for_documents(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    apart = _as_it_is(plain)

    def attend(*heads: Tensor, documents: Documents | None = None, **how: Any) -> Tensor:
        if documents is None:
            return plain(*heads, **how)
        return apart(*heads, documents=documents, **how)

    return attend


def _selective(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keeps outputs of matrix products, as `recompute.selective` does of blocks that are not
    compiled.
    """
    contexts = partial(create_selective_checkpoint_contexts, list(PRODUCTS))

    def selective(*args: Any) -> Tensor:
        out: Tensor = checkpoint(plain, *args, use_reentrant=False, context_fn=contexts)
        return out

    return selective


def refuse_uncompilable(device: torch.device, precision: str) -> None:
    """Raises UserError where this machine cannot compile, or not what this precision needs."""
    if device.type == "cpu" and precision == "fp16":
        message = (
            "a CPU computes products of fp16 in fp32 operator by operator, which compiled "
            "blocks would not show"
        )
        raise UserError(f"train.compile: {message}; try precision bf16, or compile false")
    with warnings.catch_warnings():  # of torch's own old parts, while its code generator loads
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")
    lacks = _lacks_on_cpu() if device.type == "cpu" else _lacks_on_cuda()
    if lacks is not None:
        raise UserError(f"train.compile: {lacks}, or compile false")


def _lacks_on_cpu() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return (
            "torch.compile writes C++ on a CPU, and no C++ compiler is found; try installing "
            "g++, CXX=/path/to/one"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        message = (
            "torch.compile builds modules for this Python on a CPU, and its headers are not "
            f"at {header}"
        )
        return f"{message}; try installing python{sysconfig.get_python_version()}-dev"
    return None


def _lacks_on_cuda() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return (
            "torch.compile writes Triton kernels for a GPU, and triton is not installed; try "
            "installing it"
        )
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return (
            "Triton builds its launchers with a C compiler, and none is found; try installing gcc"
        )
    return None


class Compilation:
    """Watches torch compile in this process: its phase is told while it lasts, its seconds are
    counted.

    `phase` gives and takes the training loop's phase.
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
        """Of what was compiled: seconds, and how many pieces (a backward pass is one of its own);
        None of nothing.
        """
        return {"seconds": self._seconds, "pieces": self._pieces} if self._pieces else None

    def _begin(self, _: Any) -> None:
        self._before, self._began_s = self._phase(), time.perf_counter()
        self._enter("compile")

    def _end(self, _: Any) -> None:
        self._seconds += time.perf_counter() - self._began_s
        self._pieces += 1
        self._enter(self._before)
