"""The data of `rollouts_sampled` events: some groups of an iteration's answers, with rewards.

Does not depend on who writes or shows them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from workers.contracts.base import WireContract
from workers.contracts.specs.model import Count

ROLLOUTS_SAMPLED = "rollouts_sampled"


class SampledToken(WireContract):
    """A token's text and advantage."""

    text: str = ""
    advantage: float = 0.0


class SampledAnswer(WireContract):
    """One answer, its text cut at some length; `failure` says why it has no reward.

    `pieces` are its first tokens, if each has an advantage of its own. Weights of several versions
    sampled it if `first_version` and `last_version` differ.
    """

    text: str = ""
    tokens: Count = 0
    reward: float = 0.0
    rewards: dict[str, float] = {}
    advantage: float = 0.0
    failure: str = ""
    pieces: Annotated[list[SampledToken], Field(max_length=512)] = []
    first_version: Count = 0
    last_version: Count = 0


class SampledGroup(WireContract):
    """Some answers to one prompt; `expected` is what rewards compare with. `learned` is false if
    no answer of the group has an advantage.
    """

    prompt_id: Count = 0
    prompt: str = ""
    expected: str | None = None
    learned: bool = True
    answers: Annotated[list[SampledAnswer], Field(max_length=64)] = []


class RolloutsSampled(WireContract):
    """Groups of the iteration whose first update is `step`, by weights after `weight_version`."""

    step: Count
    weight_version: Count = 0
    groups: Annotated[list[SampledGroup], Field(min_length=1, max_length=16)]
