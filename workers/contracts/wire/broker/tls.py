"""TLS options of a connection to Redis: `rediss://` always verifies certificate and host name.

`ORRERY_REDIS_CA` is a file with the certificates of the authority that signed the server's; by
default the system's authorities are trusted. Connects to nothing.
"""

from __future__ import annotations

import os
from typing import Any


def tls_options(url: str) -> dict[str, Any]:
    """Options for redis-py's `from_url` and, as `broker_use_ssl`, for Celery; empty without TLS."""
    if not url.startswith("rediss:"):
        return {}
    options: dict[str, Any] = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    ca = os.environ.get("ORRERY_REDIS_CA", "").strip()
    return {**options, "ssl_ca_certs": ca} if ca else options
