"""What the texts that a run writes go on from: its own prompts, or stretches of the held-out text,
as token ids.

Knows data and tokenizers; does not know models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.contracts.specs.run_bodies import SamplesSpec
from workers.runtime.exits import UserError
from workers.training.data.inherited import data_of
from workers.training.data.sources import open_sources, open_tokenizer
from workers.training.data.stream import Stream
from workers.training.data.tokenizer import Tokenizer
from workers.training.setup.spec_loading import TrainingRun

TOKENS = 32  # of a stretch of text, at most
# what a page or a database may choke on: control characters but tab and line break
_HIDDEN = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Prompts:
    """`ids` of each; `decode` is None where no tokenizer is known; `end` is the id with which a
    document ends.
    """

    ids: list[list[int]]
    decode: Decode | None = None
    end: int | None = None

    def words(self, ids: Sequence[int]) -> str | None:
        return None if self.decode is None else self.decode(ids).translate(_HIDDEN)

    def continuation(self, prompt: Sequence[int], new: Sequence[int]) -> str | None:
        """What `new` adds to a prompt's text: decoded together, since tokenizers leave out a text's
        first space.
        """
        before, whole = self.words(prompt), self.words([*prompt, *new])
        if before is None or whole is None:
            return None
        # a character cut in two between them
        return whole[len(before) :] if whole.startswith(before) else self.words(new)


def open_prompts(run: TrainingRun, spec: SamplesSpec, *, cache: Path, kept: Path) -> Prompts:
    """`spec.prompts`, or `spec.count` stretches of what the run validates on, spread over it; alike
    in every attempt.

    Raises UserError for prompts without a tokenizer, or as long as a sequence.
    """
    data, held = data_of(run, kept=kept), run.train.eval.data if run.train.eval else None
    told = held if held is not None and held.tokenizer is not None else data
    reader = open_tokenizer(told, vocab=run.model.vocab, kept=kept)
    tokenizer = reader if data.reads_text or (held is not None and held.reads_text) else None
    end = tokenizer.document_end if tokenizer else None
    decode = tokenizer.decode if tokenizer else None
    if spec.prompts:
        return Prompts(_encoded(spec.prompts, tokenizer, run.train.seq_len), decode, end)
    sources = open_sources(held or data, tokenizer=reader, vocab=run.model.vocab, cache=cache)
    streams = [source.stream if held else source.stream.split()[1] for source in sources]
    most = max(1, min(TOKENS, run.train.seq_len // 2))
    ids = [_stretch(streams, number, spec.count, tokenizer, most) for number in range(spec.count)]
    return Prompts([each for each in ids if each], decode, end)


def _encoded(prompts: Sequence[str], tokenizer: Tokenizer | None, seq_len: int) -> list[list[int]]:
    if tokenizer is None:
        message = (
            "token files, and the weights to begin with, come without a tokenizer to read a "
            "prompt with"
        )
        raise UserError(
            f"train.samples.prompts: {message}; try data.tokenizer, or leave the prompts out"
        )
    found = tokenizer.encode(prompts)
    for number, ids in enumerate(found):
        if not 0 < len(ids) < seq_len:
            message = f"{len(ids)} tokens, of which a sequence has {seq_len}, and one is to follow"
            raise UserError(
                f"train.samples.prompts.{number}: {message}; try one of 1 to {seq_len - 1} tokens"
            )
    return found


def _stretch(
    streams: Sequence[Stream], number: int, count: int, tokenizer: Tokenizer | None, most: int
) -> list[int]:
    """Stretch `number` of `count`: of each stream in turn, at even distances, at most `most` ids of
    one document.
    """
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
    return _whole_words(ids, tokenizer, most, begins=begins) or ids[:most]


def _whole_words(ids: list[int], tokenizer: Tokenizer, most: int, *, begins: bool) -> list[int]:
    """From the beginning of a line, or else of a word, to the end of a word; empty where there is
    none. `begins`: with
    the beginning of a document."""
    text = tokenizer.decode(ids)
    for gap in () if begins else ("\n", " "):
        _, found, rest = text.partition(gap)
        if found and len(rest) >= len(text) // 2:
            text = rest
            break
    [some] = tokenizer.encode([text.strip("\ufffd").lstrip()])
    cut = tokenizer.decode(some[:most]).rstrip("\ufffd")
    if len(some) > most:
        cut = re.sub(r"\s\S*$", "", cut) or cut  # the last word may be half a one
    [found_ids] = tokenizer.encode([cut.rstrip()])
    return found_ids[:most]
