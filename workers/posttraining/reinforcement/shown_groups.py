"""The groups of an iteration that people see on the run's page.

Does not depend on how they are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workers.contracts.wire.rollouts import (
    RolloutsSampled,
    SampledAnswer,
    SampledGroup,
    SampledToken,
)
from workers.posttraining.reinforcement.rollouts import Rollout

ITERATIONS = 200  # shown of a run, spread over it
_GROUPS = 2
_ANSWERS = 16
_CHARACTERS = 2000  # of a text
_TOKENS = 256  # with an advantage of their own
Decode = Callable[[Sequence[int]], str]


def is_shown(iteration: int, iterations: int) -> bool:
    """Whether people see this iteration: about `ITERATIONS` of all, with the first and the last."""
    return iteration % max(1, -(-iterations // ITERATIONS)) == 0 or iteration == iterations - 1


def choose_groups(rollouts: Sequence[Rollout], size: int, decode: Decode) -> RolloutsSampled:
    """The group whose rewards differ most, and the first other one; `size` answers per group.

    `decode` turns ids into text.
    """
    groups = [rollouts[at : at + size] for at in range(0, len(rollouts), size)]
    widest = max(groups, key=_spread)
    others = [group for group in groups if group is not widest]
    chosen = [widest, *others[: _GROUPS - 1]]
    first = rollouts[0]
    return RolloutsSampled(
        step=first.step,
        weight_version=first.weight_version,
        groups=[_describe(group, decode) for group in chosen],
    )


def _spread(group: Sequence[Rollout]) -> float:
    rewards = [each.reward for each in group]
    return max(rewards) - min(rewards)


def _describe(group: Sequence[Rollout], decode: Decode) -> SampledGroup:
    first = group[0]
    return SampledGroup(
        prompt_id=first.prompt_id,
        prompt=first.prompt[:_CHARACTERS],
        expected=None if first.expected is None else first.expected[:_CHARACTERS],
        learned=any(each.advantage for each in group),
        answers=[
            SampledAnswer(
                text=each.text[:_CHARACTERS],
                tokens=len(each.token_ids),
                reward=each.reward,
                rewards=each.rewards,
                advantage=each.advantage,
                failure=each.failure,
                pieces=_pieces(each, decode),
                first_version=each.weight_version,
                last_version=(each.token_versions or [each.weight_version])[-1],
            )
            for each in group[:_ANSWERS]
        ],
    )


def _pieces(rollout: Rollout, decode: Decode) -> list[SampledToken]:
    """The first tokens with their advantages; a character belongs to the token that completes
    it.
    """
    pieces: list[SampledToken] = []
    shown = ""
    for at, advantage in enumerate((rollout.advantages or [])[:_TOKENS]):
        text = decode(rollout.token_ids[: at + 1])
        complete = "" if text.endswith("\ufffd") else text[len(shown) :]
        shown = text if complete else shown
        pieces.append(SampledToken(text=complete, advantage=round(advantage, 4)))
    return pieces
