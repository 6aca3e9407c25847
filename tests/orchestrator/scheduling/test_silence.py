"""Silence is measured by the broker's stamps and only while the broker could be observed."""

from __future__ import annotations

import math

import redis

from orchestrator.scheduling.reports.silence import Liveness, NewHeartbeat
from workers.contracts.wire import liveness as wire

START = 1e9  # the broker's clock


class Observer:
    """A Liveness with a simulated broker: `beats` and `leases` are `{name: stamp}`."""

    def __init__(self) -> None:
        self.heard, self.now = Liveness(), 0.0
        self.beats: dict[str, float] = {}
        self.leases: dict[str, float] = {}

    def run(self, seconds: float, *, beating: tuple[str, ...] = (), polls: bool = True) -> None:
        """Let time pass; the beating nodes beat every second, and each second is polled."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for name in beating:
                self.beats[name] = START + self.now
            if polls:
                self.poll()

    def poll(self) -> list[NewHeartbeat]:
        beats = [
            (name, f"{at * 1000:.0f}-0".encode(), b"sealed") for name, at in self.beats.items()
        ]
        leases = [
            (node, (fence,), str(at).encode())
            for (fence, _, node), at in ((k.partition("/"), v) for k, v in self.leases.items())
        ]
        return self.heard.update(START + self.now, beats, leases, now=self.now)

    def fails(self, seconds: float) -> None:
        """Let time pass while the broker does not answer."""
        self.now += seconds
        self.heard._polled = None


def test_a_node_without_heartbeat_becomes_silent_alone() -> None:
    observer = Observer()
    observer.run(10, beating=("a", "b"))
    observer.run(30, beating=("b",))
    assert observer.heard.node_silence("a") == 30
    assert observer.heard.node_silence("b") == 0


def test_an_outage_of_the_broker_is_no_silence() -> None:
    observer = Observer()
    observer.run(10, beating=("a", "b"))
    observer.fails(600)
    observer.poll()
    assert observer.heard.node_silence("a") == 0, "no heartbeat could arrive"
    observer.run(20, beating=("b",))
    assert observer.heard.node_silence("a") == 20
    assert observer.heard.node_silence("b") == 0


def test_a_paused_scheduler_counts_at_most_two_polls() -> None:
    observer = Observer()
    observer.run(10, beating=("a",))
    observer.run(300, beating=("a",), polls=False)
    observer.poll()
    assert observer.heard.node_silence("a") == 0
    observer.now += 300  # and the node was silent meanwhile
    observer.poll()
    assert observer.heard.node_silence("a") == 2


def test_a_restarted_scheduler_starts_from_zero() -> None:
    observer = Observer()
    observer.run(10, beating=("a",))
    observer.heard = Liveness()
    observer.run(600, polls=False)
    observer.poll()
    assert observer.heard.node_silence("a") == 0 and observer.heard.node_silence("never") == 0
    observer.run(40)
    assert observer.heard.node_silence("a") == 40 and observer.heard.node_silence("never") == 40


def test_an_unchanged_heartbeat_is_not_new() -> None:
    observer = Observer()
    observer.beats["a"] = START
    assert [beat.node for beat in observer.poll()] == ["a"]
    assert observer.poll() == []


def test_what_a_node_writes_in_another_format_concerns_it_alone(redis_url: str) -> None:
    heard = Liveness()
    with redis.Redis.from_url(redis_url) as broker:
        broker.flushall()
        broker.set(wire.heartbeat_key("a"), "text")
        broker.set(wire.leases_key("a"), "text")
        broker.xadd(wire.heartbeat_key("b"), {"m": "x" * (2**20 + 1)})
        broker.xadd(wire.heartbeat_key("c"), {"other": "kept"}, id="5-1")
        broker.xadd(wire.heartbeat_key("d"), {"m": "ahead"}, id="99999999999999-0")
        broker.xadd(wire.heartbeat_key("e"), {"m": "x" * 2**22, "n": "y"})
        broker.config_resetstat()
        beats = heard.poll(broker, ["a", "b", "c", "d", "e"])
        reads = broker.info("commandstats")["cmdstat_xrevrange"]["calls"]
        assert reads == 4, "the largest is not loaded to find out its size"
        assert [(beat.node, beat.text) for beat in beats] == [("c", b"kept"), ("d", b"ahead")]
        assert beats[0].stamp == 0.005 and abs(beats[1].stamp - heard.broker_now) < 1
        assert heard.poll(broker, ["a", "b", "c", "d", "e"]) == []
        broker.flushall()


def test_only_short_leases_of_open_attempts_are_stored(redis_url: str) -> None:
    heard = Liveness()
    fences = {"a": ["1"], "b": ["2", "3", "4", "5"]}
    with redis.Redis.from_url(redis_url) as broker:
        broker.flushall()
        broker.set(wire.leases_key("a"), "text")
        invented = {f"invented {n}": "x" * 1000 for n in range(5000)}
        invented |= {"3": "1", "4": "x" * 65, "5": "1\n2", "\xff": "1"}
        broker.hset(wire.leases_key("b"), mapping=invented)
        for _ in range(2):
            heard.poll(broker, ["a", "b", "c"], fences)
            assert {*heard._leases} == {("3", "b"), ("5", "b")}
        heard.poll(broker, ["a", "b", "c"], {"b": ["5"]})
        assert heard.lease_silence("3", "b") == math.inf and heard.lease_silence("5", "b") < 5
        broker.flushall()
        heard.poll(broker, ["a", "b", "c"], {"b": ["5"]})
        assert heard.lease_silence("5", "b") < 5, "silent since its last renewal"
        heard.poll(broker, ["a", "b", "c"])
        assert heard._leases == heard._lines == {}


def test_leases_are_silent_by_the_same_rule() -> None:
    observer = Observer()
    observer.leases["fence/a"] = START
    observer.run(12)
    assert observer.heard.lease_silence("fence", "a") == 11
    assert observer.heard.lease_silence("fence", "b") == math.inf
    observer.heard.forget("fence")
    assert observer.heard.lease_silence("fence", "a") == math.inf


def test_a_stamp_ahead_of_the_broker_still_ages() -> None:
    """After a failover to a broker whose clock is behind."""
    observer = Observer()
    observer.beats["a"] = START + 5000
    observer.run(40)
    assert observer.heard.node_silence("a") == 39
