"""ChatFormat: conversations and plain texts as token ids, with the tokens that training learns.

One function encodes for training, rollouts and serving: templated text without the tokens that a
tokenizer adds around texts. Does not depend on torch or on files of examples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from workers.models.errors import WeightsError
from workers.models.text.assets import CONFIGURATION, GENERATION, TEMPLATE, TOKENIZER, read_assets
from workers.models.text.chat_prompt import Messages, encode_chat
from workers.models.text.chat_spans import answer_spans
from workers.models.text.default_template import (
    BYTES_END,
    BYTES_END_ID,
    DEFAULT_TEMPLATE,
    END_TOKENS,
)
from workers.models.text.tokenizer import open_tokenizer

TrainOn = Literal["assistant", "completion", "all"]
_Offsets = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class EncodedText:
    """`ids` of a text, which of them are `trained`, and the index of the answer's first token.

    `resegmented`: the tokenizer alone would join tokens of a prompt and its answer.
    """

    ids: list[int]
    trained: list[bool]
    answer: int
    resegmented: bool = False

    def trimmed(self) -> EncodedText:
        """Without the tokens after the last trained one."""
        last = max((n for n, trained in enumerate(self.trained) if trained), default=-1)
        return replace(self, ids=self.ids[: last + 1], trained=self.trained[: last + 1])


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A template with the tokenizer that reads it.

    `stops` are the ids that end a turn or text, the preferred one first; `control` are the texts
    of special tokens, `prefix` the ids that the tokenizer puts before plain text; `digest`
    identifies the tokenizer.
    """

    template: str
    where: str
    special: Mapping[str, str]
    stops: tuple[int, ...]
    encode: Callable[[str], tuple[list[int], _Offsets]]
    decode: Callable[[Sequence[int]], str]
    control: Mapping[str, int] = field(default_factory=dict)
    prefix: tuple[int, ...] = ()
    digest: str = "bytes"

    def plain(self, text: str) -> list[int]:
        """Ids of a text that no template formats, as a server encodes it."""
        return [*self.prefix, *self.encode(text)[0]]

    def prompt(self, messages: Messages, *, tools: Sequence[Any] = ()) -> list[int]:
        """Ids of a conversation up to the start of the next answer, as a server encodes it."""
        return encode_chat(
            self.template,
            self.special,
            messages,
            encode=lambda text: self.encode(text)[0],
            tools=tools,
            where=self.where,
        )

    def conversation(
        self,
        messages: Messages,
        *,
        answer: int,
        train_on: TrainOn,
        tools: Sequence[Any] = (),
    ) -> EncodedText:
        """Ids of a conversation whose messages from index `answer` on are the answer.

        Trained are the tokens of the assistant's turns (`completion`: of those in the answer) up
        to and including each stop token, or all. Raises WeightsError if the template refuses the
        messages or drops an answer, or if no stop token ends a turn.
        """
        self._refuse_control_tokens(
            [str(each.get("content") or "") for each in messages],
        )
        turns = [
            number
            for number, each in enumerate(messages)
            if each.get("role") == "assistant" and (train_on == "assistant" or number >= answer)
        ]
        text, spans = answer_spans(
            self.template, self._names(tools), messages, turns, where=self.where
        )
        ids, places, joined = self._encode_spans(text, spans)
        trained = [train_on == "all"] * len(ids)
        for (start, stop), turn in zip(places, turns, strict=True):
            end = self._turn_end(ids, start, stop, turn)
            trained[start:end] = [True] * (end - start)
        first = min(
            (start for (start, _), turn in zip(places, turns, strict=True) if turn >= answer),
            default=len(ids),
        )
        return EncodedText(ids, trained, first, joined)

    def completion(self, prompt: str, answer: str, *, train_on: TrainOn) -> EncodedText:
        """Ids of plain text and its continuation, which ends with the first stop token."""
        self._refuse_control_tokens([prompt, answer])
        spans = [(len(prompt), len(prompt) + len(answer))]
        ids, [(start, _)], joined = self._encode_spans(prompt + answer, spans)
        whole = [*self.prefix, *ids, *self.stops[:1]]
        start += len(self.prefix)
        trained = [train_on == "all" or number >= start for number in range(len(whole))]
        return EncodedText(whole, trained, start, joined)

    def assets(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """What `files` of a model lack so that a server formats and stops as training did."""
        new = {TEMPLATE: self.template.encode()}
        settings = json.loads(files.get(GENERATION, b"{}"))
        known = settings.get("eos_token_id")
        ends = known if isinstance(known, list) else [known] if isinstance(known, int) else []
        merged = [*ends, *(stop for stop in self.stops if stop not in ends)]
        if merged != ends:
            new[GENERATION] = _json({**settings, "eos_token_id": merged})
        configuration = json.loads(files.get(CONFIGURATION, b"{}"))
        if TOKENIZER in files and "eos_token" in self.special and "eos_token" not in configuration:
            end = {"eos_token": self.special["eos_token"]}
            new[CONFIGURATION] = _json({**configuration, **end})
        return {name: data for name, data in new.items() if files.get(name) != data}

    def _names(self, tools: Sequence[Any]) -> dict[str, Any]:
        return {**self.special, "tools": list(tools) or None}

    def _encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]], bool]:
        """Ids, the spans in tokens, and whether pieces had to be encoded alone.

        A prompt's ids must not depend on its answer, so no token may contain a span's start.
        """
        ids, offsets = self.encode(text)
        starts = {start for start, _ in spans}
        if not any(a < start < b for a, b in offsets for start in starts if a < start):
            return ids, [_tokens_of(offsets, *span) for span in spans], False
        pieces, places, done = list[int](), list[tuple[int, int]](), 0
        for start, stop in spans:
            pieces += self.encode(text[done:start])[0]
            begin = len(pieces)
            pieces += self.encode(text[start:stop])[0]
            places.append((begin, len(pieces)))
            done = stop
        pieces += self.encode(text[done:])[0]
        if self.decode(pieces) != text:
            raise WeightsError(
                f"{self.where}: its tokenizer joins the end of a prompt and the answer; end the "
                "prompt with a line break or a special token"
            )
        return pieces, places, True

    def _turn_end(self, ids: list[int], start: int, stop: int, turn: int) -> int:
        """The index after the stop token of a turn whose answer is at `start` to `stop`."""
        ends = self.stops or tuple(self.control.values())
        for accepted in (ends, tuple(self.control.values())):
            for place in range(start, min(stop + 1, len(ids))):
                if ids[place] in accepted:
                    return place + 1
        raise WeightsError(
            f"{self.where}: its chat template ends message {turn} without a stop token, so a model "
            "would not learn to stop; end the assistant's turn with eos_token"
        )

    def _refuse_control_tokens(self, texts: Sequence[str]) -> None:
        for text in texts:
            token = next((token for token in self.control if token in text), None)
            if token is not None:
                raise WeightsError(
                    f"the text spells the control token {token}, which would end or open a turn; "
                    "remove it"
                )


def open_chat_format(folder: Path, *, template: str | None = None) -> ChatFormat:
    """The format of the tokenizer in `folder`, or of raw bytes without one.

    The template is `template`, the tokenizer's own, or DEFAULT_TEMPLATE. Raises WeightsError for
    a tokenizer that cannot be read or has no end-of-text token.
    """
    files = read_assets(folder)
    if TOKENIZER not in files:
        own = files[TEMPLATE].decode() if TEMPLATE in files else None
        return ChatFormat(
            template or own or DEFAULT_TEMPLATE,
            "bytes",
            {"eos_token": BYTES_END},
            (BYTES_END_ID,),
            _encode_bytes,
            _decode_bytes,
            {BYTES_END: BYTES_END_ID},
        )
    tokenizer = open_tokenizer(folder)
    ids = tokenizer.ids()
    special = dict(tokenizer.special)
    end = special.get("eos_token") or next((each for each in END_TOKENS if each in ids), None)
    if end is None:
        raise WeightsError(
            f"{folder}: its tokenizer has no end-of-text token; name one as eos_token in "
            f"{CONFIGURATION}"
        )
    special["eos_token"] = end
    stops = dict.fromkeys([ids[end], *tokenizer.ends] if end in ids else tokenizer.ends)
    return ChatFormat(
        template or tokenizer.chat_template or DEFAULT_TEMPLATE,
        str(folder),
        special,
        tuple(stops),
        tokenizer.encode_with_offsets,
        lambda numbers: tokenizer.decode(numbers, special=True),
        tokenizer.control_tokens(),
        _prefix(tokenizer.encode("a"), tokenizer.encode("a", special=False)),
        hashlib.sha256(files[TOKENIZER]).hexdigest(),
    )


def _decode_bytes(ids: Sequence[int]) -> str:
    """Ids beyond bytes, of a larger vocabulary, become U+FFFD."""
    return bytes(number if number < 256 else 0xFF for number in ids).decode(errors="replace")


def _encode_bytes(text: str) -> tuple[list[int], _Offsets]:
    offsets = [
        (number, number + 1)
        for number, character in enumerate(text)
        for _ in range(len(character.encode()))
    ]
    return list(text.encode()), offsets


def _tokens_of(offsets: _Offsets, start: int, stop: int) -> tuple[int, int]:
    """The tokens whose characters begin in `start` to `stop`."""
    first = next((n for n, (a, b) in enumerate(offsets) if a >= start and b > a), len(offsets))
    after = next((n for n in range(first, len(offsets)) if offsets[n][0] >= stop), len(offsets))
    return first, after


def _prefix(special: list[int], plain: list[int]) -> tuple[int, ...]:
    """The ids before `plain` in `special`."""
    for place in range(len(special) - len(plain) + 1):
        if special[place : place + len(plain)] == plain:
            return tuple(special[:place])
    return ()


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
