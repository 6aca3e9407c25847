"""Preemption: which running runs give their devices to a waiting run of higher priority."""
