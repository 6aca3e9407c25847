"""An engine around a loaded model: how many blocks its cache has, then cache, scheduler and runner put together.

Knows memory; knows neither prompts nor where answers go.
"""

from __future__ import annotations

from workers.contracts.exits import UserError
from workers.inference.blocks import BlockPool
from workers.inference.cache import PagedCache, block_bytes
from workers.inference.engine import Engine
from workers.inference.load import Loaded
from workers.inference.runner import Runner
from workers.inference.scheduler import Limits, Scheduler
from workers.metrics.memory import capacity_bytes, process_memory

BLOCK_SIZE = 16  # tokens
CACHE_SHARE = {"cpu": 0.4, "cuda": 0.85}  # of the memory that the weights leave


def blocks_that_fit(loaded: Loaded) -> tuple[int, int]:
    """Blocks that the memory beside the weights has room for, and the bytes of one."""
    weight = next(loaded.decoder.parameters())
    each_bytes = block_bytes(loaded.spec, block_size=BLOCK_SIZE, dtype=weight.dtype)
    free_bytes = capacity_bytes(weight.device, local_world_size=1) - process_memory(weight.device)[0]
    return int(free_bytes * CACHE_SHARE[weight.device.type]) // each_bytes, each_bytes


def blocks_wanted(loaded: Loaded, tokens: int) -> int:
    """Of one request of so many tokens, which ends at the model's context."""
    return -(-min(tokens, loaded.spec.max_seq_len) // BLOCK_SIZE)


def build(loaded: Loaded, *, blocks: int, limits: Limits) -> Engine:
    """Raises UserError for a model that the paged cache cannot serve."""
    weight = next(loaded.decoder.parameters())
    cache = PagedCache(loaded.spec, blocks=blocks, block_size=BLOCK_SIZE, dtype=weight.dtype, device=weight.device)
    try:
        runner = Runner(loaded.decoder, cache)
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    decode = None if loaded.words is None else loaded.words.decode
    return Engine(
        runner, Scheduler(BlockPool(blocks, BLOCK_SIZE), limits), context=loaded.spec.max_seq_len, decode=decode
    )
