"""Attention over a paged cache of keys and values (decode, prefill, verification), and cache
writes.

`paged.py` is the entry point, `page_plan.py` checks addresses once per step, `kernel.py` runs on a
GPU, `torch_gather.py` elsewhere.
"""

from kernels.paged_kv.api import paged_attention
from kernels.paged_kv.cache_write import write_kv
from kernels.paged_kv.page_plan import PagePlan, plan_pages

__all__ = ["PagePlan", "paged_attention", "plan_pages", "write_kv"]
