"""Units of work and their candidates: which prompt is question, and how a method makes its answers.

A unit is one candidate, or several answers to one prompt; its number determines task, seed prompt
and random numbers. Does not depend on filters or files.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.contracts.examples.seeds import Seed
from workers.contracts.specs.finetuning.produce import ProduceBody, TaskType
from workers.posttraining.produce import tasks
from workers.posttraining.produce.client import ChatClient, Reply, Sampling
from workers.posttraining.produce.scores import Candidate

_EXAMPLES, _SEED_EXAMPLES = 3, 2  # prompts shown to invent another one; of these, seeds
_SHOWN_PROMPT = 1000  # characters of a seed prompt in provenance


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of work: its task, the seed it starts from, and its random numbers' seed."""

    number: int
    task: TaskType
    seed: Seed | None
    random: int


@dataclass(slots=True)
class GeneratedCandidates:
    """The candidates of a unit, and how its prompt came about (`steps`, `examples`).

    `problem` is why there is no candidate to filter.
    """

    candidates: list[Candidate] = field(default_factory=list)
    how: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class Generator:
    """Makes candidates by the run's method. Thread-safe."""

    def __init__(self, body: ProduceBody, client: ChatClient, seeds: Sequence[Seed]) -> None:
        self.body, self.client, self.seeds = body, client, list(seeds)
        self.answers_seeds = body.method in ("answer", "best_of_n")
        self._own: list[tuple[int, str]] = []  # accepted new instructions with their units
        self._lock = threading.Lock()

    def units(self) -> Iterator[Unit]:
        """Units in their order; endless unless every seed prompt is answered once."""
        body = self.body
        kinds = [task.task_type for task in body.tasks]
        weights = [task.weight for task in body.tasks]
        number = 0
        while not self.answers_seeds or number < len(self.seeds):
            chance = random.Random(f"{body.seed}/{number}")
            seed = self.seeds[number % len(self.seeds)] if self.seeds else None
            task = chance.choices(kinds, weights)[0]
            if seed is not None and seed.task_type is not None:
                task = seed.task_type
            yield Unit(number, task, seed, chance.getrandbits(31))
            number += 1

    def accepted(self, unit: int, prompt: str) -> None:
        """Remember an accepted instruction: later ones are question to differ from it."""
        if self.body.method == "self_instruct":
            with self._lock:
                self._own.append((unit, prompt))

    def make(self, unit: Unit) -> GeneratedCandidates:
        """The candidates of a unit. Raises as ChatClient."""
        made = GeneratedCandidates()
        prompt = self._prompt(unit, made)
        if made.problem:
            made.candidates = [Candidate(({"role": "user", "content": prompt},))]
            return made
        turns = self.body.turns if unit.task == "dialogue" and not self.answers_seeds else 1
        count = self.body.samples if self.body.method == "best_of_n" else 1
        for number in range(count):
            made.candidates.append(self._candidate(unit, prompt, turns, number))
        return made

    def _candidate(self, unit: Unit, prompt: str, turns: int, number: int) -> Candidate:
        expected = unit.seed.answer if unit.seed is not None and self.answers_seeds else None
        messages: list[dict[str, str]] = []
        if self.body.system is not None:
            messages.append({"role": "system", "content": self.body.system})
        messages.append({"role": "user", "content": prompt})
        cut = False
        for turn in range(turns):
            if turn:
                question = self._query(tasks.follow_up(messages), unit.random + 2 * turn - 1)
                messages.append({"role": "user", "content": question.text})
            reply = self._query(messages, unit.random + 2 * turn + number)
            cut = cut or reply.cut
            messages.append({"role": "assistant", "content": reply.text})
        return Candidate(tuple(messages), cut=cut, expected=expected)

    def _prompt(self, unit: Unit, made: GeneratedCandidates) -> str:
        if self.answers_seeds:
            assert unit.seed is not None
            return unit.seed.prompt
        if self.body.method == "evol":
            return self._evolved(unit, made)
        chance = random.Random(unit.random)
        known = [(f"seed {seed.line}", seed.prompt) for seed in self.seeds]
        shown = chance.sample(known, min(_SEED_EXAMPLES, len(known)))
        with self._lock:
            own = len(self._own)
            places = chance.sample(range(own), min(_EXAMPLES - len(shown), own))
            shown += [(f"unit {self._own[place][0]}", self._own[place][1]) for place in places]
        made.how["examples"] = [name for name, _ in shown]
        request = tasks.new_instruction(unit.task, [prompt for _, prompt in shown])
        return self._query(request, unit.random).text

    def _evolved(self, unit: Unit, made: GeneratedCandidates) -> str:
        """The seed prompt after `rounds` operations; the steps are in `made.how`."""
        assert unit.seed is not None
        prompt, steps = unit.seed.prompt, list[dict[str, str]]()
        made.how["steps"] = steps
        for turn in range(self.body.rounds):
            operation = tasks.OPERATIONS[(unit.number + turn) % len(tasks.OPERATIONS)]
            new = self._query(tasks.harder_instruction(prompt, operation), unit.random + turn).text
            steps.append({"operation": operation, "instruction": new[:_SHOWN_PROMPT]})
            if not new or " ".join(new.split()) == " ".join(prompt.split()):
                made.problem = "unchanged" if new else "empty"
                return new or prompt
            prompt = new
        return prompt

    def _query(self, messages: Sequence[dict[str, str]], seed: int) -> Reply:
        body = self.body
        sampling = Sampling(body.temperature, body.max_new_tokens, seed, body.top_p)
        return self.client.complete(messages, sampling)


def provenance(
    unit: Unit, body: ProduceBody, client: ChatClient, made: GeneratedCandidates
) -> dict[str, Any]:
    """Where a line comes from: unit, method, server, seed prompt, steps and sampling."""
    seed = unit.seed
    return {
        "unit": unit.number,
        "method": body.method,
        "server": client.server.label,
        "model": client.model,
        "seed_line": seed.line if seed is not None else None,
        "seed_prompt": seed.prompt[:_SHOWN_PROMPT] if seed is not None else None,
        **made.how,
        "sampling": {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "max_new_tokens": body.max_new_tokens,
            "seed": unit.random,
        },
    }
