"""Fault injection: real processes with fake ranks, faults by seed, and a checker of invariants."""
