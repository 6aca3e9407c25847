"""Reads a kubeconfig: the current context's server, certificates and login.

Refuses what would run a program or read a file of the control plane's machine.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

_FLATTEN = "write one with: kubectl config view --raw --flatten --minify"
_TOKEN = "use the token of a service account instead (kubectl create token)"
_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_PROGRAMS = ("exec", "auth-provider")


class NotUsable(ValueError):
    """The kubeconfig cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Login:
    """A server and how to log in there; PEM texts."""

    server: str
    namespace: str | None = None
    ca: str | None = None
    token: str | None = None
    certificate: str | None = None
    key: str | None = None


def read(text: str) -> Login:
    """The login of the current context. Raises NotUsable."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise NotUsable(f"the kubeconfig is not YAML: {str(error)[:200]}") from None
    if not isinstance(content, dict) or content.get("kind") != "Config":
        raise NotUsable("the text is not a kubeconfig (kind: Config)")
    current = content.get("current-context")
    context = _named(content, "contexts", "context", current)
    cluster = _named(content, "clusters", "cluster", context.get("cluster"))
    user = _named(content, "users", "user", context.get("user"))
    for part in (cluster, user):
        if name := next((name for name in _FILES if part.get(name)), None):
            raise NotUsable(f"the kubeconfig names a file ({name}); {_FLATTEN}")
    if name := next((name for name in _PROGRAMS if user.get(name)), None):
        raise NotUsable(f"the kubeconfig runs a program to log in ({name}); {_TOKEN}")
    if cluster.get("insecure-skip-tls-verify"):
        raise NotUsable("the kubeconfig skips the check of the server's certificate; add its ca")
    if user.get("username"):
        raise NotUsable(f"the kubeconfig logs in with a password; {_TOKEN}")
    server = str(cluster.get("server") or "")
    if not server.startswith(("https://", "http://127.0.0.1", "http://localhost")):
        raise NotUsable(f"the server {server!r} is not an https:// address")
    return Login(
        server=server.rstrip("/"),
        namespace=context.get("namespace"),
        ca=_pem(cluster, "certificate-authority-data"),
        token=user.get("token"),
        certificate=_pem(user, "client-certificate-data"),
        key=_pem(user, "client-key-data"),
    )


def _named(content: Mapping[str, Any], plural: str, singular: str, name: object) -> dict[str, Any]:
    listed = content.get(plural)
    for one in listed if isinstance(listed, list) else []:
        if (
            isinstance(one, dict)
            and one.get("name") == name
            and isinstance(one.get(singular), dict)
        ):
            return dict(one[singular])
    raise NotUsable(f"the kubeconfig has no {singular} named {name!r}; {_FLATTEN}")


def _pem(part: Mapping[str, Any], name: str) -> str | None:
    if not part.get(name):
        return None
    try:
        return base64.b64decode(str(part[name]), validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        raise NotUsable(f"{name} of the kubeconfig is not base64 of a PEM text") from None
