/* Compare page: relations between configuration and metrics of runs. Plotly draws scatter, box and bars; parallel
   coordinates are lines over scaled axes. */
import { groupName } from "./compare_math.js";
import { startMenu } from "./compare_menu.js";
import { format, gettext } from "./i18n.js";
import { quantity } from "./format.js";
import { faint, plotly, theme } from "./plot.js";
import { loginExpired, request } from "./request.js";

const RETRY_MS = 2000;
const AXES = 8; // of parallel coordinates, the metric included
const plain = (text) => String(text).replaceAll("<", "&lt;");
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Reads the values of the runs and draws the card; returns the values, null if the server did not respond. */
export async function startRelations({ runs, ids, color, state }) {
  const card = document.getElementById("relations"), query = new URLSearchParams({ runs: ids });
  let problem = "";
  const read = async (more = {}, tries = 3) => {
    const answer = await request(`/runs/compare/values/?${new URLSearchParams({ ...Object.fromEntries(query), ...more })}`, { headers: { Accept: "application/json" } }).catch(() => null);
    problem = loginExpired(answer);
    const body = answer?.ok && !problem ? await answer.json().catch(() => null) : null;
    if (body || problem || tries === 1) return body;
    await new Promise((done) => setTimeout(done, RETRY_MS));
    return read(more, tries - 1);
  };
  let values = null;
  const find = (name) => card.querySelector(`[data-${name}]`), note = (text) => { find("note").textContent = text; };
  if (card) startMenu(card, () => (values && find("kind").value === "scatter" && find("aggregate").value !== "median" ? scatterPanel(runs, find) : null));
  values = await read();
  if (!card) return values;
  if (!values) { note(problem || gettext("The server did not respond. Reload the page.")); return null; }
  fill(find, values, state);

  const column = (key) => {
    if (key in values.config) return values.config[key];
    const [, aggregate, name] = /^(\w+)\((.*)\)$/s.exec(key) ?? [];
    return values.metrics[name]?.[aggregate]?.map((value) => (isNumber(value) ? value : null)) ?? runs.map(() => null);
  };
  const metric = () => `${find("aggregate").value}(${find("metric").value})`;
  const label = (key) => (key in values.config ? key : key.replace(/^last\((.*)\)$/s, "$1"));
  let turn = 0;

  async function draw() {
    const mine = (turn += 1), kind = find("kind").value;
    for (const field of card.querySelectorAll("[data-for]")) field.hidden = !field.dataset.for.split(" ").includes(kind);
    let answer;
    if (kind === "importance") {
      const more = await read({ metric: find("metric").value, aggregate: find("aggregate").value });
      answer = more ? importance(more.importances, label(metric()), runs.length) : empty(problem || gettext("The server did not respond. Choose the metric again."));
    } else if (kind === "parallel") answer = parallel(runs, values, column, metric(), label);
    else if (kind === "box") answer = boxes(runs, column, metric(), find("against").value, label);
    else if (kind === "error") answer = errors(runs, values.errors[find("error").value] ?? [], find("error").value, color);
    else answer = scatter(runs, column, metric(), find("against").value, label, color);
    const Plotly = await plotly();
    if (mine !== turn) return;
    note(answer.note ?? "");
    const colors = theme(), { xaxis, yaxis, ...layout } = answer.layout, axis = { gridcolor: colors.line, zerolinecolor: colors.line, linecolor: colors.line, automargin: true, exponentformat: "e" };
    Plotly.react(card.querySelector(".compare-plot"), answer.traces, {
      height: 420, margin: { l: 56, r: 12, t: 12, b: 44 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", hovermode: "closest", showlegend: false,
      font: { color: colors["text-2"], size: 12 }, ...layout, xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
    }, { displayModeBar: false, responsive: true });
    card.dataset.drawn = kind;
  }

  card.addEventListener("change", () => {
    for (const name of ["kind", "metric", "aggregate", "against", "error"]) state.set(`r-${name}`, find(name).value);
    history.replaceState(null, "", `?${state.toString().replaceAll("%2C", ",")}`);
    draw();
  });
  addEventListener("orrery:theme", draw);
  draw();
  return values;
}

function fill(find, values, state) {
  const metrics = Object.keys(values.metrics), keys = Object.keys(values.config), errors = Object.keys(values.errors);
  const group = (label, options) => {
    const element = Object.assign(document.createElement("optgroup"), { label });
    element.append(...options.map(([value, text]) => new Option(text, value)));
    return element;
  };
  find("metric").append(...metrics.map((name) => new Option(name, name)));
  find("against").append(group(gettext("configuration"), keys.map((key) => [key, key])), group(gettext("newest metrics"), metrics.map((name) => [`last(${name})`, name])));
  find("error").append(...errors.map((name) => new Option(name, name)));
  const usual = ["val_loss", "loss"].find((name) => metrics.includes(name));
  if (usual) find("metric").value = usual;
  for (const name of ["kind", "metric", "aggregate", "against", "error"]) if (state.has(`r-${name}`)) find(name).value = state.get(`r-${name}`);
  if (!find("kind").value) find("kind").value = "scatter";
}

const empty = (note) => ({ traces: [], layout: { xaxis: { visible: false }, yaxis: { visible: false } }, note });
const titled = (runs, i, ...lines) => [`${runs[i].id} ${runs[i].name}`, ...lines].map(plain).join("<br>");
const shown = (value) => (isNumber(value) ? quantity(value, 4) : String(value));

/* The scatter plot as a panel of a dashboard: the metric over a column of the runs table. */
function scatterPanel(runs, find) {
  const metric = find("metric").value, x = find("against").value.replace(/^last\((.*)\)$/s, "$1");
  return { id: "scatter", kind: "scatter", title: metric, metrics: [metric], x_metric: x, aggregate: find("aggregate").value, size: "medium", runs: { runs: runs.map(({ id }) => String(id)) } };
}

/* Logarithmic if the values are positive and span more than a factor of 20. */
function scaleOf(column) {
  const numbers = column.filter(isNumber), low = Math.min(...numbers), high = Math.max(...numbers);
  return numbers.length > 1 && low > 0 && high / low > 20 ? "log" : "linear";
}

function scatter(runs, column, y, x, label, color) {
  const [across, up] = [column(x), column(y)], places = runs.map((_, i) => i).filter((i) => across[i] !== null && up[i] !== null);
  if (!places.length) return empty(format(gettext("No run has both %(x)s and %(y)s."), { x: label(x), y: label(y) }));
  const numeric = places.every((i) => isNumber(across[i]));
  return {
    traces: [{
      type: "scatter", mode: "markers", x: places.map((i) => (numeric ? across[i] : String(across[i]))), y: places.map((i) => up[i]),
      marker: { size: 9, color: places.map((i) => color(i)) }, hoverinfo: "text", text: places.map((i) => titled(runs, i, `${label(x)}: ${shown(across[i])}`, `${label(y)}: ${shown(up[i])}`)),
    }],
    layout: { xaxis: { title: { text: plain(label(x)) }, type: numeric ? scaleOf(across) : "category" }, yaxis: { title: { text: plain(label(y)) }, type: scaleOf(up) } },
    note: places.length < runs.length ? format(gettext("%(shown)s of %(count)s runs have both values."), { shown: places.length, count: runs.length }) : "",
  };
}

/** An axis per configuration value that differs, the metric last; each line is a run, its color the metric. */
function parallel(runs, values, column, metric, label) {
  const result = column(metric), places = runs.map((_, i) => i).filter((i) => result[i] !== null);
  const keys = Object.keys(values.config).filter((key) => new Set(places.map((i) => values.config[key][i])).size > 1).slice(0, AXES - 1);
  if (places.length < 2 || !keys.length) return empty(gettext("Parallel coordinates need two runs with this metric and different configurations."));
  const axes = [...keys, metric].map((key) => axisOf(key, places.map((i) => column(key)[i])));
  const last = axes.at(-1), traces = places.map((run, k) => ({
    type: "scatter", mode: "lines", x: axes.map((_, i) => i), y: axes.map((axis) => axis.place(k)), line: { width: 1.6, color: shade(last.place(k)) }, hoverinfo: "text",
    text: axes.map(() => titled(runs, run, ...axes.map((axis) => `${label(axis.key)}: ${shown(axis.column[k] ?? gettext("not set"))}`))),
  }));
  const marks = axes.flatMap((axis, i) => axis.ticks.map(([at, text]) => ({ x: i, y: at, text: plain(text), showarrow: false, xanchor: i === axes.length - 1 ? "right" : "left", xshift: i === axes.length - 1 ? -6 : 6, bgcolor: faint(theme().surface, 0.8), font: { size: 11 } })));
  return {
    traces,
    layout: {
      margin: { l: 24, r: 24, t: 12, b: 60 }, annotations: marks, shapes: axes.map((_, i) => ({ type: "line", x0: i, x1: i, y0: 0, y1: 1, line: { color: theme()["line-strong"], width: 1 } })),
      xaxis: { tickvals: axes.map((_, i) => i), ticktext: axes.map(({ key }) => plain(label(key)).split(".").slice(-2).join(".")), showgrid: false, range: [-0.1, axes.length - 0.9], fixedrange: true },
      yaxis: { visible: false, range: [-0.04, 1.04], fixedrange: true },
    },
    note: format(gettext("%(count)s runs; lines from %(low)s (blue) to %(high)s (orange) of %(metric)s."), { count: places.length, low: shown(Math.min(...last.column)), high: shown(Math.max(...last.column)), metric: label(metric) }),
  };
}

/* Positions 0 to 1: numbers on a linear or logarithmic scale, texts in order. */
function axisOf(key, column) {
  if (column.every((value) => value === null || isNumber(value))) {
    const log = scaleOf(column) === "log", form = (value) => (log ? Math.log10(value) : value), numbers = column.filter(isNumber);
    const low = Math.min(...numbers), high = Math.max(...numbers), span = form(high) - form(low) || 1;
    return { key, column, place: (i) => (column[i] === null ? null : (form(column[i]) - form(low)) / span), ticks: [[0, shown(low)], [1, shown(high)]] };
  }
  const texts = [...new Set(column.filter((value) => value !== null).map(String))].sort(), at = (text) => (texts.length < 2 ? 0.5 : texts.indexOf(text) / (texts.length - 1));
  return { key, column, place: (i) => (column[i] === null ? null : at(String(column[i]))), ticks: texts.slice(0, 12).map((text) => [at(text), text.slice(0, 24)]) };
}

/* From blue to orange: visible in both themes, and without seeing red and green. */
function shade(part) {
  const mix = (a, b) => Math.round(a + (b - a) * (part ?? 0)).toString(16).padStart(2, "0");
  return `#${mix(0x2f, 0xe0)}${mix(0x6f, 0x7b)}${mix(0xd0, 0x1a)}`;
}

function importance(list, metric, count) {
  if (!list?.length) return empty(gettext("Importance needs five runs with this metric and a configuration value that differs."));
  const top = list.slice(0, 20).reverse(), colors = theme();
  const word = ({ method, direction }) => (method === "groups" ? gettext("differs between groups") : direction > 0 ? gettext("higher value, higher metric") : gettext("higher value, lower metric"));
  return {
    traces: [{
      type: "bar", orientation: "h", y: top.map(({ name }) => plain(name)), x: top.map(({ strength }) => strength), marker: { color: top.map(({ method, direction }) => (method === "groups" ? colors["text-3"] : direction > 0 ? colors.loss : colors.throughput)) },
      hoverinfo: "text", text: top.map((one) => plain(format(gettext("%(name)s: %(strength)s, %(direction)s, %(count)s runs"), { name: one.name, strength: quantity(one.strength, 2), direction: word(one), count: one.runs }))), textposition: "none",
    }],
    layout: { bargap: 0.35, xaxis: { range: [0, 1], title: { text: plain(format(gettext("association with %(metric)s, 0 to 1"), { metric })) } }, yaxis: { ticksuffix: " " } },
    note: format(gettext("Method: numbers by Spearman's rank correlation, texts by the correlation ratio of ranks, over the runs with both values (%(least)s or more of %(count)s). It shows association, not cause."), { least: Math.min(...list.map((one) => one.runs)), count }),
  };
}

/** A box per value of a configuration, over its runs (for example seeds), with each run as a point. */
function boxes(runs, column, metric, key, label) {
  const [by, up] = [column(key), column(metric)], groups = new Map();
  runs.forEach((_, i) => { if (up[i] !== null) { const name = by[i] === null ? gettext("not set") : groupName(by[i]); groups.set(name, [...(groups.get(name) ?? []), i]); } });
  if (!groups.size) return empty(gettext("No run has this metric."));
  const names = [...groups.keys()].sort((a, b) => Number(a) - Number(b) || a.localeCompare(b)), colors = theme();
  return {
    traces: names.map((name) => ({
      type: "box", name: plain(name), y: groups.get(name).map((i) => up[i]), boxpoints: "all", jitter: 0.4, pointpos: 0, marker: { size: 5, color: colors.loss }, line: { color: colors["text-2"], width: 1 }, fillcolor: faint(colors.loss, 0.12),
      hoverinfo: "text", text: groups.get(name).map((i) => titled(runs, i, `${label(metric)}: ${shown(up[i])}`)),
    })),
    layout: { xaxis: { type: "category", title: { text: plain(label(key)) } }, yaxis: { title: { text: plain(label(metric)) } } },
    note: format(gettext("Runs per box: %(counts)s. The box has the middle half of the runs, the line is the median."), { counts: names.map((name) => `${name}: ${groups.get(name).length}`).slice(0, 12).join(", ") }),
  };
}

/** Measured against predicted; the diagonal is a right prediction. */
function errors(runs, column, name, color) {
  const places = runs.map((_, i) => i).filter((i) => column[i]);
  if (!places.length) return empty(gettext("None of these runs has a prediction and a measured number."));
  const all = places.flatMap((i) => column[i]), ends = [Math.min(...all) * 0.9, Math.max(...all) * 1.1], off = places.map((i) => Math.abs(column[i][0] / column[i][1] - 1)).sort((a, b) => a - b);
  return {
    traces: [
      { type: "scatter", mode: "lines", x: ends, y: ends, line: { dash: "dot", width: 1, color: theme()["text-3"] }, hoverinfo: "skip" },
      { type: "scatter", mode: "markers", x: places.map((i) => column[i][0]), y: places.map((i) => column[i][1]), marker: { size: 9, color: places.map((i) => color(i)) }, hoverinfo: "text", text: places.map((i) => titled(runs, i, format(gettext("predicted %(predicted)s, measured %(measured)s (%(off)s%)"), { predicted: shown(column[i][0]), measured: shown(column[i][1]), off: (100 * (column[i][0] / column[i][1] - 1)).toFixed(1) }))) },
    ],
    layout: { xaxis: { title: { text: plain(format(gettext("%(name)s, predicted"), { name })) } }, yaxis: { title: { text: plain(format(gettext("%(name)s, measured (median)"), { name })) } } },
    note: format(gettext("%(count)s runs; half of the predictions are within %(off)s% of the measured number."), { count: places.length, off: (100 * off[off.length >> 1]).toFixed(1) }),
  };
}
