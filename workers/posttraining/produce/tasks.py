"""Prompts of the produce methods: new instructions, harder instructions, follow-ups, evaluations.

After Self-Instruct (arXiv 2212.10560) and Evol-Instruct (arXiv 2304.12244). Does not call servers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from workers.contracts.specs.finetuning.produce import TaskType

Messages = list[dict[str, str]]
Conversation = Sequence[Mapping[str, str]]

_DESCRIPTIONS: dict[TaskType, str] = {
    "open_qa": "a question that general knowledge answers",
    "closed_qa": "a short passage and a question that the passage answers",
    "summarization": "a passage and the request to summarize it",
    "extraction": "a passage and the request to extract named facts from it",
    "classification": "a text and the request to assign one of the listed classes to it",
    "rewriting": "a text and the request to rewrite it in another style",
    "brainstorming": "a request for several ideas",
    "code": "a programming task",
    "math": "a mathematical problem with one answer",
    "role_play": "a request to answer in the role of a described person",
    "dialogue": "the first message of a conversation that needs follow-up questions",
}
# operations of Evol-Instruct: four in depth, one in breadth
_EVOLUTIONS = {
    "add_constraint": "Add one more constraint or requirement.",
    "reasoning": "Make it need several steps of reasoning.",
    "concretize": "Replace general concepts by more specific ones.",
    "deepen": "Ask more deeply about the same subject.",
    "breadth": "Ask about a rarer case of the same subject.",
}
OPERATIONS = tuple(_EVOLUTIONS)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def new_instruction(task: TaskType, examples: Sequence[str]) -> Messages:
    """Asks for one new instruction of a task type, unlike the examples."""
    shown = "".join(f"\nExample {number}: {text}" for number, text in enumerate(examples, 1))
    text = (
        f"Write one new instruction for an assistant: {_DESCRIPTIONS[task]}. It must be complete "
        f"and differ from the examples. Reply with the instruction only.{shown}"
    )
    return [{"role": "user", "content": text}]


def harder_instruction(instruction: str, operation: str) -> Messages:
    """Asks for a harder version of an instruction by one of OPERATIONS."""
    text = (
        f"Rewrite the instruction below so that it is harder. {_EVOLUTIONS[operation]} It must "
        "stay answerable. Reply with the new instruction only.\n\n"
        f"Instruction: {instruction}"
    )
    return [{"role": "user", "content": text}]


def follow_up(messages: Conversation) -> Messages:
    """Asks for the user's next message of a conversation."""
    text = (
        "Write the user's next message of this conversation, and nothing else.\n\n"
        f"{_history(messages)}"
    )
    return [{"role": "user", "content": text}]


def evaluation(messages: Conversation) -> Messages:
    """Asks for a score of a conversation's last answer from 0 to 10."""
    *before, last = messages
    questions = [each for each in before if each["role"] != "system"]
    shown = questions[0]["content"] if len(questions) == 1 else _history(questions)
    text = (
        "Rate how correct, complete and helpful the answer is, from 0 to 10. Reply with the number "
        f"only.\n\nInstruction: {shown}\n\nAnswer: {last['content']}"
    )
    return [{"role": "user", "content": text}]


def _history(messages: Conversation) -> str:
    return "\n".join(f"{each['role']}: {each['content']}" for each in messages)


def read_score(text: str) -> float | None:
    """The first number from 0 to 10 in an evaluation; None without one."""
    match = _NUMBER.search(text)
    score = float(match[0]) if match else None
    return score if score is not None and score <= 10 else None
