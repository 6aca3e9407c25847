"""The options of `manage.py up`, copied to the environment before settings are read.

Does not depend on Django.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import MutableMapping


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--home", metavar="DIR", help="data directory (ORRERY_HOME, default ./var)")
    parser.add_argument("--port", type=int, help="port to listen on (ORRERY_PORT, default 8000)")
    parser.add_argument("--host", help="address to listen on (ORRERY_HOST, default 127.0.0.1)")
    parser.add_argument(
        "--devices",
        type=int,
        default=4,
        metavar="N",
        help="CPU slots on a machine without GPU (default 4)",
    )
    parser.add_argument(
        "--web-processes",
        type=int,
        metavar="N",
        help="web processes that share the port (ORRERY_WEB_PROCESSES, default 1)",
    )
    parser.add_argument(
        "--no-demo",
        action="store_true",
        help="do not submit the demo run at the first start (ORRERY_DEMO=0)",
    )


def apply(arguments: list[str], environ: MutableMapping[str, str] | None = None) -> None:
    """Set ORRERY_HOME, _PORT, _HOST, _WEB_PROCESSES and _DEMO from the given options."""
    environ = os.environ if environ is None else environ
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    known, _ = parser.parse_known_args(arguments)
    values = {"ORRERY_HOME": known.home, "ORRERY_PORT": known.port, "ORRERY_HOST": known.host}
    values["ORRERY_WEB_PROCESSES"] = known.web_processes
    environ.update({name: str(value) for name, value in values.items() if value is not None})
    if known.no_demo:
        environ["ORRERY_DEMO"] = "0"
