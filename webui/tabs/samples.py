"""Sample texts that the model generated at its checkpoints, compared per prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from orchestrator.runs.outputs.text_samples import StepSamples, has_samples, samples_of
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED

_SHOWN: Final = 6  # steps per prompt; the others are folded
_MOST: Final = 60  # checkpoints read


@dataclass(frozen=True, slots=True)
class Text:
    """One generated text; `ended` if the model emitted its end token."""

    step: str
    text: str
    ended: bool

    @property
    def lines(self) -> list[str]:
        """Lines of the text, shown on one line with marks between them."""
        return self.text.split("\n")


@dataclass(frozen=True, slots=True)
class PromptTexts:
    """One prompt with its texts, newest first: some steps spread over all, then the rest."""

    prompt: str
    shown: list[Text]
    rest: list[Text]

    @property
    def lines(self) -> list[str]:
        """Lines of the prompt."""
        return self.prompt.split("\n")

    @property
    def rows(self) -> int:
        """Rows of the shared grid: prompt, texts, folded texts."""
        return len(self.shown) + 2


@dataclass(frozen=True, slots=True)
class Samples:
    """`in_ids`: texts are token ids, because the run's token files name no tokenizer."""

    lanes: list[PromptTexts]
    summary: str
    in_ids: bool = False


def expected(facts: Facts) -> bool:
    """Whether the run generates samples: by its spec, or because it already has."""
    if facts.run.kind in ("external", "script"):
        return has_samples(run=facts.run)
    train = facts.run.spec.get("train") or {}
    samples = train.get("samples")
    return bool(samples or train.get("checkpoint")) and (samples or {}).get("count", 3) > 0


def content(facts: Facts) -> Samples:
    """Return the run's samples."""
    rows = samples_of(run=facts.run)[-_MOST:]
    if not rows:
        return Samples([], _empty(facts))
    newest = rows[-1].content
    lanes = [
        _lane(place, item.prompt if item.prompt is not None else _ids(item.prompt_ids), rows)
        for place, item in enumerate(newest.samples)
    ]
    return Samples(lanes, _summary(rows), in_ids=newest.samples[0].text is None)


def _lane(place: int, prompt: str, rows: list[StepSamples]) -> PromptTexts:
    """One prompt's texts; texts of an earlier attempt's other prompt are left out."""
    newest = rows[-1].content.samples[place].prompt_ids
    texts = []
    for row in reversed(rows):
        sample = row.content.samples[place] if place < len(row.content.samples) else None
        if sample is not None and sample.prompt_ids == newest:
            text = sample.text if sample.text is not None else _ids(sample.token_ids)
            texts.append(Text(f"{row.content.step:,}", text, sample.ended))
    if len(texts) <= _SHOWN + 1:
        return PromptTexts(prompt, texts, [])
    chosen = {round(place * (len(texts) - 1) / (_SHOWN - 1)) for place in range(_SHOWN)}
    return PromptTexts(
        prompt,
        [texts[i] for i in sorted(chosen)],
        [text for i, text in enumerate(texts) if i not in chosen],
    )


def _summary(rows: list[StepSamples]) -> str:
    newest = rows[-1].content
    longest = max(len(sample.token_ids) for sample in newest.samples)
    text = ngettext("Up to %(count)s token", "Up to %(count)s tokens", longest) % {
        "count": f"{longest:,}"
    }
    if newest.temperature == 0:
        text += _(", greedy")
    elif newest.temperature is not None:
        text += _(", temperature %(value)s") % {"value": f"{newest.temperature:g}"}
    text += ngettext("; %(count)s checkpoint", "; %(count)s checkpoints", len(rows)) % {
        "count": len(rows)
    }
    text += _(", newest at step %(step)s.") % {"step": f"{newest.step:,}"}
    if newest.cut_short:
        text += " " + _("Truncated: sampling may take at most 2% of the training time.")
    return text


def _empty(facts: Facts) -> str:
    if facts.run.state in ENDED:
        return _("No samples: the run ended before its first checkpoint.")
    train: dict[str, Any] = facts.run.spec.get("train") or {}
    every = (train.get("checkpoint") or {}).get("every_steps") or (
        200 if train.get("checkpoint") is not None else None
    )
    first = min(every or train.get("steps") or 0, train.get("steps") or 0)
    return _("The first samples follow after step %(step)s.") % {"step": f"{first:,}"}


def _ids(ids: list[int]) -> str:
    return " ".join(map(str, ids))
