/* All charts of a page: data from REST and live frames, the shared view in the URL, cursor and zoom.
   Does not depend on runs, only on the URL of their series. */
import { Chart } from "./chart.js";
import { csvCell, saveLines } from "./csv.js";
import { axisTitle } from "./figure.js";
import { quantity } from "./format.js";
import { gettext } from "./i18n.js";
import { loginExpired, request } from "./request.js";
import { scheduler } from "./scheduler.js";
import { Curve, MOST } from "./store.js";
import { DEFAULTS, readView, writeView } from "./view.js";

const SNAPSHOT_POINTS = 1200; // leaves room for live points up to 1,500
const REFETCH_MS = 3000;
const AT_ONCE = 2; // the first chart in sight comes first
const FIRST_CURVES = 4, MOST_CURVES = 32; // of one request
const DIGITS = 7; // significant ones; a screen shows fewer

export class ChartSet {
  /** `source`: {series: address, name, per_step: {tokens, flops}}; `root` holds figure.chart[data-panel]. */
  constructor(root, source, panels, marks = []) {
    Object.assign(this, { root, source, marks, loading: true, queue: [], busy: 0, scheduled: new Map() });
    this.view = readView(source.axis);
    this.curves = new Map(); // all data: "name" or "name@rank" → Curve
    this.windows = new Map(); // the same for a zoomed window, finer
    this.charts = panels.map((panel) => {
      const chart = new Chart(root.querySelector(`[data-panel="${panel.id}"]`), panel, this);
      chart.mark = scheduler.add(chart);
      return chart;
    });
    for (const { panel } of this.charts) for (const item of panel.series) this.curves.set(this.key(panel, item.name), new Curve(item.name, panel.rank ?? null));
    this.bindTools();
    addEventListener("orrery:theme", () => this.dirty());
    this.ready = this.refetch();
  }

  key(panel, name) { return panel.rank === undefined || panel.rank === null ? name : `${name}@${panel.rank}`; }

  /** Returns the curves that a panel draws, by series name. */
  curvesOf(panel) {
    const result = new Map();
    for (const { name } of panel.series) {
      const key = this.key(panel, name);
      result.set(name, (this.zoomed() && this.windows.get(key)) || this.curves.get(key));
    }
    return result;
  }

  zoomed() { return this.view.from !== null; }

  windowOf(panel) {
    if (this.zoomed()) return [this.view.from, this.view.to];
    const match = /^last-(\d+)$/.exec(this.view.range);
    if (!match || this.view.x !== "step") return null;
    const end = Math.max(...panel.series.map(({ name }) => this.curves.get(this.key(panel, name))?.last?.x ?? 0));
    return [Math.max(0, end - Number(match[1])), end];
  }

  dirty(name = null) {
    for (const chart of this.charts) if (!name || chart.panel.series.some((item) => item.name === name)) chart.mark();
  }

  /* ---- data ---- */

  async fetchSeries(name, rank, extra = {}) {
    const query = new URLSearchParams({ name, x: this.view.x, points: SNAPSHOT_POINTS });
    if (rank !== null && rank !== undefined) query.set("rank", rank);
    for (const [key, value] of Object.entries(extra)) query.set(key, value);
    const answer = await request(`${this.source.series}?${query}`, { headers: { Accept: "application/json" } });
    if (!answer.ok) throw failure(`series ${name}`, answer);
    return answer.json();
  }

  /** Series of several curves, as [[curve, answer]]; one request for all if the source has an address for that. */
  async fetchCurves(curves, extra = {}) {
    if (!this.source.curves_url) return Promise.all(curves.map(async (curve) => [curve, await this.fetchSeries(curve.name, curve.rank, extra)]));
    const query = new URLSearchParams({ x: this.view.x, points: SNAPSHOT_POINTS, digits: DIGITS, ...extra });
    for (const curve of curves) query.append("name", curve.name);
    if (curves[0].rank !== null && curves[0].rank !== undefined) query.set("rank", curves[0].rank);
    const early = this.first(curves) && this.view.x === this.source.axis && !("from" in extra); // the page preloads it
    const answer = await request(early ? this.source.first.url : `${this.source.curves_url}?${query}`);
    if (!answer.ok) throw failure("curves", answer);
    return (await answer.json()).items.map((item, i) => [curves[i], item]);
  }

  first(curves) {
    const names = this.source.first?.names;
    return names?.length === curves.length && curves.every((curve, i) => curve.rank === null && curve.name === names[i]);
  }

  /** The curves in groups of one request each: one rank, the first group small, so that the first charts come soon. */
  groups(curves) {
    const groups = [];
    for (const curve of curves) {
      const last = groups.at(-1), most = groups.length > 1 ? MOST_CURVES : FIRST_CURVES;
      if (last && last[0].rank === curve.rank && last.length < most) last.push(curve);
      else groups.push([curve]);
    }
    return groups;
  }

  /** Reads all series again, as after a gap; resolves when all have arrived. */
  async refetch() {
    const axis = this.view.x;
    this.followed = null;
    await Promise.all(this.groups(this.curves.values()).map((group) => this.slot(async () => {
      const answers = await this.fetchCurves(group);
      if (this.view.x !== axis) return;
      for (const [curve, answer] of answers) {
        curve.replace(answer);
        this.problem = null;
        this.dirty(curve.name);
      }
    }).catch((error) => this.failed(error))));
    this.loading = false;
    await this.refine();
    this.dirty();
  }

  slot(work) {
    return new Promise((done, fail) => {
      this.queue.push(() => work().then(done, fail));
      this.next();
    });
  }

  next() {
    while (this.busy < AT_ONCE && this.queue.length) {
      this.busy += 1;
      this.queue.shift()().finally(() => { this.busy -= 1; this.next(); });
    }
  }

  failed(error) {
    console.warn(error.message);
    this.problem = loginExpired(error) || gettext("The server did not respond; retrying.");
    this.dirty();
    clearTimeout(this.again);
    this.again = setTimeout(() => this.refetch(), 5000);
  }

  /** Fetches finer points of a zoomed or "last n" window if the full curve is downsampled. */
  async refine() {
    const window = this.zoomed() ? [this.view.from, this.view.to] : this.charts[0] && this.windowOf(this.charts[0].panel);
    if (!window) return;
    const mine = (this.refining = Symbol("refine"));
    const keys = new Map([...this.curves].filter(([, curve]) => curve.thinned).map(([key, curve]) => [curve, key]));
    await Promise.all(this.groups(keys.keys()).map((group) => this.slot(async () => {
      if (this.refining !== mine) return;
      const answers = await this.fetchCurves(group, { from: window[0], to: window[1] });
      if (this.refining !== mine) return;
      for (const [curve, answer] of answers) {
        if (this.zoomed()) {
          const fine = new Curve(curve.name, curve.rank);
          fine.replace(answer);
          this.windows.set(keys.get(curve), fine);
        } else splice(curve, answer);
        this.dirty(curve.name);
      }
    }).catch((error) => console.warn(error.message))));
  }

  /** A `points` frame. */
  points(frame) {
    for (const [name, points] of Object.entries(frame.values)) {
      for (const key of [name, `${name}@${frame.rank}`]) {
        const curve = this.curves.get(key);
        if (!curve) continue;
        if (curve.rank === null || curve.rank === undefined) curve.rank = frame.rank;
        else if (curve.rank !== frame.rank) continue;
        if (frame.attempt && curve.attempt && frame.attempt > curve.attempt) this.later(curve);
        curve.attempt = Math.max(curve.attempt, frame.attempt ?? 0);
        if (this.add(curve, points, frame.time)) this.dirty(name);
        if (curve.wantsServer) { curve.wantsServer = false; this.later(curve); }
      }
    }
  }

  add(curve, points, time) {
    const axis = this.view.x, factor = this.source.per_step?.[axis];
    if ((axis === "tokens" || axis === "flops") && !factor) { this.later(curve); return false; }
    let changed = false;
    points.forEach(([step, y], i) => {
      const x = axis === "step" ? step : axis === "time" ? time - (points.length - 1 - i) * 1e-3 : step * factor;
      changed = curve.put(x, number(y)) || changed;
      const fine = this.zoomed() && this.windows.get(curve.name);
      if (fine && x <= this.view.to) fine.put(x, number(y));
    });
    return changed;
  }

  /** Schedules a refetch of a curve, at most every few seconds; it replaces locally thinned points. */
  later(curve) {
    if (this.scheduled.has(curve)) return;
    this.scheduled.set(curve, setTimeout(() => {
      this.scheduled.delete(curve);
      if (document.hidden) { curve.wantsServer = true; return; }
      this.slot(async () => curve.replace(await this.fetchSeries(curve.name, curve.rank)))
        .then(() => this.dirty(curve.name), (error) => console.warn(error.message));
    }, REFETCH_MS));
  }

  mark(mark) {
    this.marks.push(mark);
    this.dirty();
  }

  /* ---- view ---- */

  change(values, read = false) {
    Object.assign(this.view, values);
    writeView(this.view, this.source.axis);
    this.showTools();
    if (read) {
      for (const curve of this.curves.values()) curve.clear();
      this.windows.clear();
      this.loading = true;
      return this.refetch();
    }
    this.dirty();
  }

  setAxis(x) { if (x !== this.view.x) this.change({ x, from: null, to: null }, true); }
  setSmooth(smooth) { this.change({ smooth }); }
  setRange(range) {
    this.windows.clear();
    this.change({ range, from: null, to: null });
    this.refine();
  }
  zoom(from, to) {
    if (this.view.x !== "time") [from, to] = [Math.max(0, from), to];
    this.windows.clear();
    this.change({ from: Math.min(from, to), to: Math.max(from, to) });
    clearTimeout(this.zooming);
    this.zooming = setTimeout(() => this.refine(), 150);
  }
  toggle(name) {
    const hidden = new Set(this.view.hidden);
    if (!hidden.delete(name)) hidden.add(name);
    this.change({ hidden });
  }
  /** The view lists the charts whose scale differs from their default. */
  isLog(panel) {
    return this.view.logy.has(panel.id) !== Boolean(panel.log);
  }

  toggleLog(id) {
    const logy = new Set(this.view.logy);
    if (!logy.delete(id)) logy.add(id);
    this.change({ logy });
  }

  hover(at) {
    if (this.hovering === at) return;
    this.hovering = at;
    if (this.hoverQueued) return;
    this.hoverQueued = true;
    requestAnimationFrame(() => {
      this.hoverQueued = false;
      for (const chart of this.charts) chart.showCursor(this.hovering);
    });
  }

  bindTools() {
    const tools = (this.tools = document.querySelector("[data-chart-tools]"));
    tools?.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      if (button.dataset.x) this.setAxis(button.dataset.x);
      else if (button.dataset.range) this.setRange(button.dataset.range);
      else if ("logx" in button.dataset) this.change({ logx: !this.view.logx });
      else if ("reset" in button.dataset) this.change({ ...DEFAULTS(), x: this.view.x });
    });
    tools?.querySelector("[data-smooth]")?.addEventListener("input", (event) => this.setSmooth(Number(event.target.value)));
    this.showTools();
  }

  showTools() {
    const press = (selector, on) => this.tools?.querySelectorAll(selector).forEach((button) => button.setAttribute("aria-pressed", String(on(button))));
    press("[data-x]", (button) => button.dataset.x === this.view.x);
    press("[data-range]", (button) => !this.zoomed() && button.dataset.range === this.view.range);
    const slider = this.tools?.querySelector("[data-smooth]");
    if (slider) {
      slider.value = this.view.smooth;
      this.tools.querySelector("[data-smooth-value]").textContent = this.view.smooth;
    }
    press("[data-logx]", () => this.view.logx);
    this.tools?.querySelectorAll('[data-range^="last"]').forEach((button) => { button.disabled = this.view.x !== "step"; });
    for (const chart of this.charts) chart.element.querySelector('[data-act="logy"]')?.setAttribute("aria-pressed", String(this.isLog(chart.panel)));
  }

  /* ---- text and files ---- */

  formatAxis(at, bare = false) {
    if (this.view.x === "time") return `${new Date(at * 1000).toISOString().slice(11, 19)} UTC`;
    const text = this.view.x === "step" ? Math.round(at).toLocaleString("en-US") : quantity(at);
    return bare ? text : `${this.axisTitle()} ${text}`;
  }

  axisTitle() {
    return axisTitle(this.view.x);
  }

  emptyText(panel) { return this.problem ?? panel.empty ?? gettext("No data yet: points appear here when the run logs them."); }
  fileName(panel) { return `${this.source.name}-${panel.id}`; }

  async downloadCsv(panel) {
    const parts = [];
    for (const { name } of panel.series) {
      if (!this.curves.get(this.key(panel, name))?.length) continue;
      const query = new URLSearchParams({ name, raw: 1, ...(panel.rank === undefined || panel.rank === null ? {} : { rank: panel.rank }) });
      const answer = await request(`${this.source.series}?${query}`, { headers: { Accept: "text/csv" } });
      if (!answer.ok) continue;
      const [head, ...rows] = (await answer.text()).trim().split(/\r?\n/);
      if (!parts.length) parts.push(`name,${head}`);
      for (const row of rows) parts.push(`${csvCell(name)},${row}`);
    }
    saveLines(this.fileName(panel), parts);
  }

  /** Points that the browser holds, for tests and measurements. */
  held() { return Object.fromEntries([...this.curves].map(([key, curve]) => [key, { points: curve.length, total: curve.total, last: curve.last, x: curve.x }])); }
}

const failure = (what, { status }) => Object.assign(new Error(`${what}: ${status}`), { status });
const number = (value) => (typeof value === "string" ? Number(value) : (value ?? NaN));

/* Puts a window's finer points in the place of the thinned ones, within what a curve may hold. */
function splice(curve, answer) {
  const from = answer.x[0], to = answer.x.at(-1);
  if (from === undefined) return;
  const a = curve.x.findIndex((x) => x >= from), b = curve.x.findLastIndex((x) => x <= to) + 1;
  const before = a < 0 ? curve.x.length : a;
  for (const [key, list] of [["x", answer.x], ["y", answer.y], ["low", answer.low ?? answer.y], ["high", answer.high ?? answer.y]]) {
    const numbers = list.map(number);
    if (curve[key]) curve[key].splice(before, Math.max(0, b - before), ...numbers);
  }
  while (curve.x.length > MOST) curve.compact();
}
