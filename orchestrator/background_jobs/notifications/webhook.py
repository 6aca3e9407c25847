"""Posts a small body to a URL that a user chose, without reaching addresses inside the network.

The host is resolved once, every address is checked, and the connection goes to the checked address,
so a later DNS answer changes nothing. Redirects are not followed; time and size are limited.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from typing import Final
from urllib.parse import SplitResult, urlsplit

from django.conf import settings

TIMEOUT_S: Final = 10.0  # for everything after name resolution
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses inside IPv6


class TargetBlocked(Exception):
    """The URL is not allowed; another attempt would not change that."""


class PostFailed(Exception):
    """The receiver did not accept the message; it may later."""


def check_url(url: str) -> SplitResult:
    """The parts of an http or https URL without credentials. Raises TargetBlocked."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise TargetBlocked("the URL is malformed") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TargetBlocked("the URL needs http:// or https:// and a host")
    if parts.username is not None or port == 0 or any(ord(c) < 33 or ord(c) > 126 for c in url):
        raise TargetBlocked(
            "the URL has credentials, a wrong port or characters that need escaping"
        )
    return parts


def post(url: str, body: bytes, headers: dict[str, str]) -> int:
    """Post the body; returns the 2xx status. Raises TargetBlocked or PostFailed."""
    parts = check_url(url)
    host, secure = str(parts.hostname), parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    address = _checked_address(host, port)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    timer: threading.Timer | None = None
    watched: socket.socket | None = None
    try:
        sock: socket.socket = socket.create_connection((str(address), port), timeout=TIMEOUT_S)
        watched = sock.dup()
        # a receiver that sends a byte from time to time never meets the timeout of a single read
        timer = threading.Timer(TIMEOUT_S, _shut, [watched])
        timer.daemon = True
        timer.start()
        if secure:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        connection.sock = sock
        connection.request("POST", path, body=body, headers=headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise PostFailed(f"{type(error).__name__}: {error}"[:200]) from None
    finally:
        if timer is not None:
            timer.cancel()
        if watched is not None:
            watched.close()
        connection.close()
    if 300 <= status < 400:
        raise PostFailed(f"HTTP {status}: redirects are not followed")
    if not 200 <= status < 300:
        raise PostFailed(f"HTTP {status}")
    return status


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed meanwhile


def _checked_address(host: str, port: int) -> _Address:
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PostFailed(f"the host {host} does not resolve: {error}") from None
    addresses = [ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows]
    for address in addresses:
        if not _allowed(address):
            raise TargetBlocked(
                f"{host} resolves to {address}, which is not a public address; "
                "ORRERY_WEBHOOK_NETWORKS can allow its network"
            )
    return addresses[0]


def _allowed(address: _Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _allowed(inner)
    networks = map(ipaddress.ip_network, settings.ENV.webhook_networks)
    if any(address in network for network in networks):
        return True
    return address.is_global and not address.is_multicast and not address.is_reserved
