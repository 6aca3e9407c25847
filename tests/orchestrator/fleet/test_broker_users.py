"""One broker user per node: what it may do, what is refused, and when it is created or deleted."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from orchestrator.common import redis as control_redis
from orchestrator.common import streams
from orchestrator.dead_letters.models import DeadLetter
from orchestrator.fleet import broker_users, selectors
from orchestrator.fleet.models import Node
from orchestrator.scheduling import celery_client, services
from orchestrator.scheduling.loop import Loop
from orchestrator.scheduling.reports.handler import report
from orchestrator.scheduling.reports.inbox import Inbox
from orchestrator.telemetry.ingest import Ingest
from tests import factories
from tests.redis_server import _binary
from workers.agent import broker_login, identity
from workers.agent.order_transport import Amqp, install, options
from workers.agent.reports import Reporter
from workers.contracts.wire import envelope, liveness, names
from workers.contracts.wire.broker import access as broker_access

pytestmark = pytest.mark.django_db(transaction=True)
PASSWORD = "control-plane-password"


class Guarded:
    """A server with a password, whose users are lost when it restarts, as after a power cut."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.socket, self._binary, self._folder = folder / "redis.sock", binary, folder
        self.url = f"unix://:{PASSWORD}@{self.socket}"
        self.start()

    def start(self) -> None:
        command = [self._binary, "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        command += ["--requirepass", PASSWORD, "--dir", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while True:
            try:
                self.client().ping()
                return
            except redis.RedisError:
                assert self._process.poll() is None
                time.sleep(0.02)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def client(self, url: str = "") -> redis.Redis:
        return redis.Redis.from_url(url or self.url, decode_responses=True, retry=None)


@pytest.fixture(scope="module", params=["redis-server", "valkey"])
def guarded(request: pytest.FixtureRequest) -> Iterator[Guarded]:
    binary = _binary() if request.param == "valkey" else shutil.which("redis-server")
    if binary is None:
        pytest.skip("needs redis-server")
    folder = Path(tempfile.mkdtemp(prefix="orrery-acl-"))
    server = Guarded(binary, folder)
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def broker(guarded: Guarded, settings: Any) -> Iterator[Guarded]:
    settings.REDIS_URL = guarded.url
    settings.ENV = settings.ENV.model_copy(update={"redis_acl": True, "redis_join_password": ""})
    guarded.client().flushall()
    control_redis.reset()
    yield guarded
    control_redis.reset()


def own_url(broker: Guarded, node: Node) -> str:
    password = broker_access.node_password(selectors.node_secret(node))
    return broker_access.url_as(broker.url, broker_access.node_user(node.name), password)


def refused(act: Callable[[], Any]) -> bool:
    try:
        act()
    except NoPermissionError:
        return True
    return False


def test_a_node_can_do_its_work_and_nothing_else(broker: Guarded) -> None:
    node = factories.node("a")
    factories.node("a.b")  # its keys begin like those of the first node
    assert broker_users.apply_all()
    server, client = broker.client(), broker.client(own_url(broker, node))
    server.set(names.CONTROL, "{}")
    server.hset(names.acked_key(7), "points/0", 5)
    server.set(names.rendezvous_key("9", node="a.b"), "port")
    server.execute_command("ACL", "LOG", "RESET")
    client.xadd(liveness.heartbeat_key("a"), {"m": "x"}, maxlen=1, approximate=False)
    client.xadd(names.reports_stream("a"), {"m": "x"})
    client.xadd(names.telemetry_stream("a"), {"m": "x", "node": "a"})
    assert client.get(names.CONTROL) == "{}" and server.xlen(names.reports_stream("a")) == 1
    with client.pipeline(transaction=True) as pipe:
        pipe.hset(liveness.leases_key("a"), "9", "1")
        pipe.hexists(liveness.REVOKED, "9")
        assert pipe.execute() == [1, 0]
    assert client.hgetall(names.acked_key(7)) == {"points/0": "5"}
    assert client.get(names.rendezvous_key("9", node="a.b")) == "port"
    client.set(names.rendezvous_key("9", "preflight", node="a"), "port", ex=60)
    client.set(names.rendezvous_key("9"), "port", ex=60)  # with nodes of release 0.1
    assert server.execute_command("ACL", "LOG") == []
    for act in (
        lambda: client.lpush(names.node_queue("a.b"), "order"),
        lambda: client.brpop([names.node_queue("a.b")], 0.01),
        lambda: client.xadd(liveness.heartbeat_key("a.b"), {"m": "x"}),
        lambda: client.hset(liveness.leases_key("a.b"), "9", "1"),
        lambda: client.set(names.rendezvous_key("9", node="a.b"), "port"),
        lambda: client.hset(liveness.heartbeat_key("a"), "m", "x"),  # another type
        lambda: client.set(names.node_queue("a"), "x"),
        lambda: client.hset(liveness.REVOKED, "9", "1"),
        lambda: client.set(names.CONTROL, "{}"),
        lambda: client.hset(names.acked_key(7), "points/0", 9),
        lambda: client.xadd(names.reports_stream("a.b"), {"m": "x"}),
        lambda: client.xadd(names.telemetry_stream("a.b"), {"m": "x"}),
        lambda: client.xadd(names.REPORTS, {"m": "x"}),
        lambda: client.xadd(names.TELEMETRY, {"m": "x"}),
        lambda: client.xadd(names.JOINS, {"m": "x"}),
        lambda: client.xread({names.reports_stream("a"): "0"}),
        lambda: client.xrange(names.telemetry_stream("a")),
        lambda: client.xdel(names.reports_stream("a"), "1-1"),
        lambda: client.xtrim(names.reports_stream("a"), 0),
        lambda: client.delete(names.reports_stream("a")),
        lambda: client.get("session:1"),
        lambda: client.lpush(names.TICK, "1"),
        lambda: client.publish(names.live_channel("fleet"), "x"),
        lambda: client.execute_command("SUBSCRIBE", names.live_channel("fleet")),
        lambda: client.keys("*"),
        lambda: next(client.scan_iter()),
        lambda: client.flushall(),
        lambda: client.flushdb(),
        lambda: client.config_get("requirepass"),
        lambda: client.config_set("maxmemory", "1"),
        lambda: client.eval("return 1", 0),
        lambda: client.script_load("return 1"),
        lambda: client.execute_command("FUNCTION", "LIST"),
        lambda: client.execute_command("ACL", "LIST"),
        lambda: client.execute_command("ACL", "SETUSER", "x", "on"),
        lambda: client.execute_command("CLIENT", "LIST"),
        lambda: client.execute_command("MONITOR"),
        lambda: client.execute_command("SHUTDOWN"),
        lambda: client.execute_command("REPLICAOF", "127.0.0.1", "1"),
        lambda: client.execute_command("MIGRATE", "127.0.0.1", "1", names.CONTROL, 0, 1),
        lambda: client.info(),
    ):
        assert refused(act), inspect.getsource(act)


def test_a_nodes_celery_worker_needs_no_shared_key(
    broker: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection, queue and unacknowledged orders, also those of an agent that was killed."""
    from celery import Celery
    from kombu import transport

    node = factories.node("a")
    assert broker_users.apply_all()
    celery_client.send([celery_client.Order("agent.probe", "a", "text")])
    server = broker.client()
    server.execute_command("ACL", "LOG", "RESET")
    monkeypatch.setattr(transport, "TRANSPORT_ALIASES", {**transport.TRANSPORT_ALIASES})
    monkeypatch.setattr(transport, "_transport_cache", {})
    install()
    app = Celery(broker=names.broker_url(own_url(broker, node)), amqp=Amqp, set_as_current=False)
    app.conf.broker_transport_options = {**options("a"), "visibility_timeout": 300}
    taken: list[Any] = []
    with app.connection_for_read() as connection:
        channel = connection.channel()
        with connection.Consumer(
            app.amqp.queues.select_add(names.node_queue("a"), routing_key=names.node_queue("a")),
            channel=channel,
            accept=["json"],
            on_message=taken.append,
        ):
            connection.drain_events(timeout=30)
        assert len(taken) == 1
        assert server.hlen(names.node_key("a", names.UNACKED)) == 1
        channel.qos.visibility_timeout = -1
        server.config_resetstat()
        channel.qos.restore_visible(num=channel.unacked_restore_limit)
        commands = server.info("commandstats")
        assert "cmdstat_zrevrangebyscore" in commands and "cmdstat_zrange" not in commands
        assert server.llen(names.node_queue("a")) == 1, "taken again"
        assert server.hlen(names.node_key("a", names.UNACKED)) == 0
    assert server.execute_command("ACL", "LOG") == []
    assert not [key for key in server.keys() if "kombu" in key or key.startswith("unacked")]  # noqa: SIM118


def test_the_user_for_joining_can_only_join(broker: Guarded, settings: Any) -> None:
    factories.node("a")
    assert broker_users.apply_all()
    client = broker.client(broker_users.join_url())
    assert client.get(names.CONTROL) is None
    client.xadd(names.JOINS, {"m": "x"})
    assert client.blpop([names.join_reply_key("nonce")], 0.01) is None
    for act in (
        lambda: client.xrange(names.JOINS),
        lambda: client.xadd(names.REPORTS, {"m": "x"}),
        lambda: client.xadd(names.TELEMETRY, {"m": "x"}),
        lambda: client.xadd(liveness.heartbeat_key("a"), {"m": "x"}),
        lambda: client.brpop([names.node_queue("a")], 0.01),
        lambda: client.set(names.CONTROL, "{}"),
        lambda: client.keys("*"),
        lambda: client.eval("return 1", 0),
        lambda: client.execute_command("ACL", "WHOAMI"),
    ):
        assert refused(act), inspect.getsource(act)
    before = broker_users.join_url()
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "rotated" * 8
    assert broker_users.apply_all()
    assert broker_users.join_url() != before
    for url in (before, broker_users.join_url()):
        assert broker.client(url).get(names.CONTROL) is None, "both keys are accepted"
    settings.ENV = settings.ENV.model_copy(update={"redis_join_password": "chosen"})
    assert broker_users.apply_all() and ":chosen@" in broker_users.join_url()
    with pytest.raises(redis.AuthenticationError):
        broker.client(before).ping()


def join(broker: Guarded, name: str) -> tuple[dict[str, Any], bytes]:
    """Join by the reports stream; `(reply, the node's secret)`."""
    token = factories.fleet.join_token_create(by=None)
    token_id, key = envelope.join_token_parts(token)
    request = envelope.join_request(token, name=name)
    body = {"request": request, "inventory": factories.inventory(name).to_dict()}
    body |= {"release": "0.2.0", "wire": "1.1"}
    text = envelope.seal(key, names.KIND_JOIN, body, ttl_s=60, now=time.time(), node=token_id)
    assert report(text)
    reply = json.loads(broker.client().blpop([names.join_reply_key(request["nonce_a"])], 10)[1])
    return reply, envelope.join_accept(token, request, reply)[1]


def test_joining_again_replaces_the_user_and_removal_deletes_it(broker: Guarded) -> None:
    reply, secret = join(broker, "a")
    assert reply[broker_access.FIELD_USER] == "orrery-node-a"
    url = broker_access.url_as(broker.url, "orrery-node-a", broker_access.node_password(secret))
    assert broker_login.choose(broker.url, node="a", secret=secret, before=None) == (url, "own")
    earlier = broker.client(url)
    assert earlier.ping()
    _, new = join(broker, "a")
    with pytest.raises(redis.ConnectionError):  # its connection was closed
        earlier.ping()
    with pytest.raises(redis.AuthenticationError):
        broker.client(url).ping()
    client = broker.client(own_url(broker, Node.objects.get()))
    client.xadd(liveness.heartbeat_key("a"), {"m": "x"})
    services.node_remove(node=Node.objects.get(), by=factories.user("chief", role="operator"))
    with pytest.raises(redis.ConnectionError):
        client.ping()
    assert not broker.client().exists(liveness.heartbeat_key("a"))
    with pytest.raises(broker_login.NoLogin, match="may only join"):
        broker_login.choose(
            broker_users.join_url(), node="a", secret=new, before="own", patience_s=0.0
        )


def test_a_node_that_destroys_its_streams_damages_no_other(broker: Guarded, tmp_path: Path) -> None:
    """Longest ids, trimming and a flood of one node; the reports of another arrive."""
    nodes = [factories.node(name) for name in ("bad", "good")]
    assert broker_users.apply_all()
    bad, good = (broker.client(own_url(broker, node)) for node in nodes)
    last = 2**64 - 1
    for stream in (names.reports_stream("bad"), names.telemetry_stream("bad")):
        for _ in range(300):
            bad.xadd(stream, {"m": "x" * 1000})
        bad.xadd(stream, {"m": "x"}, maxlen=50, approximate=False)
        bad.xadd(stream, {"m": "x"}, id=f"{last}-{last}")
    good.xadd(names.reports_stream("good"), {"m": "good"})
    box = Inbox(lambda: redis.Redis.from_url(broker.url, socket_timeout=10), consumer="me")
    box.start(["bad", "good"])
    entries = []
    while len(entries) < 52:  # 51 of the flood
        entry = box.get(10.0)
        if entry is not None and entry.source is not None:  # no wake-up
            entries.append(entry)
            box.acknowledge(entry.source)
    assert b"good" in [entry.text for entry in entries[:51]], "its turn is not after the flood"
    box.flush()
    box.stop()
    ingest = Ingest()
    ingest.tick()
    server = control_redis.client()
    assert DeadLetter.objects.filter(node="bad", source="telemetry").count() == 2, "by content"
    for stream in (names.reports_stream("bad"), names.telemetry_stream("bad")):
        assert server.xlen(stream) == 0
        streams.clean(server, [stream])
        assert bad.xadd(stream, {"m": "y"}), "even its own ids are usable again"


def test_removing_a_node_waits_until_its_messages_are_read(broker: Guarded) -> None:
    node = factories.node("a")
    assert broker_users.apply_all()
    client = broker.client(own_url(broker, node))
    for stream in (names.reports_stream("a"), names.telemetry_stream("a")):
        client.xadd(stream, {"m": "x"})
    reader = threading.Timer(0.3, broker.client().delete, [names.reports_stream("a")])
    reader.start()
    assert broker_users.close_node("a", patience_s=1.0) == 1, "telemetry is not read"
    reader.join()
    with pytest.raises(redis.ConnectionError):  # it cannot send more meanwhile
        client.ping()
    broker_users.remove_node("a")
    assert broker.client().keys("orrery:node:a:*") == []
    broker.client().set(names.reports_stream("gone"), "x")
    factories.node("b")
    broker.client().set(names.reports_stream("b"), "x")
    broker_users.delete_unknown([])
    assert broker.client().keys("orrery:node:*") == [names.reports_stream("b")]


def test_users_return_after_a_restart_of_the_broker(broker: Guarded) -> None:
    node = factories.node("a")
    loop = Loop()
    loop._keep_users(0.0)
    assert broker.client(own_url(broker, node)).ping()
    server = broker.client()
    server.execute_command("ACL", "SETUSER", "orrery-node-gone", "on", "nopass", "+@all")
    loop._keep_users(1.0)
    assert "orrery-node-gone" in server.execute_command("ACL", "USERS"), "not in every pass"
    loop._keep_users(100.0)
    assert "orrery-node-gone" not in server.execute_command("ACL", "USERS")
    broker.stop()
    loop._keep_users(200.0)  # it is down
    broker.start()
    with pytest.raises(redis.AuthenticationError):
        broker.client(own_url(broker, node)).ping()
    control_redis.reset()
    loop._keep_users(200.5)
    assert broker.client(own_url(broker, node)).ping()


def test_without_users_nodes_share_the_credentials(
    broker: Guarded, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = broker.client()
    limited = ["reset", "on", ">limited", "~*", "&*", "+@all", "-acl"]
    server.execute_command("ACL", "SETUSER", "control", *limited)
    settings.REDIS_URL = broker_access.url_as(broker.url, "control", "limited")
    control_redis.reset()
    server.execute_command("ACL", "DELUSER", broker_access.JOIN_USER)
    assert broker_users.limited_join_url() is None and broker_users.join_url() == settings.REDIS_URL
    reply, secret = join(broker, "a")
    assert broker_access.FIELD_USER not in reply
    assert "nodes, which share the credentials" in caplog.text
    url = settings.REDIS_URL
    assert broker_login.choose(url, node="a", secret=secret, before="shared") == (url, "shared")
    # its own user, once the control plane may create it
    settings.REDIS_URL = broker.url
    control_redis.reset()
    assert broker_users.apply_all()
    assert broker_login.choose(url, node="a", secret=secret, before="shared")[1] == "own"
    settings.ENV = settings.ENV.model_copy(update={"redis_acl": False})
    assert not broker_users.apply_all() and broker_users.join_url() == broker.url
    users = broker.client().execute_command("ACL", "USERS")
    assert not [user for user in users if user.startswith(broker_access.NODE_USERS)]


def test_the_url_for_joining_works_before_the_scheduler_knows_the_broker(broker: Guarded) -> None:
    broker.client().execute_command("ACL", "DELUSER", broker_access.JOIN_USER)
    url = broker_users.limited_join_url()
    assert url is not None and broker.client(url).ping()


def test_an_agent_with_a_wrong_password_stops_at_once(broker: Guarded, tmp_path: Path) -> None:
    token = factories.fleet.join_token_create(by=None)
    url = broker_access.url_as(broker.url, broker_access.JOIN_USER, "wrong")
    with pytest.raises(identity.NotJoined, match="refuses the user or password"):
        identity.identify(
            tmp_path, factories.inventory("a"), redis_url=url, token=token, patience_s=3600.0
        )


def test_while_the_broker_is_down_the_user_stays() -> None:
    for before in ("own", "shared"):
        url, user = broker_login.choose(
            "redis://127.0.0.1:1/0", node="a", secret=b"s", before=before
        )
        assert user == before and (broker_access.user_of(url) != "") == (before == "own")


def test_a_running_agent_logs_that_its_user_is_refused(
    broker: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    node = factories.node("a")
    assert broker_users.apply_all()
    url = own_url(broker, node)
    reporter = Reporter(node="a", secret=selectors.node_secret(node), redis_url=url)
    assert reporter.heartbeat([], [])
    broker_users.remove_node("a")
    reporter.heartbeat([], [])  # its connection was closed
    reporter._disconnected = False
    assert not reporter.heartbeat([], [])
    assert "Redis refuses this node's user" in caplog.text
    assert not broker.client().exists(liveness.heartbeat_key("a"))
    assert broker_users.apply_all() and reporter.heartbeat([], []), "it returns with its user"
