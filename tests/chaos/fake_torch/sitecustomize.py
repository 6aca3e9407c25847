"""Shifts the clock of a node's processes by CHAOS_SKEW_S seconds; Python imports this at start."""

import os
import time

_skew_s = float(os.environ.get("CHAOS_SKEW_S") or 0.0)
if _skew_s:
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + _skew_s
    time.time_ns = lambda: _time_ns() + int(_skew_s * 1e9)
