"""Limits of sampling rollouts that the engine applies and the planner counts with."""

from __future__ import annotations

MAX_SEQUENCES = 256  # answers that a rank samples at the same time, if memory suffices
BLOCK_TOKENS = 16  # tokens of a block of the KV cache
