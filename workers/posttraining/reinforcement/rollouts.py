"""Rollout: a sampled answer with its rewards; an iteration's rollouts as a file.

An iteration is one generation phase with the updates from it. Does not depend on torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workers.runtime.exit_codes import UserError


@dataclass(slots=True)
class Rollout:
    """One answer: `logprobs` are the sampler's, of `token_ids`; `advantage` follows from the group.

    `step` is the first update that learns from it, `weight_version` the last update before its
    first token was sampled; `token_versions` are those of all tokens, if they differ. `failure`
    says why an answer has no reward; it is not trained on. `old_logprobs` are those of the policy
    at the start of the iteration, `reference_logprobs` the reference's.
    `generation_s` is its share of the engine's time.
    PPO also has, for each token, its value before it was sampled, its return and its advantage.
    """

    step: int
    prompt_id: int
    sample: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    weight_version: int
    prompt: str = ""
    text: str = ""
    expected: str | None = None
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    failure: str = ""
    old_logprobs: list[float] | None = None
    reference_logprobs: list[float] | None = None
    values: list[float] | None = None
    returns: list[float] | None = None
    advantages: list[float] | None = None
    token_versions: list[int] | None = None
    generation_s: float = 0.0

    def to_line(self) -> str:
        """One JSON line of everything."""
        return json.dumps(asdict(self))

    def to_log_line(self) -> str:
        """One JSON line without what only the next updates need."""
        fields = asdict(self)
        for name in ("old_logprobs", "reference_logprobs", "values", "returns", "generation_s"):
            del fields[name]
        for name in ("advantages", "token_versions"):
            if fields[name] is None:
                del fields[name]
        return json.dumps(fields)


def oldest_version(rollout: Rollout) -> int:
    """The version of the oldest weights that sampled a token."""
    return min(rollout.token_versions or [rollout.weight_version])


class RolloutFiles:
    """Complete iterations next to the checkpoints, so that a resumed run learns from the same
    answers.
    """

    def __init__(self, folder: Path, *, digest: str) -> None:
        """`digest` identifies what answers depend on: options, prompts and seed."""
        self.folder, self.digest = folder, digest

    def write(self, iteration: int, rollouts: Sequence[Rollout], state: dict[str, Any]) -> None:
        """Write an iteration with the `state` that it began with; it appears when complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(iteration)
        hidden = path.with_name(f".{path.name}.{os.getpid()}")
        with open(hidden, "w", encoding="ascii") as file:
            header = {"iteration": iteration, "count": len(rollouts), "digest": self.digest}
            file.write(json.dumps({**header, **state}) + "\n")
            file.writelines(each.to_line() + "\n" for each in rollouts)
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(path)

    def read(self, iteration: int) -> tuple[list[Rollout], dict[str, Any]] | None:
        """An iteration's rollouts and state; None if it was not completed, or belongs to a run
        with other options.

        Raises UserError for a damaged file.
        """
        path = self._path(iteration)
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            lines = []
        try:
            state = json.loads(lines[0])
            if state.get("digest") != self.digest:
                return None
            rollouts = [Rollout(**json.loads(line)) for line in lines[1:]]
            complete = state["count"] == len(rollouts)
        except (ValueError, TypeError, KeyError, IndexError):
            complete = False
        if not complete:
            raise UserError(f"resume: {path} is damaged. Remove it.")
        return rollouts, state

    def stored(self) -> list[int]:
        """The iterations that are there."""
        return sorted(
            int(path.stem.removeprefix("iteration-"))
            for path in self.folder.glob("iteration-*.jsonl")
        )

    def prune(self, first: int, last: int) -> None:
        """Remove iterations before `first`, and those after `last`: of a discarded continuation."""
        for path in self.folder.glob("iteration-*.jsonl"):
            if not first <= int(path.stem.removeprefix("iteration-")) <= last:
                path.unlink(missing_ok=True)

    def _path(self, iteration: int) -> Path:
        return self.folder / f"iteration-{iteration:08d}.jsonl"
