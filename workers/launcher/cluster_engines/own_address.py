"""The address with which this machine reaches the broker; other nodes reach it there."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def own_address(redis_url: str) -> str:
    """Loopback if the broker runs on this machine."""
    parts = urlsplit(redis_url)
    if parts.scheme == "unix" or parts.hostname in (None, "localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname, parts.port or 6379))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
