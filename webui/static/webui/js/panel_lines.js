/* What chart.js asks of the charts of a page, for one panel of lines whose data came in one answer. Panels with the same
   x axis share the cursor. */
import { saveCsv } from "./csv.js";
import { axisTitle } from "./figure.js";
import { parse, quantity } from "./format.js";
import { format, gettext, ngettext } from "./i18n.js";
import { metricHue, runHue } from "./run_colors.js";
import { Curve } from "./store.js";

const sets = new Set();
const MOST_LABEL = 60;

export class PanelLines {
  /** `spec`: the panel; `data`: its answer; `reload(limits)` reads a window of the x axis again. */
  constructor(spec, data, reload) {
    Object.assign(this, { spec, reload, marks: [], loading: false, charts: [] });
    const x = data.content.axis ?? spec.x ?? "step";
    this.view = { x, smooth: spec.smoothing ?? 0, logx: Boolean(spec.x_log), hidden: new Set(), limits: [spec.y_min ?? null, spec.y_max ?? null] };
    this.logy = Boolean(spec.y_log);
    this.window = null;
    this.take(data);
    sets.add(this);
  }

  take(data) {
    this.data = data;
    const names = new Map(data.runs.map((run) => [run.id, run])), places = new Map(data.runs.map((run, place) => [run.id, place]));
    const curves = data.content.curves ?? [], metrics = [...new Set(curves.map((curve) => curve.metric))], alone = data.runs.length === 1;
    this.curves = new Map();
    this.series = curves.map((curve) => {
      const name = `${curve.run}:${curve.metric}`, held = new Curve(name), run = names.get(curve.run);
      held.replace({ ...curve, unit: data.unit }, false);
      this.curves.set(name, held);
      const metric = metrics.indexOf(curve.metric);
      const hue = alone ? (metrics.length === 1 ? metricHue(curve.metric) : null) ?? runHue(metric) : runHue(places.get(curve.run));
      const label = alone ? curve.metric : metrics.length === 1 ? `${run.id} ${run.name}` : `${run.id} ${run.name} · ${curve.metric}`;
      return { name, label: label.slice(0, MOST_LABEL), hue, dash: !alone && metric > 0 ? ["dash", "dot", "dashdot"][(metric - 1) % 3] : "" };
    });
  }

  /** The panel as chart.js reads it. */
  panel() {
    const { spec, data } = this;
    return { id: spec.id, title: data.title, unit: data.unit, series: this.series, kind: "lines", zero: false, log: this.logy, wide: spec.size === "large", levels: [] };
  }

  curvesOf() { return this.curves; }
  isLog() { return this.logy; }
  emptyText() { return ""; }
  get source() { return { title: this.runsText(), name: this.runsText() }; }

  runsText() {
    const { runs } = this.data, count = runs.length;
    return count === 1 ? `${runs[0].id} ${runs[0].name}` : format(ngettext("%(count)s run", "%(count)s runs", count), { count });
  }

  windowOf() {
    if (this.window) return this.window;
    const { x_min: from = null, x_max: to = null } = this.spec;
    if (from === null && to === null) return null;
    const every = [...this.curves.values()].filter((curve) => curve.length);
    const low = from ?? Math.min(...every.map((curve) => curve.x[0])), high = to ?? Math.max(...every.map((curve) => curve.x.at(-1)));
    return high > low ? [low, high] : [low, low + 1];
  }

  zoom(from, to) {
    this.window = [Math.min(from, to), Math.max(from, to)];
    this.dirty();
    clearTimeout(this.zooming);
    if (this.view.x !== "elapsed" && this.data.content.curves.some((curve) => curve.total_points > curve.x.length)) this.zooming = setTimeout(() => this.reload(this.window), 150);
  }

  setRange() {
    if (!this.window) return;
    this.window = null;
    this.dirty();
    this.reload(null);
  }

  smooth(value) {
    this.view.smooth = value;
    this.dirty();
  }

  toggle(name) {
    if (!this.view.hidden.delete(name)) this.view.hidden.add(name);
    this.dirty();
  }

  toggleLog() {
    this.logy = !this.logy;
    for (const chart of this.charts) chart.element.querySelector('[data-act="logy"]')?.setAttribute("aria-pressed", String(this.logy));
    this.dirty();
  }

  hover(at) {
    for (const set of sets) if (set.view.x === this.view.x) for (const chart of set.charts) chart.showCursor(at);
  }

  dirty() { for (const chart of this.charts) chart.mark?.(); }

  formatAxis(at, bare = false) {
    if (this.view.x === "time") return `${new Date(at * 1000).toISOString().slice(11, 19)} UTC`;
    const text = this.view.x === "step" ? Math.round(at).toLocaleString("en-US") : quantity(at);
    return bare ? text : `${this.axisTitle()} ${text}`;
  }

  axisTitle() { return axisTitle(this.view.x); }
  fileName() { return (this.data.title || this.spec.id).replaceAll(/[^\w.-]+/g, "-"); }

  downloadCsv() {
    const rows = this.data.content.curves.flatMap((curve) => curve.x.map((x, i) => [curve.run, curve.metric, x, parse(curve.y[i])]));
    saveCsv(this.fileName(), [["run", "metric", this.view.x, "value"], ...rows]);
  }

  remove() { sets.delete(this); }
}

/** Why a panel shows nothing: a sentence and what to do; `empty` is {code, subject, near, detail}. */
export function emptyText(empty) {
  const { code, subject, near, detail } = empty;
  switch (code) {
    case "no_runs": return [gettext("No runs here yet"), gettext("The panel fills when a run of its source exists.")];
    case "no_source": return [gettext("The runs of this panel are gone"), gettext("They were deleted, or belong to users outside your teams. Choose other runs in the panel's settings.")];
    case "bad_query": return [gettext("The query cannot be read"), `${subject}: ${detail}`];
    case "no_match": return [gettext("No metric matches"), detail ? `${subject}: ${detail}` : format(gettext("The pattern %(subject)s matches no name that these runs have."), { subject })];
    case "no_points": return [gettext("No numbers to draw"), format(gettext("%(subject)s has no finite values on this axis."), { subject })];
    case "no_axis": return [gettext("This axis is unknown"), format(gettext("The runs of this panel log no %(subject)s. Choose the axis step or time."), { subject: axisTitle(subject) ?? subject })];
    default: {
      const hint = near ? format(gettext("Did you mean %(near)s?"), { near }) : detail || gettext("It was renamed, or no run has logged it yet.");
      return [format(gettext("No run has %(subject)s"), { subject }), hint];
    }
  }
}
