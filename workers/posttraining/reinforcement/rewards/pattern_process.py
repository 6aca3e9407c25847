"""The process of a reward by a user's pattern: whether a text matches or satisfies a schema.

A pattern may take exponential time, so the rank ends this process after a limit. Runs alone,
without this project's packages: `pattern_process.py FD KIND RULE`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable


def main() -> None:
    """Say `ready`, then answer true or false to each text."""
    fd, kind, rule = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    os.set_inheritable(fd, False)
    holds = _matches(rule) if kind == "regex" else _satisfies(rule)
    with os.fdopen(fd, "w") as replies:
        replies.write('"ready"\n')
        replies.flush()
        for line in sys.stdin:
            replies.write(json.dumps(holds(json.loads(line))) + "\n")
            replies.flush()


def _matches(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern)
    return lambda text: compiled.search(text) is not None


def _satisfies(schema: dict[str, object]) -> Callable[[str], bool]:
    from jsonschema import validators
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    # an empty registry: references to other addresses are not fetched
    validator = validators.validator_for(schema)(schema, registry=Registry())

    def is_valid(text: str) -> bool:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        try:
            return bool(validator.is_valid(value))
        except (Unresolvable, RecursionError):
            return False

    return is_valid


if __name__ == "__main__":
    main()
