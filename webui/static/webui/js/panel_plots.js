/* Data of a panel → Plotly traces and layout, for bars, scatter plots, histograms and heat maps; rows for their tables.
   Pure: no DOM, no network, no Plotly call. */
import { axisTitle } from "./figure.js";
import { inUnit, parse, quantity } from "./format.js";
import { format, gettext } from "./i18n.js";
import { faint } from "./plot.js";

const plain = (text) => String(text).replaceAll("<", "&lt;");
const short = (text) => (text.length > 28 ? `${text.slice(0, 27)}…` : text);

/** `hueOf(run)` and `hueOfMetric(place)` are colors; `names` maps run ids to names. Returns {data, layout}. */
export function plot({ spec, data, theme, colorOf, width }) {
  const names = new Map(data.runs.map((run) => [run.id, `${run.id} ${run.name}`]));
  const input = { spec, data, content: data.content, theme, colorOf, names, width };
  const { traces, x = {}, y = {}, margin = {}, scales = "xy" } = { bar, scatter, histogram, heatmap }[spec.kind](input);
  const axis = { gridcolor: theme.grid, linecolor: theme.line, zeroline: false, tickfont: { size: 11 }, automargin: false, color: theme["text-3"] };
  return {
    data: traces,
    layout: {
      uirevision: "still", autosize: true, showlegend: false, hovermode: "closest", dragmode: "zoom", bargap: 0.15, barmode: "group",
      margin: { l: width < 420 ? 46 : 54, r: 14, t: 8, b: 44, ...margin }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: theme.font, size: 11, color: theme["text-3"] },
      hoverlabel: { bgcolor: theme.surface, bordercolor: theme["line-strong"], font: { color: theme.text, size: 12 } },
      xaxis: { ...axis, showgrid: false, ticks: "outside", tickcolor: theme.line, ticklen: 4, ...x, ...(scales.includes("x") ? scale(spec, "x") : {}) },
      yaxis: { ...axis, nticks: 6, ...y, ...(scales.includes("y") ? scale(spec, "y") : {}) },
    },
  };
}

/* Logarithm and limits of an axis, where it has numbers. */
function scale(spec, name) {
  const low = spec[`${name}_min`] ?? null, high = spec[`${name}_max`] ?? null, log = Boolean(spec[`${name}_log`]);
  const at = (limit) => (limit === null ? null : log ? Math.log10(limit) : limit);
  const result = log ? { type: "log", tickformat: "~g" } : {};
  if (low === null && high === null) return result;
  return { ...result, range: [at(low), at(high)], autorange: low !== null && high !== null ? false : low === null ? "min" : "max" };
}

const title = (text) => ({ title: { text: plain(text), standoff: 6, font: { size: 11 } } });
/* Ticks of an axis with these values: SI multiples from ten thousand on. */
const ticks = (unit, values) => (unit === "fraction" ? { tickformat: ".1~%" } : { ticksuffix: unit === "s" ? " s" : "", tickformat: values.some((value) => Math.abs(value) >= 1e4) ? "~s" : "~g" });

function bar({ spec, data, content, theme, colorOf, names, width }) {
  const metrics = [...new Set(content.bars.map((entry) => entry.metric))], labels = data.runs.map((run) => names.get(run.id));
  const traces = metrics.map((metric, place) => {
    const own = content.bars.filter((entry) => entry.metric === metric).toReversed(); // the first run is on top
    return {
      type: "bar", orientation: "h", name: metric, x: own.map((entry) => entry.value), y: own.map((entry) => names.get(entry.run)),
      marker: { color: own.map((entry) => (metrics.length > 1 ? colorOf.metric(place) : colorOf.run(entry.run))) },
      text: own.map((entry) => plain(`${names.get(entry.run)}, ${metric}: ${inUnit(entry.value, data.unit)}`)), hoverinfo: "text", textposition: "none",
    };
  });
  const room = Math.min(width * 0.4, 8 + 6.4 * Math.max(4, ...labels.map((label) => short(label).length)));
  return {
    traces, scales: "x", margin: { l: room, b: 40 }, x: { ...ticks(data.unit, content.bars.map((entry) => parse(entry.value))), ...title(`${content.aggregate}${metrics.length === 1 ? ` ${metrics[0]}` : ""}${data.unit && data.unit !== "fraction" ? ` (${data.unit})` : ""}`), showgrid: true, ...(spec.x_log ? {} : { rangemode: "tozero" }) },
    y: { type: "category", tickvals: labels, ticktext: labels.map((label) => plain(short(label))), showgrid: false, nticks: undefined },
  };
}

function scatter({ data, content, theme, colorOf, names }) {
  const texts = content.points.some((point) => typeof point.x === "string"), over = content.over === "steps";
  return {
    traces: [{
      type: "scatter", mode: "markers", x: content.points.map((point) => (typeof point.x === "string" ? plain(point.x) : point.x)), y: content.points.map((point) => parse(point.y)),
      marker: { size: over ? 5 : 9, opacity: over ? 0.55 : 0.9, color: content.points.map((point) => colorOf.run(point.run)), line: { width: over ? 0 : 1, color: theme.surface } },
      text: content.points.map((point) => plain(`${names.get(point.run)}${over ? `, ${format(gettext("step %(step)s"), { step: point.step })}` : ""}: ${content.x} ${shown(point.x)}, ${content.y} ${inUnit(parse(point.y), data.unit)}`)),
      hoverinfo: "text",
    }],
    x: { ...title(content.x), showgrid: true, ...(texts ? { type: "category" } : { tickformat: "~g" }) }, y: { ...ticks(data.unit, content.points.map((point) => parse(point.y))), ...title(content.y) },
    margin: { l: 60 }, scales: texts ? "y" : "xy",
  };
}

function histogram({ data, content, colorOf, theme, names }) {
  const logged = content.of === "media";
  const parts = logged ? content.items.map((item) => ({ ...item.data, label: `${names.get(item.run)}, ${format(gettext("step %(step)s"), { step: item.step })}`, color: colorOf.run(item.run) }))
    : [{ edges: content.edges, counts: content.counts, label: "", color: colorOf.metric(0) }];
  const traces = parts.map(({ edges, counts, label, color }) => ({
    type: "bar", x: counts.map((_, i) => (edges[i] + edges[i + 1]) / 2), width: counts.map((_, i) => edges[i + 1] - edges[i]), y: counts, name: label,
    marker: { color: parts.length > 1 ? faint(color, 0.5) : color, line: { width: 1, color: theme.surface } },
    text: counts.map((count, i) => plain(`${label ? `${label}: ` : ""}${quantity(edges[i])} – ${quantity(edges[i + 1])}: ${quantity(count)}`)), hoverinfo: "text", textposition: "none",
  }));
  const unit = data.unit && data.unit !== "fraction" ? ` (${data.unit})` : "";
  const counted = logged ? gettext("count") : content.over === "runs" ? gettext("runs") : gettext("points");
  return { traces, x: { ...ticks(data.unit, parts.flatMap((part) => part.edges)), ...title(`${logged ? content.items[0]?.name ?? "" : content.metric}${unit}`) }, y: title(counted) };
}

function heatmap({ data, content, theme, names, width }) {
  const logged = content.of === "histograms", alone = data.runs.length === 1;
  const labels = logged ? [] : content.rows.map((row) => (alone ? row.metric : new Set(content.rows.map((each) => each.metric)).size > 1 ? `${names.get(row.run)} · ${row.metric}` : names.get(row.run)));
  const room = logged ? 54 : Math.min(width * 0.4, 10 + 6.4 * Math.max(4, ...labels.map((label) => short(label).length)));
  const value = (z) => (logged ? quantity(z) : inUnit(z, data.unit));
  const across = (column) => (logged ? quantity(content.x[column]) : `${quantity(content.x[column])} – ${quantity(content.x[column + 1])}`);
  const trace = {
    type: "heatmap", x: content.x, y: logged ? content.y : labels.map((_, place) => place), z: content.z, hoverongaps: false, hoverinfo: "text",
    colorscale: [[0, theme["heat-ground"]], [0.5, theme["heat-mid"]], [1, theme.heat]],
    colorbar: { thickness: 8, len: 1, outlinewidth: 0, tickfont: { size: 10, color: theme["text-3"] }, ...ticks(data.unit, content.z.flat()), xpad: 4, nticks: 5 },
    text: content.z.map((row, place) => row.map((z, column) => plain(`${logged ? `${quantity(content.y[place])} – ${quantity(content.y[place + 1])}` : labels[place]}, ${axisTitle(content.axis)} ${across(column)}: ${z === null ? gettext("no data") : value(z)}`))),
  };
  const time = content.axis === "time" ? { type: "date" } : { tickformat: content.axis === "step" ? ",d" : "~s" };
  if (content.axis === "time") trace.x = content.x.map((second) => second * 1000);
  return {
    traces: [trace], scales: logged ? "xy" : "", margin: { l: room, r: 8 }, x: { ...time, ...title(axisTitle(content.axis)), nticks: 6 },
    y: logged ? { tickformat: "~g" } : { tickvals: labels.map((_, place) => place), ticktext: labels.map((label) => plain(short(label))), showgrid: false, autorange: "reversed" },
  };
}

const shown = (value) => (typeof value === "number" ? quantity(value, 4) : String(value));

/** The same numbers as rows of texts, the first with the titles of the columns. */
export function rows({ spec, data }) {
  const { content } = data, names = new Map(data.runs.map((run) => [run.id, `${run.id} ${run.name}`]));
  const value = (number) => inUnit(parse(number), data.unit);
  if (spec.kind === "bar") return [[gettext("run"), gettext("metric"), content.aggregate], ...content.bars.map((entry) => [names.get(entry.run), entry.metric, value(entry.value)])];
  if (spec.kind === "scatter") return [[gettext("run"), content.x, content.y], ...content.points.map((point) => [names.get(point.run), shown(point.x), value(point.y)])];
  if (spec.kind === "histogram") {
    const parts = content.of === "media" ? content.items.map((item) => [`${names.get(item.run)}, ${item.step}`, item.data]) : [["", content]];
    return [[gettext("from"), gettext("to"), gettext("count")], ...parts.flatMap(([label, part]) => part.counts.map((count, i) => [`${label && i === 0 ? `${label}: ` : ""}${quantity(part.edges[i], 4)}`, quantity(part.edges[i + 1], 4), quantity(count, 4)]))];
  }
  const logged = content.of === "histograms";
  return [
    [logged ? gettext("from") : gettext("metric"), axisTitle(content.axis), logged ? gettext("count") : gettext("mean")],
    ...content.z.flatMap((row, place) => row.flatMap((z, column) => (z ? [[logged ? quantity(content.y[place], 4) : `${names.get(content.rows[place].run)} ${content.rows[place].metric}`, quantity(content.x[column], 4), logged ? quantity(z, 3) : value(z)]] : []))),
  ];
}

/** A plot in one sentence, for screen readers. */
export function summary({ spec, data }) {
  const { content } = data, list = rows({ spec, data }).slice(1), title = data.title;
  if (spec.kind === "bar") {
    const best = content.bars.toSorted((a, b) => a.value - b.value), name = (entry) => data.runs.find((run) => run.id === entry.run)?.name ?? entry.run;
    return format(gettext("%(title)s. %(count)s bars, from %(low)s (%(lowest)s) to %(high)s (%(highest)s)."), {
      title, count: list.length, low: inUnit(best[0].value, data.unit), lowest: name(best[0]), high: inUnit(best.at(-1).value, data.unit), highest: name(best.at(-1)),
    });
  }
  if (spec.kind === "scatter") return format(gettext("%(title)s. %(count)s points of %(y)s over %(x)s."), { title, count: list.length, x: content.x, y: content.y });
  if (spec.kind === "histogram") return format(gettext("%(title)s. Histogram with %(count)s bins."), { title, count: list.length });
  return format(gettext("%(title)s. Heat map with %(rows)s rows and %(columns)s columns."), { title, rows: content.z.length, columns: content.z[0]?.length ?? 0 });
}
