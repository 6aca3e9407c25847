"""Scheduling policy: the limits of a step, and the order of requests."""

from __future__ import annotations

from dataclasses import dataclass

from workers.inference.request import Request

AGING_STEPS = 1000
"""Steps of waiting that outweigh one step of priority, so a low priority never waits forever."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a step: query tokens and sequences.

    `watermark` is the share of blocks that admission leaves free, so that running requests can
    grow without immediate preemption.
    """

    step_tokens: int = 2048
    sequences: int = 16
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if self.step_tokens < 1 or self.sequences < 1 or not 0 <= self.watermark < 1:
            raise ValueError(
                f"{self} computes nothing; step_tokens and sequences must be at least 1, "
                "watermark from 0 to below 1"
            )


def order_key(request: Request) -> tuple[float, int]:
    """Sort key: the lowest goes first. The order of two requests never changes."""
    return request.arrival - AGING_STEPS * request.priority, request.number


def sequence_slots(request: Request) -> int:
    """Sequences that a request occupies: all of its answers until their shared prompt is forked."""
    return request.sampling.num_sequences if len(request.tokens) == len(request.prompt) else 1
