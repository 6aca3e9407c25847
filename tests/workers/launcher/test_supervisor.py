"""Real supervisors over a real torchrun and tiny programs: every kind of exit, no leftovers."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tests.workers.launcher.harness import Node, script
from workers.contracts.wire import encrypted_text
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import processes
from workers.launcher.recovery import is_reported, recover, supervisor_alive
from workers.launcher.rundir import RunDir, read_json, write_json

pytestmark = pytest.mark.flow

SLEEPS = script("print('up', flush=True)\ntime.sleep(600)")


def test_all_ranks_finish_and_every_line_arrives_once(node: Node) -> None:
    program = script(
        """
        for n in range(1, 31):
            point(n)
            print("step", n)
        print("last words", file=sys.stderr)
        while not os.path.exists("go"):  # no shorter than a supervisor's look
            time.sleep(0.01)
        points.write('{"seq": 99, "no": "point"}\\nnot json\\n')
        """,
        points=True,
    )
    order = node.order(program)
    run_dir = node.launch(order)
    node.reported("running")
    (run_dir.path / "go").touch()
    assert node.exited(order)["class"] == "ok"
    assert [report["type"] for report in node.reports] == ["launching", "running", "exited"]
    for rank in (0, 1):
        assert node.seqs("points", rank) == list(range(1, 31))
        assert node.seqs("logs", rank) == list(range(1, 32))
        assert sorted(node.lines(rank)) == sorted(
            [f"step {n}" for n in range(1, 31)] + ["last words"]
        )
    batch = next(b for b in node.batches if b["stream"] == "points")["batch"]
    assert (batch["run"], batch["attempt"]) == ("7", 1) and set(batch["values"]) == {"loss"}
    assert read_json(run_dir.exit) == {
        "class": "ok",
        "reason": "All ranks finished.",
        "code": 0,
        "reported": True,
    }


def test_ranks_get_secrets_that_no_file_of_the_attempt_shows(node: Node) -> None:
    program = script("print(os.environ['SPICE'][::-1], os.environ['PLAIN'], flush=True)")
    order = node.order(program, ranks=1, env={"PLAIN": "yes", "SPICE": "replaced"})
    purpose = LaunchOrder.from_dict(order).secret_purpose
    value = encrypted_text.encrypt(node.secret, "hush-4711", purpose=purpose)
    run_dir = node.launch({**order, "secrets": {"SPICE": value}})
    assert node.exited(order)["class"] == "ok"
    assert node.lines(0) == ["1174-hsuh yes"]
    for path in run_dir.path.rglob("*"):
        assert path.is_dir() or b"hush-4711" not in path.read_bytes(), path


def test_secrets_for_another_attempt_are_not_used(node: Node) -> None:
    order = node.order(script("print('started')"), ranks=1)
    value = encrypted_text.encrypt(node.secret, "hush", purpose="variables of another")
    node.launch({**order, "secrets": {"SPICE": value}})
    ended = node.exited(order)
    assert ended["class"] == "infrastructure" and "secrets are unreadable" in ended["reason"]


def test_a_script_may_be_a_program_of_orrery(node: Node) -> None:
    module = "workers.posttraining.solved_problems.main"
    order = node.order(["-m", module, "--steps", "2", "--seconds", "0"], ranks=1)
    run_dir = node.launch(order)
    assert node.exited(order)["class"] == "ok"
    points = (run_dir.path / "rank-0" / "points.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in points] == [1, 2]


def test_ranks_know_their_attempt(node: Node) -> None:
    program = script(
        """
        names = ("RANK", "WORLD_SIZE", "ORRERY_RUN", "ORRERY_ATTEMPT", "ORRERY_FENCE",
                 "ORRERY_RUN_DIR", "ORRERY_RESUME", "ORRERY_HOME", "OMP_NUM_THREADS",
                 "CUDA_VISIBLE_DEVICES", "MINE")
        print({name: os.environ.get(name) for name in names}, flush=True)
        import orrery_recorder
        """
    )
    order = node.order(
        program,
        ranks=1,
        env={"MINE": "yes"},
        resume_from={"path": "runs/7/checkpoints/step-3", "step": 3},
    )
    run_dir = node.launch(order)
    assert node.exited(order)["class"] == "ok"
    reported = eval(node.lines(0)[0])
    assert reported == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "ORRERY_RUN": "7",
        "ORRERY_ATTEMPT": "1",
        "ORRERY_FENCE": order["fence"],
        "ORRERY_RUN_DIR": str(run_dir),
        "ORRERY_RESUME": str(node.home / "runs/7/checkpoints/step-3"),
        "ORRERY_HOME": str(node.home),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MINE": "yes",
    }


@pytest.mark.parametrize(
    ("text", "exit_class", "reason"),
    [
        ("raise ValueError('no such column')", "user_error", "ValueError: no such column"),
        (
            "print('CUDA out of memory', file=sys.stderr); sys.exit(1)",
            "out_of_memory",
            "CUDA out of memory",
        ),
        ("sys.exit(65)", "numerics", "exited with 65"),
        (
            "raise ConnectionResetError('Connection reset by peer')",
            "infrastructure",
            "Connection reset",
        ),
    ],
)
def test_the_first_cause_is_reported(node: Node, text: str, exit_class: str, reason: str) -> None:
    order = node.order(script(f"if os.environ['RANK'] == '1':\n    {text}\ntime.sleep(60)"))
    node.launch(order)
    result = node.exited(order)
    assert result["class"] == exit_class and reason in result["reason"] and result["rank"] == 1
    events = [report["data"] for report in node.reports if report["type"] == "event"]
    assert {event["rank"]: event["data"]["class"] for event in events}[1] == exit_class


def test_a_killed_rank_is_the_cause_and_not_those_it_took_along(node: Node) -> None:
    order = node.order(SLEEPS)
    run_dir = node.launch(order)
    node.reported("running")
    os.kill(node.pid(run_dir, 1), signal.SIGKILL)
    result = node.exited(order)
    assert (result["class"], result["rank"], result["signal"]) == ("infrastructure", 1, "SIGKILL")


@pytest.mark.parametrize(
    ("action", "exit_class"),
    [("cancel", "cancelled"), ("pause", "preempted"), ("kill", "cancelled")],
)
def test_requests_end_every_process(node: Node, action: str, exit_class: str) -> None:
    """Rank 0 has a child in a session of its own and ignores SIGTERM."""
    program = script(
        """
        import signal, subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("up", flush=True)
        time.sleep(600)
        """
    )
    order = node.order(program)
    run_dir = node.launch(order)
    node.until(
        lambda: len([p for p in processes.members(order["fence"]) if p.name() == "sleep"]) == 2,
        120,
        "children",
    )
    write_json(
        run_dir.request,
        {"action": action, "grace_s": 0.5, "fence": order["fence"], "attempt_id": "71"},
    )
    assert node.exited(order)["class"] == exit_class
    assert read_json(run_dir.control).get("action") == {"cancel": "stop", "pause": "pause"}.get(
        action
    )


def test_a_limit_in_seconds_ends_the_attempt_with_a_sentence(node: Node) -> None:
    order = node.order(SLEEPS, max_seconds=0.3, grace_s=0.5)
    node.launch(order)
    result = node.exited(order)
    assert result["class"] == "user_error" and "limit of 0.3 s" in result["reason"]


def test_a_hang_is_ended_with_the_stacks_of_its_ranks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only training is watched: another program need not write points.

    So the engine's place is taken by a sleeper.
    """
    stand_in = node.home / "stand-in"
    (stand_in / "workers" / "training").mkdir(parents=True)
    for name in ("workers/__init__.py", "workers/training/__init__.py"):
        (stand_in / name).write_text(
            "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"
        )
    (stand_in / "workers/training/main.py").write_text(
        script(
            """
            import pathlib

            def stuck_here():  # both of them, before either shows itself
                pathlib.Path(f"here-{rank}").touch()
                while len(list(pathlib.Path().glob("here-*"))) < 2:
                    time.sleep(0.01)
                point(1)
                time.sleep(600)

            stuck_here()
            """,
            points=True,
        )
    )
    monkeypatch.setattr("tests.workers.launcher.harness.ROOT", stand_in)
    monkeypatch.setenv("PYTHONPATH", f"{stand_in}:{Path(__file__).resolve().parents[3]}")
    # until a first point three times as long: enough to get that far on a busy machine
    order = node.order("", kind="train", spec={"kind": "train"}, hang_s=4.0)
    node.launch(order)
    result = node.exited(order)
    assert result["class"] == "hang" and "No rank wrote a point" in result["reason"]
    exits = [
        report["data"]["data"]
        for report in list(node.reports)
        if report["type"] == "event" and report["data"]["type"] == "rank_exited"
    ]
    assert {(item["signal"], item["class"]) for item in exits} == {("SIGABRT", "hang")}
    assert any("stuck_here" in line for line in node.lines(0)) and any(
        "stuck_here" in line for line in node.lines(1)
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nowhere.py"], "there is no file"),
        (["no-such-program"], "neither a program"),
        ([], "script.command is empty"),
    ],
)
def test_what_cannot_be_launched_is_a_user_error(
    node: Node, command: list[str], message: str
) -> None:
    order = node.order(command)
    node.launch(order)
    result = node.exited(order)
    assert result["class"] == "user_error" and message in result["reason"]


def test_a_kind_that_nodes_cannot_start_is_refused_in_words(node: Node) -> None:
    order = node.order("", kind="external", spec={"kind": "external"})
    node.launch(order)
    assert "cannot start runs of kind external" in node.exited(order)["reason"]


def test_an_unwritable_run_directory_is_an_infrastructure_error(node: Node) -> None:
    order = node.order(SLEEPS)
    run_dir = RunDir(node.home / order["run_dir"])
    run_dir.path.mkdir(parents=True)
    (run_dir.path / "spec.json").mkdir()  # a rename onto it fails, as a write to a full disk would
    node.launch(order)
    result = node.exited(order)
    assert (
        result["class"] == "infrastructure"
        and "cannot be used" in result["reason"]
        and str(run_dir) in result["reason"]
    )


def test_a_killed_supervisor_takes_its_ranks_along_and_a_successor_reports_the_rest(
    node: Node,
) -> None:
    order = node.order(
        script(
            "for n in range(1, 20_000):\n    point(n)\n    print(n, flush=True)\n    "
            "time.sleep(0.01)",
            points=True,
        )
    )
    run_dir = node.launch(order)
    node.until(lambda: node.seqs("points", 1), 120, "points")
    os.kill(read_json(run_dir.supervisor)["pid"], signal.SIGKILL)
    node.until(
        lambda: not processes.members(order["fence"]), 60, "ranks ended with their supervisor"
    )
    assert not supervisor_alive(run_dir) and not is_reported(run_dir)
    reported = recover(run_dir, node.node_file, patience_s=60)
    assert reported is not None and reported["class"] == "infrastructure" and is_reported(run_dir)
    assert node.exited(order)["class"] == "infrastructure"
    for rank in (0, 1):
        whole = (run_dir.rank(rank) / "points.jsonl").read_text().splitlines()
        assert sorted(set(node.seqs("points", rank))) == list(range(1, len(whole) + 1))
        lines = sorted(set(node.seqs("logs", rank)))
        assert lines == list(range(1, len(lines) + 1)) and len(lines) >= len(whole) - 1


def test_redis_may_be_killed_and_nothing_is_missing(tmp_path: Path) -> None:
    """What the server lost of its last second is sent again."""
    server = RedisServer(Path(tempfile.mkdtemp(prefix="orrery-redis-"))).start()
    node = Node(tmp_path / "home", server.url)
    try:
        program = """
            for n in range(1, 301):
                point(n)
                time.sleep(0.01)
                while n == 200 and not os.path.exists("go"):
                    time.sleep(0.01)
            """
        order = node.order(script(program, points=True), ranks=1)
        run_dir = node.launch(order)
        node.until(lambda: node.seqs("points", 0), 120, "points")
        server.kill()
        time.sleep(1.0)
        server.start()
        (run_dir.path / "go").touch()
        assert node.exited(order)["class"] == "ok"
        assert sorted(set(node.seqs("points", 0))) == list(range(1, 301))
    finally:
        node.close()
        server.stop()
