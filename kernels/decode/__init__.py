"""Attention over a paged cache of keys and values (decode, prefill, verification), and cache
writes.

`paged.py` is the entry point, `page_plan.py` checks addresses once per step, `kernel.py` runs on a
GPU, `torch_gather.py` elsewhere.
"""

from kernels.decode.cache_write import write_kv
from kernels.decode.page_plan import PagePlan, plan_pages
from kernels.decode.paged import paged_attention

__all__ = ["PagePlan", "paged_attention", "plan_pages", "write_kv"]
