"""The process of a user's reward function: JSON lines on standard input, replies on a pipe.

Runs alone, without this project's packages: `function_process.py FD FILE FUNCTION`. What the
function prints goes to standard error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback


def main() -> None:
    """Load the file, say `ready`, then answer each request."""
    fd, path, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.set_inheritable(fd, False)
    with os.fdopen(fd, "w") as replies:

        def reply(value: object) -> None:
            replies.write(json.dumps(value) + "\n")
            replies.flush()

        try:
            spec = importlib.util.spec_from_file_location("reward_function", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
            sys.modules["reward_function"] = module
            spec.loader.exec_module(module)
        except BaseException as error:
            traceback.print_exc()
            reply(f"cannot be loaded: {type(error).__name__}: {error}")
            return
        function = getattr(module, name, None)
        if function is None:
            reply(f"has no function {name}")
            return
        reply("ready")
        for line in sys.stdin:
            try:
                values = function(**json.loads(line))
                reply({"values": _plain(values)})
            except Exception as error:
                traceback.print_exc()
                reply({"error": f"raised {type(error).__name__}: {error}"})


def _plain(values: object) -> object:
    """Lists and numbers of what a function returns, arrays and tensors included."""
    convert = getattr(values, "tolist", None)
    if convert is not None:
        values = convert()
    if isinstance(values, tuple | list):
        return [_plain(value) for value in values]
    if values is None or isinstance(values, bool | int | float | str):
        return values
    return repr(values)[:200]


if __name__ == "__main__":
    main()
