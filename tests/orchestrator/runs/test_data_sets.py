"""Data sets: registered, fingerprinted, copied, used by runs at a fixed version, and deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.background_jobs import store_garbage
from orchestrator.common.errors import Refusal
from orchestrator.config.env.variables import Env
from orchestrator.runs import bundles
from orchestrator.runs import selectors as run_selectors
from orchestrator.runs import services as runs
from orchestrator.runs.datasets import registration, selectors, services
from orchestrator.runs.datasets.resolve import inputs_of
from orchestrator.runs.models import DataSetUse, DataSetVersion
from orchestrator.runs.store import access, readers
from orchestrator.scheduling import dispatch
from tests import factories
from tests.orchestrator.scheduling.conftest import FakeNode
from tests.s3_server import REGION, S3Server
from workers.contracts.wire.maintenance.store import INDEX

pytestmark = pytest.mark.django_db
TEXT = "to be or not to be, that is the question\n" * 100


@pytest.fixture
def root(settings: Any, tmp_path: Path) -> Path:
    """The data root, with a file; the store is a folder."""
    (tmp_path / "store").mkdir()
    settings.ENV = Env(home=tmp_path / "home", store_url=str(tmp_path / "store"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "hamlet.txt").write_text(TEXT)
    settings.DATA_ROOTS = [folder]
    return folder


def registered(by: User, name: str = "hamlet", path: str = "hamlet.txt") -> DataSetVersion:
    """A version that waits for the job."""
    return services.data_set_register(by=by, name=name, path=path)


def read() -> dict[str, int]:
    return registration.register_waiting(dry_run=False, renew=lambda: None)


def problem(owner: User, dataset: str, **data: Any) -> tuple[str, str]:
    """The first problem of a run with this data set: message and hint."""
    with pytest.raises(Refusal) as caught:
        factories.run(owner, data={"dataset": dataset, **data})
    (first, *_) = caught.value.errors
    assert first["field"] == "data.dataset"
    return first["message"], first["hint"]


def test_a_data_set_from_its_registration_to_the_end(
    owner: User, operator: User, root: Path, settings: Any, live_redis: str
) -> None:
    api = factories.api(owner)
    body = {"name": "hamlet", "path": "hamlet.txt", "notes": "act 3"}
    made = api.post("/api/v1/datasets", body, content_type="application/json")
    assert made.status_code == 201 and made["Location"] == "/api/v1/datasets/hamlet/1"
    assert made.json()["state"] == "waiting" and made.json()["format"] == "text"
    assert "still being read" in problem(owner, "hamlet")[0]
    assert registration.register_waiting(dry_run=True, renew=lambda: None)["data_sets"] == 1
    assert read() == {"data_sets": 1, "bytes": len(TEXT)}
    assert read() == {"data_sets": 0, "bytes": 0}
    details = api.get("/api/v1/datasets/hamlet/1").json()
    assert details["state"] == "stored" and details["files"]["hamlet.txt"]["bytes"] == len(TEXT)
    copy = Path(settings.ENV.store_url) / details["key"]
    assert sorted(path.name for path in copy.iterdir()) == ["hamlet.txt", INDEX]

    run = factories.run(owner, data={"dataset": "hamlet"})
    assert run.spec["data"] == {
        "dataset": "hamlet@1",
        "path": str(root / "hamlet.txt"),
        "fingerprint": details["fingerprint"],
        "format": "text",
    }
    node = factories.node("n1")
    attempt = factories.running(run, node)
    order = dispatch.launch_order(attempt, attempt.placement[0], gpu=False)
    (item,) = order.inputs
    assert (item.name, item.fields, item.key) == ("hamlet@1", ["data.path"], details["key"])
    details = api.get("/api/v1/datasets/hamlet/1").json()
    assert [each["id"] for each in details["used_by"]] == [str(run.pk)]
    refused = api.delete("/api/v1/datasets/hamlet/1")
    assert refused.status_code == 409 and f"not ended: {run.pk}" in refused.json()["detail"]

    FakeNode(node).exited(attempt, "user_error")
    assert api.delete("/api/v1/datasets/hamlet/1").status_code == 204
    assert store_garbage.collect(dry_run=True, renew=lambda: None)["data_sets"] == 1
    listed = factories.api(operator).get("/api/v1/storage/copies/candidates").json()
    assert [(item["kind"], item["data_set"], item["reason"]) for item in listed["items"]] == [
        ("data", "hamlet@1", "deleted")
    ]
    assert listed["bytes"] == len(TEXT)
    page = factories.client_for(operator).get("/account/storage/").content.decode()
    assert 'href="/data/sets/hamlet/1/">hamlet@1</a>' in page and "the data set was deleted" in page
    assert copy.exists()
    collected = store_garbage.collect(dry_run=False, renew=lambda: None)
    assert collected == {"copies": 0, "bytes": len(TEXT), "data_sets": 1}
    assert not copy.exists() and (root / "hamlet.txt").exists()
    assert "was deleted" in problem(owner, "hamlet@1")[0]
    run.refresh_from_db()
    with pytest.raises(Refusal, match=r"hamlet@1 of this run was deleted"):
        runs.run_retry(run=run, by=owner)


def test_a_new_version_changes_no_earlier_run(owner: User, root: Path) -> None:
    registered(owner)
    read()
    first = factories.run(owner, data={"dataset": "hamlet"})
    (root / "hamlet.txt").write_text(TEXT + "more")
    registered(owner)
    assert "still being read" in problem(owner, "hamlet")[0]
    assert problem(owner, "hamlet@2")[1] == "Wait for it, or use hamlet@1."
    read()
    second = factories.run(owner, data={"dataset": "hamlet"})
    assert [run.spec["data"]["dataset"] for run in (first, second)] == ["hamlet@1", "hamlet@2"]
    clone = runs.run_clone(run=first, by=owner)
    assert clone.spec["data"] == first.spec["data"]
    (row,) = selectors.newest_of_each(user=owner)
    assert (row.label, row.versions, row.run_count) == ("hamlet@2", 2, 3)


def test_validation_data_and_sources(owner: User, root: Path) -> None:
    (root / "other").mkdir()
    (root / "other" / "b.txt").write_text(TEXT)
    registered(owner)
    registered(owner, name="other", path="other")
    read()
    data = {"sources": [{"dataset": "hamlet"}, {"dataset": "other@1", "weight": 2.0}]}
    evaluation = {"every_steps": 5, "batches": 1, "data": {"dataset": "other"}}
    train = {"steps": 20, "seq_len": 64, "eval": evaluation}
    run = factories.run(owner, data=data, train=train)
    uses = DataSetUse.objects.filter(run=run).order_by("use", "pk")
    assert [(str(use.data_set), use.use) for use in uses] == [
        ("hamlet@1", "data"),
        ("other@1", "data"),
        ("other@1", "validation_data"),
    ]
    fields = {item.name: item.fields for item in inputs_of(run)}
    assert fields == {
        "hamlet@1": ["data.sources.0.path"],
        "other@1": ["data.sources.1.path", "train.eval.data.path"],
    }


def test_inputs_of_other_kinds_name_a_data_set_in_place_of_a_path(owner: User, root: Path) -> None:
    """Generate, evaluate, produce and script runs: at a fixed version, known to the nodes."""
    line = json.dumps({"id": 1, "prompt": "To be", "answer": "or not to be"})
    (root / "prompts.jsonl").write_text(line + "\n")
    (root / "main.py").write_text("print('read')")
    registered(owner)
    registered(owner, name="prompts", path="prompts.jsonl")
    read()
    server = {"url": "http://127.0.0.1:8000/v1", "model": "tiny"}
    filters = [{"kind": "ngram", "against": "dataset:hamlet"}]
    specs = [
        {"kind": "generate", "generate": {"input": "dataset:prompts", "output": "out.jsonl"}},
        {
            "kind": "evaluate",
            "evaluate": {"input": "dataset:prompts@1", "references": "dataset:prompts"},
        },
        {
            "kind": "produce",
            "produce": {
                "tasks": ["math"],
                "count": 5,
                "server": server,
                "method": "answer",
                "seeds": "dataset:prompts",
                "filters": filters,
            },
        },
        {
            "kind": "script",
            "script": {
                "command": ["main.py", "--text=dataset:hamlet", "dataset:prompts"],
                "workdir": str(root),
                "env": {"TEXT": "dataset:hamlet@1", "OTHER": "text"},
            },
        },
    ]
    runs_ = [runs.run_submit(owner=owner, name="x", spec=each) for each in specs]
    generate, evaluate, produce, script = runs_
    assert generate.spec["generate"]["input"] == "dataset:prompts@1"
    assert script.spec["script"]["command"][1:] == ["--text=dataset:hamlet@1", "dataset:prompts@1"]
    fields = [{item.name: item.fields for item in inputs_of(each)} for each in runs_]
    assert fields == [
        {"prompts@1": ["generate.input"]},
        {"prompts@1": ["evaluate.input", "evaluate.references"]},
        {"prompts@1": ["produce.seeds"], "hamlet@1": ["produce.filters.0.against"]},
        {
            "hamlet@1": ["script.command.1", "script.env.TEXT"],
            "prompts@1": ["script.command.2"],
        },
    ]
    uses = DataSetUse.objects.order_by("run", "use").values_list("run", "use", "data_set__name")
    assert list(uses) == [
        (generate.pk, "prompts", "prompts"),
        (evaluate.pk, "prompts", "prompts"),
        (evaluate.pk, "references", "prompts"),
        (produce.pk, "excluded", "hamlet"),
        (produce.pk, "seeds", "prompts"),
        *sorted((script.pk, "data", name) for name in ("hamlet", "prompts")),
    ]
    graph = factories.api(owner).get(f"/api/v1/runs/{produce.pk}/lineage").json()
    assert {(edge["source"], edge["use"]) for edge in graph["edges"]} == {
        ("data:prompts@1", "seeds"),
        ("data:hamlet@1", "excluded"),
    }
    bundle = json.loads(json.dumps(bundles.bundle_of(generate)))
    assert list(bundle["data_sets"]) == ["prompts@1"]
    again = bundles.bundle_submit(owner=owner, bundle=bundle)
    assert again.spec["generate"]["input"] == "dataset:prompts@1"
    (root / "prompts.jsonl").unlink()  # the store has it
    runs.run_submit(owner=owner, name="x", spec=specs[0])


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ("dataset:hamlt", "there is no data set hamlt", "Use hamlet."),
        ("dataset:hamlet@x", "dataset:hamlet@x does not name a data set", "dataset:NAME"),
        ("dataset:", "dataset: does not name a data set", "dataset:NAME"),
        ("dataset:hamlet", "is not JSON", "one JSON object per line"),
    ],
)
def test_wrong_data_sets_of_inputs(
    owner: User, root: Path, given: str, message: str, hint: str
) -> None:
    registered(owner)
    read()
    spec = {"kind": "generate", "generate": {"input": given, "output": "out.jsonl"}}
    [problem] = runs.spec_problem_list(spec, by=owner)
    assert problem["field"] == "generate.input" and message in problem["message"]
    assert hint in problem["hint"]


def test_a_data_set_in_a_runs_folder_keeps_the_folder(
    owner: User, root: Path, settings: Any, live_redis: str
) -> None:
    writer = factories.external_run(owner)
    folder = settings.ENV.media_runs / str(writer.pk)
    folder.mkdir(parents=True)
    (folder / "out.jsonl").write_text('{"id": 1, "prompt": "To be"}\n')
    registered(owner, name="out", path=str(folder / "out.jsonl"))
    assert readers.references()[writer.pk] == {"out.jsonl"}
    read()  # now the store has it
    assert writer.pk not in readers.references()
    spec = {"kind": "generate", "generate": {"input": "dataset:out", "output": "a.jsonl"}}
    run = runs.run_submit(owner=owner, name="x", spec=spec)
    assert run_selectors.runs_read_by(run) == [str(writer.pk)]


def test_a_data_set_on_s3(owner: User, root: Path, settings: Any) -> None:
    """Registered, copied, its copy listed and deleted again."""
    server = S3Server()
    try:
        settings.ENV = Env(
            home=settings.ENV.home,
            store_url=server.bucket(),
            store_endpoint=server.endpoint,
            store_region=REGION,
            store_key="k",
            store_secret="s",
        )
        registered(owner)
        assert read() == {"data_sets": 1, "bytes": len(TEXT)}
        row = DataSetVersion.objects.get()
        store = server.open(settings.ENV.store_url)
        place = f"{settings.ENV.store_url.removeprefix('s3://')}/{row.key}"
        assert row.state == "stored"
        assert {path.rpartition("/")[2] for path in store.fs.ls(place)} == {"hamlet.txt", INDEX}
        index = registration.find_copy(row.fingerprint)
        assert index is not None and index.fingerprint == row.fingerprint
        services.data_set_delete(row=row, by=owner)
        collected = store_garbage.collect(dry_run=False, renew=lambda: None)
        assert collected == {"copies": 0, "bytes": len(TEXT), "data_sets": 1}
        store.fs.invalidate_cache()
        assert not store.fs.exists(f"{place}/hamlet.txt")
    finally:
        server.close()


def test_names_that_do_not_exist_are_refused_with_a_suggestion(owner: User, root: Path) -> None:
    assert problem(owner, "hamlet") == ("there is no data set hamlet", "Register it first.")
    registered(owner)
    read()
    assert problem(owner, "hamlt") == ("there is no data set hamlt", "Use hamlet.")
    assert problem(owner, "hamlet@7") == ("data set hamlet has no version 7", "Use hamlet@1.")
    message, hint = problem(owner, "hamlet@1", fingerprint="0" * 64)
    assert "another fingerprint" in message and hint == "Omit the fingerprint."


def test_a_changed_file_needs_its_copy_in_the_store(owner: User, root: Path, settings: Any) -> None:
    settings.ENV = Env(home=settings.ENV.home)
    registered(owner)
    read()
    row = DataSetVersion.objects.get()
    assert row.state == "fingerprinted" and row.key == ""
    changed = TEXT.replace("not", "mot")  # of the same size
    (root / "hamlet.txt").write_text(changed)
    message, hint = problem(owner, "hamlet")
    assert "has other content" in message and hint == "Register it again."
    (root / "hamlet.txt").write_text(TEXT)
    factories.run(owner, data={"dataset": "hamlet"})
    settings.ENV = Env(home=settings.ENV.home, store_url=str(root.parent / "store"))
    assert read()["data_sets"] == 1  # a store was configured later
    (root / "hamlet.txt").unlink()
    assert factories.run(owner, data={"dataset": "hamlet"}).spec["data"]["dataset"] == "hamlet@1"


def test_a_store_that_refuses_loses_nothing(owner: User, root: Path, settings: Any) -> None:
    settings.ENV = Env(home=settings.ENV.home, store_url=str(root.parent / "not-mounted"))
    registered(owner)
    read()
    row = DataSetVersion.objects.get()
    assert row.state == "fingerprinted" and "does not exist" in row.problem and row.hint
    assert row.retry_at is not None and read()["data_sets"] == 0  # later
    factories.run(owner, data={"dataset": "hamlet"})
    (root.parent / "not-mounted").mkdir()
    DataSetVersion.objects.update(retry_at=None)
    read()
    row.refresh_from_db()
    assert row.state == "stored" and row.problem == ""


def test_a_file_that_vanishes_before_it_is_read(owner: User, root: Path) -> None:
    registered(owner)
    (root / "hamlet.txt").unlink()
    read()
    row = DataSetVersion.objects.get()
    assert row.state == "failed" and row.problem
    assert "cannot be used" in problem(owner, "hamlet")[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a b"}, "1 to 80 letters"),
        ({"name": ""}, "1 to 80 letters"),
        ({"path": "nothing.txt"}, "does not exist"),
        ({"path": "/etc/passwd"}, "not under the allowed folders"),
        ({"path": None}, "a path or the output of a run"),
        ({"format": "jsonl"}, "is not JSON"),
        ({"format": "parquet"}, "is not a format"),
        ({"notes": "n" * 2001}, "at most 2000"),
    ],
)
def test_wrong_registrations(owner: User, root: Path, fields: dict[str, Any], message: str) -> None:
    given = {"name": "hamlet", "path": "hamlet.txt", **fields}
    with pytest.raises(Refusal, match=message):
        services.data_set_register(by=owner, **given)
    assert not DataSetVersion.objects.exists()


def test_the_output_of_a_run_belongs_to_who_may_see_the_run(
    owner: User, teammate: User, settings: Any, root: Path, live_redis: str
) -> None:
    other = factories.user("rival")
    run = factories.external_run(owner)
    run.kind = "produce"
    run.spec = {"kind": "produce", "produce": {"output": "out.jsonl"}}
    run.save()
    folder = settings.ENV.media_runs / str(run.pk)
    folder.mkdir(parents=True)
    line = {"prompt": "2+2?", "completion": "4"}
    (folder / "out.jsonl").write_text(json.dumps(line) + "\n")
    row = services.data_set_register(by=owner, name="sums", run=run.pk)
    assert (row.format, row.shared, row.run) == ("prompt_completion", False, run)
    read()
    assert selectors.source_of(row=row, user=teammate) == run
    assert "no data set sums" in problem(other, "sums")[0]
    with pytest.raises(Refusal, match="outside your teams"):
        services.data_set_register(by=other, name="sums", path="hamlet.txt")
    with pytest.raises(Refusal, match="in no run that you may see"):
        services.data_set_register(by=other, name="mine", path=str(folder / "out.jsonl"))
    trained = factories.run(
        teammate,
        data={"dataset": "sums"},
        train={"objective": "sft", "steps": 2, "seq_len": 64, "sft": {}},
    )
    assert trained.spec["data"]["format"] == "prompt_completion"


def test_equal_content_has_one_copy(owner: User, root: Path, settings: Any) -> None:
    for name in ("one", "two"):
        registered(owner, name=name)
    read()
    one, two = DataSetVersion.objects.order_by("pk")
    assert one.key == two.key
    services.data_set_delete(row=one, by=owner)
    store_garbage.collect(dry_run=False, renew=lambda: None)
    assert access.open_store()[0].exists(f"{settings.ENV.store_url}/{two.key}/{INDEX}")
    one.refresh_from_db()
    assert one.removed is not None


def test_a_bundle_finds_its_data_by_fingerprint_or_in_the_store(
    owner: User, root: Path, settings: Any, tmp_path: Path
) -> None:
    registered(owner)
    read()
    run = factories.run(owner, data={"dataset": "hamlet"})
    bundle = bundles.bundle_of(run)
    (facts,) = bundle["data_sets"].values()
    assert facts["bytes"] == len(TEXT) and bundle["files"] == {}
    bundle = json.loads(json.dumps(bundle))
    DataSetUse.objects.all().delete()  # another installation with the same store
    DataSetVersion.objects.all().delete()
    settings.DATA_ROOTS = [tmp_path / "fresh"]
    repeated = bundles.bundle_submit(owner=owner, bundle=bundle)
    row = DataSetVersion.objects.get()
    assert (row.label, row.state, row.fingerprint) == ("hamlet@1", "stored", facts["fingerprint"])
    (item,) = inputs_of(repeated)
    assert item.key == row.key and not Path(item.path).exists()
    bundles.bundle_submit(owner=owner, bundle=bundle)
    assert DataSetVersion.objects.count() == 1
    DataSetUse.objects.all().delete()
    DataSetVersion.objects.all().delete()
    settings.ENV = Env(home=settings.ENV.home)
    with pytest.raises(Refusal, match="no data set here has the files of hamlet@1"):
        bundles.bundle_submit(owner=owner, bundle=bundle)


def test_lineage_and_pages_show_what_wrote_and_what_uses_a_data_set(
    owner: User, root: Path, live_redis: str
) -> None:
    browser = factories.client_for(owner)
    assert "No data sets yet" in browser.get("/data/sets/").content.decode()
    writer = factories.external_run(owner, name="writer")
    form = {"name": "hamlet", "path": "hamlet.txt", "notes": "act 3"}
    refused = browser.post("/data/sets/", {**form, "path": "missing.txt"})
    assert refused.status_code == 422 and b"does not exist" in refused.content
    made = browser.post("/data/sets/", form)
    assert made.status_code == 302 and made["Location"] == "/data/sets/hamlet/1/"
    DataSetVersion.objects.update(run=writer)
    read()
    run = factories.run(owner, name="reader", data={"dataset": "hamlet"})
    text = browser.get("/data/sets/").content.decode()
    assert "hamlet@1" in text and "in the store" in text and "1 run" in text
    text = browser.get("/data/sets/hamlet/").content.decode()
    assert "act 3" in text and "wrote it" in text and f"{run.pk} reader" in text
    for each in (run, writer):
        graph = factories.api(owner).get(f"/api/v1/runs/{each.pk}/lineage").json()
        edges = {(edge["source"], edge["target"], edge["use"]) for edge in graph["edges"]}
        assert edges == {
            (f"run:{writer.pk}", "data:hamlet@1", "produced"),
            ("data:hamlet@1", f"run:{run.pk}", "data"),
        }
    tab = browser.get(f"/runs/{run.pk}/?tab=lineage").content.decode()
    assert 'href="/data/sets/hamlet/1/"' in tab
    deleted = browser.post("/data/sets/hamlet/1/delete/")
    assert deleted.status_code == 409 and b"have not ended" in deleted.content
