"""Records the requests that other projects' clients send to a server of an untrained model.

The clients are not dependencies of this project, so the tests send their recorded requests again
(`test_recorded_clients.py`). To record again, in an environment that has the project's packages and
those of the clients:

    pip install litellm langchain-openai instructor "lm-eval[api]"
    python -m tests.workers.inference.server.recorded_clients.record litellm langchain-openai ...

Each call writes CLIENT.jsonl next to this file: a line about the client, then a line per request.
It fails if the client cannot use a response.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

from tests.workers.inference.server.conftest import Serving
from tests.workers.inference.server.recorded_clients import calls
from tests.workers.inference.server.recorded_clients.weights import byte_weights

FOLDER = Path(__file__).parent


def main(names: list[str]) -> int:
    """Record the named clients."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = byte_weights(folder / "weights")
        serving = Serving(folder / "run", weights, max_seqs=4, kv_blocks=400)
        model = serving.event("serving")["model"]
        try:
            for client in names:
                with _Recorder(serving.url) as recorder:
                    results = calls.CALLS[client](f"{recorder.url}/v1", model, weights)
                _write(client, recorder.requests, model, results)
        finally:
            serving.request_action("stop", grace_s=0)
            serving.wait()
    return 0


def _write(client: str, requests: list[dict[str, Any]], model: str, results: Any) -> None:
    record = {
        "client": client,
        "version": metadata.version(client),
        "recorded": datetime.now(UTC).date().isoformat(),
        "by": "python -m tests.workers.inference.server.recorded_clients.record",
        "model": model,
        "results": results,
    }
    lines = [json.dumps(each, ensure_ascii=False) for each in (record, *requests)]
    (FOLDER / f"{client}.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{client} {record['version']}: {len(requests)} requests")


class _Recorder:
    """A server that stores requests and forwards them to the server under `url`."""

    def __init__(self, url: str) -> None:
        self.requests: list[dict[str, Any]] = []
        recorder, upstream = self, httpx.Client(base_url=url, timeout=120, trust_env=False)

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = upstream.request(
                    self.command,
                    self.path,
                    content=body,
                    headers={"Content-Type": self.headers.get("Content-Type", "")},
                )
                shown = {"method": self.command, "path": self.path, "status": answer.status_code}
                agent = self.headers.get("User-Agent", "")
                content = json.loads(body) if body else None
                recorder.requests.append({**shown, "user_agent": agent, "body": content})
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

        self._upstream = upstream
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> _Recorder:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._upstream.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
