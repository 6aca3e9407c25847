"""Attention over a paged cache of keys and values: decode, prefill and verification; and writing to
that cache.

`paged.py` is the door; `plan.py` checks addresses once a step, `kernel.py` runs on a GPU,
`gathered.py` elsewhere.
"""

from kernels.decode.cache_write import write_kv
from kernels.decode.page_plan import PagePlan, plan_pages
from kernels.decode.paged import paged_attention

__all__ = ["PagePlan", "paged_attention", "plan_pages", "write_kv"]
