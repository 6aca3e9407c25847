/* Curves in the browser: at most 1,500 points each, spikes retained, one value per step. Does not depend on DOM or network. */
import { parse } from "./format.js";

export const MOST = 1500;
const AFTER_COMPACTION = 1000;

export class Curve {
  constructor(name, rank = null) {
    Object.assign(this, { name, rank, unit: "", attempt: 0 });
    this.clear();
  }

  clear() {
    this.x = [];
    this.y = [];
    this.low = null;
    this.high = null;
    this.total = 0;
    this.thinned = false;
    this.filled = false;
  }

  get length() { return this.x.length; }
  get last() { return this.x.length ? { x: this.x.at(-1), y: this.y.at(-1) } : null; }

  /** Takes a series answer as it is; points that came live meanwhile and lie after it are kept. */
  replace(answer, keepTail = true) {
    const tail = keepTail && this.x.length ? this.after(answer.x.at(-1) ?? -Infinity) : [];
    this.x = answer.x.map(parse);
    this.y = answer.y.map(parse);
    this.low = answer.low ? answer.low.map(parse) : null;
    this.high = answer.high ? answer.high.map(parse) : null;
    this.unit = answer.unit ?? this.unit;
    this.rank = answer.rank ?? this.rank;
    this.attempt = answer.attempt ?? this.attempt;
    this.total = answer.total_points ?? this.x.length;
    this.thinned = this.total > this.x.length;
    this.filled = true;
    for (const [x, y] of tail) this.put(x, y);
  }

  after(x) {
    const from = upper(this.x, x);
    return this.x.slice(from).map((at, i) => [at, this.y[from + i]]);
  }

  /** Adds a point, or replaces the one at the same place (a newer attempt, a repeat). True when it changed something. */
  put(x, y) {
    const end = this.x.length ? this.x.at(-1) : -Infinity;
    if (x > end) {
      this.x.push(x);
      this.y.push(y);
      if (this.low) { this.low.push(y); this.high.push(y); }
      this.total += 1;
      if (this.x.length > MOST) this.compact();
      return true;
    }
    const at = upper(this.x, x) - 1;
    if (at >= 0 && this.x[at] === x) {
      if (Object.is(this.y[at], y)) return false;
      this.y[at] = y;
      if (this.low) { this.low[at] = y; this.high[at] = y; }
      return true;
    }
    if (this.thinned) return false; // its bucket is drawn already
    this.x.splice(at + 1, 0, x);
    this.y.splice(at + 1, 0, y);
    if (this.low) { this.low.splice(at + 1, 0, y); this.high.splice(at + 1, 0, y); }
    this.total += 1;
    if (this.x.length > MOST) this.compact();
    return true;
  }

  /** Thins to 1,000 points: of each bucket the smallest, the largest and any that is not a number stay. */
  compact() {
    const keep = extremes(this.y, AFTER_COMPACTION);
    const pick = (list) => (list ? keep.map((i) => list[i]) : null);
    if (!this.low) { this.low = this.y.slice(); this.high = this.y.slice(); }
    for (const key of ["x", "y", "low", "high"]) this[key] = pick(this[key]);
    this.thinned = true;
    this.wantsServer = true;
  }
}

/** Indices of the smallest and largest of each bucket, first and last, and of what is not finite (few of a bucket). */
export function extremes(y, most) {
  const buckets = Math.max(1, Math.floor(most / 2) - 1), size = y.length / buckets;
  const keep = new Set([0, y.length - 1]);
  for (let b = 0; b < buckets; b++) {
    let low = -1, high = -1, odd = -1;
    for (let i = Math.floor(b * size), end = Math.floor((b + 1) * size); i < end; i++) {
      if (!Number.isFinite(y[i])) { odd = i; continue; }
      if (low < 0 || y[i] < y[low]) low = i;
      if (high < 0 || y[i] > y[high]) high = i;
    }
    if (odd >= 0) { keep.add(odd); if (high >= 0) keep.add(high); }
    else { if (low >= 0) keep.add(low); if (high >= 0) keep.add(high); }
  }
  return [...keep].filter((i) => i >= 0).sort((a, b) => a - b);
}

/** Exponential moving average with bias correction; places where y is not a number stay so and do not count. */
export function ema(y, weight) {
  if (!weight) return y;
  let mean = 0, mass = 0;
  return y.map((value) => {
    if (!Number.isFinite(value)) return NaN;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

/** First index whose x is above `value`. */
export function upper(x, value) {
  let low = 0, high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
