"""The live parts of a report's Markdown: fenced blocks `panel` and `runs`. Pure.

    ```panel frozen 2026-01-15
    kind: line
    …
    ```

The first word after the fence is the kind. The word `frozen` stores the block's data with the
version; any text after it, such as a date, makes it another block, whose data are read again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Final

import yaml
from yaml.nodes import Node

from orchestrator.common.errors import invalid
from orchestrator.common.markdown import parser

KINDS: Final = ("panel", "runs")
MOST_BLOCKS: Final = 60  # of a report
MOST_CHARACTERS: Final = 20_000  # of a block
FROZEN: Final = "frozen"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block that draws data."""

    kind: str  # of KINDS
    text: str  # between the fences
    frozen: bool
    key: str  # equal for equal blocks
    line: int  # of its opening fence, from 1
    token: int  # its place in the list of Markdown tokens
    problem: str = ""  # why `body` could not be read
    body: dict[str, Any] = field(default_factory=dict)


def blocks_of(tokens: list[Any]) -> list[Block]:
    """The blocks of a parsed text, in order; fences inside lists and quotes stay code.

    Blocks above the limit are not read.
    """
    fences = [
        (index, token)
        for index, token in enumerate(tokens)
        if token.type == "fence" and token.level == 0 and _words(token.info)[:1] in _STARTS
    ]
    return [_block(index, token) for index, token in fences[: MOST_BLOCKS + 1]]


def blocks_in(text: str) -> list[Block]:
    """The blocks of a text."""
    return blocks_of(parser().parse(text))


def check_blocks(text: str) -> list[Block]:
    """The blocks of a text. Raises 422 with the line of the first one that cannot be read."""
    blocks = blocks_in(text)
    if len(blocks) > MOST_BLOCKS:
        message = f"the report has more than {MOST_BLOCKS} panels and run tables"
        raise invalid("text", message, "Write a second report.")
    for block in blocks:
        if block.problem:
            raise invalid("text", f"line {block.line}: {block.problem}", _HINTS[block.kind])
    return blocks


def block_key(info: str, text: str) -> str:
    """Names a block by its content."""
    words = " ".join(_words(info))
    return hashlib.sha256(f"{words}\n{text.strip()}".encode()).hexdigest()


_STARTS: Final = [[kind] for kind in KINDS]
_HINTS: Final = {
    "panel": 'lines such as "kind: line", or JSON',
    "runs": 'lines such as "query: state = finished" and "columns: loss, val_loss"',
}


def _block(index: int, token: Any) -> Block:
    words = _words(token.info)
    body, problem = _body(token.content)
    return Block(
        kind=words[0],
        text=token.content,
        frozen=FROZEN in words[1:2],
        key=block_key(token.info, token.content),
        line=token.map[0] + 1 if token.map else 1,
        token=index,
        problem=problem,
        body=body,
    )


def _words(info: str) -> list[str]:
    return info.strip().split()


class _Loader(yaml.SafeLoader):
    """Reads plain YAML. A few lines of aliases could name gigabytes."""

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not possible", mark)
        return super().compose_node(parent, index)


def _body(text: str) -> tuple[dict[str, Any], str]:
    """The block's fields, or what is wrong with it."""
    if len(text) > MOST_CHARACTERS:
        return {}, f"the block has {len(text):,} characters, more than {MOST_CHARACTERS:,}"
    try:
        read = yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1} of the block" if mark else ""
        problem = getattr(error, "problem", None) or "it is not YAML or JSON"
        return {}, f"{problem}{where}"
    except (ValueError, RecursionError):
        return {}, "it is not YAML or JSON"
    if read is None:
        return {}, ""
    if not isinstance(read, dict):
        return {}, "the block is not a list of fields with values"
    return {str(name): value for name, value in read.items()}, ""
