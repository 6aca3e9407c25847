"""`orrery import`: files of TensorBoard, W&B and MLflow become runs, once."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from orrery_cli.imports import mlflow, tensorboard, wandb
from orrery_cli.imports.send import read_runs
from orrery_cli.imports.source import SourceError, SourceRun

from orchestrator.runs.models import Run
from orchestrator.telemetry import selectors as telemetry
from orchestrator.tracking.models import MediaItem, RunDetails
from tests.cli.conftest import Orrery
from workers.recorder import orrery_media

FILES = Path(__file__).parent / "tracker_files"
WANDB, MLRUNS = FILES / "wandb-offline-run", FILES / "mlruns"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A folder that TensorBoard's own writer has filled."""
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = tmp_path / "logs" / "first"
    writer = EventFileWriter(str(folder))

    def add(step: int, value: summary_pb2.Summary.Value) -> None:
        summary = summary_pb2.Summary(value=[value])
        writer.add_event(event_pb2.Event(wall_time=1.7e9 + step, step=step, summary=summary))

    for step in range(5):
        add(step, summary_pb2.Summary.Value(tag="loss", simple_value=2.0 / (step + 1)))
    add(5, summary_pb2.Summary.Value(tag="<script>", simple_value=float("nan")))
    image = summary_pb2.Summary.Image(
        height=1, width=2, colorspace=1, encoded_image_string=orrery_media.png([[0, 255]])
    )
    add(5, summary_pb2.Summary.Value(tag="sample", image=image))
    histogram = summary_pb2.HistogramProto(
        min=-1, max=1, num=3, bucket_limit=[-0.5, 0.5, 1e300], bucket=[1, 0, 2]
    )
    add(5, summary_pb2.Summary.Value(tag="weights", histo=histogram))
    text = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[b"hello"])
    add(5, summary_pb2.Summary.Value(tag="words/text_summary", tensor=text))
    writer.close()
    return folder.parent


def steps_of(run: Run, name: str = "loss") -> tuple[list[float], list[float]]:
    answer = telemetry.series(run=run, name=name)
    return answer.x, answer.y


def runs_of(items: Iterable[SourceRun | SourceError]) -> list[SourceRun]:
    """The runs; raises the first error."""
    runs = []
    for item in items:
        if isinstance(item, SourceError):
            raise item
        runs.append(item)
    return runs


@pytest.mark.parametrize(("path", "tool"), [(WANDB, "wandb"), (MLRUNS, "mlflow")])
def test_a_run_of_another_tracker_is_imported_once(path: Path, tool: str, orrery: Orrery) -> None:
    shown = orrery("import", path, "--json")
    assert shown.code == 0, shown.err
    (answer,) = json.loads(shown.out)
    assert answer["new"] and not answer["rejected"]
    run = Run.objects.get(pk=answer["id"])
    assert (run.name, run.state, run.notes) == ("fixture run", "finished", "some notes")
    assert run.experiment is not None and run.experiment.name == "tiny"
    steps, losses = steps_of(run)
    assert steps == [0, 10, 20, 30, 40] and losses[:2] == [2.0, 1.0]
    assert RunDetails.objects.get(run=run).config["lr"] == 3e-4
    if tool == "wandb":
        assert RunDetails.objects.get(run=run).summary["best"] == 0.4
        assert len(steps_of(run, "long")[0]) == 150
    again = json.loads(orrery("import", path, "--json").out)
    assert (again[0]["id"], again[0]["new"], again[0]["points"]) == (answer["id"], False, 0)
    assert again[0]["known"] == answer["points"] and again[0]["media"] == 0
    kinds = sorted(MediaItem.objects.filter(run=run).values_list("kind", flat=True))
    assert kinds == (["histogram", "table"] if tool == "wandb" else ["text"])


def test_tensorboard_folders_are_imported(log: Path, orrery: Orrery) -> None:
    shown = orrery("import", log)
    assert shown.code == 0, shown.err
    assert "new run" in shown.out and "6 points" in shown.out and "3 media" in shown.out
    run = Run.objects.get()
    assert run.name == "logs/first" and steps_of(run)[1][:2] == [2.0, 1.0]
    items = {item.name: item for item in MediaItem.objects.filter(run=run)}
    assert items["weights"].body == {"counts": [1.0, 0.0, 2.0], "edges": [-1.0, -0.5, 0.5, 1.0]}
    assert items["words"].body == "hello" and items["sample"].blob is not None
    assert "0 points" in orrery("import", log).out and Run.objects.count() == 1


def test_an_interrupted_import_continues(orrery: Orrery, monkeypatch: pytest.MonkeyPatch) -> None:
    from orrery_cli.client import Client

    send, calls = Client.send, list[str]()

    def fail_once(self: Client, path: str, body: Any) -> Any:
        calls.append(path)
        if len(calls) == 3:
            raise RuntimeError
        return send(self, path, body)

    monkeypatch.setattr(Client, "send", fail_once)
    monkeypatch.setattr("orrery_cli.imports.send._POINTS", 50)
    with pytest.raises(RuntimeError):
        orrery("import", WANDB)
    shown = orrery("import", WANDB, "--json")
    (answer,) = json.loads(shown.out)
    assert not answer["new"] and answer["known"] == 50 and answer["points"] == 105


def test_a_damaged_file_is_named_with_the_place(tmp_path: Path, log: Path) -> None:
    data = bytearray((WANDB / "run-fixture1.wandb").read_bytes())
    data[5000] ^= 1
    damaged = tmp_path / "run-x.wandb"
    damaged.write_bytes(data)
    with pytest.raises(SourceError, match=r"run-x\.wandb, byte \d+: the checksum"):
        runs_of(wandb.read(damaged))
    damaged.write_bytes(b"something else")
    with pytest.raises(SourceError, match="does not begin like"):
        runs_of(wandb.read(damaged))
    events = next(log.rglob("*tfevents*"))
    data = bytearray(events.read_bytes())
    data[30] ^= 1
    events.write_bytes(data)
    with pytest.raises(SourceError, match=r"record 1: its checksum at byte"):
        runs_of(tensorboard.read(log))


def test_a_file_that_ends_early_gives_what_it_has(tmp_path: Path, log: Path) -> None:
    data = (WANDB / "run-fixture1.wandb").read_bytes()
    part = tmp_path / "run-x.wandb"
    part.write_bytes(data[: len(data) // 2])
    (run,) = runs_of(wandb.read(part))
    assert 10 < len(run.points) < 155 and run.status == "failed" and "no exit" in run.reason
    events = next(log.rglob("*tfevents*"))
    events.write_bytes(events.read_bytes()[:-3])
    (run,) = runs_of(tensorboard.read(log))
    assert len(run.points) == 6 and len(run.media) == 2


def test_a_wrong_line_of_mlflow_is_named(tmp_path: Path) -> None:
    shutil.copytree(MLRUNS, tmp_path / "mlruns")
    loss = next((tmp_path / "mlruns").rglob("metrics/loss"))
    loss.write_text(loss.read_text() + "12 x\n")
    with pytest.raises(SourceError, match=r"metrics/loss, line 6: '12 x' is not"):
        runs_of(read_runs(tmp_path / "mlruns"))
    meta = loss.parents[1] / "meta.yaml"
    meta.write_text(meta.read_text().replace("status: 3", "status: 1"))
    with pytest.raises(SourceError, match="has not ended"):
        runs_of(read_runs(tmp_path / "mlruns"))


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "secret.png").write_bytes(orrery_media.png([[0]]))
    (run,) = runs_of(wandb.read(WANDB))
    reader = wandb._Reader(run, tmp_path / "files", tmp_path)
    assert not reader._is_own(tmp_path / "files" / "../secret.png")


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "outside" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text("0 hidden==1 0")
    shutil.copytree(WANDB, tmp_path / "wandb")
    shutil.copytree(MLRUNS, tmp_path / "mlruns")
    (tmp_path / "wandb" / "files" / "requirements.txt").symlink_to(secret)
    with pytest.raises(SourceError, match=r"requirements\.txt: it is a link"):
        runs_of(wandb.read(tmp_path / "wandb"))
    (tmp_path / "wandb" / "files" / "requirements.txt").unlink()
    shutil.rmtree(tmp_path / "wandb" / "files")
    (tmp_path / "wandb" / "files").symlink_to(secret.parent)
    (run,) = runs_of(wandb.read(tmp_path / "wandb"))
    reader = wandb._Reader(run, tmp_path / "wandb" / "files", tmp_path / "wandb")
    assert not reader._is_own(tmp_path / "wandb" / "files" / "secret.txt")
    folder = next((tmp_path / "mlruns").rglob("artifacts"))
    (folder / "stolen.txt").symlink_to(secret)
    (run,) = runs_of(mlflow.read(tmp_path / "mlruns"))
    assert run.skipped == {"links to files outside the folder": 1}
    assert "hidden" not in str(run.media) and run.experiment == "tiny"
    (folder.parent / "params" / "stolen").symlink_to(secret)
    with pytest.raises(SourceError, match="it is a link"):
        runs_of(mlflow.read(tmp_path / "mlruns"))


def test_a_run_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path, orrery: Orrery) -> None:
    shutil.copytree(MLRUNS, tmp_path / "mlruns")
    folder = next((tmp_path / "mlruns").rglob("params")).parent
    meta = (folder / "meta.yaml").read_text()
    running = folder.parent / "0000running"
    shutil.copytree(folder, running)
    running_meta = meta.replace("status: 3", "status: 1").replace(folder.name, running.name)
    (running / "meta.yaml").write_text(running_meta)
    model = tmp_path / "mlruns" / "models" / "m" / "version-1"
    model.mkdir(parents=True)
    (model / "meta.yaml").write_text(f"name: m\nrun_id: {folder.name}\nstatus: READY\n")
    (folder / "artifacts" / "meta.yaml").write_text("not a run")
    shown = orrery("import", tmp_path / "mlruns")
    assert shown.code == 1 and Run.objects.get().name == "fixture run"
    assert shown.err.count("has not ended") == 1
    assert "1 run was not imported, 1 imported" in shown.err
    (running / "meta.yaml").write_text(running_meta.replace("status: 1", "status: 3"))
    again = orrery("import", tmp_path / "mlruns")
    assert again.code == 0 and Run.objects.count() == 2, again.err


def test_a_file_that_grows_neither_loses_nor_doubles_points(log: Path, orrery: Orrery) -> None:
    first = next(log.rglob("*tfevents*"))
    data = first.read_bytes()
    first.write_bytes(data[:-3])
    later = first.with_name(first.name + ".later")
    later.write_bytes(data)
    assert "12 points" in orrery("import", log).out
    first.write_bytes(data + data[_header(data) :])  # six more points
    assert "6 points" in orrery("import", log).out and Run.objects.count() == 1


def _header(data: bytes) -> int:
    """The bytes of the first record, which has the version."""
    return int.from_bytes(data[:8], "little") + 16


def test_string_tensors_are_images_or_texts_by_their_plugin(tmp_path: Path) -> None:
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    png = orrery_media.png([[0, 255]])
    writer = EventFileWriter(str(tmp_path))
    for step, tag, plugin, texts in (
        (0, "seen", "images", [b"2", b"1", png, png]),
        (1, "seen", "", [b"2", b"1", png]),  # only the first event of a tag names it
        (0, "words", "text", [b"hello", b"there"]),
        (0, "bytes", "", [b"\xff\x00"]),
        (0, "curve", "pr_curves", [b"x"]),
    ):
        data = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin)
        value = summary_pb2.Summary.Value(
            tag=tag,
            tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=texts),
            metadata=summary_pb2.SummaryMetadata(plugin_data=data),
        )
        summary = summary_pb2.Summary(value=[value])
        writer.add_event(event_pb2.Event(wall_time=1.7e9, step=step, summary=summary))
    writer.close()
    (run,) = runs_of(tensorboard.read(tmp_path))
    items = [(item["name"], item["step"], item.get("index", 0)) for item in run.media]
    assert items == [("seen", 0, 0), ("seen", 0, 1), ("seen", 1, 0), ("words", 0, 0)]
    assert base64.b64decode(run.media[0]["data"]) == png and run.media[3]["data"] == "hello\nthere"
    assert run.skipped == {"values of other kinds": 2}


@pytest.mark.parametrize(
    "row",
    [
        {"_step": 1e400},
        {"_step": [1]},
        {"h": {"_type": "histogram", "values": 5, "bins": [1]}},
        {"h": {"_type": "histogram", "packedBins": {"min": 0}}},
        {"x": 10**400},
    ],
)
def test_a_hostile_row_of_wandb_is_named(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "_items", lambda *_, **__: row)
    (error,) = wandb.read(WANDB)
    assert isinstance(error, SourceError) and "record " in error.message


def test_a_folder_without_files_of_a_tracker_is_refused(tmp_path: Path, orrery: Orrery) -> None:
    shown = orrery("import", tmp_path)
    assert shown.code == 1 and "no files of TensorBoard, W&B or MLflow" in shown.err
    assert "does not exist" in orrery("import", tmp_path / "none").err
