"""Builds an engine around a loaded model: sizes its cache, then creates scheduler and runner.

Does not depend on prompts or outputs.
"""

from __future__ import annotations

import torch

from workers.contracts.catalog.adapter_shapes import block_linears
from workers.contracts.catalog.rollout_limits import BLOCK_TOKENS
from workers.inference.adapters.low_rank_slots import LowRankSlots
from workers.inference.adapters.store import AdapterStore
from workers.inference.constrain.guide import Guides
from workers.inference.cpu.matmul import use_onednn_layout
from workers.inference.engine import Engine
from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.kv_cache.cpu_swap import CpuBlocks
from workers.inference.kv_cache.paged_cache import PagedCache, block_bytes
from workers.inference.model_loading import LoadedModel
from workers.inference.parallel.driver import DriverRunner
from workers.inference.parallel.messages import COUNT_BLOCKS
from workers.inference.parallel.sharding import Shard, rank_shard
from workers.inference.runner import Runner
from workers.inference.scheduling.policy import Limits
from workers.inference.scheduling.scheduler import Scheduler
from workers.inference.speculate.setup import Drafting
from workers.metrics.memory import capacity_bytes, process_memory
from workers.models.decoder import Decoder
from workers.models.tensor_parallel_plan import block_plan
from workers.runtime.exit_codes import UserError

BLOCK_SIZE = BLOCK_TOKENS
CACHE_SHARE = {"cpu": 0.4, "cuda": 0.85}  # of the memory that is free after loading weights
SWAP_SHARE = 0.1  # of free CPU memory


def count_available_blocks(
    loaded: LoadedModel, drafting: Drafting | None = None
) -> tuple[int, int]:
    """Blocks that fit into the memory next to the weights, and the bytes of one block here.

    Bytes include a draft model's. In a group of ranks each has its part of every block, and the
    rank with the least memory decides.
    """
    available, one_block_bytes = count_local_blocks(loaded, drafting)
    if loaded.rank_group is not None:
        loaded.rank_group.broadcast(COUNT_BLOCKS)
        available = loaded.rank_group.min_over_ranks(available)
    return available, one_block_bytes


def count_local_blocks(loaded: LoadedModel, drafting: Drafting | None = None) -> tuple[int, int]:
    """As `count_available_blocks`, for this rank only."""
    # allocates a second copy of the weights, so do it before free memory is read
    use_onednn_layout(loaded.decoder)
    weight = next(loaded.decoder.parameters())
    one_block_bytes = _block_bytes(loaded)
    if drafting is not None and drafting.model is not None:
        use_onednn_layout(drafting.model.decoder)
        one_block_bytes += block_bytes(
            drafting.model.spec, block_size=BLOCK_SIZE, dtype=weight.dtype
        )
    free_bytes = (
        capacity_bytes(weight.device, local_world_size=1) - process_memory(weight.device)[0]
    )
    if loaded.rank_group is not None and weight.device.type == "cpu":
        free_bytes //= loaded.rank_group.local_world_size
    free_bytes -= adapter_slot_bytes(loaded)
    share = CACHE_SHARE[weight.device.type]
    return max(0, int(free_bytes * share)) // one_block_bytes, one_block_bytes


def blocks_per_request(loaded: LoadedModel, tokens: int) -> int:
    """Blocks of a request of this many tokens, at most the model's context."""
    return -(-min(tokens, loaded.spec.max_seq_len) // BLOCK_SIZE)


def create_cache(loaded: LoadedModel, *, blocks: int, block_size: int, swap: int) -> PagedCache:
    """The cache of this rank's layers and heads."""
    weight = next(loaded.decoder.parameters())
    return PagedCache(
        loaded.spec,
        blocks=blocks,
        block_size=block_size,
        dtype=loaded.cache_dtype or weight.dtype,
        device=weight.device,
        swap=swap,
        shares=loaded.shares,
        layers=len(loaded.decoder.blocks),
    )


def create_adapter_slots(loaded: LoadedModel, decoder: Decoder) -> LowRankSlots | None:
    """The slots for adapters in this rank's decoder; None if there are none."""
    if loaded.adapter_slots is None:
        return None
    use_onednn_layout(decoder)  # hooks are for the modules that compute
    place = None if loaded.rank_group is None else loaded.rank_group.place
    plan = block_plan(loaded.spec) if loaded.shares > 1 else {}

    def shard_of(name: str) -> Shard | None:
        shard = plan.get(name)
        return None if shard is None or place is None else rank_shard(shard, loaded.spec, place)

    return LowRankSlots(decoder, loaded.adapter_slots, shards=shard_of)


def adapter_slot_bytes(loaded: LoadedModel) -> int:
    """Bytes of all slots for adapters on this rank, at most."""
    slots, decoder = loaded.adapter_slots, loaded.decoder
    if slots is None:
        return 0
    itemsize = next(decoder.parameters()).dtype.itemsize
    shapes = [block_linears(loaded.spec, int(layer)) for layer in decoder.blocks]
    widths = sum(outputs + inputs for shape in shapes for outputs, inputs in shape.values())
    return slots.count * slots.padded_rank * widths * itemsize


def build_engine(
    loaded: LoadedModel,
    *,
    blocks: int,
    limits: Limits,
    drafting: Drafting | None = None,
    swaps: bool = True,
    decode_graphs: bool = True,
) -> Engine:
    """The engine; in a group of ranks that of the leader, which sends the cache's size to the rest.

    Also creates the loaded model's slots for adapters.
    With `swaps` there is swap space for as many blocks as the cache has, up to a share of CPU
    memory. `decode_graphs`: on one GPU, decode steps are captured as CUDA graphs. Raises UserError
    for a model that the paged cache does not support.
    """
    rank_group, cpu = loaded.rank_group, torch.device("cpu")
    free_cpu_bytes = capacity_bytes(cpu, local_world_size=1) - process_memory(cpu)[0]
    free_cpu_bytes //= 1 if rank_group is None else rank_group.local_world_size
    swap = max(0, min(blocks, int(SWAP_SHARE * free_cpu_bytes) // _block_bytes(loaded)))
    swap = swap if swaps else 0
    cache = create_cache(loaded, blocks=blocks, block_size=BLOCK_SIZE, swap=swap)
    slots = create_adapter_slots(loaded, loaded.decoder)
    try:
        runner = (
            Runner(loaded.decoder, cache, slots, graphs=decode_graphs)
            if rank_group is None
            else DriverRunner(loaded.decoder, cache, rank_group, slots)
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    pool = BlockPool(blocks, BLOCK_SIZE)
    scheduler = Scheduler(
        pool, limits, window=loaded.spec.window, swap=CpuBlocks(swap) if swap else None
    )
    scheduler.swapper.costs.block_s = cache.block_swap_s()
    tokenizer, ends, vocab = loaded.tokenizer, loaded.stop_token_ids, loaded.spec.vocab
    speculator = None if drafting is None else drafting.speculator(pool)
    return Engine(
        runner,
        scheduler,
        context=loaded.spec.max_seq_len,
        decode=None if tokenizer is None else tokenizer.decode,
        speculator=speculator,
        guides=None if tokenizer is None else Guides(tokenizer, ends, vocab=vocab),
        adapters=None
        if slots is None
        else AdapterStore(slots, loaded.spec, base=loaded.path, rank_group=rank_group),
    )


def _block_bytes(loaded: LoadedModel) -> int:
    """Bytes of a block's part on this rank."""
    dtype = loaded.cache_dtype or next(loaded.decoder.parameters()).dtype
    layers = len(loaded.decoder.blocks)
    return block_bytes(
        loaded.spec, block_size=BLOCK_SIZE, dtype=dtype, shares=loaded.shares, layers=layers
    )
