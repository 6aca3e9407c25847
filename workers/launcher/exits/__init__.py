"""Exits of attempts: `classification` of those of ranks, `own_verdicts` of the supervisor."""
