"""Configuration, media, origin and system metrics of the recorder."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from orchestrator.tracking import media
from orchestrator.tracking.images import image_info
from tests.workers.recorder.server import LISTS, TOKEN, Ingest
from workers.recorder import orrery_capture, orrery_media, orrery_recorder, orrery_system

PATIENCE_S = 90.0  # against hangs


def test_configuration_and_media_arrive_in_a_form_that_the_server_takes(
    server: Ingest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import numpy as np

    run = orrery_recorder.init(server.url, TOKEN, "media", config={"lr": 0.1})
    run.summary({"best": 1.5})
    run.log({"loss": 1.0}, step=7)
    run.image("sample", np.zeros((2, 3, 3), np.uint8), caption="black")
    run.image("gray", np.ones((2, 3)), step=9)
    (tmp_path / "a.png").write_bytes(orrery_media.png([[0]]))
    run.image("file", tmp_path / "a.png")
    run.histogram("weights", np.array([0.0, 1.0, float("nan")]), bins=2)
    run.text("words", "hello")
    run.table("rows", ["a", "b"], [[1, np.float32(0.5)], ["x", Path("p")]])
    run.image("odd", "/nowhere.png")
    run.histogram("none", [])
    assert run.finish(timeout_s=PATIENCE_S)
    store = server.store["r1"]
    merged = [
        {name: item[name] for name in ("config", "summary") if name in item}
        for item in store["details"].values()
    ]
    assert merged == [{"config": {"lr": 0.1}}, {"summary": {"best": 1.5}}]
    items = {item["name"]: item for item in store["media"].values()}
    assert {name: item["step"] for name, item in items.items()} == {
        "sample": 7,
        "gray": 9,
        "file": 7,
        "weights": 7,
        "words": 7,
        "rows": 7,
    }
    for item in items.values():
        media.check(**{name: item[name] for name in item if name not in ("seq", "rank")})
    assert image_info(base64.b64decode(items["sample"]["data"])).width == 3
    assert items["weights"]["data"] == {"counts": [1.0, 1.0], "edges": [0.0, 0.5, 1.0]}
    assert items["rows"]["data"]["rows"] == [[1, 0.5], ["x", "p"]]
    assert "odd is not recorded" in caplog.text and "none is not recorded" in caplog.text


def test_a_server_without_media_still_gets_the_numbers(
    server: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = server.RequestHandlerClass.take  # type: ignore[attr-defined]
    monkeypatch.setattr(
        server.RequestHandlerClass,
        "take",
        lambda self, path, body: (
            (404, {"detail": "no such path"})
            if path[-1] in ("details", "media")
            else take(self, path, body)
        ),
    )
    run = orrery_recorder.init(server.url, TOKEN, "old", config={"lr": 0.1})
    run.text("words", "hello")
    run.log({"loss": 1.0})
    assert run.finish(timeout_s=PATIENCE_S)
    assert len(server.points("r1")) == 1 and not server.store["r1"]["media"]
    assert set(server.store["r1"]) == set(LISTS)


def test_the_origin_is_captured_without_secrets(
    server: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet", "--initial-branch", "trunk")
    (tmp_path / "train.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    git("remote", "add", "origin", "https://me:secret@example.com/x.git")
    (tmp_path / "train.py").write_text("a = 2\n")
    captured = orrery_capture.capture(tmp_path)
    program = captured["program"]
    assert len(program["commit"]) == 40 and program["branch"] == "trunk" and program["dirty"]
    assert program["remote"] == "https://example.com/x.git"
    assert "-a = 1\n+a = 2\n" in captured["diff"] and "pytest==" in captured["requirements"]
    bare = orrery_capture.capture("/")
    assert "commit" not in bare["program"] and bare["diff"] == ""
    monkeypatch.setenv("ORRERY_CAPTURE", "1")
    run = orrery_recorder.init(server.url, TOKEN, "origin")
    assert run.finish(timeout_s=PATIENCE_S)
    (sent,) = server.store["r1"]["details"].values()
    assert sent["program"]["python"].startswith("3.")


def test_secrets_in_commands_are_hidden() -> None:
    words = ["a.py", "--api-key", "s1", "--token=s2", "HF_TOKEN=s3", "--lr", "1", "http://u:p@h/"]
    assert orrery_capture.safe_command(words) == [
        "a.py",
        "--api-key",
        "***",
        "--token=***",
        "HF_TOKEN=***",
        "--lr",
        "1",
        "http://h/",
    ]

    words = ["--password", "-abc", "--token", "--lr", "1", '{"api_key": "s4"}']
    assert orrery_capture.safe_command(words) == [
        "--password",
        "***",
        "--token",
        "--lr",
        "1",
        '{"api_key": ***',
    ]


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        ('+API_KEY = "hunter2"', "+API_KEY = ***"),
        ('+os.environ["HF_TOKEN"] = "hunter2"', '+os.environ["HF_TOKEN"] = ***'),
        ('-  "password": "hunter2",', '-  "password": ***'),
        (' login(token="hunter2")', " login(token=***"),
        ('+run(["x", "--token", "hunter2"])', '+run(["x", "--token", ***'),
        ("+train.sh --token hunter2", "+train.sh --token ***"),
        ("@@ -1 +1 @@ SECRET_KEY: hunter2", "@@ -1 +1 @@ SECRET_KEY: ***"),
        ("+x = 'sk-abcdefghijklmnopqrstuv'", "+x = '***'"),
        ("+AWS_SECRET_ACCESS_KEY=hunter2", "+AWS_SECRET_ACCESS_KEY=***"),
        ("+headers = {'Authorization': 'Bearer x'}", "+headers = {'Authorization': ***"),
        ("+git clone https://me:hunter2@host/", "+git clone https://host/"),
        ("+tokens = batch * seq", None),
        ("+tokenizer = load(name)", None),
        ("+for token in text:", None),
        ("+if token == other:", None),
        ("+++ b/tokens.py", None),
    ],
)
def test_secrets_in_diffs_are_hidden(line: str, hidden: str | None) -> None:
    wanted = line if hidden is None else hidden
    assert orrery_capture.without_secrets(f" a\n{line}\n b\n") == f" a\n{wanted}\n b\n"


def test_a_private_key_in_a_diff_is_hidden() -> None:
    key = "+-----BEGIN RSA PRIVATE KEY-----\n+abc\n+def\n+-----END RSA PRIVATE KEY-----\n"
    hidden = orrery_capture.without_secrets(key)
    assert "abc" not in hidden and "def" not in hidden


def test_a_long_diff_is_cut_at_a_line() -> None:
    short = orrery_capture.shortened("+é\n" * 400_000)
    assert len(short.encode()) <= orrery_capture.DIFF_BYTES
    assert short.endswith("+é\n# cut: the diff has 1,600,000 bytes\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_system_metrics_are_logged_at_the_current_step(server: Ingest) -> None:
    sampler = orrery_system.Sampler()
    values = sampler.sample()
    assert values["system/process_memory_bytes"] > 1e6
    assert values["system/memory_bytes"] > values["system/process_memory_bytes"]
    run = orrery_recorder.init(server.url, TOKEN, "system", system_s=0.01)
    run.log({"loss": 1.0}, step=5)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        run.flush(1.0)
        named = [p for p in server.points(run.id) if "system/memory_bytes" in p["values"]]
        if any(p["step"] == 5 for p in named):
            break
    assert run.finish(timeout_s=PATIENCE_S)
    assert any(p["step"] == 5 for p in named)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_sample_that_is_being_written_arrives_before_the_end(server: Ingest) -> None:
    run = orrery_recorder.init(server.url, TOKEN, "system", system_s=0.01)
    sink = run._sink
    assert sink is not None
    append, entered = sink.append, threading.Event()

    def slowly(stream: str, fields: str) -> None:
        if stream == "points":
            entered.set()
            time.sleep(0.5)
        append(stream, fields)

    sink.append = slowly  # type: ignore[method-assign]
    assert entered.wait(PATIENCE_S)
    assert run.finish(timeout_s=PATIENCE_S)
    assert len(server.points(str(run.id))) == 1
