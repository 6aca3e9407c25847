"""The prompts of policy optimization: token ids and expected answers, in the order of training.

Lines are `{"prompt": …, "answer": …}` or prompts with completions. Does not depend on rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workers.contracts.examples.example import LineError
from workers.contracts.examples.prompts import PromptLine, parse_prompt
from workers.contracts.specs.data import DataSpec
from workers.models.errors import WeightsError
from workers.models.initialize import derived_seed
from workers.models.text.chat_format import ChatFormat
from workers.runtime.exit_codes import UserError
from workers.training.data.examples.reading import LineProblems
from workers.training.data.files import BOM, list_files


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line's prompt as `ids` and `text`; `expected` is its answer, None without one."""

    number: int
    where: str
    text: str
    ids: tuple[int, ...]
    expected: str | None = None


class Prompts:
    """All prompts; every epoch has each once, in an order that follows from the seed."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        self.prompts, self.seed = list(prompts), seed
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def __len__(self) -> int:
        return len(self.prompts)

    def at(self, position: int) -> Prompt:
        """The prompt at a position of the run, which may be many epochs long."""
        epoch, within = divmod(position, len(self.prompts))
        if self._order[0] != epoch:
            generator = np.random.default_rng(derived_seed(self.seed, "prompts", epoch))
            self._order = epoch, generator.permutation(len(self.prompts)).tolist()
        return self.prompts[self._order[1][within]]


def read_prompts(
    data: DataSpec, chat: ChatFormat, *, longest: int, needs_answer: bool, vocab: int, seed: int
) -> Prompts:
    """All lines of the data. `longest`: tokens of a prompt, at most.

    Raises UserError that lists lines which are not prompts, are too long or, if `needs_answer`,
    have no answer.
    """
    prompts: list[Prompt] = []
    problems = LineProblems()
    for field, part in data.parts():
        if part.path is None:
            raise UserError(
                f"{field}: policy optimization reads prompts, this source is {part.preset}. "
                "Use path with format prompt_completion."
            )
        for path in list_files(Path(part.path), part.format):
            with open(path, "rb") as file:
                for line, raw in enumerate(file, 1):
                    text = raw.removeprefix(BOM) if line == 1 else raw
                    if not text.strip():
                        continue
                    where = f"{path}: line {line}"
                    try:
                        parsed = parse_prompt(text, needs_answer=needs_answer)
                        shown, ids = _encode(parsed, chat)
                        _check(ids, longest, vocab)
                    except (LineError, WeightsError) as error:
                        problems.add(where, str(error))
                        continue
                    prompts.append(Prompt(len(prompts), where, shown, tuple(ids), parsed.expected))
    problems.raise_if_any()
    if not prompts:
        raise UserError("data.path: there is no prompt. Use a file with lines.")
    return Prompts(prompts, seed=seed)


def _encode(line: PromptLine, chat: ChatFormat) -> tuple[str, list[int]]:
    """The prompt's text for people, and its ids."""
    if isinstance(line.prompt, str):
        return line.prompt, chat.plain(line.prompt)
    shown = "\n".join(f"{each['role']}: {each.get('content') or ''}" for each in line.prompt)
    return shown, chat.prompt(line.prompt, tools=line.tools)


def _check(ids: list[int], longest: int, vocab: int) -> None:
    if not ids:
        raise LineError("the prompt has no tokens", "Write a text, or remove the line.")
    if len(ids) > longest:
        raise LineError(
            f"the prompt has {len(ids)} tokens, {longest} leave room for an answer",
            "Use a larger train.seq_len, a shorter prompt, or a smaller rollout.max_new_tokens.",
        )
    if max(ids) >= vocab:
        raise LineError(
            f"token id {max(ids)} is outside the model's vocabulary of {vocab}",
            "Use the tokenizer of this model.",
        )
