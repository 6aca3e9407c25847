"""What programs record about themselves, and media: rules, REST, runs table and pages."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from django.test import Client

from orchestrator.api.http import pagination
from orchestrator.common.errors import Refusal
from orchestrator.run_table import selectors as run_table
from orchestrator.tracking import images, media, selectors, services
from orchestrator.tracking.details import checked_program, merged
from orchestrator.tracking.models import MediaBlob, MediaItem
from tests import factories
from workers.recorder import orrery_media

PNG = orrery_media.png([[0, 128, 255]])
PLACE: dict[str, Any] = {"step": 1, "index": 0, "caption": "", "time": 0.0}


def send(client: Client, run: Any, path: str, body: Any, method: str = "post") -> Any:
    url = f"/api/v1/runs/{run.pk}/{path}"
    return getattr(client, method)(url, json.dumps(body), content_type="application/json")


def item(**values: Any) -> dict[str, Any]:
    return {"name": "x", "kind": "text", "step": 1, "data": "hello", **values}


def test_changes_merge_and_null_removes() -> None:
    stored = {"lr": 1, "optimizer": {"name": "adamw", "beta": 0.9}}
    patch = {"lr": None, "optimizer": {"beta": 0.95}, "loss": float("nan"), "name": "a\0b"}
    assert merged(stored, patch, "config") == {
        "optimizer": {"name": "adamw", "beta": 0.95},
        "loss": "NaN",
        "name": "ab",
    }


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"x" * 201: 1}, "201 characters"),
        ({str(i): i for i in range(2001)}, "2,000 values"),
        ({"text": "x" * 300_000}, "256,000"),
        ({"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}}}}}, "levels"),
    ],
)
def test_too_much_is_refused_with_its_field(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message) as refused:
        merged({}, patch, "config")
    assert refused.value.errors[0]["field"].startswith("config")


@pytest.mark.parametrize("program", [{"shell": "x"}, {"command": "x"}, {"dirty": "yes"}])
def test_an_unknown_or_wrong_field_of_the_program_is_refused(program: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="program"):
        checked_program(program)


def test_images_are_checked_by_their_structure() -> None:
    from PIL import Image

    assert images.image_info(PNG) == images.ImageInfo("image/png", 3, 1)
    for kind in ("PNG", "JPEG"):
        buffer = io.BytesIO()
        Image.new("RGB", (20, 10), (200, 30, 30)).save(buffer, kind)
        data = buffer.getvalue()
        info = images.image_info(data)
        assert (info.content_type, info.width, info.height) == (f"image/{kind.lower()}", 20, 10)
        with pytest.raises(images.BadImage, match="too early"):
            images.image_info(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<svg onload=alert(1)>", "neither PNG nor JPEG"),
        (PNG[:40] + bytes([PNG[40] ^ 1]) + PNG[41:], "checksum"),
        (orrery_media.png([[0]]).replace(b"IDAT", b"IDAX"), "checksum"),
        (b"\xff\xd8\xff\xe0\x00\x04ab\xff\xd9", "too early"),
        (b"\xff\xd8junk", "marker"),
    ],
)
def test_bad_images_are_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(images.BadImage, match=message):
        images.image_info(data)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("image", "!", "base64"),
        ("image", base64.b64encode(b"GIF89a").decode(), "send PNG or JPEG"),
        ("histogram", {"counts": [1, 2], "edges": [0, 1]}, "one edge more"),
        ("histogram", {"counts": [1, -1], "edges": [0, 1, 2]}, "negative"),
        ("histogram", {"counts": [1, 1], "edges": [0, 2, 1]}, "ascend"),
        ("histogram", {"counts": [], "edges": []}, "1 to 512"),
        ("histogram", {"counts": [10**400], "edges": [0, 1]}, "finite numbers"),
        ("histogram", {"counts": [True], "edges": [0, 1]}, "finite numbers"),
        ("text", "x" * 70_000, "64,000"),
        ("text", 5, "is a text"),
        ("table", {"columns": ["a"], "rows": [[1, 2]]}, "row 0"),
        ("table", {"columns": [], "rows": []}, "1 to 50"),
        ("table", {"columns": ["a"], "rows": [[1]] * 1001}, "1,000 rows"),
    ],
)
def test_bad_media_are_refused_with_a_sentence(kind: str, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        media.check(name="m", kind=kind, data=data, **PLACE)


def test_configuration_and_summary_by_rest(owner: Any, live_redis: str) -> None:
    run, client = factories.external_run(owner), factories.api(owner)
    first = {"config": {"lr": 0.1, "model": {"layers": 2}}, "program": {"commit": "ab12"}}
    assert send(client, run, "details", first, "patch").status_code == 200
    changes = {"details": [{"seq": 1, "summary": {"best": 2.5}}, {"seq": 2, "config": {"lr": 0.2}}]}
    assert send(client, run, "details", changes).json()["accepted"] == 2
    document = client.get(f"/api/v1/runs/{run.pk}/details").json()
    assert document["config"] == {"lr": 0.2, "model": {"layers": 2}}
    assert document["summary"] == {"best": 2.5} and document["program"]["commit"] == "ab12"
    wrong = send(client, run, "details", {"program": {"shell": "x"}}, "patch")
    assert wrong.status_code == 422 and wrong.json()["errors"][0]["field"] == "program.shell"


def test_the_runs_table_filters_and_sorts_by_recorded_values(owner: Any, live_redis: str) -> None:
    runs = [factories.external_run(owner) for _ in range(3)]
    for run, lr in zip(runs[:2], (0.1, 0.3), strict=True):
        change = {"config": {"lr": lr, "head": {"kind": "mlp"}}, "summary": {"best": lr * 10}}
        services.details_update(run=run, changes=[change])
    services.details_update(run=runs[0], changes=[{"config": {"lr": 0.2}}])

    def ids(query: str) -> set[int]:
        return set(run_table.table_runs(user=owner, query=query).values_list("pk", flat=True))

    assert ids("lr > 0.15") == {runs[0].pk, runs[1].pk}
    assert ids("config.lr > 0.25") == {runs[1].pk}
    assert ids("head.kind = mlp and summary.best < 2") == {runs[0].pk}
    names = run_table.known_names(user=owner)
    sort = run_table.read_sort("-config.lr", names)
    rows = run_table.table_ids(runs=run_table.matching(user=owner), sort=sort)
    assert [pk for pk, _ in rows] == [runs[1].pk, runs[0].pk, runs[2].pk]


def test_media_are_stored_once_and_replaced(owner: Any, live_redis: str) -> None:
    run, client = factories.external_run(owner), factories.api(owner)
    picture = base64.b64encode(PNG).decode()
    batch = [
        item(name="sample", kind="image", data=picture, caption="first"),
        item(name="words"),
        item(name="bad", kind="image", data="AAAA"),
        item(name="weights", kind="histogram", data={"counts": [1, 3], "edges": [-1, 0, 1]}),
        item(name="rows", kind="table", data={"columns": ["a", "b"], "rows": [[1, "<b>"]]}),
    ]
    answer = send(client, run, "media", {"media": batch}).json()
    assert answer["accepted"] == 4 and answer["rejected"][0]["index"] == 2
    answer = send(client, run, "media", {"media": batch}).json()
    assert (answer["accepted"], answer["duplicates"]) == (0, 4)
    other = base64.b64encode(orrery_media.png([[9]])).decode()
    batch[0]["data"] = other
    assert send(client, run, "media", {"media": batch[:1]}).json()["accepted"] == 1
    assert MediaItem.objects.count() == 4 and MediaBlob.objects.count() == 1
    rows = client.get(f"/api/v1/runs/{run.pk}/media?kind=image").json()["items"]
    assert (rows[0]["image"]["width"], rows[0]["data"]) == (1, None)
    file = client.get(rows[0]["image"]["url"])
    assert file.content == orrery_media.png([[9]]) and file["Content-Type"] == "image/png"
    assert "sandbox" in file["Content-Security-Policy"]


def store(run: Any, **values: Any) -> None:
    services.media_store(
        run=run,
        items=[media.check(**{**PLACE, "name": "x", "kind": "text", "data": "hello", **values})],
    )


def test_pages_load_few_items_and_bytes(
    owner: Any, live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = factories.external_run(owner)
    for index in reversed(range(15)):
        store(run, index=index, data=str(index))
    store(run, name="y", step=3, data="y" * 50)
    store(run, name="x", step=3, data="too new")
    shown = selectors.media_at(run=run, names=["x", "y", "z"], step=2)
    assert [item.body for item in shown["x"].items] == [str(index) for index in range(12)]
    assert [(each.total, len(each.items)) for each in shown.values()] == [(15, 12), (0, 0), (0, 0)]
    monkeypatch.setattr(selectors, "_SHOWN_BYTES", 60)
    shown = selectors.media_at(run=run, names=["x", "y"], step=None)
    assert [len(each.items) for each in shown.values()] == [1, 1]
    monkeypatch.setattr(pagination, "MAX_BYTES", 30)
    url, seen = f"/api/v1/runs/{run.pk}/media", list[str]()
    client, cursor = factories.api(owner), ""
    while cursor is not None:
        page = client.get(f"{url}?cursor={cursor}").json()
        assert sum(len(item["data"]) + 2 for item in page["items"]) <= 30 or len(page["items"]) == 1
        seen += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
    assert len(seen) == len(set(seen)) == 17


def test_all_media_count_towards_the_bytes_of_a_run(
    owner: Any, live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, picture = factories.external_run(owner), base64.b64encode(PNG).decode()
    monkeypatch.setattr(services, "MOST_BYTES", len(PNG) + 100)
    store(run, data="x" * 90)
    store(run, data="y" * 98)  # replaces it: 100 bytes with its quotes
    for step in (1, 2):  # the same bytes, once
        store(run, name="sample", kind="image", data=picture, step=step)
    with pytest.raises(ValueError, match="at most"):
        store(run, step=2)
    assert MediaItem.objects.count() == 3


def test_orrery_records_its_own_runs(owner: Any, live_redis: str) -> None:
    answer = send(factories.api(owner), factories.run(owner), "details", {"config": {}}, "patch")
    assert answer.status_code == 409 and "its spec is its configuration" in answer.json()["detail"]


def test_the_run_page_shows_what_was_recorded(owner: Any, live_redis: str) -> None:
    run, client = factories.external_run(owner), factories.client_for(owner)
    bare = client.get(f"/runs/{run.pk}/").content.decode()
    assert "tab=media" not in bare and "tab=code" not in bare
    change = {
        "config": {"<script>": "alert(1)", "lr": 0.1},
        "summary": {"best_loss": 1.25},
        "program": {"command": ["python", "train.py"], "commit": "ab12cd", "dirty": True},
        "diff": "diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\n+b\n",
        "requirements": "torch==2.13",
    }
    services.details_update(run=run, changes=[change])
    for step in (1, 5):
        for name, kind, data in (
            ("<script>alert(2)</script>", "text", f"text {step}"),
            ("weights", "histogram", {"counts": [1, 3], "edges": [-1, 0, 1]}),
        ):
            checked = media.check(name=name, kind=kind, data=data, **{**PLACE, "step": step})
            services.media_store(run=run, items=[checked])
    factories.image_item(run)
    config = client.get(f"/runs/{run.pk}/?tab=config").content.decode()
    assert "best_<wbr>loss" in config and "<script>alert" not in config
    code = client.get(f"/runs/{run.pk}/?tab=code").content.decode()
    assert "python train.py" in code and "ab12cd with changes" in code and "torch==2.13" in code
    assert client.get(f"/runs/{run.pk}/diff/").content.startswith(b"diff --git")
    page = client.get(f"/runs/{run.pk}/?tab=media").content.decode()
    assert "text 5" in page and "text 1" not in page and "<rect" in page and "<img" in page
    assert "<script>alert" not in page
    assert "text 1" in client.get(f"/runs/{run.pk}/?tab=media&step=4").content.decode()
    assert (
        "No media with this name"
        in client.get(f"/runs/{run.pk}/?tab=media&q=nothing").content.decode()
    )


def test_compare_shows_recorded_differences(owner: Any, live_redis: str) -> None:
    runs = [factories.external_run(owner) for _ in range(2)]
    client = factories.client_for(owner)
    url = f"/runs/compare/?runs={runs[0].pk},{runs[1].pk}"
    page = client.get(url).content.decode()
    assert "No differences in configuration" not in page
    assert "2 runs recorded no configuration" in page
    for run, lr in zip(runs, (0.125, 0.25), strict=True):
        change = {"config": {"lr": lr, "same": 1}, "summary": {"score": lr * 4}}
        services.details_update(run=run, changes=[change])
    page = client.get(url).content.decode()
    assert "config.<wbr>lr" in page and "0.125" in page and "same" not in page.split("<tbody>")[-1]
    assert "score" in page and "recorded no configuration" not in page
    services.details_update(run=runs[1], changes=[{"config": {"lr": 0.125}}])
    page = client.get(url).content.decode()
    assert "No differences in configuration" in page
