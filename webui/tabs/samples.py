"""What the model wrote after the same prompts at one checkpoint after the other, to be read beside
each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from orchestrator.runs.outputs.text_samples import Written, samples_of, samples_told
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED

_SHOWN: Final = 6  # steps; the others on request
_MOST: Final = 60  # of those that are read


@dataclass(frozen=True, slots=True)
class Text:
    step: str
    text: str
    ended: bool

    @property
    def lines(self) -> list[str]:
        """Shown in one with marks between: a model that has learned little writes many empty ones."""
        return self.text.split("\n")


@dataclass(frozen=True, slots=True)
class Lane:
    """One prompt with what was written after it, newest first: some steps spread over all, then the
    rest.
    """

    prompt: str
    shown: list[Text]
    rest: list[Text]

    @property
    def lines(self) -> list[str]:
        return self.prompt.split("\n")

    @property
    def rows(self) -> int:
        """Of the grid that lanes share: the prompt, texts, and what is folded."""
        return len(self.shown) + 2


@dataclass(frozen=True, slots=True)
class Samples:
    """`in_ids`: texts are token ids, since the run's token files name no tokenizer."""

    lanes: list[Lane]
    says: str
    in_ids: bool = False


def expected(facts: Facts) -> bool:
    """Whether the run was told to write texts, or writes some because it keeps checkpoints; of
    programs that Orrery
    knows nothing of, whether they have."""
    if facts.run.kind in ("external", "script"):
        return samples_told(run=facts.run)
    train = facts.run.spec.get("train") or {}
    asked = train.get("samples")
    return bool(asked or train.get("checkpoint")) and (asked or {}).get("count", 3) > 0


def content(facts: Facts) -> Samples:
    found = samples_of(run=facts.run)[-_MOST:]
    if not found:
        return Samples([], _nothing(facts))
    newest = found[-1].told
    lanes = [
        _lane(place, each.prompt if each.prompt is not None else _ids(each.prompt_ids), found)
        for place, each in enumerate(newest.samples)
    ]
    return Samples(lanes, _says(found), in_ids=newest.samples[0].text is None)


def _lane(place: int, prompt: str, found: list[Written]) -> Lane:
    """A prompt keeps its place; where an earlier attempt had another one there, its texts are left
    out.
    """
    newest = found[-1].told.samples[place].prompt_ids
    texts = []
    for each in reversed(found):
        here = each.told.samples[place] if place < len(each.told.samples) else None
        if here is not None and here.prompt_ids == newest:
            text = here.text if here.text is not None else _ids(here.token_ids)
            texts.append(Text(f"{each.told.step:,}", text, here.ended))
    if len(texts) <= _SHOWN + 1:
        return Lane(prompt, texts, [])
    chosen = {round(place * (len(texts) - 1) / (_SHOWN - 1)) for place in range(_SHOWN)}
    return Lane(
        prompt,
        [texts[i] for i in sorted(chosen)],
        [text for i, text in enumerate(texts) if i not in chosen],
    )


def _says(found: list[Written]) -> str:
    newest = found[-1].told
    longest = max(len(each.token_ids) for each in newest.samples)
    how = "" if newest.temperature is None else _how(newest.temperature)
    says = f"What the model writes after the same words, {formatting.count(longest, 'token')} long{how}: "
    says += f"{len(found)} checkpoints, the newest of " if len(found) > 1 else ""
    says += f"step {newest.step:,}"
    return says + (
        ". Cut short, since writing may take 2% of the time at most." if newest.cut_short else "."
    )


def _how(temperature: float) -> str:
    return (
        ", the likeliest token each time"
        if temperature == 0
        else f", drawn at temperature {temperature:g}"
    )


def _nothing(facts: Facts) -> str:
    if facts.run.state in ENDED:
        return "No texts were written: the run ended before its first checkpoint."
    train: dict[str, Any] = facts.run.spec.get("train") or {}
    every = (train.get("checkpoint") or {}).get("every_steps") or (
        200 if train.get("checkpoint") is not None else None
    )
    first = min(every or train.get("steps") or 0, train.get("steps") or 0)
    return f"The first texts come after step {first:,}, written by the model as it is then."


def _ids(ids: list[int]) -> str:
    return " ".join(map(str, ids))
