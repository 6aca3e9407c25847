"""An engine around a loaded model: how many blocks its cache has, then cache, scheduler and runner put together.

Knows memory; knows neither prompts nor where answers go.
"""

from __future__ import annotations

import torch

from workers.contracts.exits import UserError
from workers.inference.blocks import BlockPool
from workers.inference.cache import PagedCache, block_bytes
from workers.inference.constrain.guide import Guides
from workers.inference.engine import Engine
from workers.inference.load import Loaded
from workers.inference.parallel import LeadingRunner, Team
from workers.inference.products import lay_out
from workers.inference.runner import Runner
from workers.inference.scheduler import Limits, Scheduler
from workers.inference.speculate.opening import Drafting
from workers.inference.swap import HostBlocks
from workers.metrics.memory import capacity_bytes, process_memory

BLOCK_SIZE = 16  # tokens
CACHE_SHARE = {"cpu": 0.4, "cuda": 0.85}  # of the memory that the weights leave
SWAP_SHARE = 0.1  # of the CPU's memory that is free


def blocks_that_fit(loaded: Loaded, drafting: Drafting | None = None) -> tuple[int, int]:
    """Blocks that the memory beside the weights has room for, and the bytes of one, a draft model's included."""
    lay_out(loaded.decoder)  # a second copy of the weights has to be there when free memory is counted
    weight = next(loaded.decoder.parameters())
    each_bytes = block_bytes(loaded.spec, block_size=BLOCK_SIZE, dtype=loaded.cache_dtype or weight.dtype)
    if drafting is not None and drafting.model is not None:
        lay_out(drafting.model.decoder)
        each_bytes += block_bytes(drafting.model.spec, block_size=BLOCK_SIZE, dtype=weight.dtype)
    free_bytes = capacity_bytes(weight.device, local_world_size=1) - process_memory(weight.device)[0]
    return int(free_bytes * CACHE_SHARE[weight.device.type]) // each_bytes, each_bytes


def blocks_wanted(loaded: Loaded, tokens: int) -> int:
    """Of one request of so many tokens, which ends at the model's context."""
    return -(-min(tokens, loaded.spec.max_seq_len) // BLOCK_SIZE)


def build(
    loaded: Loaded, *, blocks: int, limits: Limits, drafting: Drafting | None = None, team: Team | None = None
) -> Engine:
    """Raises UserError for a model that the paged cache cannot serve.

    There are as many places for swapped blocks as the cache has blocks, as far as a share of CPU memory goes. Of a
    `team` this is rank 0.
    """
    weight, host = next(loaded.decoder.parameters()), torch.device("cpu")
    dtype = loaded.cache_dtype or weight.dtype
    each_bytes = block_bytes(loaded.spec, block_size=BLOCK_SIZE, dtype=dtype)
    host_bytes = capacity_bytes(host, local_world_size=1) - process_memory(host)[0]
    swap = max(0, min(blocks, int(SWAP_SHARE * host_bytes) // each_bytes))
    cache = PagedCache(
        loaded.spec, blocks=blocks, block_size=BLOCK_SIZE, dtype=dtype, device=weight.device, swap=swap,
        shares=1 if team is None else team.size,
    )  # fmt: skip
    try:
        runner = Runner(loaded.decoder, cache) if team is None else LeadingRunner(loaded.decoder, cache, team)
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    decode = None if loaded.words is None else loaded.words.decode
    pool = BlockPool(blocks, BLOCK_SIZE)
    scheduler = Scheduler(pool, limits, window=loaded.spec.window, swap=HostBlocks(swap) if swap else None)
    scheduler.costs.block_s = cache.block_swap_s()
    guides = None if loaded.words is None else Guides(loaded.words, loaded.ends, vocab=loaded.spec.vocab)
    speculator = None if drafting is None else drafting.speculator(pool)
    return Engine(
        runner, scheduler, context=loaded.spec.max_seq_len, decode=decode, speculator=speculator, guides=guides
    )
