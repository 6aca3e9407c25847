/* Panels of dashboards and reports: each element [data-panel-spec] reads its data when it comes into sight and draws it.

   A panel whose element has a script of class "panel-data" draws that data and reads nothing: a frozen panel. */
import { Chart } from "./chart.js";
import { saveCsv } from "./csv.js";
import { format, gettext, ngettext } from "./i18n.js";
import { PanelLines, emptyText } from "./panel_lines.js";
import { mediaElements, stepControl, tableRows } from "./panel_media.js";
import { plot, rows, summary } from "./panel_plots.js";
import { plotly, theme } from "./plot.js";
import { request } from "./request.js";
import { runHue, metricHue } from "./run_colors.js";
import { scheduler, watchVisible } from "./scheduler.js";

const AT_ONCE = 3;
const REFRESH_MS = 15_000; // of a panel in sight whose runs are active
const PLOTS = ["bar", "scatter", "histogram", "heatmap"];
const CONFIG = { displayModeBar: false, responsive: false, doubleClick: "reset", scrollZoom: false, showTips: false };
const queue = [];
let busy = 0;

/* At most some requests at once: the first panel in sight comes first. */
function slot(work) {
  return new Promise((done, fail) => {
    queue.push(() => work().then(done, fail));
    next();
  });
}

function next() {
  while (busy < AT_ONCE && queue.length) {
    busy += 1;
    queue.shift()().finally(() => { busy -= 1; next(); });
  }
}

/** Sends JSON to the API and returns its answer; throws the problem's detail. */
export async function send(url, body, method = "POST", headers = {}) {
  const csrf = JSON.parse(document.body.getAttribute("hx-headers") ?? "{}")["X-CSRFToken"];
  const answer = await request(url, {
    method, body: body === undefined ? undefined : JSON.stringify(body), headers: { "Content-Type": "application/json", Accept: "application/json", "X-CSRFToken": csrf, ...headers },
  });
  if (answer.status === 204) return null;
  const result = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(result.detail ?? String(answer.status)), { status: answer.status, problem: result });
  return result;
}

export class PanelView {
  /** `subject`: the source of panels that have none of their own, or null. */
  constructor(element, subject) {
    Object.assign(this, { element, subject, step: null, data: null, hz: 2, zoomed: null });
    this.spec = JSON.parse(element.dataset.panelSpec);
    this.note = element.querySelector(".chart-note");
    this.area = element.querySelector(".chart-area");
    this.body = element.querySelector(".panel-body");
    this.foot = element.querySelector(".panel-foot");
    const frozen = element.querySelector("script.panel-data");
    this.frozen = frozen ? JSON.parse(frozen.textContent) : null;
    if (this.spec.kind === "markdown") return;
    this.sight = watchVisible(element, () => this.seen());
    if (this.spec.kind !== "line") this.listen();
    addEventListener("orrery:theme", () => this.redraw());
  }

  visible() { return this.sight.visible && !document.hidden; }

  seen() {
    if (!this.data && !this.reading) this.read();
    else this.redraw();
  }

  async read() {
    if (this.frozen) return this.take(this.frozen);
    this.reading = true;
    const limits = this.zoomed ? { x_min: this.zoomed[0], x_max: this.zoomed[1] } : {};
    const panel = { ...this.spec, ...limits, ...(this.step === null ? {} : { step: this.step }) };
    try {
      this.take(await slot(() => send("/api/v1/panels/data", { panel, subject: this.subject })));
    } catch (error) {
      if (!this.data) this.showNote(error.status ? gettext("The server refused this panel") : gettext("The server did not respond; retrying."), error.status ? error.message : "");
      if (!error.status || error.status >= 500) this.later(5000);
    } finally { this.reading = false; }
  }

  later(wait) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => (this.visible() ? this.read() : this.later(wait)), wait);
  }

  take(data) {
    this.data = data;
    this.element.dataset.state = data.empty ? "empty" : "drawn";
    const title = this.element.querySelector("[data-panel-title]");
    if (title && data.title) title.textContent = data.title;
    this.showFoot();
    if (data.empty) this.showEmpty();
    else if (this.spec.kind === "line") this.drawLines();
    else if (PLOTS.includes(this.spec.kind)) this.drawPlot();
    else this.drawMedia();
    if (data.active && !this.frozen) this.later(REFRESH_MS);
  }

  showEmpty() {
    this.element.classList.add("waiting");
    this.showNote(...emptyText(this.data.empty));
    this.body?.replaceChildren();
  }

  showNote(text, detail = "") {
    this.note.hidden = false;
    this.note.replaceChildren(Object.assign(document.createElement("strong"), { textContent: text }));
    if (detail) this.note.append(Object.assign(document.createElement("span"), { textContent: detail }));
  }

  /** What the panel leaves out, below it. */
  showFoot() {
    const { missing, hidden_runs: hidden, more_runs: more, runs, content } = this.data, parts = [];
    if (more) parts.push(format(ngettext("Only the newest run.", "Only the newest %(count)s runs.", runs.length), { count: runs.length }));
    if (hidden) parts.push(format(ngettext("%(count)s run is deleted or not visible to you.", "%(count)s runs are deleted or not visible to you.", hidden), { count: hidden }));
    if (missing.length && !this.data.empty) parts.push(format(gettext("No run has %(names)s."), { names: missing.slice(0, 5).join(", ") }));
    if (content.left_out) parts.push(format(ngettext("%(count)s more match is not shown.", "%(count)s more matches are not shown.", content.left_out), { count: content.left_out }));
    if (content.missing?.length) parts.push(format(gettext("Unknown columns: %(names)s."), { names: content.missing.join(", ") }));
    if (content.over === "steps" && content.total > content.drawn) parts.push(format(gettext("From %(drawn)s of %(total)s points."), { drawn: content.drawn.toLocaleString("en-US"), total: content.total.toLocaleString("en-US") }));
    this.foot.textContent = parts.join(" ");
    this.foot.hidden = !parts.length;
  }

  redraw() {
    if (!this.data || this.data.empty) return;
    if (this.spec.kind === "line") this.lines?.dirty();
    else if (PLOTS.includes(this.spec.kind)) this.drawPlot();
  }

  /** Sets the smoothing of lines, as a page's slider does. */
  smooth(value) {
    this.spec = { ...this.spec, smoothing: value };
    this.lines?.smooth(value);
  }

  /* ---- lines: chart.js draws them ---- */

  drawLines() {
    const key = this.data.content.curves.map((curve) => `${curve.run}:${curve.metric}`).join("|");
    if (this.lines && this.key === key) {
      this.lines.take(this.data);
      this.lines.dirty();
      return;
    }
    this.lines?.remove();
    this.chart?.mark.remove();
    if (this.chart) this.renew();
    this.key = key;
    this.lines = new PanelLines(this.spec, this.data, (window) => { this.zoomed = window; this.read(); });
    this.chart = new Chart(this.element, this.lines.panel(), this.lines);
    this.lines.charts = [this.chart];
    this.chart.mark = scheduler.add(this.chart);
    this.element.querySelector('[data-act="logy"]')?.setAttribute("aria-pressed", String(this.lines.logy));
    this.chart.mark();
  }

  /* Other curves than before: chart.js binds its buttons once, so the parts that it fills are replaced by copies. */
  renew() {
    for (const part of this.element.querySelectorAll(".legend, .chart-plot")) part.replaceWith(part.cloneNode(false));
    for (const button of this.element.querySelectorAll("[data-act]")) button.replaceWith(button.cloneNode(true));
    this.element.querySelector(".chart-cursor")?.remove();
  }

  /* ---- bars, scatter plots, histograms, heat maps ---- */

  async drawPlot() {
    if (!this.visible() || this.data.empty) return;
    const Plotly = await plotly(), place = this.element.querySelector(".chart-plot"), colors = theme();
    const order = new Map(this.data.runs.map((run, at) => [run.id, at])), alone = this.data.runs.length === 1, name = this.spec.metrics?.[0] ?? "";
    const colorOf = { run: (run) => colors[alone ? metricHue(name) ?? runHue(0) : runHue(order.get(run) ?? 0)], metric: (at) => colors[(at === 0 && metricHue(name)) || runHue(at)] };
    const { data, layout } = plot({ spec: this.spec, data: this.data, theme: colors, colorOf, width: place.clientWidth });
    Object.assign(layout, { width: place.clientWidth, height: place.clientHeight });
    this.element.classList.remove("waiting");
    this.note.hidden = true;
    await Plotly.react(place, data, layout, CONFIG);
    place.setAttribute("aria-label", summary({ spec: this.spec, data: this.data }));
    this.controls();
    this.picture = () => ({ data, layout: { ...layout, title: { text: this.data.title.replaceAll("<", "&lt;"), font: { size: 18, color: colors.text } }, margin: { ...layout.margin, t: 64 }, paper_bgcolor: colors.surface, plot_bgcolor: colors.surface } });
    if (this.tableOpen) this.fillTable();
    const size = () => `${place.clientWidth} ${place.clientHeight}`;
    if (!this.resized) {
      this.resized = new ResizeObserver(() => { if (size() !== this.size) { this.size = size(); this.drawPlot(); } });
      this.size = size();
      this.resized.observe(place);
    }
  }

  /* ---- images, texts, tables ---- */

  drawMedia() {
    this.element.classList.remove("waiting");
    this.note.hidden = true;
    this.body.replaceChildren(...mediaElements({ spec: this.spec, data: this.data }));
    this.controls();
  }

  controls() {
    const place = this.element.querySelector(".panel-controls"), steps = this.data.content.of === "media" ? this.data.content.steps : [];
    if (!place || place.contains(document.activeElement)) return;
    const control = this.frozen ? null : stepControl(steps, this.step, (step) => { this.step = step; this.read(); });
    place.replaceChildren(...(control ? [control] : []));
    place.hidden = !control;
  }

  listen() {
    for (const button of this.element.querySelectorAll("[data-act]")) button.addEventListener("click", () => this.act(button.dataset.act, button));
    document.addEventListener("fullscreenchange", () => this.redraw());
  }

  async act(name, button) {
    this.element.querySelector("details.menu[open]")?.removeAttribute("open");
    if (name === "full") return document.fullscreenElement ? document.exitFullscreen() : this.element.requestFullscreen();
    if (name === "table") {
      this.tableOpen = !this.tableOpen;
      button.setAttribute("aria-pressed", String(this.tableOpen));
      this.element.querySelector(".chart-table").hidden = !this.tableOpen;
      if (this.tableOpen) this.fillTable();
    }
    if (!this.data || this.data.empty) return;
    const file = (this.data.title || this.spec.id).replaceAll(/[^\w.-]+/g, "-");
    if (name === "csv") saveCsv(file, this.spec.kind === "table" ? tableRows(this.data) : rows({ spec: this.spec, data: this.data }));
    if (name === "png" && this.picture) (await plotly()).downloadImage(this.picture(), { format: "png", scale: 2, width: 1200, height: 520, filename: file });
  }

  fillTable() {
    if (!this.data || this.data.empty) return;
    const [head, ...body] = rows({ spec: this.spec, data: this.data }), table = document.createElement("table");
    table.className = "table";
    const top = table.createTHead().insertRow();
    for (const text of head) top.append(Object.assign(document.createElement("th"), { scope: "col", textContent: text }));
    const rest = table.createTBody();
    for (const row of body.slice(0, 500)) {
      const line = rest.insertRow();
      for (const text of row) line.insertCell().textContent = text;
    }
    this.element.querySelector(".chart-table").replaceChildren(table);
  }

  remove() {
    clearTimeout(this.timer);
    this.lines?.remove();
    this.chart?.mark.remove();
    this.resized?.disconnect();
  }
}

/** Starts all panels below `root`; `subject` as above. Returns their views by id. */
export function startPanels(root, subject = null) {
  const views = new Map();
  for (const element of root.querySelectorAll("[data-panel-spec]")) {
    if (!element.dataset.panelSpec) continue;
    const view = new PanelView(element, subject);
    views.set(view.spec.id, view);
  }
  return views;
}
