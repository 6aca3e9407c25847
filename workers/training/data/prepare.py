"""Train a tokenizer, or write token files, ahead of a run: `python -m
workers.training.data.prepare`.

Knows the command line only; does not know models.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from workers.contracts.base import validation_problems
from workers.contracts.specs.data import BYTES, BpeSpec, DataSpec
from workers.runtime.exits import CODES, UserError
from workers.training.data.files import files_of
from workers.training.data.shards import beside
from workers.training.data.sources import documents, open_tokenizer, write_tokens
from workers.training.data.tokenizer import NAME

_LARGEST = 2**32  # ids of token files have at most 32 bits


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or 64 with one line of what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.training.data.prepare", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("tokenizer", help=f"train a byte-level BPE and write FOLDER/{NAME}")
    train.add_argument(
        "--vocab", type=int, required=True, help=f"tokens at most, more than {BYTES}"
    )
    tokens = commands.add_parser("tokens", help="write a token file with its description beside it")
    tokens.add_argument("--tokenizer", help=f"a {NAME} or its folder; without one, bytes")
    for command, out in ((train, "folder"), (tokens, "file, as train.bin")):
        command.add_argument("path", type=Path, help="a file, or a folder of files")
        command.add_argument("--format", choices=("text", "jsonl"), default="text")
        command.add_argument("--out", type=Path, required=True, help=out)
    given = parser.parse_args(arguments)
    try:
        print(_tokenizer(given) if given.command == "tokenizer" else _tokens(given))
    except ValidationError as error:
        print(*validation_problems(error), sep="\n", file=sys.stderr)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
    else:
        return 0
    return CODES["user_error"]


def _tokenizer(given: argparse.Namespace) -> str:
    if (given.out / NAME).exists():
        raise UserError(f"--out: {given.out / NAME} is there already; try another folder")
    data = DataSpec(path=str(given.path), format=given.format, tokenizer=BpeSpec(vocab=given.vocab))
    made = open_tokenizer(data, vocab=given.vocab, kept=given.out)
    return f"{given.out / NAME}: {made.vocab} tokens"


def _tokens(given: argparse.Namespace) -> str:
    data = DataSpec(path=str(given.path), format=given.format, tokenizer=given.tokenizer)
    tokenizer = open_tokenizer(data, vocab=_LARGEST, kept=given.out.parent)
    [(_, part)] = data.parts()
    write_tokens(given.out, documents(part, files_of(given.path, given.format)), tokenizer)
    return f"{given.out}: {beside(given.out).read_text(encoding='utf-8').strip()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
