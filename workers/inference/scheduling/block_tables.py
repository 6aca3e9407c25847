"""Block tables: which cache blocks each request holds, as its tokens are scheduled and computed.

Does not decide which requests run.
"""

from __future__ import annotations

from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.request import Request

NO_BLOCK = -1  # in a request's table: a block that slid out of the window and was freed


class BlockTables:
    """Allocates, shares, seals and frees the blocks of requests.

    `window` is the attention window of all layers: blocks before it are freed, with
    `draft_reads_cache` only after a draft model has computed them, too.
    """

    def __init__(self, pool: BlockPool, *, window: int | None) -> None:
        self.pool, self.window = pool, window
        self.draft_reads_cache = False

    def missing(self, request: Request, count: int) -> int:
        """Blocks to take before `count` more tokens can be computed, a copy on write included."""
        place = request.computed // self.pool.block_size
        copied = place < len(request.blocks) and self.pool.references(request.blocks[place]) > 1
        return self.pool.blocks_for(request.computed + count) - len(request.blocks) + copied

    def missing_for_prompt(self, request: Request) -> int:
        """Blocks that the rest of a chunked prompt will take."""
        return max(0, self.pool.blocks_for(len(request.tokens)) - len(request.blocks))

    def allocate(self, request: Request, count: int) -> tuple[int, int] | None:
        """Take blocks for `count` more tokens; the block to copy (from, to), if any."""
        page, blocks = self.pool.block_size, request.blocks
        copy: tuple[int, int] | None = None
        place = request.computed // page
        if place < len(blocks):
            shared, blocks[place] = blocks[place], self.pool.own(blocks[place])
            copy = (shared, blocks[place]) if shared != blocks[place] else None
        self.grow(request, request.computed + count)
        return copy

    def grow(self, request: Request, tokens: int) -> None:
        """Take blocks until the table covers `tokens`."""
        while len(request.blocks) * self.pool.block_size < tokens:
            request.blocks.append(self.pool.take())

    def trim(self, request: Request) -> None:
        """Free the blocks beyond its tokens: those of rejected drafts."""
        needed = self.pool.blocks_for(len(request.tokens))
        self.pool.release(request.blocks[needed:])
        del request.blocks[needed:]

    def fork(self, request: Request, child: Request) -> None:
        """Let `child` continue from what `request` has computed, on the same blocks."""
        child.blocks, child.computed = list(request.blocks), request.computed
        child.freed_blocks, child.cached_tokens = request.freed_blocks, request.computed
        self.pool.share(child.blocks[child.freed_blocks :])

    def release(self, request: Request) -> None:
        """Free all of its blocks."""
        self.pool.release(request.blocks[request.freed_blocks :])
        request.blocks, request.computed = [], 0
        request.freed_blocks, request.draft_computed = 0, 0

    def mark_computed(self, request: Request, tokens: int) -> None:
        """Seal the blocks that are full now; free those that slid out of the window."""
        page = self.pool.block_size
        first, request.computed = request.computed // page, tokens
        full = tokens // page
        keys = request.block_keys(full, page)
        for place in range(first, full):
            self.pool.seal(request.blocks[place], keys[place])
        if self.window is not None:
            done = min(tokens, request.draft_computed) if self.draft_reads_cache else tokens
            # the next query sees keys from done + 1 - window on
            outside = max(0, done + 1 - self.window) // page
            newly_freed = max(0, outside - request.freed_blocks)
            self.pool.release(request.blocks[request.freed_blocks : outside])
            request.blocks[request.freed_blocks : outside] = [NO_BLOCK] * newly_freed
            request.freed_blocks = max(outside, request.freed_blocks)

    def uncomputed_prompt_keys(self, request: Request) -> list[bytes]:
        """Hashes of the full blocks of a prompt that are not computed yet."""
        if request.is_decoding:
            return []
        page = self.pool.block_size
        return request.block_keys(len(request.tokens) // page, page)[request.computed // page :]
