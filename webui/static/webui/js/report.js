/* A report: its panels, and printing. On a page without a login all data are in the page, and nothing is fetched. */
import { format, gettext } from "./i18n.js";
import { startPanels } from "./panels.js";
import { plot } from "./panel_plots.js";
import { plotly, theme } from "./plot.js";
import { metricHue, runHue } from "./run_colors.js";

const PRINT = { width: 720, height: 300 };
const PLOTS = ["line", "bar", "scatter", "histogram", "heatmap"];
const views = new Set();
const pictured = new WeakMap(); // view → the data that its picture for paper is of

/** Draws the panels below a node that are not drawn yet. */
export function drawPanels(root) {
  for (const [, view] of startPanels(root)) views.add(view);
}

/** Forgets panels whose elements left the page. */
export function forgetPanels() {
  for (const view of views) if (!view.element.isConnected) { view.remove(); views.delete(view); }
}

/* Wide tables and code of the text scroll: by keyboard too. */
const wide = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
});
for (const part of document.querySelectorAll(".report-prose :is(pre, table)")) wide.observe(part);

/* ---- paper: a vector picture per chart, in light colors and at the width of a page ---- */

function picture(view) {
  const { spec, data, chart } = view, colors = theme();
  if (spec.kind === "line") {
    const { data: traces, layout } = chart.picture(), alone = data.runs.length === 1 && traces.filter((trace) => trace.showlegend).length === 1;
    const yaxis = { ...layout.yaxis, title: { text: data.unit && data.unit !== "fraction" ? data.unit.replaceAll("<", "&lt;") : "", font: { size: 11 } } };
    return { data: traces, layout: { ...layout, ...PRINT, yaxis, title: undefined, showlegend: !alone, margin: { l: 64, r: 12, t: alone ? 8 : 44, b: 44 } } };
  }
  const order = new Map(data.runs.map((run, at) => [run.id, at])), single = data.runs.length === 1, name = spec.metrics?.[0] ?? "";
  const colorOf = { run: (run) => colors[single ? metricHue(name) ?? runHue(0) : runHue(order.get(run) ?? 0)], metric: (at) => colors[(at === 0 && metricHue(name)) || runHue(at)] };
  const { data: traces, layout } = plot({ spec, data, theme: colors, colorOf, width: PRINT.width });
  return { data: traces, layout: { ...layout, ...PRINT } };
}

/* Reads the light colors between two repaints, so that nothing flashes. */
function inLight(work) {
  const root = document.documentElement, before = root.dataset.theme;
  root.dataset.theme = "light";
  dispatchEvent(new CustomEvent("orrery:theme"));
  try { return work(); } finally {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    dispatchEvent(new CustomEvent("orrery:theme"));
  }
}

async function prepare() {
  await Promise.all([...views].filter((view) => !view.data && PLOTS.concat("image", "text", "table").includes(view.spec.kind)).map((view) => view.read()));
  const due = [...views].filter((view) => view.data && !view.data.empty && PLOTS.includes(view.spec.kind) && pictured.get(view) !== view.data);
  if (!due.length) return;
  const Plotly = await plotly();
  const figures = inLight(() => due.map((view) => [view, view.data, picture(view)]));
  for (const [view, data, figure] of figures) {
    const src = await Plotly.toImage(figure, { format: "svg", ...PRINT });
    let image = view.element.querySelector(".print-picture");
    if (!image) {
      image = Object.assign(document.createElement("img"), { className: "print-picture", alt: "", ...PRINT });
      view.element.querySelector(".chart-area").append(image);
    }
    image.src = src;
    await image.decode().catch(() => {});
    pictured.set(view, data);
  }
}

for (const button of document.querySelectorAll("[data-print]")) button.addEventListener("click", async () => {
  button.disabled = true;
  try { await prepare(); } catch (error) { console.error("preparing for print failed", error); }
  button.disabled = false;
  print();
});

/* The browser's own print command cannot wait: pictures are made when the page has nothing else to do. */
function soon() {
  const run = () => prepare().catch(() => {}).then(() => setTimeout(soon, 30_000));
  if (document.hidden || !views.size) setTimeout(soon, 5000);
  else if ("requestIdleCallback" in window) requestIdleCallback(run, { timeout: 3000 });
  else setTimeout(run, 1000);
}

/* Paper is white in the dark theme too. */
let screenTheme = null;
addEventListener("beforeprint", () => {
  screenTheme = document.documentElement.dataset.theme ?? "";
  document.documentElement.dataset.theme = "light";
  const missing = [...views].filter((view) => PLOTS.includes(view.spec.kind) && !view.data?.empty && !pictured.has(view)).length;
  if (missing) document.getElementById("announce").textContent = format(gettext("%(count)s charts are still loading; use the button Print."), { count: missing });
});

addEventListener("afterprint", () => {
  if (screenTheme) document.documentElement.dataset.theme = screenTheme;
  else delete document.documentElement.dataset.theme;
});

drawPanels(document);
if (document.querySelector("[data-print]")) setTimeout(soon, 1500);
