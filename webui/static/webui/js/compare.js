// Comparison of runs: one metric of all runs in one chart, with smoothing and a color per run.
import { averageOver, band, groupName, valueAt } from "./compare_math.js";
import { startRelations } from "./compare_relations.js";
import { format, gettext, ngettext } from "./i18n.js";
import { parse, quantity } from "./format.js";
import { faint, plotly, theme } from "./plot.js";
import { loginExpired, request } from "./request.js";
import { ema } from "./store.js";
import { startMenu } from "./compare_menu.js";

const card = document.getElementById("curves");
const runs = JSON.parse(document.getElementById("compared-runs")?.textContent ?? "[]");
const find = (name) => card.querySelector(`[data-${name}]`);
const state = new URLSearchParams(location.search);
const hidden = new Set((state.get("hidden") ?? "").split(",").filter(Boolean).map(Number));
const TITLES = { step: gettext("step"), time: gettext("seconds since the first point"), tokens: gettext("tokens"), flops: "FLOPs" };
const LEGEND_ROW = 20; // px, of about four groups
let data = null, newest = 0, values = null;

/** Hues around the circle by the golden angle: neighbors differ, also with a hundred runs. */
function color(place) {
  const hue = (place * 137.508 + 215) % 360, light = matchMedia("(prefers-color-scheme: dark)").matches || document.documentElement.dataset.theme === "dark" ? 0.68 : 0.42;
  const part = (n) => {
    const k = (n + hue / 30) % 12, a = 0.62 * Math.min(light, 1 - light);
    return Math.round(255 * (light - a * Math.max(-1, Math.min(k - 3, 9 - k, 1)))).toString(16).padStart(2, "0");
  };
  return `#${part(0)}${part(8)}${part(4)}`;
}

async function read() {
  const mine = (newest += 1);
  const query = new URLSearchParams({ runs: card.dataset.runs, name: find("name").value, x: find("axis").value });
  note(gettext("Loading…"));
  try {
    const answer = await request(`/runs/compare/curves/?${query}`, { headers: { Accept: "application/json" } });
    if (loginExpired(answer)) { if (mine === newest) note(loginExpired(answer)); return; }
    if (!answer.ok) throw new Error(String(answer.status));
    const body = await answer.json();
    if (mine !== newest) return;
    data = { ...body, items: body.items.map((item) => ({ ...item, x: item.x.map(parse), y: item.y.map(parse) })) };
    const count = data.missing.length;
    note(count ? format(ngettext("%(count)s run has no such curve.", "%(count)s runs have no such curve.", count), { count }) : "");
    await draw();
  } catch {
    if (mine === newest) note(gettext("The server did not respond. Choose the metric again."));
  }
}

function note(text) { find("note").textContent = text; }

const plain = (text) => String(text).replaceAll("<", "&lt;");
const label = (run) => plain(`${run.id} ${run.name}`).replaceAll("%{", "% {"); // as it is, not a placeholder of Plotly
const smoothed = (x, y, weight) => (!weight ? y : data.axis === "time" ? averageOver(x, y, weight) : ema(y, weight));

/** The curves to draw: those in sight, as differences to the baseline if one is chosen. */
function shownItems() {
  const items = data.items.filter((item) => !hidden.has(item.run)), base = data.items.find((item) => String(item.run) === find("baseline").value);
  if (!base) return items;
  return items.map((item) => ({ ...item, y: item.y.map((y, i) => y - valueAt(base.x, base.y, item.x[i])) }));
}

function linesOf(items, smoothing) {
  const order = new Map(runs.map((run, i) => [run.id, i])), traces = [];
  for (const item of items) {
    const at = order.get(item.run), own = color(at), run = runs[at];
    const line = (y, shade, width, name) => ({ type: "scatter", mode: item.x.length < 3 ? "markers" : "lines", x: item.x, y, line: { color: shade, width }, marker: { color: shade }, name, showlegend: false, ...(name ? { hovertemplate: `${label(run)}: %{y:.4~g}<extra></extra>` } : { hoverinfo: "skip" }) });
    if (smoothing) traces.push(line(item.y, faint(own, 0.22), 1, ""));
    traces.push(line(smoothed(item.x, item.y, smoothing), own, 1.5, run.name || String(run.id)));
  }
  return traces;
}

/** Per group of runs with the same value: the mean as a line, minimum and maximum as a band. */
function bandsOf(items, smoothing, key) {
  const column = values.config[key], groups = new Map();
  for (const item of items) {
    const value = column[runs.findIndex((run) => run.id === item.run)], name = value === null ? gettext("not set") : groupName(value);
    groups.set(name, [...(groups.get(name) ?? []), item]);
  }
  const names = [...groups.keys()].sort((a, b) => (Number(a) - Number(b)) || a.localeCompare(b));
  return names.flatMap((name, i) => {
    const own = color(i), { x, mean, low, high, count } = band(groups.get(name));
    const edge = (y, more) => ({ type: "scatter", mode: "lines", x, y, line: { width: 0, color: own }, hoverinfo: "skip", showlegend: false, ...more });
    const text = mean.map((value, k) => plain(format(gettext("%(name)s: mean %(mean)s, %(low)s to %(high)s, %(count)s runs"), { name, mean: quantity(value, 4), low: quantity(low[k], 4), high: quantity(high[k], 4), count: count[k] })));
    return [
      edge(low), edge(high, { fill: "tonexty", fillcolor: faint(own, 0.16) }),
      { type: "scatter", mode: x.length < 3 ? "markers" : "lines", x, y: smoothed(x, mean, smoothing), line: { color: own, width: 2 }, marker: { color: own }, name: plain(`${key} = ${name}`), text, hoverinfo: "text", showlegend: true },
    ];
  });
}

async function draw() {
  const Plotly = await plotly(), colors = theme(), place = card.querySelector(".compare-plot");
  const smoothing = Number(find("smoothing").value), key = find("group").value, items = shownItems();
  const traces = key && values?.config[key] ? bandsOf(items, smoothing, key) : linesOf(items, smoothing);
  const base = find("baseline").value, title = base ? format(gettext("%(name)s, difference to run %(run)s"), { name: data.name, run: base }) : data.name;
  const axis = { gridcolor: colors.line, zerolinecolor: colors.line, linecolor: colors.line, automargin: true };
  Plotly.react(place, traces, {
    height: 420 + LEGEND_ROW * Math.ceil(traces.filter((trace) => trace.showlegend).length / 4), margin: { l: 56, r: 12, t: 8, b: 44 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", hovermode: "closest",
    font: { color: colors["text-2"], size: 12 }, uirevision: `${data.name}${data.axis}${base}`, legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" },
    xaxis: { ...axis, title: { text: TITLES[data.axis] } }, yaxis: { ...axis, title: { text: plain(title) } },
  }, { displayModeBar: false, responsive: true });
  card.dataset.drawn = String(traces.length);
}

function legend() {
  find("legend").replaceChildren(...runs.map((run, i) => {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "chip", textContent: `${run.id} ${run.name}` });
    const dot = document.createElement("span");
    dot.className = "compare-dot";
    dot.style.setProperty("--hue", color(i));
    button.prepend(dot);
    button.setAttribute("aria-pressed", String(!hidden.has(run.id)));
    button.onclick = () => { if (!hidden.delete(run.id)) hidden.add(run.id); button.setAttribute("aria-pressed", String(!hidden.has(run.id))); remember(); draw(); };
    return button;
  }));
}

/** The curves as a panel of a dashboard; null if no panel draws what the card does. */
function panel() {
  const shown = runs.map(({ id }) => id).filter((id) => !hidden.has(id));
  if (!shown.length || find("baseline").value || find("group").value) return null;
  const smoothing = Number(find("smoothing").value), result = { id: "curves", kind: "line", title: find("name").value, metrics: [find("name").value], x: find("axis").value, size: "large" };
  return { ...result, ...(smoothing ? { smoothing } : {}), runs: { runs: shown.map(String) } };
}

function remember() {
  const values = { name: find("name").value, x: find("axis").value, smooth: find("smoothing").value, group: find("group").value, base: find("baseline").value, hidden: [...hidden].join(",") };
  for (const [key, value] of Object.entries(values)) { if (value && value !== "0") state.set(key, value); else state.delete(key); }
  history.replaceState(null, "", `?${state.toString().replaceAll("%2C", ",")}`);
}

if (card) {
  for (const [key, name] of [["name", "name"], ["axis", "x"], ["smoothing", "smooth"], ["baseline", "base"]]) if (state.has(name)) find(key).value = state.get(name);
  if (!find("name").value) find("name").selectedIndex = 0;
  for (const key of ["name", "axis"]) find(key).addEventListener("change", () => { remember(); read(); });
  for (const key of ["smoothing", "group", "baseline"]) find(key).addEventListener("input", () => { remember(); if (data) draw(); });
  addEventListener("orrery:theme", () => { legend(); if (data) draw(); });
  legend();
  read();
  startMenu(card, panel);
  plotly().catch(() => {}); // loads while the server reads the curves; `draw` reports a failure
  startRelations({ runs, ids: card.dataset.runs, color, state }).then((read) => {
    values = read;
    find("group").append(...Object.keys(values?.config ?? {}).map((key) => new Option(key, key)));
    if (state.has("group")) find("group").value = state.get("group");
    if (find("group").value && data) draw();
  });
}
