/* One chart: figure element, toolbar, legend with values, cursor, table, downloads. */
import { figure } from "./figure.js";
import { inUnit, quantity } from "./format.js";
import { format, gettext } from "./i18n.js";
import { plotly, theme } from "./plot.js";
import { watchVisible } from "./scheduler.js";
import { upper } from "./store.js";

const CONFIG = { displayModeBar: false, responsive: false, doubleClick: false, scrollZoom: false, showTips: false };

export class Chart {
  constructor(element, panel, set) {
    Object.assign(this, { element, panel, set, memory: {}, cursorAt: null, hz: 1, drawn: false });
    this.plot = element.querySelector(".chart-plot");
    this.legend = element.querySelector(".legend");
    this.note = element.querySelector(".chart-note");
    this.textSummary = element.querySelector(".chart-summary");
    this.cursor = Object.assign(document.createElement("div"), { className: "chart-cursor", hidden: true });
    this.plot.after(this.cursor);
    this.sight = watchVisible(element, () => this.mark?.());
    this.buildLegend();
    this.listen();
  }

  visible() { return this.sight.visible && !document.hidden; }
  curves() { return this.set.curvesOf(this.panel); }
  hasData() { return this.panel.series.some(({ name }) => this.curves().get(name)?.length); }

  draw() {
    const has = this.hasData();
    this.element.classList.toggle("waiting", !has);
    if (!has) return this.showEmpty();
    const Plotly = window.Plotly;
    if (!Plotly) { plotly().then(() => this.mark(), (error) => this.showNote(error.message)); return; }
    const view = { ...this.set.view, logy: this.set.isLog(this.panel) };
    const width = this.plot.clientWidth;
    const { data, layout, from, to } = figure({
      panel: this.panel, curves: this.curves(), view, window: this.set.windowOf(this.panel), marks: this.set.marks, theme: theme(),
      memory: this.memory, width,
    });
    layout.width = width;
    layout.height = this.plot.clientHeight;
    this.range = [from, to];
    if (!this.drawn) this.note.hidden = true;
    Plotly.react(this.plot, data, layout, CONFIG);
    if (!this.drawn) this.attach();
    this.drawn = true;
    this.points = data.reduce((most, trace) => Math.max(most, trace.x.length), 0);
    this.legendValues();
    if (performance.now() - (this.described ?? -1e9) > 5000) this.describe();
    if (this.tableOpen) this.fillTable();
  }

  showEmpty() { this.showNote(this.set.loading ? "" : this.set.emptyText(this.panel)); }

  showNote(text) {
    this.note.hidden = false;
    this.note.textContent = text;
  }

  attach() {
    this.plot.on("plotly_relayout", (change) => {
      const a = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0], b = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
      if (a === undefined || b === undefined) return;
      this.set.zoom(this.toAxis(a), this.toAxis(b));
    });
    this.plot.on("plotly_doubleclick", () => this.set.setRange("all"));
  }

  toAxis(value) {
    const view = this.set.view;
    if (view.x === "time") return (typeof value === "string" ? Date.parse(value.replace(" ", "T") + "Z") : value) / 1000;
    return view.logx ? 10 ** value : Number(value);
  }

  buildLegend() {
    this.values = new Map();
    for (const item of this.panel.series) {
      const button = document.createElement("button");
      button.type = "button";
      button.style.setProperty("--hue", `var(--${item.hue})`);
      button.className = item.dash ? "dashed" : "";
      const value = document.createElement("b");
      button.append(item.label, " ", value);
      button.onclick = () => this.set.toggle(item.name);
      this.legend.append(button);
      this.values.set(item.name, { button, value });
    }
    for (const level of this.panel.levels ?? []) {
      const entry = Object.assign(document.createElement("span"), { className: "level" });
      entry.style.setProperty("--hue", `var(--${level.hue})`);
      entry.append(`${level.label} `, Object.assign(document.createElement("b"), { textContent: inUnit(level.value, this.panel.unit) }));
      this.legend.append(entry);
    }
  }

  /** Newest values, or those under the cursor. */
  legendValues() {
    const curves = this.curves();
    for (const item of this.panel.series) {
      const { button, value } = this.values.get(item.name), curve = curves.get(item.name);
      button.hidden = !curve?.length && this.panel.series.length > 1;
      button.setAttribute("aria-pressed", String(!this.set.view.hidden.has(item.name)));
      if (!curve?.length) { value.textContent = ""; continue; }
      value.textContent = this.valueAt(curve, this.cursorAt ?? Infinity);
    }
  }

  valueAt(curve, place) {
    const number = curve.y[Math.max(0, upper(curve.x, place) - 1)];
    return Number.isFinite(number) ? inUnit(number, this.panel.unit) : gettext("not finite");
  }

  listen() {
    this.plot.addEventListener("pointermove", (event) => {
      const axis = this.plot._fullLayout?.xaxis;
      if (!axis || !this.drawn) return;
      const pixel = event.clientX - this.plot.getBoundingClientRect().left - axis._offset;
      if (pixel < 0 || pixel > axis._length) return this.set.hover(null);
      this.set.hover(this.toAxis(axis.p2r(pixel)));
    });
    this.plot.addEventListener("pointerleave", () => this.set.hover(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    for (const button of this.element.querySelectorAll("[data-act]")) button.addEventListener("click", () => this.act(button.dataset.act, button));
    new ResizeObserver(() => { if (this.drawn) this.mark?.(); }).observe(this.plot);
    document.addEventListener("fullscreenchange", () => this.mark?.());
  }

  key(event) {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    event.stopPropagation();
    const curve = this.curves().get(this.panel.series.find(({ name }) => this.curves().get(name)?.length)?.name);
    if (!curve) return;
    const jump = event.shiftKey ? 20 : 1, forward = event.key === "ArrowRight";
    const here = this.cursorAt === null ? curve.length - 1 : Math.max(0, upper(curve.x, this.cursorAt) - 1);
    const at = Math.max(0, Math.min(curve.length - 1, here + (forward ? jump : -jump)));
    this.set.hover(curve.x[at]);
    const values = this.panel.series.filter(({ name }) => this.curves().get(name)?.length)
      .map((item) => `${item.label} ${this.valueAt(this.curves().get(item.name), curve.x[at])}`).join(", ");
    this.textSummary.textContent = `${this.set.formatAxis(curve.x[at])}: ${values}`;
  }

  /** Shows the cursor at the place of the other charts. */
  showCursor(at) {
    this.cursorAt = at;
    if (!this.drawn || !this.visible()) return;
    const axis = this.plot._fullLayout.xaxis;
    const view = this.set.view;
    const place = at === null ? -1 : axis.r2p(view.x === "time" ? at * 1000 : view.logx ? Math.log10(at) : at);
    this.cursor.hidden = at === null || place < 0 || place > axis._length;
    if (!this.cursor.hidden) {
      this.cursor.style.transform = `translateX(${this.plot.offsetLeft + axis._offset + place}px)`;
      this.cursor.dataset.at = this.set.formatAxis(at);
      this.cursor.classList.toggle("left", place > axis._length * 0.7);
    }
    this.legendValues();
  }

  act(name, button) {
    if (name === "logy") this.set.toggleLog(this.panel.id);
    else if (name === "full") document.fullscreenElement ? document.exitFullscreen() : this.element.requestFullscreen();
    else if (name === "png") this.downloadPng();
    else if (name === "dashboard") this.addToDashboard();
    else if (name === "csv") this.set.downloadCsv(this.panel);
    else if (name === "table") this.toggleTable(button);
    this.element.querySelector("details.menu[open]")?.removeAttribute("open");
  }

  /** A picture that stands alone: title, run, legend, axis titles and a background. */
  async downloadPng() {
    if (!this.drawn) return;
    const Plotly = await plotly(), { data, layout } = this.picture();
    await Plotly.downloadImage({ data, layout }, { format: "png", scale: 2, width: 1200, height: 520, filename: this.set.fileName(this.panel) });
  }

  picture() {
    const colors = theme(), named = new Set(), plain = (text) => String(text).replaceAll("<", "&lt;");
    const { data, layout } = figure({
      panel: this.panel, curves: this.curves(), view: { ...this.set.view, logy: this.set.isLog(this.panel) }, window: this.set.windowOf(this.panel),
      marks: this.set.marks, theme: colors, memory: { ...this.memory }, width: 1200,
    });
    for (const trace of data.toReversed()) { // the last trace of a name is the line itself; bands and faint raw lines come before it
      trace.showlegend = Boolean(trace.name) && !named.has(trace.name);
      if (trace.name) named.add(trace.name);
    }
    const unit = { fraction: "", bytes: gettext("bytes"), s: gettext("seconds") }[this.panel.unit] ?? this.panel.unit;
    return {
      data,
      layout: {
        ...layout, showlegend: true, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 13, color: colors["text-2"] } },
        title: { text: plain(format(gettext("%(title)s, %(run)s"), { title: this.panel.title, run: this.set.source.title ?? this.set.source.name })), x: 0.02, xanchor: "left", font: { size: 18, color: colors.text } },
        paper_bgcolor: colors.surface, plot_bgcolor: colors.surface, margin: { l: 84, r: 24, t: 84, b: 60 },
        yaxis: { ...layout.yaxis, title: { text: plain(unit ? `${this.panel.title} (${unit})` : this.panel.title), font: { size: 13 } } },
      },
    };
  }

  /** The chart as a panel of a dashboard: metrics with data, axis, smoothing and scale as shown. */
  async addToDashboard() {
    const { view } = this.set, names = this.panel.series.map(({ name }) => name), drawn = names.filter((name) => this.curves().get(name)?.length && !view.hidden.has(name));
    const panel = { id: this.panel.id.replace(/[^A-Za-z0-9_-]/g, "-").slice(0, 40), kind: "line", title: this.panel.title, metrics: drawn.length ? drawn : names, x: view.x, runs: { runs: [String(this.set.source.id)] } };
    if (view.smooth) panel.smoothing = Math.min(view.smooth, 0.99);
    if (this.set.isLog(this.panel)) panel.y_log = true;
    const { addToDashboard } = await import("./dashboard_add.js");
    await addToDashboard(panel, this.set.source.id);
  }

  toggleTable(button) {
    this.tableOpen = !this.tableOpen;
    const box = this.element.querySelector(".chart-table");
    box.hidden = !this.tableOpen;
    button.setAttribute("aria-pressed", String(this.tableOpen));
    if (this.tableOpen) this.fillTable();
  }

  fillTable() {
    const curves = this.curves(), shown = this.panel.series.filter(({ name }) => curves.get(name)?.length);
    const places = [...new Set(shown.flatMap(({ name }) => curves.get(name).x.slice(-100)))].sort((a, b) => b - a).slice(0, 100);
    const table = document.createElement("table");
    table.className = "table";
    const head = table.createTHead().insertRow();
    for (const title of [this.set.axisTitle(), ...shown.map(({ label }) => label)]) head.append(Object.assign(document.createElement("th"), { className: "num", textContent: title, scope: "col" }));
    const body = table.createTBody();
    for (const place of places) {
      const row = body.insertRow();
      const cells = [this.set.formatAxis(place, true), ...shown.map(({ name }) => {
        const curve = curves.get(name), at = upper(curve.x, place) - 1;
        return curve.x[at] !== place ? "" : Number.isFinite(curve.y[at]) ? inUnit(curve.y[at], this.panel.unit) : String(curve.y[at]);
      })];
      for (const text of cells) Object.assign(row.insertCell(), { className: "num", textContent: text });
    }
    const caption = table.createCaption();
    caption.className = "small muted";
    caption.textContent = format(gettext("%(title)s: the newest %(count)s points; the CSV file has all points"), { title: this.panel.title, count: places.length });
    this.element.querySelector(".chart-table").replaceChildren(table);
  }

  /** Describes the chart for screen readers. */
  describe() {
    this.described = performance.now();
    const parts = [];
    for (const item of this.panel.series) {
      const curve = this.curves().get(item.name);
      if (!curve?.length) continue;
      let low = Infinity, high = -Infinity, nonFinite = 0;
      for (const value of curve.y) {
        if (!Number.isFinite(value)) nonFinite += 1;
        else { low = Math.min(low, value); high = Math.max(high, value); }
      }
      parts.push(this.describeCurve(item.label, curve, low, high, nonFinite));
    }
    const values = { title: this.panel.title, curves: parts.join("; ") };
    this.plot.setAttribute("aria-label", format(gettext("%(title)s. %(curves)s. Use the arrow keys to move along the curve."), values));
  }

  describeCurve(label, curve, low, high, nonFinite) {
    const inUnits = (value) => inUnit(value, this.panel.unit);
    const text = format(gettext("%(label)s %(last)s at %(position)s, between %(low)s and %(high)s over %(count)s points"), {
      label, last: inUnits(curve.last.y), position: this.set.formatAxis(curve.last.x), low: inUnits(low), high: inUnits(high),
      count: quantity(curve.total),
    });
    return nonFinite ? text + format(gettext(", %(count)s not finite"), { count: nonFinite }) : text;
  }
}
