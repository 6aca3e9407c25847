"""The one error of reading and writing weights. Does not import torch."""

from __future__ import annotations


class WeightsError(ValueError):
    """Weights or their configuration cannot be read, or not be written so: which file, why, and
    what to do next.
    """
