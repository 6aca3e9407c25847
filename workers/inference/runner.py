"""A decoder of `workers.models` run against the paged cache: a step's tokens of all sequences in
one forward pass.

Turns a step plan into tensors; knows nothing of sampling or of why the plan is what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kernels.decode import plan_pages
from workers.inference.cache import PagedAttend, PagedCache, Step
from workers.inference.cpu.matmul import lay_out
from workers.inference.latent_cache import CachedLatent
from workers.inference.step import StepPlan
from workers.inference.work import Work, work_of
from workers.models.decoder import Decoder

_SHORTEST_TABLE = 512
_hooks: WeakKeyDictionary[Decoder, RemovableHandle] = WeakKeyDictionary()


class Runner:
    """`run` gives logits `[wanted tokens, vocab]`, fp32, in the plan's order: of each slice its
    last `wants`. `start`
    is called for up to `depth` plans before the first of them is asked for its logits.

    The decoder's own code runs unchanged: its attention is given the cache, its placement the
    tokens' positions, and
    its last norm sees only the tokens whose logits are wanted. Raises ValueError for a model whose
    cached keys would
    not stay right. A decoder may be a part of the model: `through` takes and gives hidden states
    then.
    """

    depth = 1

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        spec = decoder.spec
        if (
            spec.rope.scaling is not None
            and spec.position == "rope"
            and spec.rope.scaling.name == "dynamic"
        ):
            message = (
                f"{spec.name} has dynamic rotary scaling, by which every cached key would turn "
                "as its sequence grows"
            )
            raise ValueError(f"{message}; try linear or yarn scaling")
        lay_out(decoder)
        self.decoder, self.cache, self.vocab = decoder.eval(), cache, spec.vocab
        self.device, self.dtype = cache.keys[0].device, next(decoder.parameters()).dtype
        self._most, self._length = spec.max_seq_len, _SHORTEST_TABLE
        self._positions = self._wanted = torch.empty(0, dtype=torch.int64)
        decoder.placement = self._placement
        if earlier := _hooks.get(decoder):  # a decoder serves the cache that it was given last
            earlier.remove()
        if decoder.norm is not None:
            _hooks[decoder] = decoder.norm.register_forward_pre_hook(self._only_wanted)
        for layer, block in enumerate(decoder.blocks.values()):
            attention: Any = block.attn
            if spec.mla is not None:
                attention.forward = CachedLatent(attention, cache, layer)
            else:
                attention.attend = PagedAttend(cache, layer)

    def run(self, plan: StepPlan) -> Tensor:
        return self.compute(work_of(plan, self.cache.block_size))

    def start(self, plan: StepPlan) -> Callable[[], Tensor]:
        """Whose call does as `run`."""
        return partial(self.run, plan)

    def idle(self) -> None:
        """There is nothing to run for the time being."""

    @torch.inference_mode()
    def compute(self, work: Work, hidden: Tensor | None = None) -> Tensor:
        """As `run`, of what a plan comes to, and of the `hidden` states that the stage before
        gives.
        """
        return self.decoder.logits(self.through(work, hidden))[0].float()

    @torch.inference_mode()
    def through(self, work: Work, hidden: Tensor | None = None) -> Tensor:
        """`[1, tokens, hidden]`, all but norm and head."""
        self.cache.swap_out(work.outs)
        self.cache.swap_in(work.ins)
        self.cache.copy(work.copies)
        while self._length < max(work.lens):
            self._length *= 2
        self._positions, self._wanted = self._tensor(work.places), self._tensor(work.wanted)
        self.cache.step = self._step(work)
        try:
            given = self._tensor(work.tokens).unsqueeze(0) if hidden is None else hidden
            return self.decoder.through(given)
        finally:
            self.cache.step = None

    def _step(self, work: Work) -> Step:
        table, lens = self._tensor(work.table, torch.int32), self._tensor(work.lens, torch.int32)
        most = work.most
        cu = None if most == 1 else self._tensor([0, *work.ends], torch.int32)
        pages = plan_pages(
            table,
            lens,
            blocks=self.cache.blocks,
            block_size=self.cache.block_size,
            cu_q=cu,
            max_q=None if cu is None else most,
        )
        return Step(self._tensor(work.slots), table, lens, cu, pages)

    def _placement(self, tokens: int, device: torch.device) -> tuple[int, Tensor]:
        return min(self._length, self._most), self._positions

    def _only_wanted(self, norm: torch.nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return (given[0][:, self._wanted],)

    def _tensor(self, numbers: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)
