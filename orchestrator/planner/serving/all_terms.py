"""Imports every module that registers serving terms.

Import it wherever serving terms are computed by name.
"""

from orchestrator.planner.serving import memory_terms, speed_terms
from orchestrator.planner.serving.registry import SERVING

MODULES = (memory_terms, speed_terms)

__all__ = ["MODULES", "SERVING"]
