/* Formats numbers like webui/presentation/formatting.py. */
import { format, gettext } from "./i18n.js";

export const DASH = "–";
export const real = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

/** The number that JSON carried: the strings "NaN", "Infinity", "-Infinity" become themselves. */
export const parse = (value) => (typeof value === "string" ? Number(value) : value === null || value === undefined ? NaN : value);

const formats = []; // by decimals: making one takes longer than a thousand uses
const english = (decimals) => (formats[decimals] ??= new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));

export function significant(value, digits = 3) {
  if (value === 0) return "0";
  const decimals = Math.max(0, Math.min(20, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
  return english(decimals).format(value);
}

export function quantity(value, digits = 3) {
  if (real(value) === null) return DASH;
  for (const [size, suffix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= size) return significant(value / (suffix === "k" ? 1e3 : size), digits) + suffix;
  if (Math.abs(value) < 1e-3 && value !== 0) return value.toExponential(digits - 1);
  return Number.isInteger(value) ? english(0).format(value) : significant(value, Math.max(digits, String(Math.trunc(Math.abs(value))).length));
}

export function memory(value) {
  if (real(value) === null) return DASH;
  for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]])
    if (Math.abs(value) >= 1024 ** power) return `${significant(value / 1024 ** power)} ${unit}`;
  return `${Math.round(value)} B`;
}

export const percent = (value) => (real(value) === null ? DASH : `${significant(100 * value)}%`);

export function duration(value) {
  if (real(value) === null || value < 0) return DASH;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return value < 10 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
  const seconds = Math.round(value), minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  const two = (n) => String(n).padStart(2, "0");
  if (days) return `${days} d ${two(hours % 24)} h`;
  if (hours) return `${hours} h ${two(minutes % 60)} min`;
  return seconds % 60 ? `${minutes} min ${two(seconds % 60)} s` : `${minutes} min`;
}

/** A predicted duration with the precision that it has: 35 min, 2.5 h. */
export function remaining(value) {
  if (real(value) === null || value < 0) return DASH;
  if (value < 55) return `${Math.max(5, 5 * Math.round(value / 5))} s`;
  for (const [most, size, step, unit] of [[570, 60, 1, "min"], [5400, 60, 5, "min"], [36000, 3600, 0.5, "h"], [172800, 3600, 1, "h"], [Infinity, 86400, 0.5, "d"]])
    if (value < most) return `${Math.max(step, step * Math.round(value / size / step))} ${unit}`;
  return DASH;
}

export function ago(seconds) {
  const rounded = Math.max(0, Math.round(seconds));
  if (rounded < 3) return gettext("now");
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (rounded >= size) return format(gettext("%(age)s ago"), { age: `${Math.floor(rounded / size)} ${unit}` });
  return format(gettext("%(age)s ago"), { age: `${rounded} s` });
}

/** A value of a metric in its unit; the unit comes from the series endpoint or the chart. */
export function inUnit(value, unit) {
  if (unit === "bytes") return memory(value);
  if (unit === "fraction") return percent(value);
  if (unit === "seconds" || unit === "s") return real(value) === null ? DASH : value < 1 ? `${significant(value * 1000)} ms` : `${significant(value)} s`;
  return unit ? `${quantity(value, unit.startsWith("nats/") ? 4 : 3)} ${unit}` : quantity(value, 4);
}
