"""Token ids that a run's text samples continue: its prompts, or excerpts of the held-out text.

Does not depend on models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.contracts.examples.shapes import needed_shape
from workers.contracts.specs.train import SamplesSpec
from workers.runtime.exit_codes import UserError
from workers.training.data.examples.run_examples import example_prompts
from workers.training.data.pretrained_tokenizer import resolve_data
from workers.training.data.sources import open_sources, open_tokenizer
from workers.training.data.stream import Stream
from workers.training.data.tokenizer import Tokenizer
from workers.training.setup.spec_loading import TrainingRun

EXCERPT_TOKENS = 32  # at most
# pages and databases may reject control characters other than tab and line break
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Prompts:
    """`ids` of each prompt; `decode` is None without a tokenizer; `end` is the
    end-of-document id.
    """

    ids: list[list[int]]
    decode: Decode | None = None
    end: int | None = None

    def text(self, ids: Sequence[int]) -> str | None:
        """The text of `ids` without control characters, or None without a tokenizer."""
        return None if self.decode is None else self.decode(ids).translate(_CONTROL)

    def continuation(self, prompt: Sequence[int], new: Sequence[int]) -> str | None:
        """What `new` adds to a prompt's text. Decodes both, since tokenizers omit a text's first
        space.
        """
        before, whole = self.text(prompt), self.text([*prompt, *new])
        if before is None or whole is None:
            return None
        # a character may be split between them
        return whole[len(before) :] if whole.startswith(before) else self.text(new)


def open_prompts(run: TrainingRun, spec: SamplesSpec, *, cache: Path, checkpoints: Path) -> Prompts:
    """`spec.prompts`, or `spec.count` excerpts at even distances in the validation data.

    Equal in every attempt. Raises UserError for prompts without a tokenizer, or as long as a
    sequence.
    """
    data, eval_data = (
        resolve_data(run, checkpoints=checkpoints),
        run.train.eval.data if run.train.eval else None,
    )
    tokenizer_data = (
        eval_data if eval_data is not None and eval_data.tokenizer is not None else data
    )
    reader = open_tokenizer(tokenizer_data, vocab=run.model.vocab, checkpoints=checkpoints)
    tokenizer = (
        reader if data.reads_text or (eval_data is not None and eval_data.reads_text) else None
    )
    if needed_shape(run.train) is not None:
        ids, chat = example_prompts(run, data, spec.prompts, cache=cache, checkpoints=checkpoints)
        _check_lengths(ids if spec.prompts else [], run.train.seq_len)
        return Prompts(ids if spec.prompts else ids[: spec.count], reader.decode, chat.stops[0])
    end = tokenizer.document_end if tokenizer else None
    decode = tokenizer.decode if tokenizer else None
    if spec.prompts:
        return Prompts(_encoded(spec.prompts, tokenizer, run.train.seq_len), decode, end)
    sources = open_sources(eval_data or data, tokenizer=reader, vocab=run.model.vocab, cache=cache)
    streams = [source.stream if eval_data else source.stream.split()[1] for source in sources]
    most = max(1, min(EXCERPT_TOKENS, run.train.seq_len // 2))
    ids = [_excerpt(streams, number, spec.count, tokenizer, most) for number in range(spec.count)]
    return Prompts([each for each in ids if each], decode, end)


def _encoded(prompts: Sequence[str], tokenizer: Tokenizer | None, seq_len: int) -> list[list[int]]:
    if tokenizer is None:
        message = (
            "neither the token files nor the initial weights have a tokenizer to encode prompts"
        )
        raise UserError(
            f"train.samples.prompts: {message}. Set data.tokenizer, or omit the prompts."
        )
    encoded = tokenizer.encode(prompts)
    _check_lengths(encoded, seq_len)
    return encoded


def _check_lengths(encoded: Sequence[Sequence[int]], seq_len: int) -> None:
    for number, ids in enumerate(encoded):
        if not 0 < len(ids) < seq_len:
            message = f"{len(ids)} tokens; a sequence has {seq_len}, of which one must be generated"
            raise UserError(
                f"train.samples.prompts.{number}: {message}. Use one of 1 to {seq_len - 1} tokens."
            )


def _excerpt(
    streams: Sequence[Stream], number: int, count: int, tokenizer: Tokenizer | None, most: int
) -> list[int]:
    """Excerpt `number` of `count`, at most `most` ids of one document; streams alternate."""
    stream = streams[number % len(streams)]
    start = len(stream) * (2 * number + 1) // (2 * count)
    ids = [int(each) for each in stream.read(start, min(len(stream), start + 4 * most))]
    if tokenizer is None:
        return ids[:most]
    begins = False
    if tokenizer.document_end in ids:
        end = ids.index(tokenizer.document_end)
        begins = len(ids) - end > most
        ids = ids[end + 1 :] if begins else ids[:end] or ids[end + 1 :]
    return _trim_to_words(ids, tokenizer, most, begins=begins) or ids[:most]


def _trim_to_words(ids: list[int], tokenizer: Tokenizer, most: int, *, begins: bool) -> list[int]:
    """From the start of a line or word to the end of a word; empty if no word remains.

    `begins`: the text starts at the beginning of a document.
    """
    text = tokenizer.decode(ids)
    for gap in () if begins else ("\n", " "):
        _, encoded, rest = text.partition(gap)
        if encoded and len(rest) >= len(text) // 2:
            text = rest
            break
    [some] = tokenizer.encode([text.strip("\ufffd").lstrip()])
    cut = tokenizer.decode(some[:most]).rstrip("\ufffd")
    if len(some) > most:
        cut = re.sub(r"\s\S*$", "", cut) or cut  # the last word may be incomplete
    [ids_in_words] = tokenizer.encode([cut.rstrip()])
    return ids_in_words[:most]
