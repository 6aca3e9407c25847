/* Curves and a view → Plotly traces and layout. Pure: no DOM, no network, no Plotly call. */
import { gettext } from "./i18n.js";
import { ema, extremes, upper } from "./store.js";
import { faint } from "./plot.js";

const AXIS = {
  step: { tickformat: ",d" },
  tokens: { tickformat: "~s" },
  flops: { tickformat: "~s" },
  time: { type: "date" },
  elapsed: { tickformat: "~s" },
};
const UNIT_SUFFIXES = { s: " s", W: " W", "°C": " °C" };
const FEW = 60; // a curve of so few points is not smoothed: validation points stay exact
const POINTS_PER_PIXEL = 1.2; // more cannot be seen; the extremes stay
const LAYER_PLACES = 400; // of a stack: its cost is the sum of its layers
const LINES_FOR_EVENTS = 60; // more marks than that get no line through the chart

/** `panel`: {id, kind, unit, zero, series: [{name, label, hue, dash}]}; `view`: axis, smoothing, range, scales.
    `memory`: kept by the chart between calls, so that the y axis stays still while data stay inside it. */
export function figure({ panel, curves, view, window, marks, theme, memory, width }) {
  const shown = panel.series.filter((item) => !view.hidden.has(item.name) && curves.get(item.name)?.length);
  const scale = view.x === "time" ? 1000 : 1;
  const [from, to] = window ?? span(shown, curves);
  const traces = [];
  const extent = { low: Infinity, high: -Infinity };
  const odd = [];
  const stack = panel.kind === "stack";
  const grid = stack ? commonPlaces(shown.map(({ name }) => curves.get(name))) : null;
  const most = Math.max(300, Math.round(width * POINTS_PER_PIXEL));
  for (const item of shown) {
    const own = curves.get(item.name), color = theme[item.hue], curve = stack ? held(own, grid) : own;
    const a = Math.max(0, upper(curve.x, from) - 1), b = Math.min(curve.x.length, upper(curve.x, to) + 1);
    const x = cut(curve.x, a, b, scale);
    const y = a || b < curve.y.length ? curve.y.slice(a, b) : curve.y;
    const smoothing = view.smooth > 0 && !stack && own.length > FEW;
    const smooth = smoothing ? ema(y, view.smooth) : y;
    const keep = !stack && x.length > most ? extremes(y, most) : null;
    const cuts = view.x === "time" && !stack ? pauses(keep ? keep.map((i) => x[i]) : x) : [];
    const seen = (list) => interrupted(keep ? keep.map((i) => list[i]) : list, cuts);
    if (!stack) for (const value of smoothing ? [...quartiles(y), ...smooth] : y) grow(extent, value, view.logy);
    x.forEach((at, i) => { if (!Number.isFinite(y[i])) odd.push([at, item.label, y[i]]); });
    if (!stack && curve.low && curve.length > 400 && !smoothing) traces.push(...band(seen(x), seen(curve.high.slice(a, b)), seen(curve.low.slice(a, b)), color));
    if (smoothing) traces.push(line(seen(x), seen(y), faint(color, 0.28), 1, item));
    traces.push(stack ? layer(x, y, color, item) : line(seen(x), seen(smooth), color, 1.75, item, x.length < 30));
  }
  for (const level of shown.length ? panel.levels ?? [] : []) {
    grow(extent, level.value, view.logy);
    traces.push(across(level, from * scale, to * scale, theme[level.hue]));
  }
  if (stack && grid) for (const total of totals(shown, curves, grid, from, to)) grow(extent, total, false);
  traces.push(...oddTrace(odd, theme), ...markTraces(marksOf(panel, marks), theme, from, to, view.x, scale, memory));
  const [low, high] = limited(steady(extent, panel, view, memory), view);
  return {
    data: traces,
    layout: layout({ panel, view, theme, range: padded(from * scale, to * scale, view), y: [low, high], width, empty: !shown.length }),
    from, to,
  };
}

/* Room for the marks at both ends; a logarithmic axis has it by its rounding. */
function padded(from, to, view) {
  const room = view.logx && view.x !== "time" ? 0 : (to - from) * 0.012;
  return [from - room, to + room];
}

/** What the x axis shows, with its unit. */
export function axisTitle(x) {
  return { step: gettext("step"), time: gettext("time (UTC)"), tokens: gettext("tokens"), flops: gettext("FLOPs"), elapsed: gettext("seconds since the first point") }[x];
}

/* Where a curve over time stops for a minute or longer and for 20 usual distances: a pause, not a slope. */
function pauses(x) {
  const steps = x.slice(1).map((value, i) => value - x[i]), usual = steps.toSorted((a, b) => a - b)[steps.length >> 1];
  return steps.flatMap((step, i) => (step > Math.max(60_000, 20 * usual) ? [i + 1] : []));
}

const interrupted = (list, cuts) => (cuts.length ? list.flatMap((value, i) => (cuts.includes(i) ? [null, value] : [value])) : list);

function span(shown, curves) {
  let from = Infinity, to = -Infinity;
  for (const { name } of shown) {
    const { x } = curves.get(name);
    from = Math.min(from, x[0]);
    to = Math.max(to, x.at(-1));
  }
  if (from > to) return [0, 1];
  return from === to ? [from - 0.5, to + 0.5] : [from, to];
}

const cut = (list, a, b, scale) => {
  const part = a || b < list.length ? list.slice(a, b) : list;
  return scale === 1 ? part : part.map((value) => value * scale);
};

function grow(extent, value, log) {
  if (!Number.isFinite(value) || (log && value <= 0)) return;
  if (value < extent.low) extent.low = value;
  if (value > extent.high) extent.high = value;
}

/* With smoothing on, lone spikes of the faint line may leave the chart; the bulk of it may not. */
function quartiles(y) {
  const sorted = y.filter(Number.isFinite).sort((p, q) => p - q);
  return sorted.length ? [sorted[Math.floor(sorted.length * 0.02)], sorted[Math.floor((sorted.length - 1) * 0.98)]] : [];
}

function* totals(shown, curves, grid, from, to) {
  const layers = shown.map(({ name }) => held(curves.get(name), grid).y);
  for (let i = Math.max(0, upper(grid.x ?? [], from) - 1); i < grid.length && grid.x[i] <= to; i++)
    yield layers.reduce((sum, y) => sum + (y[i] || 0), 0);
}

/* The places that all layers of a stack are drawn at: those of the longest one, thinned where its extremes allow. */
function commonPlaces(curves) {
  const longest = curves.reduce((a, b) => (b.length > a.length ? b : a), { x: [], y: [], length: 0 });
  if (longest.length <= LAYER_PLACES) return longest;
  const x = longest.x, sums = x.map(() => 0);
  for (const curve of curves) held(curve, { x, length: x.length }).y.forEach((y, i) => { sums[i] += y || 0; });
  const keep = extremes(sums, LAYER_PLACES);
  return { x: keep.map((i) => x[i]), y: [], length: keep.length };
}

/* A layer at the places of another curve: each series is thinned at places of its own, and layers must share theirs. */
function held(curve, grid) {
  if (curve === grid) return curve;
  let at = -1;
  const y = grid.x.map((x) => {
    while (at + 1 < curve.length && curve.x[at + 1] <= x) at += 1;
    return curve.y[Math.max(at, 0)];
  });
  return { x: grid.x, y, length: grid.length };
}

const line = (x, y, color, width, item, dots = false) => ({
  type: "scatter", mode: dots ? "lines+markers" : "lines", x, y, name: item.label, hoverinfo: "skip", connectgaps: false,
  line: { color: color, width, dash: item.dash || "solid" }, marker: { size: 4, color: color },
});
/* What was predicted: dashed, in the color of what it predicts. */
const across = (level, from, to, color) => ({
  type: "scatter", mode: "lines", x: [from, to], y: [level.value, level.value], name: level.label, hoverinfo: "skip",
  line: { color: color, width: 1.25, dash: "dash" },
});
const layer = (x, y, color, item) => ({
  type: "scatter", mode: "lines", x, y, name: item.label, hoverinfo: "skip", stackgroup: "one",
  line: { color: color, width: 0.5 }, fillcolor: faint(color, 0.75),
});
const band = (x, high, low, color) => [
  { type: "scatter", mode: "lines", x, y: high, line: { width: 0 }, hoverinfo: "skip" },
  { type: "scatter", mode: "lines", x, y: low, line: { width: 0 }, fill: "tonexty", fillcolor: faint(color, 0.16), hoverinfo: "skip" },
];

/* What is not a number: a red cross on the axis, never a silent hole. */
function oddTrace(odd, theme) {
  if (!odd.length) return [];
  return [{
    type: "scatter", mode: "markers", yaxis: "y2", x: odd.map((o) => o[0]), y: odd.map(() => 0.025),
    marker: { symbol: "x", size: 8, color: theme.fail }, text: odd.map((o) => `${o[1]}: ${Number.isNaN(o[2]) ? gettext("not a number") : gettext("infinite")}`),
    hovertemplate: "%{text}<extra></extra>",
  }];
}

/* The wide chart marks every event, the others only failures: checkpoints say nothing about a learning rate. */
function marksOf(panel, marks) {
  return panel.wide ? marks : marks.filter((mark) => mark.kind === "bad");
}

function markTraces(marks, theme, from, to, axis, scale, memory) {
  const seen = marks.map((mark) => ({ ...mark, at: mark[axis] })).filter((mark) => mark.at >= from && mark.at <= to);
  memory.marks = seen;
  if (!seen.length) return [];
  const traces = [];
  if (seen.length <= LINES_FOR_EVENTS) for (const bad of [false, true]) {
    const some = seen.filter((mark) => (mark.kind === "bad") === bad && mark.kind !== "plain" && mark.kind !== "good");
    if (some.length) traces.push({
      type: "scatter", mode: "lines", yaxis: "y2", hoverinfo: "skip",
      x: some.flatMap((mark) => [mark.at * scale, mark.at * scale, null]), y: some.flatMap(() => [0, 0.96, null]),
      line: { width: 1, dash: "dot", color: faint(bad ? theme.fail : theme.event, 0.55) },
    });
  }
  const symbols = { bad: "triangle-up", good: "square", plain: "circle", event: "diamond" };
  const colors = { bad: theme.fail, good: theme.good, plain: theme["text-3"], event: theme.event };
  traces.push({
    type: "scatter", mode: "markers", yaxis: "y2", x: seen.map((mark) => mark.at * scale), y: seen.map(() => 0.97),
    marker: { symbol: seen.map((mark) => symbols[mark.kind] ?? "diamond"), size: 8, color: seen.map((mark) => colors[mark.kind] ?? theme.event) },
    text: seen.map((mark) => mark.text), hovertemplate: "%{text}<extra></extra>",
  });
  return traces;
}

/* The y range moves only when data leave it or fill less than two thirds of it. */
function steady(extent, panel, view, memory) {
  let { low, high } = extent;
  if (low > high) [low, high] = view.logy ? [0.1, 1] : [0, 1];
  if (view.logy) [low, high] = [Math.log10(low), Math.log10(high)];
  else if (panel.zero) low = Math.min(0, low);
  const pad = (high - low || Math.abs(high) * 0.1 || 1) * 0.06;
  const key = `${view.logy}|${view.smooth > 0}`;
  const before = memory.key === key ? memory.range : null;
  if (before && low >= before[0] && high <= before[1] && high - low > 0.66 * (before[1] - before[0])) return before;
  memory.key = key;
  memory.range = [panel.zero && !view.logy && low === 0 ? 0 : low - pad, high + pad * 2];
  return memory.range;
}

/* The limits that a panel sets on its y axis, in the place of what the data need. */
function limited([low, high], view) {
  const at = (limit) => (view.logy ? Math.log10(limit) : limit), [from, to] = view.limits ?? [null, null];
  const range = [from ?? null, to ?? null].map((limit, i) => (limit === null ? [low, high][i] : at(limit)));
  return range[0] < range[1] ? range : from === null || from === undefined ? [range[1] - 1, range[1]] : [range[0], range[0] + 1];
}

function layout({ panel, view, theme, range, y, width, empty }) {
  const axis = AXIS[view.x], small = width < 420;
  const log = view.logx && view.x !== "time";
  const [a, b] = range[0] === range[1] ? [range[0] - 1, range[1] + 1] : range;
  const common = {
    gridcolor: theme.grid, linecolor: theme.line, zeroline: false, color: theme["text-3"], tickfont: { size: 11 }, fixedrange: false,
    ticklabeloverflow: "allow", // the margins have room; else every label is measured twice
  };
  return {
    uirevision: "still", datarevision: performance.now(), autosize: true, showlegend: false, hovermode: "closest", hoverdistance: 12,
    margin: { l: small ? 46 : 54, r: 14, t: 8, b: view.x === "time" ? 58 : 46 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: theme.font, size: 11, color: theme["text-3"] }, dragmode: empty ? false : "zoom",
    hoverlabel: { bgcolor: theme.surface, bordercolor: theme["line-strong"], font: { color: theme.text, size: 12 } },
    xaxis: {
      ...common, type: log ? "log" : (axis.type ?? "linear"), tickformat: axis.tickformat, nticks: small ? 4 : 7, showgrid: false,
      title: { text: axisTitle(view.x), standoff: 6, font: { size: 11 } },
      ticks: "outside", tickcolor: theme.line, ticklen: 4, range: log ? [Math.log10(Math.max(a, 1)), Math.log10(Math.max(b, 2))] : [a, b],
    },
    yaxis: {
      ...common, type: view.logy ? "log" : "linear", range: y, nticks: 5, ...ticks(panel.unit, y, view.logy), fixedrange: true,
      ...(view.logy ? { dtick: y[1] - y[0] > 2 ? 1 : undefined, minor: { showgrid: false } } : {}),
    },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  };
}

/* Ticks in the unit's own words: binary multiples for bytes, per cent for fractions, SI else. */
function ticks(unit, [low, high], log) {
  if (unit === "fraction") return { tickformat: high - low < 0.02 ? ".2%" : high - low < 0.1 ? ".1%" : ".0%" };
  if (unit === "s" && !log && high < 1) return scaled(high, 1e-3, "ms");
  const ticksuffix = UNIT_SUFFIXES[unit] ?? "";
  if (unit !== "bytes" || log) return { ticksuffix, tickformat: high >= 1e4 ? "~s" : high < 1e-3 ? "~e" : ",~g" };
  const power = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, high)) / 10)));
  return scaled(high, 1024 ** power, ["B", "KiB", "MiB", "GiB", "TiB"][power]);
}

function scaled(high, size, word) {
  const step = nice(high / size / 4) * size;
  const tickvals = Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
  return { tickvals, ticktext: tickvals.map((v) => `${+(v / size).toPrecision(4)} ${word}`) };
}

function nice(value) {
  const ten = 10 ** Math.floor(Math.log10(value || 1));
  return ([1, 2, 2.5, 5, 10].find((n) => n * ten >= value) ?? 10) * ten;
}
