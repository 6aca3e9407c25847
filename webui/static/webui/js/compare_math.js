/* Numbers behind the charts of the Compare page. Does not depend on DOM or network. */
import { upper } from "./store.js";

/** The value of a curve at `at`, on the line between its neighbors; NaN outside of the curve. */
export function valueAt(x, y, at) {
  const after = upper(x, at), before = after - 1;
  if (before < 0) return NaN;
  if (x[before] === at) return y[before];
  if (after >= x.length) return NaN;
  const part = (at - x[before]) / (x[after] - x[before]);
  return y[before] + part * (y[after] - y[before]);
}

/** The name of the group of a value: integers such as seeds are exact, other numbers have 8 digits. */
export const groupName = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(8))) : String(value));

/** Mean, minimum and maximum of several curves at up to `most` places; a place has at least one of them. */
export function band(items, most = 300) {
  const all = [...new Set(items.flatMap(({ x }) => x))].sort((a, b) => a - b), step = Math.max(1, all.length / most);
  const result = { x: [], mean: [], low: [], high: [], count: [] };
  for (let i = 0; i < all.length; i += step) {
    const at = all[Math.floor(i)];
    const values = items.map(({ x, y }) => valueAt(x, y, at)).filter(Number.isFinite);
    if (!values.length) continue;
    result.x.push(at);
    result.mean.push(values.reduce((sum, value) => sum + value, 0) / values.length);
    result.low.push(Math.min(...values));
    result.high.push(Math.max(...values));
    result.count.push(values.length);
  }
  return result;
}

/** Exponential moving average whose weight holds per median distance of x: points far apart count as several steps. */
export function averageOver(x, y, weight) {
  const gaps = x.slice(1).map((at, i) => at - x[i]).filter((gap) => gap > 0).sort((a, b) => a - b);
  const usual = gaps[gaps.length >> 1] || 1;
  let mean = 0, mass = 0, last = null;
  return y.map((value, i) => {
    if (!Number.isFinite(value)) return NaN;
    const own = last === null ? weight : weight ** Math.min(1e3, Math.max(0, (x[i] - last) / usual));
    last = x[i];
    mean = own * mean + (1 - own) * value;
    mass = own * mass + (1 - own);
    return mass ? mean / mass : value;
  });
}
