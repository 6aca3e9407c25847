"""Runs a decoder of `workers.models` over the paged cache: all sequences of a step in one pass.

Turns a step plan into tensors; does not depend on sampling or scheduling decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kernels.paged_kv import plan_pages
from workers.inference.adapters.low_rank_slots import LowRankSlots
from workers.inference.cpu.matmul import use_onednn_layout
from workers.inference.decode_graphs import DecodeBatch, DecodeGraphs
from workers.inference.kv_cache.latent_attention import PagedLatentAttention
from workers.inference.kv_cache.paged_cache import AttentionMetadata, PagedAttention, PagedCache
from workers.inference.scheduling.step_inputs import StepInputs, build_step_inputs
from workers.inference.scheduling.step_plan import StepPlan
from workers.models.decoder import Decoder

_SHORTEST_TABLE = 512  # positions
_hooks: WeakKeyDictionary[Decoder, RemovableHandle] = WeakKeyDictionary()


class Runner:
    """`run` returns fp32 logits `[tokens with logits, vocab]` in the plan's order.

    The decoder's code runs unchanged: its attention reads and writes the cache, its placement
    returns the tokens' positions, and its last norm sees only tokens that get logits. A decoder
    may be a pipeline stage: `through` then takes and returns hidden states. `start` may be called
    for up to `depth` plans before the first one's logits are requested. `adapters` are the slots
    of low-rank updates in this decoder. With `graphs`, decode steps on a GPU are captured.
    """

    depth = 1

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        adapters: LowRankSlots | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        """Raises ValueError for a model whose cached keys would become wrong."""
        spec = decoder.spec
        scaling = spec.rope.scaling
        if scaling is not None and spec.position == "rope" and scaling.name == "dynamic":
            raise ValueError(
                f"{spec.name} has dynamic rotary scaling, which changes cached keys as a sequence "
                "grows. Use linear or yarn scaling."
            )
        use_onednn_layout(decoder)
        self.adapters = adapters
        self.decoder, self.cache, self.vocab = decoder.eval(), cache, spec.vocab
        self.device, self.dtype = cache.keys[0].device, next(decoder.parameters()).dtype
        self._max_table, self._table = spec.max_seq_len, _SHORTEST_TABLE
        self._positions = torch.empty(0, dtype=torch.int64)
        self._logit_indices: Tensor | None = None  # all
        self.graphs: DecodeGraphs | None = None
        # latent attention has no slots for padding
        if graphs and self.device.type == "cuda" and spec.mla is None:
            self.graphs = DecodeGraphs(self._decode, self.device)
        self._generation = cache.generation
        decoder.placement = self._placement
        if earlier := _hooks.get(decoder):  # a decoder uses the newest cache
            earlier.remove()
        if decoder.norm is not None:
            _hooks[decoder] = decoder.norm.register_forward_pre_hook(self._select_logit_tokens)
        for layer, block in enumerate(decoder.blocks.values()):
            attention: Any = block.attn
            if spec.mla is not None:
                attention.forward = PagedLatentAttention(attention, cache, layer)
            else:
                attention.attend = PagedAttention(cache, layer)

    def run(self, plan: StepPlan) -> Tensor:
        """Compute a plan's logits."""
        return self.compute(build_step_inputs(plan, self.cache.block_size))

    def start(self, plan: StepPlan) -> Callable[[], Tensor]:
        """Start computing a plan; the call of the result waits for its logits."""
        return partial(self.run, plan)

    def idle(self) -> None:
        """Called while there is nothing to run."""

    @torch.inference_mode()
    def compute(self, inputs: StepInputs, hidden: Tensor | None = None) -> Tensor:
        """Logits as in `run`, from `hidden` states of the stage before if there is one."""
        if self.graphs is not None and hidden is None:
            logits = self._replay(self.graphs, inputs)
            if logits is not None:
                return logits
        return self.decoder.logits(self.through(inputs, hidden))[0].float()

    @torch.inference_mode()
    def through(self, inputs: StepInputs, hidden: Tensor | None = None) -> Tensor:
        """Hidden states `[1, tokens, hidden]` after all blocks, before norm and head."""
        self._move_blocks(inputs)
        while self._table < max(inputs.context_lens):
            self._table *= 2
        tokens, self._positions, self._logit_indices, metadata = self._upload(inputs)
        self.cache.metadata = metadata
        if self.adapters is not None:
            self.adapters.begin(inputs.adapter_slots, inputs.query_ends)
        try:
            x = tokens.unsqueeze(0) if hidden is None else hidden
            return self.decoder.through(x)
        finally:
            self.cache.metadata = None
            if self.adapters is not None:
                self.adapters.end()

    def _move_blocks(self, inputs: StepInputs) -> None:
        self.cache.swap_out(inputs.swap_outs)
        self.cache.swap_in(inputs.swap_ins)
        self.cache.copy(inputs.copies)

    def _replay(self, graphs: DecodeGraphs, inputs: StepInputs) -> Tensor | None:
        """Logits of a decode step by a graph; None if it has to run eagerly."""
        if self._generation != self.cache.generation:
            graphs.clear()
            self._generation = self.cache.generation
        if inputs.swap_outs or inputs.swap_ins or inputs.copies:
            return None
        # graphs read the tables of rotations: they must not be replaced by longer ones
        self._table = max(self._table, self._max_table)
        logits = graphs.run(inputs)
        # rows of prompt scores and beams outlive the step
        return None if logits is None else logits.clone()

    def _decode(self, batch: DecodeBatch) -> Tensor:
        """Logits `[n, vocab]` in fp32 of one token per sequence; reads no number on the host."""
        lens, table = batch.lens.int(), batch.table.int()
        plan = plan_pages(
            table, lens, blocks=self.cache.blocks, block_size=self.cache.block_size, check=False
        )
        self._positions, self._logit_indices = batch.positions, None
        self.cache.metadata = AttentionMetadata(batch.slots, table, lens, None, plan)
        try:
            x = self.decoder.through(batch.tokens.unsqueeze(0))
            return self.decoder.logits(x)[0].float()
        finally:
            self.cache.metadata = None

    def _upload(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """Tokens, positions, indices of tokens with logits, and where attention reads and writes.

        One copy to the device for the step. The scheduler's addresses are not read back for a
        check, which would wait for the device.
        """
        longest_query, sequences = inputs.max_query_len, len(inputs.context_lens)
        ends = [] if longest_query == 1 else [0, *inputs.query_ends]
        rows = (inputs.tokens, inputs.positions, inputs.slots, inputs.logit_indices)
        addresses = [*inputs.context_lens, *ends, *chain.from_iterable(inputs.table)]
        numbers = torch.tensor(
            [*chain.from_iterable(rows), *addresses], pin_memory=self.device.type == "cuda"
        ).to(self.device, non_blocking=True)
        sizes = [*(len(row) for row in rows), len(addresses)]
        tokens, positions, slots, indices, flat = torch.split(numbers, sizes)
        sizes = [sequences, len(ends), len(addresses) - sequences - len(ends)]
        lens, starts, blocks = torch.split(flat.int(), sizes)
        table, cu = blocks.view(sequences, -1), starts if ends else None
        plan = plan_pages(
            table,
            lens,
            blocks=self.cache.blocks,
            block_size=self.cache.block_size,
            cu_q=cu,
            max_q=None if cu is None else longest_query,
            longest=max(inputs.context_lens),
            tokens=len(inputs.tokens),
            check=False,
        )
        return tokens, positions, indices, AttentionMetadata(slots, table, lens, cu, plan)

    def _placement(self, tokens: int, device: torch.device) -> tuple[int, Tensor]:
        return min(self._table, self._max_table), self._positions

    def _select_logit_tokens(self, norm: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        if self._logit_indices is None:
            return args
        return (args[0][:, self._logit_indices],)
