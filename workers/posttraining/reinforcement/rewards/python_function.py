"""The user's reward function in a process of its own, which may hang or crash alone.

Does not depend on what the function computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workers.contracts.specs.finetuning.rewards import PythonReward
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore, Reward, Score, checked
from workers.posttraining.reinforcement.rewards.reward_process import RewardProcess
from workers.runtime.exit_codes import UserError

_PROGRAM = Path(__file__).with_name("function_process.py")


class FunctionReward(Reward):
    """Calls `function` of the file `path`; a new process replaces one that failed."""

    def __init__(self, spec: PythonReward, name: str) -> None:
        """Raises UserError if the file is missing or has no such function."""
        super().__init__(name, spec.weight)
        self.spec = spec
        if not Path(spec.path).is_file():
            raise UserError(f"{name}: {spec.path} is not a file on this node. Use its full path.")
        self._process = RewardProcess(_PROGRAM, [spec.path, spec.function])
        problem = self._process.start()
        if problem:
            raise UserError(f"{name}: {spec.path}: {problem}")

    def score(self, answers: Sequence[AnswerToScore]) -> list[Score]:
        """One call for all answers."""
        if not answers:
            return []
        request = {
            "prompts": [each.prompt for each in answers],
            "answers": [each.text for each in answers],
            "expected": [each.expected for each in answers],
        }
        values, problem = self._call(request)
        if not problem and not isinstance(values, list):
            problem = f"returned {type(values).__name__}, not a list of numbers"
        elif not problem and isinstance(values, list):
            if len(values) == len(answers):
                return [checked(value) for value in values]
            problem = f"returned {len(values)} numbers for {len(answers)} answers"
        return [Score(failure=f"{self.spec.function} {problem}")] * len(answers)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _call(self, request: object) -> tuple[object, str]:
        reply, problem = self._process.request(request, self.spec.timeout_s)
        if problem:
            return None, problem
        assert isinstance(reply, dict)
        return reply.get("values"), str(reply.get("error") or "")
