"""A decoder of `workers.models` run against the paged cache: a step's tokens of all sequences in one forward pass.

Turns a step plan into tensors; knows nothing of sampling or of why the plan is what it is.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.decode import plan_pages
from workers.inference.cache import PagedAttend, PagedCache, Step
from workers.inference.scheduler import Slice, StepPlan
from workers.models.decoder import Decoder

_SHORTEST_TABLE = 512


class Runner:
    """`run` gives logits `[slices that sample, vocab]`, fp32, in the plan's order.

    The decoder's own code runs unchanged: its attention is given the cache, its placement the tokens' positions, and
    its last norm sees only the tokens whose logits are wanted. Raises ValueError for a model whose cached keys would
    not stay right.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        spec = decoder.spec
        if spec.rope.scaling is not None and spec.position == "rope" and spec.rope.scaling.name == "dynamic":
            says = f"{spec.name} has dynamic rotary scaling, by which every cached key would turn as its sequence grows"
            raise ValueError(f"{says}; try linear or yarn scaling")
        assert decoder.norm is not None and decoder.part.first
        self.decoder, self.cache, self.vocab = decoder.eval(), cache, spec.vocab
        self.device = cache.keys[0].device
        self._most, self._length = spec.max_seq_len, _SHORTEST_TABLE
        self._positions = self._wanted = torch.empty(0, dtype=torch.int64)
        decoder.placement = self._placement
        decoder.norm.register_forward_pre_hook(self._only_wanted)
        for layer, block in decoder.blocks.items():
            attention: Any = block.attn
            attention.attend = PagedAttend(cache, int(layer))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        slices = plan.slices
        self.cache.copy([each.copy for each in slices if each.copy is not None])
        tokens = [token for each in slices for token in each.request.tokens[each.start : each.start + each.count]]
        places = [place for each in slices for place in range(each.start, each.start + each.count)]
        ends = list(accumulate(each.count for each in slices))
        wanted = [end - 1 for end, each in zip(ends, slices, strict=True) if each.samples]
        longest = max(each.start + each.count for each in slices)
        while self._length < longest:
            self._length *= 2
        self._positions, self._wanted = self._tensor(places), self._tensor(wanted)
        self.cache.step = self._step(slices, ends)
        try:
            logits: Tensor = self.decoder(self._tensor(tokens).unsqueeze(0))
        finally:
            self.cache.step = None
        return logits[0].float()

    def _step(self, slices: tuple[Slice, ...], ends: list[int]) -> Step:
        page = self.cache.block_size
        slots = [
            each.request.blocks[place // page] * page + place % page
            for each in slices
            for place in range(each.start, each.start + each.count)
        ]
        width = max(len(each.request.blocks) for each in slices)
        table = self._tensor(
            [each.request.blocks + [0] * (width - len(each.request.blocks)) for each in slices], torch.int32
        )
        lens = self._tensor([each.start + each.count for each in slices], torch.int32)
        most = max(each.count for each in slices)
        cu = None if most == 1 else self._tensor([0, *ends], torch.int32)
        pages = plan_pages(
            table, lens, blocks=self.cache.blocks, block_size=page, cu_q=cu, max_q=None if cu is None else most
        )
        return Step(self._tensor(slots), table, lens, cu, pages)

    def _placement(self, tokens: int, device: torch.device) -> tuple[int, Tensor]:
        return min(self._length, self._most), self._positions

    def _only_wanted(self, norm: torch.nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return (given[0][:, self._wanted],)

    def _tensor(self, numbers: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)
