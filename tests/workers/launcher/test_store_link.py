"""Real supervisors copy checkpoints into a store and read them back on another node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3_server import REGION, S3Server, refusing
from tests.workers.launcher.harness import Node, script
from workers.contracts.wire import encrypted_text
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher.recovery import is_reported

pytestmark = pytest.mark.flow

SAVES = """
    import hashlib, json, time
    from pathlib import Path
    folder = Path(os.environ["ORRERY_CHECKPOINTS"]) / "step-00000004"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 1000)
    digest = hashlib.sha256(b"w" * 1000).hexdigest()
    files = {"weights": {"bytes": 1000, "sha256": digest}}
    (folder / "manifest.json").write_text(json.dumps({"version": 1, "files": files}))
    path = str(folder.relative_to(os.environ["ORRERY_HOME"]))
    data = {"step": 4, "tokens": 9, "bytes": 1000, "path": path}
    row = {"run": os.environ["ORRERY_RUN"], "attempt": 1, "rank": 0, "seq": 1, "time": time.time()}
    with open(os.environ["ORRERY_RUN_DIR"] + "/rank-0/events.jsonl", "a") as file:
        file.write(json.dumps({**row, "type": "checkpoint_saved", "data": data}) + "\\n")
    print("trained on", flush=True)
"""
READS = """
    from pathlib import Path
    print(len((Path(os.environ["ORRERY_RESUME"]) / "weights").read_bytes()), flush=True)
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


def order(node: Node, text: str, *, url: str, endpoint: str, **more: Any) -> dict[str, Any]:
    """An order whose store has encrypted credentials."""
    made = node.order(script(text), ranks=1, **more)
    plain = json.dumps({"key": "AK", "secret": "hush-4711"})
    purpose = LaunchOrder.from_dict(made).store_purpose
    sealed = encrypted_text.encrypt(node.secret, plain, purpose=purpose)
    store = {"url": url, "endpoint": endpoint, "region": REGION, "credentials": sealed}
    return {**made, "store": store}


def event(node: Node, type: str) -> dict[str, Any]:
    """The data of the first event of this type."""

    def find() -> dict[str, Any] | None:
        events = (r["data"] for r in list(node.reports) if r["type"] == "event")
        return next((e["data"] for e in events if e["type"] == type), None)

    return node.until(find, 120, type)


def test_a_checkpoint_goes_to_the_store_and_another_node_continues_from_it(
    node: Node, s3: S3Server, tmp_path: Path
) -> None:
    url = s3.bucket()
    saving = order(node, SAVES, url=url, endpoint=s3.endpoint)
    run_dir = node.launch(saving)
    stored = event(node, "checkpoint_stored")
    assert node.exited(saving)["class"] == "ok"
    assert stored["step"] == 4 and stored["sent_bytes"] == stored["bytes"]
    node.until(lambda: is_reported(run_dir), 60, "reported")
    for path in run_dir.path.parent.rglob("*"):
        assert path.is_dir() or b"hush-4711" not in path.read_bytes(), path
    assert not list(run_dir.path.parent.rglob(".store-*"))
    other = Node(tmp_path / "other", node.url, "n2")
    try:
        resume = {"path": "runs/7/checkpoints/step-00000004", "step": 4, "stored": stored["key"]}
        reading = order(
            other,
            READS,
            url=url,
            endpoint=s3.endpoint,
            attempt=2,
            resume_from=resume,
            run_dir="runs/7/attempt-2",
        )
        other.launch(reading)
        assert other.exited(reading)["class"] == "ok"
        assert other.lines(0) == ["1000"]
        assert event(other, "checkpoint_fetched")["step"] == 4
    finally:
        other.close()


def test_training_goes_on_while_the_store_refuses(
    node: Node, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORRERY_STORE_RETRY_S", "0.2")
    with refusing(403, "InvalidAccessKeyId") as endpoint:
        saving = order(node, SAVES, url="s3://b", endpoint=endpoint)
        node.launch(saving)
        problem = event(node, "store_problem")
        assert problem["reason"] == "credentials" and "ORRERY_STORE_KEY" in problem["hint"]
        assert node.exited(saving, ended=False)["class"] == "ok"
    assert not any(
        r["type"] == "event" and r["data"]["type"] == "checkpoint_stored" for r in node.reports
    )


def test_a_missing_copy_ends_the_attempt_with_a_reason(node: Node, s3: S3Server) -> None:
    resume = {"path": "runs/7/checkpoints/step-00000004", "step": 4, "stored": "runs/7/gone"}
    reading = order(node, READS, url=s3.bucket(), endpoint=s3.endpoint, resume_from=resume)
    node.launch(reading)
    ended = node.exited(reading)
    assert ended["class"] == "infrastructure"
    assert "step 4 cannot be read: The store has no complete copy runs/7/gone" in ended["reason"]
