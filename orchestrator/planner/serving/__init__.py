"""Serving: KV cache, time to first token, time per output token, throughput, concurrency.

Does not depend on training.
"""

from orchestrator.planner.serving.answer import serving
from orchestrator.planner.serving.request import ServingRequest

__all__ = ["ServingRequest", "serving"]
