"""Runs under other Unix users than the installation: what they cannot reach, and what still works.

Real `up` as root, real supervisors and ranks.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from tests.flows.embedded import Orrery, train_spec
from tests.migrated_database import install
from tests.other_users import as_seen_by_others, open_home  # noqa: F401  (fixtures)
from tests.workers.launcher.harness import script
from tests.workers.launcher.test_environment import project
from tests.workers.launcher.test_store_link import SAVES
from workers.launcher.isolation.run_user import FIRST_RUN_GID, FIRST_UID

# each line of the output is one attempt to reach something: what, and the error or "reached"
ATTACK = """
import json, os, pathlib, signal, sys

home = pathlib.Path(os.environ["ORRERY_HOME"])
other = sys.argv[1]

def attempt(name, act):
    try:
        act()
        result = "reached"
    except OSError as error:
        result = type(error).__name__
    print(json.dumps([name, result]), flush=True)

def parents(pid):
    while pid > 1:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
        pid = int(text.rpartition(")")[2].split()[1])
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\\0", b" ").decode()
        yield pid, command

agents = [pathlib.Path(p) for p in pathlib.Path("/proc").iterdir() if p.name.isdigit()]
def named(path, text):
    try:
        return text in (path / "cmdline").read_bytes() and str(home).encode() in (
            path / "cmdline").read_bytes()
    except OSError:
        return False
agent = next(path for path in agents if named(path, b"workers.agent"))
supervisor = next(pid for pid, line in parents(os.getpid()) if "workers.launcher" in line)

for path in ("secret_key", "first-login", "orrery.sqlite3", "valkey/valkey.conf",
             "valkey/appendonlydir", "up.json", f"agent/{os.environ['ORRERY_NODE']}/node.json"):
    attempt(path, lambda: os.open(home / path, os.O_RDONLY))
attempt("names in the home", lambda: os.listdir(home))
attempt("environment of the agent", lambda: (agent / "environ").read_bytes())
attempt("memory of the agent", lambda: os.open(agent / "mem", os.O_RDONLY))
attempt("environment of the supervisor", lambda: os.open(
    f"/proc/{supervisor}/environ", os.O_RDONLY))
attempt("memory of the supervisor", lambda: os.open(f"/proc/{supervisor}/mem", os.O_RDONLY))
attempt("signal to the agent", lambda: os.kill(int(agent.name), 0))
attempt("signal to the supervisor", lambda: os.kill(supervisor, 0))
attempt("folder of another user's run", lambda: os.listdir(home / "runs" / other))
attempt("file of another user's run", lambda: os.open(
    home / "runs" / other / "attempt-1" / "spec.json", os.O_RDONLY))
attempt("another user's home", lambda: os.listdir(home / "users" / sys.argv[2]))
attempt("root again", lambda: os.setuid(0))
secrets = [name for name in os.environ if name in ("REDIS_URL", "ORRERY_JOIN", "NODE_API_TOKEN")]
status = pathlib.Path("/proc/self/status").read_text()
print(json.dumps(["facts", {
    "uid": os.getuid(), "gid": os.getgid(), "groups": sorted(os.getgroups()), "secrets": secrets,
    "capabilities": [line.split()[1] for line in status.splitlines() if line.startswith("CapEff")],
    "no_new_privs": "NoNewPrivs:\\t1" in status, "home": os.environ["HOME"],
}]), flush=True)
pathlib.Path("own.txt").write_text("mine")
# links and pipes in place of files that others read
os.symlink(home / "secret_key", "stolen.txt")
for name in ("stolen-a", "stolen-b"):
    os.symlink(home / "secret_key", name)
"""
SLEEP = ["--no-python", "sh", "-c", "echo up; sleep 600"]


class Isolated(Orrery):
    """Its programs see a Python that other users may start."""

    prefix: list[str] = []
    clients: dict[str, httpx.Client] = {}

    def command(self) -> list[str]:
        return [*self.prefix, *super().command()]


@pytest.fixture(scope="module")
def orrery(
    as_seen_by_others: list[str],  # noqa: F811
    migrated_database: Path,
) -> Iterator[Orrery]:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="orrery-iso-", dir="/tmp"))
    folder.chmod(0o711)
    (folder / "store").mkdir()
    (folder / "store").chmod(0o777)  # copies are written with the rights of the run's user
    environ = {"ORRERY_RUN_AS": "uids", "NODE_API_TOKEN": "hush", "PLAIN_SETTING": "shown"}
    environ["ORRERY_STORE_URL"] = str(folder / "store")
    server = Isolated(folder / "home", devices=2, environ=environ)
    server.prefix = as_seen_by_others
    try:
        install(migrated_database, server.home)
        server.start()
        yield server
    finally:
        for client in server.clients.values():
            client.close()
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


def lines(orrery: Orrery, run: str) -> list[str]:
    return [row["text"] for row in orrery.get(f"runs/{run}/logs", limit=200)["items"]]


def as_user(orrery: Orrery, name: str, role: str = "submitter") -> httpx.Client:
    assert isinstance(orrery, Isolated)
    if name not in orrery.clients:
        orrery.clients[name] = orrery.log_in(name, role)
    return orrery.clients[name]


def submit(client: httpx.Client, command: list[str], env: dict[str, str] | None = None) -> str:
    body = {"command": command, "env": env or {}}
    spec = {"kind": "script", "script": body, "resources": {"devices": 1}}
    answer = client.post("runs", json={"name": "script", "spec": spec})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def test_a_script_reaches_nothing_of_the_installation_or_of_others(orrery: Orrery) -> None:
    assert "runs execute under a user of its own per owner" in orrery.words
    program = orrery.home / "data" / "attack.py"
    program.write_text(ATTACK)
    victim = submit(as_user(orrery, "victim"), SLEEP)
    orrery.until_state(victim, "running")
    attacker = as_user(orrery, "attacker")
    owner = str((orrery.home / "runs" / victim).stat().st_uid)
    # a variable that the loader of a program that is still root would act on: it writes there
    trace = orrery.home / "data" / "trace"
    trace.mkdir(mode=0o777)
    trace.chmod(0o777)
    loader = {"LD_DEBUG": "statistics", "LD_DEBUG_OUTPUT": str(trace / "of")}
    run = submit(attacker, [str(program), victim, owner], loader)
    assert orrery.until_state(run, "finished", "failed") == "finished", orrery.last_lines()
    orrery.until(lambda: any("facts" in text for text in lines(orrery, run)), 60, "the last line")
    results = dict(json.loads(text) for text in lines(orrery, run))
    facts = results.pop("facts")
    owners = {path.stat().st_uid for path in trace.iterdir()}
    assert owners == {facts["uid"]}, "setpriv, as root, got the submitter's variables"
    assert len(results) >= 17
    assert set(results.values()) == {"PermissionError"}, results
    uid = facts["uid"]
    assert uid > FIRST_UID and facts["gid"] == uid
    assert facts["groups"] == [FIRST_RUN_GID + int(run)]
    assert facts["secrets"] == [] and facts["no_new_privs"]
    assert set(facts["capabilities"]) == {"0" * 16}
    assert facts["home"] == str(orrery.home / "users" / str(uid))
    folder = orrery.home / "runs" / run
    status = folder.stat()
    assert (status.st_uid, status.st_gid) == (uid, FIRST_RUN_GID + int(run))
    assert stat.S_IMODE(status.st_mode) & 0o777 == 0o750
    assert (folder / "attempt-1" / "own.txt").stat().st_uid == uid
    assert (folder / "attempt-1" / "exit.json").stat().st_uid == uid
    assert stat.S_IMODE(orrery.home.stat().st_mode) == 0o711
    # the same user's runs share a user, another's do not
    assert (orrery.home / "runs" / victim).stat().st_uid != uid
    answer = orrery.client.post(f"runs/{victim}/cancel") if orrery.client else None
    assert answer is not None and answer.status_code == 200
    assert orrery.until_state(victim, "cancelled", seconds=60) == "cancelled"


def test_a_script_has_its_code_packages_and_copies_in_the_store(orrery: Orrery) -> None:
    work = project(orrery.home / "data")
    code = "import os, small\nprint('small', small.version, os.getuid(), flush=True)\n"
    (work / "train.py").write_text(code + script(SAVES))
    (work / "requirements.txt").write_text("small==1.0\n")
    env = {"UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(work.parent / "wheels")}
    environment = {"lock": "requirements.txt"}
    body = {"command": ["train.py"], "workdir": str(work), "env": env, "environment": environment}
    spec = {"kind": "script", "script": body, "resources": {"devices": 1}}
    answer = as_user(orrery, "coder").post("runs", json={"name": "script", "spec": spec})
    assert answer.status_code == 201, answer.text
    (work / "train.py").write_text("raise SystemExit('edited after the submit')")
    run = str(answer.json()["id"])
    assert orrery.until_state(run, "finished", "failed") == "finished", orrery.last_lines()
    uid = (orrery.home / "runs" / run).stat().st_uid
    assert uid > FIRST_UID and f"small 1.0 {uid}" in lines(orrery, run)
    assert list((orrery.home / "users" / str(uid) / "environments").iterdir())
    orrery.until(
        lambda: list((orrery.home.parent / "store").rglob("weights")), 120, "the store has a copy"
    )


def test_links_that_a_run_left_do_not_lead_the_supervisor_elsewhere(orrery: Orrery) -> None:
    secret = (orrery.home / "secret_key").read_text().strip()
    trap = (
        "rm -rf rank-0/points.jsonl rank-0/stderr.log; ln -s $ORRERY_HOME/secret_key "
        "rank-0/points.jsonl; ln -s $ORRERY_HOME/secret_key rank-0/stderr.log; "
        "for name in supervisor.json request.json exit.json order.json; do "
        "rm -f $name; mkfifo $name; done; echo trapped; sleep 600"
    )
    run = submit(as_user(orrery, "attacker"), ["--no-python", "sh", "-c", trap])
    orrery.until(lambda: "trapped" in lines(orrery, run), 120, "the trap is set")
    assert orrery.client is not None
    beat = orrery.get("nodes")["items"][0]["last_heartbeat"]
    orrery.until(
        lambda: orrery.get("nodes")["items"][0]["last_heartbeat"] != beat, 60, "a heartbeat"
    )
    orrery.client.post(f"runs/{run}/cancel")
    assert orrery.until_state(run, "cancelled", seconds=90) == "cancelled"
    assert secret not in "\n".join(lines(orrery, run))
    assert (orrery.home / "secret_key").read_text().strip() == secret


def test_training_pauses_resumes_and_is_served_to_a_teammate_only(orrery: Orrery) -> None:
    run = orrery.submit(train_spec(steps=100_000, ranks=2, every=10))
    orrery.until_step(run, 12)
    assert orrery.client is not None
    for pid in orrery.ranks_of(run):
        assert os.stat(f"/proc/{pid}").st_uid > FIRST_UID
    orrery.client.post(f"runs/{run}/pause")
    orrery.until_state(run, "paused")
    saved = orrery.get(f"runs/{run}/checkpoints")["items"]
    assert saved
    orrery.client.post(f"runs/{run}/resume")
    orrery.until_step(run, max(item["step"] for item in saved) + 5)
    orrery.client.post(f"runs/{run}/cancel")
    orrery.until_state(run, "cancelled")
    step = max(item["step"] for item in orrery.get(f"runs/{run}/checkpoints")["items"])
    # an operator sees the run and forks it: another Unix user continues from a copy
    chief = as_user(orrery, "chief", "operator")
    body = {"step": step, "spec": {"train": {"steps": step + 3}}}
    answer = chief.post(f"runs/{run}/fork", json=body)
    assert answer.status_code == 201, answer.text
    fork = str(answer.json()["id"])
    assert orrery.until_state(fork, "finished", "failed") == "finished", orrery.last_lines()
    assert (orrery.home / "runs" / fork).stat().st_uid != (orrery.home / "runs" / run).stat().st_uid
    assert orrery.steps(fork)[0] > step - 1


def test_a_killed_supervisor_leaves_no_process(orrery: Orrery) -> None:
    run = submit(as_user(orrery, "victim"), SLEEP)
    orrery.until_state(run, "running")
    folder = orrery.folder(run)
    supervisor = json.loads((folder / "supervisor.json").read_text())["pid"]
    ranks = orrery.ranks_of(run)
    os.kill(supervisor, 9)
    orrery.until(
        lambda: not any(Path(f"/proc/{pid}/environ").exists() for pid in ranks), 60, "ranks end"
    )
    orrery.until(lambda: orrery.get(f"runs/{run}")["attempt"] == 2, 120, "a second attempt")
    assert orrery.client is not None
    orrery.client.post(f"runs/{run}/cancel")
    orrery.until_state(run, "cancelled")


def test_node_page_and_rest_name_the_method(orrery: Orrery) -> None:
    node = orrery.get("nodes")["items"][0]
    reported = node["isolation"]
    assert reported["method"] == "uids" and "user of its own" in reported["detail"]
    # everything above was done by a user of the broker that is limited to this node's keys
    assert node["broker_user"] == "own"
    url = (orrery.home / "valkey" / "password").read_text().strip()
    port = (orrery.home / "valkey" / "port").read_text().strip()
    with redis.Redis.from_url(
        f"redis://:{url}@127.0.0.1:{port}/0", decode_responses=True
    ) as broker:
        assert broker.execute_command("ACL", "LOG") == [], "an agent needs nothing else"
