"""An engine around a loaded model: how many blocks its cache has, then cache, scheduler and runner
put together.

Knows memory; knows neither prompts nor where answers go.
"""

from __future__ import annotations

import torch

from workers.contracts.wire.exits import UserError
from workers.inference.blocks import BlockPool
from workers.inference.cache import PagedCache, block_bytes
from workers.inference.constrain.guide import Guides
from workers.inference.cpu.matmul import lay_out
from workers.inference.cpu_swap import HostBlocks
from workers.inference.engine import Engine
from workers.inference.load import Loaded
from workers.inference.parallel.driver import LeadingRunner
from workers.inference.parallel.messages import ROOM
from workers.inference.runner import Runner
from workers.inference.scheduler import Limits, Scheduler
from workers.inference.speculate.setup import Drafting
from workers.metrics.memory import capacity_bytes, process_memory

BLOCK_SIZE = 16  # tokens
CACHE_SHARE = {"cpu": 0.4, "cuda": 0.85}  # of the memory that the weights leave
SWAP_SHARE = 0.1  # of the CPU's memory that is free


def blocks_that_fit(loaded: Loaded, drafting: Drafting | None = None) -> tuple[int, int]:
    """Blocks that the memory beside the weights has room for, and the bytes of one here, a draft
    model's included. Of a
    team each rank has its part of every block, and the one with the least room decides."""
    fits, each_bytes = blocks_here(loaded, drafting)
    if loaded.team is not None:
        loaded.team.tell(ROOM)
        fits = loaded.team.least(fits)
    return fits, each_bytes


def blocks_here(loaded: Loaded, drafting: Drafting | None = None) -> tuple[int, int]:
    """As `blocks_that_fit`, of this rank alone."""
    # a second copy of the weights has to be there when free memory is counted
    lay_out(loaded.decoder)
    weight = next(loaded.decoder.parameters())
    each_bytes = _block_bytes(loaded)
    if drafting is not None and drafting.model is not None:
        lay_out(drafting.model.decoder)
        each_bytes += block_bytes(drafting.model.spec, block_size=BLOCK_SIZE, dtype=weight.dtype)
    free_bytes = (
        capacity_bytes(weight.device, local_world_size=1) - process_memory(weight.device)[0]
    )
    if loaded.team is not None and weight.device.type == "cpu":
        free_bytes //= loaded.team.local_world_size
    return int(free_bytes * CACHE_SHARE[weight.device.type]) // each_bytes, each_bytes


def blocks_wanted(loaded: Loaded, tokens: int) -> int:
    """Of one request of so many tokens, which ends at the model's context."""
    return -(-min(tokens, loaded.spec.max_seq_len) // BLOCK_SIZE)


def cache_of(loaded: Loaded, *, blocks: int, block_size: int, swap: int) -> PagedCache:
    """Of the layers, and the heads of each, that are held here."""
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


def build(
    loaded: Loaded, *, blocks: int, limits: Limits, drafting: Drafting | None = None
) -> Engine:
    """Raises UserError for a model that the paged cache cannot serve.

    There are as many places for swapped blocks as the cache has blocks, as far as a share of CPU
    memory goes. Of a team
    this is the leader, and the others make their caches by what it tells.
    """
    team, host = loaded.team, torch.device("cpu")
    host_bytes = capacity_bytes(host, local_world_size=1) - process_memory(host)[0]
    host_bytes //= 1 if team is None else team.local_world_size
    swap = max(0, min(blocks, int(SWAP_SHARE * host_bytes) // _block_bytes(loaded)))
    cache = cache_of(loaded, blocks=blocks, block_size=BLOCK_SIZE, swap=swap)
    try:
        runner = (
            Runner(loaded.decoder, cache)
            if team is None
            else LeadingRunner(loaded.decoder, cache, team)
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    decode = None if loaded.words is None else loaded.words.decode
    pool = BlockPool(blocks, BLOCK_SIZE)
    scheduler = Scheduler(
        pool, limits, window=loaded.spec.window, swap=HostBlocks(swap) if swap else None
    )
    scheduler.costs.block_s = cache.block_swap_s()
    guides = (
        None if loaded.words is None else Guides(loaded.words, loaded.ends, vocab=loaded.spec.vocab)
    )
    speculator = None if drafting is None else drafting.speculator(pool)
    return Engine(
        runner,
        scheduler,
        context=loaded.spec.max_seq_len,
        decode=decode,
        speculator=speculator,
        guides=guides,
    )


def _block_bytes(loaded: Loaded) -> int:
    """Of a block's part that is held here."""
    dtype = loaded.cache_dtype or next(loaded.decoder.parameters()).dtype
    layers = len(loaded.decoder.blocks)
    return block_bytes(
        loaded.spec, block_size=BLOCK_SIZE, dtype=dtype, shares=loaded.shares, layers=layers
    )
