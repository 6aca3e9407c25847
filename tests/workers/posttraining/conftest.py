"""The pools of training ranks, for runs that sample and learn."""

from tests.workers.training.conftest import pools

__all__ = ["pools"]
