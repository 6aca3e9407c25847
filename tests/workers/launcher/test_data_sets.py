"""A node has the data sets of its runs: its own files if they are equal, else the store's copy."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest

from tests.flows.embedded import train_spec
from tests.s3_server import REGION, S3Server
from tests.workers.launcher.harness import Node, script
from workers.contracts.wire import encrypted_text
from workers.contracts.wire.maintenance.data_sets import DataInput, data_key
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher.exits.classification import Verdict
from workers.launcher.inputs import data_cache
from workers.launcher.inputs.data_sets import DataSets
from workers.launcher.rundir import RunDir, read_json
from workers.launcher.shipping.redis_link import Link
from workers.launcher.store_link import StoreLink
from workers.store import copies, register
from workers.store.access import open_store


class FakeLink:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.node = self
        self.secret = b""

    def __str__(self) -> str:
        return "n1"

    def report(self, kind: str, data: dict[str, Any]) -> None:
        assert kind == "event"
        self.events.append(data)


class Place:
    """A node's home, a store, and a data set of one file or a folder."""

    def __init__(self, top: Path, *, folder: bool = False) -> None:
        self.home, self.store, self.link = top / "home", top / "store", FakeLink()
        self.store.mkdir(parents=True)
        self.source = top / "data" / ("texts" if folder else "a.txt")
        self.source.parent.mkdir(parents=True)
        if folder:
            self.source.mkdir()
        file = self.source / "a.txt" if folder else self.source
        file.write_text("to be or not to be\n" * 50)
        index = register.describe(self.source)
        key = data_key(index.fingerprint)
        copies.put(open_store(url=str(self.store)), self.source, key, index)
        self.item = DataInput(
            name="hamlet@1",
            fields=["data.path"],
            path=str(self.source),
            folder=folder,
            fingerprint=index.fingerprint,
            bytes=index.bytes,
            files=index.files,
            key=key,
        )

    def provide(self, run: str = "7", **changes: Any) -> tuple[Verdict | None, str]:
        """The verdict, and the path that the engine reads."""
        item = self.item.model_copy(update=changes)
        order = LaunchOrder.from_dict(
            {
                "run": run,
                "kind": "train",
                "attempt": 1,
                "attempt_id": "1",
                "fence": "f",
                "spec": {"kind": "train", "data": {"path": item.path}},
                "local_devices": [0],
                "local_ranks": 1,
                "world_size": 1,
                "run_dir": f"runs/{run}/attempt-1",
                "store": {"url": str(self.store)},
                "inputs": [item.to_dict()],
            }
        )
        run_dir = RunDir(self.home / order.run_dir)
        run_dir.path.mkdir(parents=True, exist_ok=True)
        link = cast(Link, self.link)
        data_sets = DataSets(order, run_dir, link, None)
        verdict = data_sets.provide(StoreLink(run_dir, order, link), keep_waiting=lambda: True)
        return verdict, data_sets.with_local_paths(order.spec)["data"]["path"]

    @property
    def copy(self) -> Path:
        return self.home / "datasets" / self.item.fingerprint


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_equal_files_of_the_node_are_used_where_they_are(place: Place) -> None:
    assert place.provide() == (None, str(place.source))
    assert not place.copy.exists() and not place.link.events


def test_a_missing_file_is_read_from_the_store_once(place: Place) -> None:
    place.source.unlink()
    assert place.provide() == (None, str(place.copy / "a.txt"))
    assert place.provide(run="8") == (None, str(place.copy / "a.txt"))
    (event,) = place.link.events  # the second run found it
    assert event["type"] == "data_fetched"
    assert event["data"]["data_set"] == "hamlet@1" and event["data"]["bytes"] == 950
    assert event["data"]["seconds"] > 0


def test_a_file_with_the_same_size_and_other_content_is_not_used(place: Place) -> None:
    assert place.provide()[1] == str(place.source)
    place.source.write_text("to be or not to bee" * 50)
    assert place.provide()[1] == str(place.copy / "a.txt")
    place.copy.joinpath("a.txt").write_text("to be or not to bee" * 50)  # damaged later
    assert place.provide()[1] == str(place.copy / "a.txt")
    assert len(place.link.events) == 2


def test_a_folder_with_a_further_file_is_not_used(tmp_path: Path) -> None:
    place = Place(tmp_path, folder=True)
    assert place.provide() == (None, str(place.source))
    (place.source / "b.txt").write_text("another")
    assert place.provide() == (None, str(place.copy))
    assert [path.name for path in place.copy.iterdir()] == ["a.txt"]


def test_a_damaged_copy_is_infrastructure(place: Place) -> None:
    place.source.unlink()
    assert place.item.key is not None
    (place.store / place.item.key / "a.txt").write_text("other")
    verdict, _ = place.provide()
    assert verdict is not None and verdict.exit_class == "infrastructure"
    assert "does not have the checksum" in verdict.reason and "Register the data" in verdict.reason


def test_a_missing_file_without_a_copy_is_a_user_error(place: Place) -> None:
    place.source.unlink()
    verdict, _ = place.provide(key=None)
    assert verdict is not None and verdict.exit_class == "user_error"
    assert "hamlet@1 is not on node" in verdict.reason and "ORRERY_STORE_URL" in verdict.reason


def test_a_full_disk_ends_the_attempt_before_the_copy_is_read(place: Place) -> None:
    place.source.unlink()
    verdict, _ = place.provide(bytes=1 << 60)
    assert verdict is not None and verdict.exit_class == "infrastructure"
    assert "bytes free" in verdict.reason


def test_copies_without_use_are_deleted_and_used_ones_stay(tmp_path: Path) -> None:
    for name in ("old", "used", "new"):
        (tmp_path / name).mkdir()
        os.close(data_cache.use(tmp_path / name))
    month_ago = time.time() - 31 * 86400
    held = data_cache.use(tmp_path / "used")
    for name in ("old", "used"):
        os.utime(tmp_path / f"{name}.use", (month_ago, month_ago))
    assert data_cache.delete_unused(tmp_path, 0) == []
    assert data_cache.delete_unused(tmp_path, 30) == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["new", "used"]
    os.close(held)


READS = """
    import json
    print(open(sys.argv[1].partition("=")[2]).read(5), open(os.environ["TEXT"]).read(5))
    print(json.load(open(os.environ["ORRERY_RUN_DIR"] + "/spec.json"))["data"]["path"])
"""


@pytest.mark.flow
def test_a_script_gets_the_local_path_in_its_spec_words_and_variables(
    node: Node, tmp_path: Path
) -> None:
    place = Place(tmp_path / "more")
    place.source.unlink()
    fields = ["data.path", "script.command.1", "script.env.TEXT"]
    item = place.item.model_copy(update={"fields": fields})
    order = node.order(script(READS), ranks=1, inputs=[item.to_dict()])
    order["spec"]["data"] = {"dataset": "hamlet@1", "path": place.item.path}
    order["spec"]["script"]["command"].append("--data=dataset:hamlet@1")
    order["spec"]["script"]["env"] = {"TEXT": "dataset:hamlet@1"}
    order["store"] = {"url": str(place.store)}
    node.launch(order)
    assert node.exited(order)["class"] == "ok"
    local = node.home / "datasets" / item.fingerprint / "a.txt"
    assert node.lines(0) == ["to be to be", str(local)]
    fetched = [r["data"] for r in node.reports if r["data"].get("type") == "data_fetched"]
    assert fetched[0]["data"]["data_set"] == "hamlet@1"


@pytest.mark.flow
@pytest.mark.ranks
def test_training_from_a_data_set_that_only_s3_has(node: Node, tmp_path: Path) -> None:
    """A real run: registered files are copied to S3, read on the node and trained on."""
    server = S3Server()
    try:
        place = Place(tmp_path / "more")
        url = server.bucket()
        index = register.describe(place.source)
        assert place.item.key is not None
        copies.put(server.open(url), place.source, place.item.key, index)
        place.source.unlink()
        spec = train_spec(steps=3, ranks=1, every=3)
        data = {"dataset": "hamlet@1", "path": place.item.path, "format": "text"}
        order = {
            **node.order([], ranks=1, inputs=[place.item.to_dict()]),
            "kind": "train",
            "spec": {**spec, "data": data},
            "plan": spec["plan"],
        }
        sealed = encrypted_text.encrypt(
            node.secret,
            json.dumps({"key": "k", "secret": "s"}),
            purpose=LaunchOrder.from_dict(order).store_purpose,
        )
        order["store"] = {
            "url": url,
            "endpoint": server.endpoint,
            "region": REGION,
            "credentials": sealed,
        }
        run_dir = node.launch(order)
        assert node.exited(order)["class"] == "ok", node.lines(0)
        local = node.home / "datasets" / place.item.fingerprint / "a.txt"
        assert read_json(run_dir.spec)["data"]["path"] == str(local)
        assert local.read_text().startswith("to be")
        node.until(lambda: node.seqs("points", 0)[-1:] == [3] or None, 60, "points of 3 steps")
    finally:
        server.close()
