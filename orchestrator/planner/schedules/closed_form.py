"""Closed forms of a pipeline's step time: each is the longest of a few chains of operations.

Rows of one schedule on two devices or more. The length of a chain is linear in the stage times; the
coefficients count operations in the longest chains of the event simulator, and tests compare the
two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """Rows of one schedule: p devices, v stages on each, m micro-batches, and seconds.

    `f`, `b`, `w`: forward, input gradient and weight gradient of one regular stage, of which a
    pipeline has p * v. `xf`, `xb`, `xw`: extra time of the first stage (embedding); `yf`, `yb`,
    `yw`: of the last one (logits, loss). `h`: transfer to a stage on another device. `o`: time
    saved when a forward overlaps with a backward (dualpipev).
    """

    p: Ints
    v: Ints
    m: Ints
    f: Floats
    b: Floats
    w: Floats
    xf: Floats
    xb: Floats
    xw: Floats
    yf: Floats
    yb: Floats
    yw: Floats
    h: Floats
    o: Floats

    @property
    def t(self) -> Floats:
        """Work of a regular stage on one micro-batch."""
        return self.f + self.b + self.w

    @property
    def x(self) -> Floats:
        """Extra work of the first stage on one micro-batch."""
        return self.xf + self.xb + self.xw

    @property
    def y(self) -> Floats:
        """Extra work of the last stage on one micro-batch."""
        return self.yf + self.yb + self.yw


def busy_s(c: Columns, schedule: str) -> Floats:
    """Mean busy time of the devices; in dualpipev minus what its pairs save."""
    work = c.m * (c.v * c.t + (c.x + c.y) / c.p)
    if schedule == "dualpipev":
        work = work - c.o * (2 * (c.m - 2 * c.p) + c.p + 1 + (c.p - 1) / 2 - 1 / c.p)
    return np.asarray(work, np.float64)


def naive(c: Columns) -> Floats:
    """Exact. A micro-batch passes all stages and returns before the next one starts."""
    return _longest(c.m * (c.p * c.t + c.x + c.y + 2 * (c.p - 1) * c.h))


def gpipe(c: Columns) -> Floats:
    """Exact. Even stages: m(F + B) + (p - 1)(F + B) (arXiv 1811.06965).

    Both halves are flow shops of equal jobs: one traversal, then the slowest stage m - 1 times.
    """
    forward = c.p * c.f + c.xf + c.yf + (c.m - 1) * (c.f + np.maximum(c.xf, c.yf))
    back, x, y = c.b + c.w, c.xb + c.xw, c.yb + c.yw
    backward = c.p * back + x + y + (c.m - 1) * (back + np.maximum(x, y))
    return _longest(forward + backward + 2 * (c.p - 1) * c.h)


def one_forward_one_backward(c: Columns) -> Floats:
    """Exact. Even stages: m(F + B) + (p - 1)(F + B) (arXiv 2104.04473, section 2.2.1).

    A chain traverses the pipeline down and up once, then spends the other m - 1 micro-batches at
    the first stage, at the last one, or, p micro-batches at a time, on further round trips, each
    with 2(p - 1) hops.
    """
    n, back = c.p - 1, c.b + c.w
    xb, t, few = c.xb + c.xw, c.t, np.maximum(c.p - c.m, 0)
    way = n * t + c.x + c.y + 2 * n * c.h
    trips, rest = np.divmod(c.m - 1, c.p)
    at_end = np.where(trips > 0, np.maximum(c.x, c.y), c.y)
    part = np.maximum(2 * (rest - 1) * c.h + at_end, rest * at_end) * (rest > 0)
    once = np.maximum(c.m - n, 1)
    chains = _longest(
        way + (c.m - 1) * c.y,
        np.where(trips > 0, way + (c.m - c.p) * c.x + c.y + 2 * n * c.h, 0.0),
        way + trips * (c.x + c.y + 2 * n * c.h) + part,
        c.m * c.x + few * (t + 2 * c.h),
        few * c.f + n * back + once * c.xf + c.m * xb + c.y + 2 * n * c.h,
        n * c.f + few * back + c.m * c.xf + once * xb + c.y + 2 * n * c.h,
    )
    return _sum(c.m * t, chains)


def pipedream(c: Columns) -> Floats:
    """Exact. The slowest cycle, m times, of a run that never flushes (arXiv 1806.03377).

    A cycle is one stage's forward and backward, or p concurrent round trips with 2(p - 1) hops per
    p.
    """
    n = c.p - 1
    several = _longest(
        c.x,
        c.y,
        (c.x + c.y + 2 * n * c.h) / c.p,
        (np.maximum(c.x, c.y) + 2 * (n - 1) * c.h) / np.maximum(n, 1),
        2 * np.maximum(n - 2, 0) * c.h / np.maximum(n - 1, 1),
    )
    return _sum(c.m * c.t, c.m * several)


def interleaved(c: Columns) -> Floats:
    """Even stages without hops exact: m v (F + B) + (p - 1)(F + B), with F and B of a chunk.

    Source: arXiv 2104.04473, 2.2.2. With fewer micro-batches than devices each of the v - 1 changes
    to the next chunk waits for a traversal of all devices. Uneven ends and hops: a lower bound, or
    close to it.
    """
    n, p, m = c.p - 1, c.p, c.m
    back, x_back = c.b + c.w, c.xb + c.xw
    few = np.maximum(p - m, 0) * (c.v - 1)
    rounds = m // p * (m % p == 0)
    # hops longer than the work of a turn delay every round
    around = p * (c.v - 1) * np.maximum(rounds - 1, 0) * np.maximum(c.h - c.f, 0.0)
    there_and_back = n * rounds // 2 * np.maximum(2 * c.h - c.f - back, 0.0)
    base = (n + few) * c.t + 2 * n * c.h + (c.v - 2) * (_turn(c, c.f) + _turn(c, back))
    chains = _longest(
        base + c.x + _turn(c, c.f, c.xf) + _turn(c, back, x_back) + m * c.y,
        base + _turn(c, c.f) + _turn(c, back) + around + c.x + m * c.y,
        base + _turn(c, c.f) + _turn(c, back) + around + there_and_back + rounds * (c.x + c.y),
        np.where(
            m >= 2 * p, (n - 1) * c.t + 2 * p * c.h * (c.v - 1) + (m - p) * c.x + 2 * p * c.y, 0.0
        ),
        m * c.x,
    )
    return _sum(m * c.v * c.t, chains)


def zb1p(c: Columns) -> Floats:
    """Exact for even stages without hops and m >= p: the bubble is (p - 1) max(F, B, F + B - W).

    Times are those of a chunk, B is the input gradient only; if W is the shortest, the bubble is (p
    - 1)(F + B - W), the ZB1P of arXiv 2401.10241 (its table 2), independent of v. Uneven ends and
    hops: a lower bound, or close to it.
    """
    n, p, m, h = c.p - 1, c.p, c.m, c.h
    held, turn, x_back = _held(c), _turn(c, c.f), c.xb + c.xw
    middle = n * (c.f + c.b - c.w)
    around = (c.v - 2) * turn
    stay = _longest(p * x_back - np.maximum(2 * p - 1 - held, 0) * c.yw, held * x_back - n * c.yw)
    into = around + c.xf + _turn(c, c.f, c.xf)
    # hops bind on round trips between the ends, one trip less with a single round
    ways = (c.v - 1) * turn - np.where(m < 2 * p, 2 * h, 0.0)
    # if hops take longer than the weight gradients that fill them, every round waits
    way = n * c.v * (m // p) + c.v - 2
    back_again = np.where(m >= 2 * p, (c.v - 1) * p * np.maximum(c.w - h, 0.0), -c.w)
    waits = (
        middle
        + n * (2 * h + c.w)
        + way * (2 * h - c.w)
        + back_again
        + m // p * (c.x - c.xw + c.y - c.yw)
    )
    at_first = (m - n) * c.xf + m * x_back + 2 * (c.yf + c.yb) + c.yw
    at_last = (m - n) * c.y - 2 * c.yw
    chains = _longest(
        middle
        + 2 * n * h
        + into
        + np.where(c.v > 2, held * x_back, _longest(x_back, stay))
        + m * c.y,
        middle + 4 * n * h + around + m * c.x + 2 * (c.yf + c.yb) + c.yw,
        middle
        + 4 * n * h
        + ways
        + np.where(m < 2 * p, c.x + 2 * (c.yf + c.yb), _longest(at_first, at_last)),
        n * c.f + n * h + into + m * c.y,
        n * c.f + 3 * n * h + ways + at_last + c.yw,
        n * c.b + 2 * n * h + around + m * c.x + c.yf + c.yb,
        np.where(m % p == 0, waits, 0.0),
        m * c.y,
    )
    return _sum(m * c.v * c.t, chains)


def zbv(c: Columns) -> Floats:
    """Exact for even stages without hops and m >= 2p - 1; for F = B = W the bubble is (p - 1) F.

    F is that of a chunk. In arXiv 2401.10241 the bubble is zero if steps overlap; here a step ends
    when its last device ends. First and last stage share device 0, which is never idle if they are
    heavy enough. Uneven ends and hops: approximate.
    """
    n, p, m, e = c.p - 1, c.p, c.m, c.x + c.y
    f, b, w, h = c.f, c.b, c.w, c.h
    x_back = c.xb + c.xw
    start = c.xf + 2 * n * np.maximum(c.xf - h, 0.0)
    up = start + c.yf + c.yb
    late = 2 * n * np.maximum(h - c.xf, 0.0)
    # excess of a hop over the work that hides it
    slow = np.maximum(h - np.minimum(f, b) - w, 0.0)
    chains = _longest(
        b + (n - 1) * w + 3 * n * h + up,
        n * b + (5 * n - 2) * h + up,
        (n - 1) * f + b + (5 * n - 2) * h + up,
        2 * n * (b - w) + (6 * n - 2) * h + up + x_back,
        f + (n - 1) * w + (3 * n - 2) * h + start,
        n * f + (3 * n - 2) * h + start,
        n * (f + b - 2 * w) + (4 * n - 2) * h + start,
        (2 * n - 1) * f - (n - 1) * b + (3 * n - 2) * h + start,
        (2 * n - 1) * f + b - 2 * n * w + (4 * n - 2) * h + start + x_back,
        2 * n * f - n * b - w + 3 * n * h + up,
        n * (b - 2 * w) + n * _longest(f, b) - w + 6 * n * h + 2 * (n * (m - p) // p - 1) * slow,
        2 * n * f - (2 * n + 1) * w + 4 * n * h + up + x_back,
        m * e + late + np.maximum((n - 1) * w + n * h - p * x_back - c.yw, 0.0),
        m * e + late + n * b - p * w + 2 * n * h - n * x_back - c.yw,
        m * e
        + late
        + n * (2 * b - f)
        - (2 * n + 1) * w
        + 4 * n * h
        - c.xf
        - n * (x_back + c.y)
        - 2 * c.yw,
    )
    return _sum(2 * m * c.t, chains)


def dualpipev(c: Columns) -> Floats:
    """Exact for even stages without hops and m >= 2p; a pair takes F and B + W minus `o`.

    The (p/2 - 1)(F&B + B - 3W) of arXiv 2412.19437 does not count what pairs save. Layers are
    placed once (see `orders.device_of_stage`). Uneven ends and hops: approximate.
    """
    n, p, m, e = c.p - 1, c.p, c.m, c.x + c.y
    f, b, w, h = c.f, c.b, c.w, c.h
    x_back = c.xb + c.xw
    steady = m - 2 * p
    trips, rest = np.divmod(steady, p)
    # pairs of all devices in turn, or of device 0 alone
    fill = (
        np.maximum(2 * (n * trips + rest) * h + trips * e, steady * e)
        - (2 * steady + 3 * p - 2) * c.o
    )
    fill = fill + c.xf + 2 * n * np.maximum(c.xf - h, 0.0) + x_back + c.y
    # at device 0, which rarely waits
    first = m * e + 2 * n * np.maximum(h - c.xf, 0.0) - (2 * steady + p + 1) * c.o
    down, up = n * (x_back + c.y), c.yf + c.yb
    chains = _longest(
        (n - 1) * f + n * b + (7 * n - 2) * h + fill + up,
        (n - 1) * f + 2 * n * b - n * w + (8 * n - 2) * h + fill + x_back + up,
        2 * n * f + (5 * n - 2) * h + fill,
        2 * n * f + n * (b - w) + (6 * n - 2) * h + fill + x_back,
        first,
        first + n * (b - w) + 2 * n * h - n * x_back,
        first + n * (b - w) + (n - 1) * b + (4 * n - 2) * h - c.xf - down + up - (n - 1) * c.o,
        first + n * (b - w) + n * b - f + 4 * n * h - c.xf - down - c.yw - (n - 1) * c.o,
        first + n * (f + b - w) + 4 * n * h - 2 * n * x_back - n * c.y - n * c.o,
        first
        + n * (f + b - w)
        + (n - 1) * b
        + 4 * n * h
        - c.xf
        - 2 * n * (x_back + c.y)
        + up
        - 2 * n * c.o,
    )
    return _sum(2 * m * c.t, chains)


def _held(c: Columns) -> Ints:
    """Micro-batches of a round: about as many as devices, fewer if the step has fewer."""
    return np.asarray(c.m // np.maximum(1, c.m // c.p))


def _turn(c: Columns, work: Floats, extra: Floats | float = 0.0) -> Floats:
    """Time of a round between chunks, beyond `work` per micro-batch or device.

    Either the first stage runs all micro-batches, all but one with its `extra`, or one micro-batch
    passes all devices.
    """
    held = _held(c)
    stay = (held - 1) * extra - np.maximum(c.p - held, 0) * work
    return _longest(stay, c.p * c.h - np.maximum(held - c.p, 0) * work)


def _longest(*chains: Floats) -> Floats:
    return np.asarray(reduce(np.maximum, chains), np.float64)


def _sum(*terms: Floats) -> Floats:
    return np.asarray(sum(terms), np.float64)


# schedule -> formula, and the minimum of micro-batches (times p, plus) for which it holds
FORMULAS: dict[str, tuple[Callable[[Columns], Floats], tuple[int, int]]] = {
    "naive": (naive, (0, 1)),
    "gpipe": (gpipe, (0, 1)),
    "1f1b": (one_forward_one_backward, (0, 1)),
    "interleaved_1f1b": (interleaved, (0, 1)),
    "zb1p": (zb1p, (1, 0)),
    "zbv": (zbv, (2, -1)),
    "dualpipev": (dualpipev, (2, 0)),
    "pipedream": (pipedream, (0, 1)),
}
