"""The rank watch with a simulated clock: timely alarms, none in first steps, saves, validation."""

from __future__ import annotations

from pathlib import Path

from workers.contracts.wire.progress import BEACON, BEAT, LAYOUT, VERSION
from workers.launcher.hangs import hang_events
from workers.launcher.hangs.hang_detector import MIN_LIMIT_S, RankWatch, Stall, StallOver
from workers.launcher.hangs.stragglers import LOOKS, StragglerDetector


class Ranks:
    """Two ranks' beacons; `tick` moves the clock while they stand where `at` put them."""

    def __init__(self, folder: Path, *, synchronized: bool = True) -> None:
        self.folder, self.now, self.marks = folder, 1000.0, 0
        self.watch = RankWatch(
            lambda rank: folder / f"rank-{rank}",
            [0, 1],
            pipeline_stage=lambda rank: rank,
            node="n",
            synchronized=synchronized,
        )
        for rank in (0, 1):
            (folder / f"rank-{rank}").mkdir()
        self.at("starting", 0)

    def at(self, phase: str, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.marks += 1
        for rank in ranks:
            words = LAYOUT.pack(VERSION, step, 1, self.marks, int(self.now * 1e9), phase.encode())
            (self.folder / f"rank-{rank}" / BEACON).write_bytes(
                words + BEAT.pack(int(self.now * 1e9))
            )

    def beat(self, rank: int) -> None:
        path = self.folder / f"rank-{rank}" / BEACON
        path.write_bytes(path.read_bytes()[: LAYOUT.size] + BEAT.pack(int(self.now * 1e9)))

    def tick(self, seconds: float, beats: tuple[int, ...] = (0, 1)) -> list[object]:
        result = []
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for rank in beats:
                self.beat(rank)
            result.append(self.watch.look(self.now))
        return [each for each in result if each is not None]

    def steps(self, first: int, last: int, each_s: float = 1.0) -> list[object]:
        result = []
        for step in range(first, last + 1):
            self.at("forward", step)
            result += self.tick(each_s / 2)
            self.at("update", step)
            result += self.tick(each_s / 2)
        return result


def test_a_stall_is_reported_in_time_with_the_rank_without_heartbeat(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    assert ranks.steps(0, 9) == []
    ranks.at("forward", 10)
    ranks.at("update", 10, ranks=(0,))
    [stall] = ranks.tick(10.0, beats=(0,))
    assert isinstance(stall, Stall) and MIN_LIMIT_S < stall.quiet_s <= 10.0
    assert [(each.rank, each.stage, each.phase) for each in stall.diagnosis.behind] == [
        (1, 1, "forward")
    ]
    assert [each.rank for each in stall.diagnosis.waiting] == [0]
    [repeated] = ranks.tick(32.0, beats=(0,))
    assert isinstance(repeated, Stall) and repeated.repeated
    ranks.at("update", 10)
    [over] = ranks.tick(1.0)
    assert isinstance(over, StallOver) and over.quiet_s > 40.0
    assert ranks.steps(11, 15) == []
    assert isinstance(ranks.tick(10.0)[0], Stall), (
        "and its length is not what the next one is compared with"
    )


def test_replicas_may_idle_and_a_stalled_one_is_detected(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, synchronized=False)
    assert ranks.steps(0, 9) == []
    for _ in range(100):
        ranks.at("idle", 10)
        assert ranks.tick(1.0) == [], "no requests are no hang"
    assert ranks.steps(10, 12) == [] and ranks.watch.step_s == 1.0, "and no step either"
    result = []
    for _ in range(12):
        ranks.at("idle", 20, ranks=(0,))
        result += ranks.tick(1.0)
    [stall] = result
    assert isinstance(stall, Stall) and [each.rank for each in stall.diagnosis.behind] == [1]


def test_long_steps_are_given_their_time(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    assert ranks.steps(0, 6, each_s=20.0) == []
    ranks.at("forward", 7)
    assert ranks.tick(45.0) == []
    assert isinstance(ranks.tick(15.0)[0], Stall), "within three times a step"


def test_no_alarm_at_the_start_in_first_steps_in_validation_saves_and_texts(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    assert ranks.tick(120.0) == [] and not ranks.watch.in_a_step
    assert ranks.steps(0, 0, each_s=100.0) == [], "compiling"
    assert ranks.steps(1, 9) == []
    for phase in ("validation", "checkpoint", "samples", "compile"):
        ranks.at(phase, 10)
        assert ranks.tick(90.0) == [], f"a first {phase} takes as long as it takes"
        assert not ranks.watch.in_a_step
        ranks.at("forward", 10)
        assert ranks.tick(1.0) == []
        ranks.at(phase, 10)
        assert ranks.tick(200.0) == [], "the next one up to 2.5 times that"
        assert isinstance(ranks.tick(40.0)[0], Stall)
        ranks.at("forward", 11)
        ranks.tick(1.0)


def test_the_announced_end_of_a_hang_is_the_limit_that_ends_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.steps(0, 9)
    for phase, expected in (("samples", 60.0), ("forward", 20.0)):
        for seconds in (2.0, 60.0):  # the first text takes 2 s, the second does not end
            ranks.at(phase, 10)
            stalls = [item for item in ranks.tick(seconds) if isinstance(item, Stall)]
        limit_s = hang_events.limit_s(20.0, in_step=ranks.watch.in_a_step)
        report = hang_events.event(stalls[0], nodes=1, ends_after_s=limit_s)
        assert report is not None
        assert (limit_s, report["data"]["ends_after_s"]) == (expected, expected), phase
        ranks.at("forward", 11)
        ranks.tick(1.0)


def arrivals(
    late_ns: int, count: int = 40, start: int = 0
) -> dict[int, list[tuple[str, int, int]]]:
    """Three ranks at collectives every 100 ms; rank 2 comes late."""
    at = [(number, number * 100_000_000) for number in range(start, start + count)]
    return {
        rank: [("g", n, ns + (late_ns if rank == 2 else rank * 1000)) for n, ns in at]
        for rank in range(3)
    }


def test_a_rank_that_is_always_late_is_reported_once(tmp_path: Path) -> None:
    detector = StragglerDetector()
    reported = [detector.look(arrivals(50_000_000, start=40 * look)) for look in range(LOOKS + 3)]
    [result] = [each for each in reported if each is not None]
    assert result.rank == 2 and 0.4 < result.share < 0.6 and abs(result.mean_s - 0.05) < 0.001
    assert all(StragglerDetector().look(arrivals(1_000_000)) is None for _ in range(LOOKS)), (
        "no rank is late"
    )
    few = {0: [("g", 1, 5)], 1: [("h", 1, 9)]}
    assert detector.look(few) is None, "nothing in common"
