// Comparison of runs: one metric of all runs in one chart, with smoothing and a color per run.
import { format, gettext, ngettext } from "./i18n.js";
import { parse, quantity } from "./format.js";
import { faint, plotly, theme } from "./plot.js";
import { ema } from "./store.js";

const card = document.getElementById("curves");
const runs = JSON.parse(document.getElementById("compared-runs")?.textContent ?? "[]");
const find = (name) => card.querySelector(`[data-${name}]`);
const state = new URLSearchParams(location.search);
const hidden = new Set((state.get("hidden") ?? "").split(",").filter(Boolean).map(Number));
const TITLES = { step: gettext("step"), time: gettext("seconds since the first point"), tokens: gettext("tokens"), flops: "FLOPs" };
let data = null, asked = 0;

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
  const mine = (asked += 1);
  const query = new URLSearchParams({ runs: card.dataset.runs, name: find("name").value, x: find("axis").value });
  note(gettext("Loading…"));
  try {
    const answer = await fetch(`/runs/compare/curves/?${query}`, { headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(String(answer.status));
    const body = await answer.json();
    if (mine !== asked) return;
    data = { ...body, items: body.items.map((item) => ({ ...item, x: item.x.map(parse), y: item.y.map(parse) })) };
    const count = data.missing.length;
    note(count ? format(ngettext("%(count)s run has no such curve.", "%(count)s runs have no such curve.", count), { count }) : "");
    await draw();
  } catch {
    if (mine === asked) note(gettext("The server did not respond. Choose the metric again."));
  }
}

function note(text) { find("note").textContent = text; }

async function draw() {
  const Plotly = await plotly(), colors = theme(), place = card.querySelector(".compare-plot");
  const smoothing = Number(find("smoothing").value), traces = [];
  const order = new Map(runs.map((run, i) => [run.id, i]));
  for (const item of data.items) {
    if (hidden.has(item.run)) continue;
    const at = order.get(item.run), own = color(at), run = runs[at];
    const line = (y, shade, width, name) => ({ type: "scatter", mode: item.x.length < 3 ? "markers" : "lines", x: item.x, y, line: { color: shade, width }, marker: { color: shade }, name, hoverinfo: name ? "text" : "skip", text: name ? y.map((value) => `${run.id} ${run.name}: ${quantity(value, 4)}`.replaceAll("<", "&lt;")) : undefined, showlegend: false });
    if (smoothing) traces.push(line(item.y, faint(own, 0.22), 1, ""));
    traces.push(line(smoothing ? ema(item.y, smoothing) : item.y, own, 1.5, run.name || String(run.id)));
  }
  const axis = { gridcolor: colors.line, zerolinecolor: colors.line, linecolor: colors.line, automargin: true };
  Plotly.react(place, traces, {
    height: 420, margin: { l: 56, r: 12, t: 8, b: 44 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", hovermode: "closest",
    font: { color: colors["text-2"], size: 12 }, uirevision: `${data.name}${data.axis}`,
    xaxis: { ...axis, title: { text: TITLES[data.axis] } }, yaxis: { ...axis, title: { text: data.name.replaceAll("<", "&lt;") } },
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

function remember() {
  const values = { name: find("name").value, x: find("axis").value, smooth: find("smoothing").value, hidden: [...hidden].join(",") };
  for (const [key, value] of Object.entries(values)) { if (value && value !== "0") state.set(key, value); else state.delete(key); }
  history.replaceState(null, "", `?${state.toString().replaceAll("%2C", ",")}`);
}

if (card) {
  for (const [key, name] of [["name", "name"], ["axis", "x"], ["smoothing", "smooth"]]) if (state.has(name)) find(key).value = state.get(name);
  if (!find("name").value) find("name").selectedIndex = 0;
  for (const key of ["name", "axis"]) find(key).addEventListener("change", () => { remember(); read(); });
  find("smoothing").addEventListener("input", () => { remember(); if (data) draw(); });
  addEventListener("orrery:theme", () => { legend(); if (data) draw(); });
  legend();
  read();
}
