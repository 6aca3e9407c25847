"""The command `python -m workers.training.data.prepare`: train a tokenizer or write token files.

Does not depend on models.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from workers.contracts.base import validation_problems
from workers.contracts.specs.data import BYTES, BpeSpec, DataSpec
from workers.runtime.exit_codes import CODES, UserError
from workers.training.data.files import list_files
from workers.training.data.shards import description_path
from workers.training.data.sources import documents, open_tokenizer, write_tokens
from workers.training.data.tokenizer import NAME

_LARGEST = 2**32  # ids of token files have at most 32 bits


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or 64 with one line per problem."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.training.data.prepare", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("tokenizer", help=f"train a byte-level BPE and write FOLDER/{NAME}")
    train.add_argument(
        "--vocab", type=int, required=True, help=f"tokens at most, more than {BYTES}"
    )
    tokens = commands.add_parser("tokens", help="write a token file and its description")
    tokens.add_argument("--tokenizer", help=f"a {NAME} or its folder; without one, bytes")
    for command, out in ((train, "folder"), (tokens, "file, as train.bin")):
        command.add_argument("path", type=Path, help="a file, or a folder of files")
        command.add_argument("--format", choices=("text", "jsonl"), default="text")
        command.add_argument("--out", type=Path, required=True, help=out)
    options = parser.parse_args(arguments)
    try:
        print(_tokenizer(options) if options.command == "tokenizer" else _tokens(options))
    except ValidationError as error:
        print(*validation_problems(error), sep="\n", file=sys.stderr)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
    else:
        return 0
    return CODES["user_error"]


def _tokenizer(options: argparse.Namespace) -> str:
    if (options.out / NAME).exists():
        raise UserError(f"--out: {options.out / NAME} already exists. Use another folder.")
    data = DataSpec(
        path=str(options.path), format=options.format, tokenizer=BpeSpec(vocab=options.vocab)
    )
    tokenizer = open_tokenizer(data, vocab=options.vocab, checkpoints=options.out)
    return f"{options.out / NAME}: {tokenizer.vocab} tokens"


def _tokens(options: argparse.Namespace) -> str:
    data = DataSpec(path=str(options.path), format=options.format, tokenizer=options.tokenizer)
    tokenizer = open_tokenizer(data, vocab=_LARGEST, checkpoints=options.out.parent)
    [(_, part)] = data.parts()
    write_tokens(options.out, documents(part, list_files(options.path, options.format)), tokenizer)
    return f"{options.out}: {description_path(options.out).read_text(encoding='utf-8').strip()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
