"""`orrery login` and `orrery logout`: store or remove a token."""

from __future__ import annotations

import re
import socket
import sys
from typing import Annotated, Any, Optional

import typer

from orrery_cli import credentials
from orrery_cli.errors import CliError
from orrery_cli.options import AsJson
from orrery_cli.output import print_json

OptionalText = Optional[str]  # noqa: UP045  (Python 3.10 with older releases of typer)


def login(
    url: Annotated[OptionalText, typer.Argument(help="Address of the server.")] = None,
    token: Annotated[
        OptionalText,
        typer.Option(help="A token of the page Tokens; `-` or a pipe: standard input."),
    ] = None,
    username: Annotated[
        OptionalText,
        typer.Option(help="Log in with this name and a password, and create a token."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a token, and store it for later commands."""
    from orrery_cli.client import Client

    server = credentials.server_url(url)
    if username is not None:
        token = _token_by_password(server, username)
    elif token is None or token == "-":
        if sys.stdin.isatty():
            typer.echo(f"Create a token at {server}/account/tokens/ and paste it here.", err=True)
            token = typer.prompt("Token", hide_input=True, err=True)
        else:
            token = sys.stdin.readline()
    token = str(token).strip()
    if not token:
        raise CliError("the token is empty", "Give it with --token, or by a pipe.", code=2)
    with Client(server, token) as client:
        caller = client.get("me")
    credentials.store(server, token)
    if as_json:
        print_json({"url": server, **caller, "stored": str(credentials.path())})
        return
    print(f"logged in to {server} as {caller['username']} ({caller['role']})")
    print(f"the token is in {credentials.path()}")


def logout(as_json: AsJson = False) -> None:
    """Remove the stored token of the server. The page Tokens revokes tokens."""
    server = credentials.server_url()
    credentials.store(server, None)
    if as_json:
        print_json({"url": server, "stored": None})
    else:
        print(f"removed the token of {server}; it stays valid until it expires or is revoked")


def _token_by_password(server: str, username: str) -> str:
    """A new token, created in a session that is used for nothing else."""
    import httpx

    from orrery_cli import client as rest
    from orrery_cli.errors import Unreachable

    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    try:
        with httpx.Client(
            base_url=server, transport=rest.TRANSPORT, headers={"Referer": f"{server}/"}
        ) as session:
            session.get("/login/")
            form = {"username": username, "password": password}
            answer = session.post("/login/", data={**form, **_csrf(session)})
            if answer.status_code != 302:
                refused = answer.status_code == 403 or answer.status_code == 429
                raise CliError(
                    f"{server} refused the login of {username}"
                    if refused
                    else f"{server}/login/ answered {answer.status_code}",
                    "Check name and password; after several wrong ones, wait some minutes.",
                )
            headers = {"X-CSRFToken": _csrf(session)["csrfmiddlewaretoken"]}
            name = re.sub(r"\s+", " ", f"orrery on {socket.gethostname()}")[:80]
            created = session.post("/api/v1/tokens", json={"name": name}, headers=headers)
            rest.check(created, server)
            return str(created.json()["token"])
    except httpx.TransportError as error:
        raise Unreachable(f"cannot reach {server}: {error}", "Check the address.") from None


def _csrf(session: Any) -> dict[str, str]:
    token = next((c.value for c in session.cookies.jar if c.name.endswith("csrftoken")), None)
    if token is None:
        raise CliError("the server has no login form", "Log in with --token.")
    return {"csrfmiddlewaretoken": str(token)}
