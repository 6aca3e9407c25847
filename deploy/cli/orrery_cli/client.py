"""Requests to the REST API: token, pages of lists, retries, and errors as problem details."""

from __future__ import annotations

import gzip
import json
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Any

# Without its own command, for which it imports rich and click, httpx loads in half the time.
if "httpx" not in sys.modules:
    sys.modules["httpx._main"] = None  # type: ignore[assignment]
import httpx

from orrery_cli import __version__, credentials
from orrery_cli.errors import AUTHENTICATION, CliError, Refused, Unreachable

TRANSPORT: httpx.BaseTransport | None = None  # tests replace it
TIMEOUT_S = 30.0
LONGEST_WAIT_S = 60.0  # for a server that limits the rate
_TEMPORARY = (502, 503, 504)
_PAUSES_S = (0.5, 1.5)  # before the second and third try of a request that may be repeated


class Client:
    """One server with one token."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self.url = credentials.server_url(url)
        self._given = token
        self.token = token or credentials.token(self.url)
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            transport=TRANSPORT,
            verify=self.url.startswith("https:"),  # reading certificates takes 20 ms
            timeout=TIMEOUT_S,
            headers={"User-Agent": f"orrery-cli/{__version__}"},
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        """The JSON document at a path below /api/v1/."""
        known = {name: value for name, value in params.items() if value is not None}
        return self._repeated("GET", path, params=known).json()

    def post(self, path: str, body: Any = None) -> Any:
        """The answer to an action. It is repeated only if the server did not execute it."""
        request = {"json": {} if body is None else body}
        return self._repeated("POST", path, only_unsent=True, **request).json()

    def create(self, path: str, body: Any, *, key: str = "") -> Any:
        """The created object; a repeated request with the same `key` creates nothing."""
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return self._repeated("POST", path, json=body, headers=headers).json()

    def change(self, path: str, body: Any) -> Any:
        """The changed object. It is repeated only if the server did not execute it."""
        return self._repeated("PATCH", path, only_unsent=True, json=body).json()

    def send(self, path: str, body: Any) -> Any:
        """The answer to data that the server recognizes when it is sent again; sent compressed."""
        content = gzip.compress(json.dumps(body).encode(), 1)
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return self._repeated("POST", path, content=content, headers=headers).json()

    def items(self, path: str, *, most: int | None = None, **params: Any) -> Iterator[Any]:
        """The items of a list, over all of its pages, at most `most`."""
        cursor, left = None, most
        while left is None or left > 0:
            limit = 200 if left is None else min(200, left)
            page = self.get(path, limit=limit, cursor=cursor, **params)
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return
            if left is not None:
                left -= len(page["items"])

    @contextmanager
    def stream(self, path: str) -> Iterator[httpx.Response]:
        """The successful response of a file, whose body is read in parts."""
        try:
            response = self._opened(path)
        except Refused as error:
            self._take_stored_token(error)
            response = self._opened(path)
        with closing(response):
            yield response

    def _opened(self, path: str) -> httpx.Response:
        request = self._http.build_request("GET", path, headers=self._headers())
        response = self._http.send(request, stream=True)
        try:
            check(response, self.url)
        except BaseException:
            response.close()
            raise
        return response

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def _repeated(
        self, method: str, path: str, *, only_unsent: bool = False, **request: Any
    ) -> httpx.Response:
        for pause_s in (*_PAUSES_S, None):
            try:
                return self._with_newest_token(method, path, **request)
            except Unreachable as error:
                wait_s = pause_s if error.after_s is None else error.after_s
                if pause_s is None or wait_s is None or wait_s > LONGEST_WAIT_S:
                    raise
                if only_unsent and error.sent:
                    raise
                if wait_s > 0:
                    time.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _with_newest_token(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The response; a request that the token does not allow is repeated with the token that
        another command has stored meanwhile, if any.
        """
        try:
            return self._once(method, path, **request)
        except Refused as error:
            self._take_stored_token(error)
            return self._once(method, path, **request)

    def _take_stored_token(self, error: Refused) -> None:
        """Use the token that another command has stored; raises the refusal if none helps."""
        stored = self._given or credentials.token(self.url)
        if error.status != AUTHENTICATION or not stored or stored == self.token:
            raise error
        self.token = stored

    def _once(self, method: str, path: str, **request: Any) -> httpx.Response:
        headers = {**self._headers(), **request.pop("headers", {})}
        try:
            response = self._http.request(method, path, headers=headers, **request)
        except httpx.TransportError as error:
            raise Unreachable(
                f"cannot reach {self.url}: {error or type(error).__name__}",
                "Check the address (ORRERY_URL, --url) and that the server is up.",
                sent=not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout),
            ) from None
        except httpx.InvalidURL as error:
            raise CliError(f"{self.url} is not an address: {error}") from None
        check(response, self.url)
        return response


def check(response: httpx.Response, url: str) -> None:
    """Raise the error that a response reports."""
    if response.is_success:
        return
    response.read()
    is_problem = "json" in response.headers.get("Content-Type", "")
    document = response.json() if is_problem else {}
    if response.status_code in _TEMPORARY or response.status_code == 429:
        what = document.get("detail") or f"it answers {response.status_code}"
        raise Unreachable(
            f"{url} cannot answer now: {what}",
            "Try again in a minute.",
            after_s=_seconds(response.headers.get("Retry-After")),
        )
    if not isinstance(document, dict) or "title" not in document:
        raise CliError(
            f"{response.request.url} answered {response.status_code} without problem details",
            "Check that the address (ORRERY_URL, --url) belongs to an Orrery server.",
        )
    raise Refused(document, response.status_code)


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:  # a date
        return None
