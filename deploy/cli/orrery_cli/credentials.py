"""Which server and token a command uses, and where tokens are stored.

Tokens are in `$XDG_CONFIG_HOME/orrery/credentials.json`, readable by their owner only. ORRERY_URL
and ORRERY_TOKEN take precedence.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from orrery_cli.errors import USAGE, CliError

DEFAULT_URL = "http://127.0.0.1:8000"

chosen_url: str | None = None  # the option --url


def path() -> Path:
    """The file with the tokens."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "orrery" / "credentials.json"


def server_url(given: str | None = None) -> str:
    """The server's address without a slash at its end.

    The first of: `given`, the option --url, ORRERY_URL, the last login, this machine. Raises
    CliError for an address that is not HTTP.
    """
    url = given or chosen_url or os.environ.get("ORRERY_URL") or _read().get("url") or DEFAULT_URL
    url = str(url).strip().rstrip("/").removesuffix("/api/v1")
    if not url.startswith(("http://", "https://")):
        raise CliError(
            f"{url!r} is not the address of a server",
            f"Write it with http:// or https://, such as {DEFAULT_URL}.",
            code=USAGE,
        )
    return url


def token(url: str) -> str | None:
    """The token for a server: ORRERY_TOKEN, else the stored one."""
    stored = os.environ.get("ORRERY_TOKEN") or _read().get("tokens", {}).get(url)
    return str(stored).strip() if stored else None


def store(url: str, token: str | None) -> None:
    """Store a server's token, or remove it; later commands use this server."""
    document = _read()
    tokens = dict(document.get("tokens", {}))
    if token is None:
        tokens.pop(url, None)
    else:
        tokens[url] = token
    file = path()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        json.dump({"url": url, "tokens": tokens}, stream, indent=1)
    os.replace(new, file)


def _read() -> dict[str, Any]:
    try:
        document = json.loads(path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CliError(
            f"cannot read {path()}: {error}", "Delete the file, then run `orrery login`."
        ) from None
    return document if isinstance(document, dict) else {}
