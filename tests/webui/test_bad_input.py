"""Pages with hostile and extreme input: names, numbers of metrics and tags, clocks, queries."""

from __future__ import annotations

import html
import time
from typing import Any

import pytest

from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from webui.views.gallery import gallery_bad_input
from workers.contracts.wire.points import PointBatch

pytestmark = pytest.mark.django_db
MARKUP = gallery_bad_input.MARKUP
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"


def store(run: Run, values: dict[str, list[float]], times: list[float] | None = None) -> None:
    """Store points of steps 1, 2, ... of rank 0; later calls continue them."""
    count = len(next(iter(values.values())))
    first = store.seq.get(run.pk, 0) + 1  # type: ignore[attr-defined]
    store.seq[run.pk] = first + count - 1  # type: ignore[attr-defined]
    batch = PointBatch(
        run=str(run.pk),
        attempt=1,
        rank=0,
        seq=list(range(first, first + count)),
        step=list(range(first, first + count)),
        tokens=[0] * count,
        time=times or [time.time()] * count,
        values=values,
    )
    telemetry.points_store(run=run, attempt=1, batches=[batch])


store.seq = {}  # type: ignore[attr-defined]


@pytest.fixture
def run(people: factories.People) -> Run:
    store.seq.clear()  # type: ignore[attr-defined]
    return factories.external_run(people.owner)


@pytest.fixture
def client(people: factories.People) -> Any:
    return factories.client_for(people.owner)


def test_a_metric_named_like_markup_is_text(run: Run, client: Any) -> None:
    store(run, {MARKUP: [1.0, 2.0], "</script><b>": [1.0, 2.0]})
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert ESCAPED in page and MARKUP not in page and "</script><b>" not in page
    for address in (f"/compare/?runs={run.pk}", f"/runs/?columns={MARKUP}"):
        assert MARKUP not in client.get(address).content.decode(), address
    series = client.get(f"/api/v1/runs/{run.pk}/series", {"name": MARKUP}).json()
    assert series["y"] == [1.0, 2.0]


def test_five_thousand_metrics_are_searched(run: Run, client: Any) -> None:
    for part in range(5):
        names = [f"layer.{number}/norm" for number in range(part * 1000, part * 1000 + 1000)]
        store(run, {name: [1.0] for name in names})
    answer = client.get(f"/runs/{run.pk}/")
    page = " ".join(answer.content.decode().split())
    assert "18 of 5,000 custom metrics have a chart above" in page
    assert page.count("data-panel=") < 30 and len(page) < 400_000
    matches = " ".join(client.get(f"/runs/{run.pk}/?metrics=LAYER.123").content.decode().split())
    assert "11 of the 11 metrics that contain “LAYER.123” have a chart above" in matches
    assert "layer.1234/norm" in matches and "layer.1240/norm" not in matches.split("run-source")[0]
    none = " ".join(client.get(f"/runs/{run.pk}/?metrics=<b>").content.decode().split())
    assert "None of the 5,000 custom metrics contains “&lt;b&gt;”" in none


def test_a_run_without_a_step_has_a_message(run: Run, client: Any) -> None:
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert "No data yet: points appear here when the run logs them." in page
    end = factories.api(run.owner).post(
        f"/api/v1/runs/{run.pk}/finish", {"status": "finished"}, content_type="application/json"
    )
    assert end.status_code == 200
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert "The run ended before it logged a number, so there are no charts." in page


def test_values_that_are_not_numbers_are_sent_as_words(run: Run, client: Any) -> None:
    store(run, {"loss": [float("nan")] * 4})
    page = client.get(f"/runs/{run.pk}/")
    assert page.status_code == 200
    series = client.get(f"/api/v1/runs/{run.pk}/series?name=loss").json()
    assert series["y"] == ["NaN"] * 4 and series["x"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("clock", "shown"),
    [
        ([0, 60, 120, 30, 3600], [0, 60, 120, 120, 3600]),  # one point too early
        ([0, 9000, 120, 180, 240], [0, 120, 120, 180, 240]),  # one point too late
    ],
)
def test_a_clock_that_goes_backwards_keeps_the_order_of_steps(
    run: Run, client: Any, clock: list[float], shown: list[float]
) -> None:
    start = 1.7e9
    store(run, {"loss": [4.0, 3.0, 2.0, 1.0, 0.5]}, [start + each for each in clock])
    assert client.get(f"/runs/{run.pk}/?x=time").status_code == 200
    by_time = client.get(f"/api/v1/runs/{run.pk}/series?name=loss&x=time").json()
    assert by_time["y"] == [4.0, 3.0, 2.0, 1.0, 0.5]
    assert [each - start for each in by_time["x"]] == shown


def test_a_thousand_tags_are_folded(people: factories.People, run: Run, client: Any) -> None:
    tags = [f"tag-{number}" for number in range(1000)]
    runs.run_update(run=run, by=people.owner, tags=tags)
    page = " ".join(client.get(f"/runs/{run.pk}/").content.decode().split())
    assert "all 1,000 tags" in page and 'class="more-tags"' in page
    rows = " ".join(client.get("/runs/").content.decode().split())
    assert "1,000 tags" in rows and "tag-700<" not in rows


def test_a_name_of_200_characters_is_refused_at_its_field(client: Any) -> None:
    body = {"name": "n" * 200, "spec": {"kind": "external"}}
    answer = client.post("/api/v1/runs", body, content_type="application/json")
    assert answer.status_code == 422
    assert [each["field"] for each in answer.json()["errors"]] == ["name"]


def test_a_filter_that_cannot_be_read_shows_where(client: Any) -> None:
    answer = client.get("/runs/", {"query": gallery_bad_input.QUERY})
    page = answer.content.decode()
    assert answer.status_code == 422
    message = html.unescape(page.split("<pre>")[1].split("</pre>")[0])
    *_, text, caret = message.splitlines()
    assert text == gallery_bad_input.QUERY and text[caret.index("^")] == ","


def test_the_gallery_has_every_state(people: factories.People) -> None:
    page = factories.client_for(people.stranger).get("/gallery/").content.decode()
    for words in (
        ESCAPED,
        "Only values that are not numbers",
        "A gap of 10 hours",
        "A clock that goes backwards",
        "A run without a step",
        "all 1,000 tags",
        "printable characters",
        "18 of 5,000 custom metrics",
        "^</pre>",
    ):
        assert words in " ".join(page.split()) or words in page, words
    assert MARKUP not in page
