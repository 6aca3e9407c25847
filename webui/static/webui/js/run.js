/* Live run page: one socket feeds charts, tiles, log lines and the headline. */
import { ChartSet } from "./charts.js";
import { duration, memory, parse, percent, quantity } from "./format.js";
import { format, gettext } from "./i18n.js";
import { Live, showStatus } from "./live.js";
import { startLog } from "./logs.js";
import { announce } from "./page.js";
import { plotly } from "./plot.js";
import { request } from "./request.js";
import { scheduler, watchVisible } from "./scheduler.js";
import { spark } from "./spark.js";
import { extremes } from "./store.js";
import "./heat.js";

const PULSE_MS = 4000;
const data = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
const source = data("run-source"), panels = data("run-panels") ?? [], marks = data("run-marks") ?? [];
const part = (id) => document.getElementById(id);

const charts = panels.length ? new ChartSet(part("charts"), source, panels, marks) : null;
if (charts) plotly().then(() => charts.dirty(), (error) => showStatus("refused", format(gettext("%(error)s. Reload the page."), { error: error.message })));
const tiles = startTiles();
const log = part("log") ? startLog(part("log"), part("log-empty"), part("follow"), source.ended) : null;

const live = new Live({
  path: source.socket, after: source.after, epoch: source.epoch, onStatus: showStatus,
  onFrame(frame) {
    if (frame.type === "points") {
      charts?.points(frame);
      tiles.points(frame);
      noticeNew(frame.values);
      schedulePulse();
    } else if (frame.type === "log") log?.add(frame);
    else if (frame.type === "event" || frame.type === "state") schedulePulse(true);
  },
  async onGap(gap) {
    schedulePulse(true);
    await Promise.all([charts?.refetch(), log && gap.to - gap.from > 0 ? log.reload() : null]);
  },
});

window.orrery = { charts, live, scheduler, tiles };

/* ---- headline: rendered by the server ---- */

let pulseTimer = 0, lastPulse = performance.now() - PULSE_MS + 1500, state = document.querySelector("#run-state .state")?.textContent.trim();

function schedulePulse(now = false) {
  const wait = now ? 150 : Math.max(150, lastPulse + PULSE_MS - performance.now());
  if (pulseTimer && !now) return;
  clearTimeout(pulseTimer);
  pulseTimer = setTimeout(pulse, wait);
}

async function pulse() {
  pulseTimer = 0;
  if (document.hidden) return;
  lastPulse = performance.now();
  const answer = await request(`/runs/${source.id}/pulse/`, { headers: { Accept: "application/json" } }).catch(() => null);
  if (!answer?.ok) return;
  const update = await answer.json();
  part("sentence").textContent = update.sentence;
  const bar = part("run-progress");
  if (bar && update.part) {
    bar.removeAttribute("data-none");
    bar.style.setProperty("--part", `${update.part}%`);
    bar.setAttribute("aria-valuenow", update.part);
  }
  if (part("run-events") && part("run-events").innerHTML !== update.parts.events) part("run-events").innerHTML = update.parts.events;
  if (charts && update.marks.length !== charts.marks.length) {
    charts.marks = update.marks;
    charts.dirty();
  }
  if (update.run_state === state) return;
  state = update.run_state;
  part("run-state").innerHTML = update.parts.state;
  if (part("run-actions")) part("run-actions").innerHTML = update.parts.actions;
  announce(format(gettext("The run is now %(state)s. %(sentence)s"), { state, sentence: update.sentence }));
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) schedulePulse(true); });
if (!source.ended) schedulePulse();

/* ---- tiles ---- */

function startTiles() {
  const known = new Map();
  for (const element of document.querySelectorAll("[data-metric]")) {
    const name = element.dataset.metric, canvas = element.querySelector("canvas"), value = element.querySelector("[data-value]");
    const median = "median" in element.dataset; // of an ended run: only its curve is drawn
    const tile = { values: [], digits: element.dataset.digits, median, hz: 4, light: true, draw: () => draw(tile), visible: () => sight.visible };
    const sight = watchVisible(element, () => tile.mark?.());
    Object.assign(tile, { name, canvas, value, mark: scheduler.add(tile) });
    known.set(name, tile);
    charts?.ready.then(() => fill(tile)).then(() => tile.mark(), (error) => console.warn(error.message));
    addEventListener("orrery:theme", () => tile.mark());
  }
  async function fill(tile) {
    const y = charts.curves.get(tile.name)?.y ?? (await charts.fetchSeries(tile.name, null)).y.map(parse);
    if (y.length && !tile.values.length) tile.values = extremes(y, 120).map((i) => y[i]);
  }
  function draw(tile) {
    const last = tile.values.at(-1);
    if (last !== undefined && !tile.median) tile.value.textContent = tile.digits && Number.isFinite(last) ? last.toFixed(tile.digits) : shown(tile.name, last);
    if (tile.canvas) spark(tile.canvas, tile.values);
  }
  return {
    points(frame) {
      for (const [name, points] of Object.entries(frame.values)) {
        const tile = known.get(name);
        if (!tile || (tile.rank ?? frame.rank) !== frame.rank) continue;
        tile.rank = frame.rank;
        for (const point of points) tile.values.push(parse(point[1]));
        if (tile.values.length > 240) tile.values = extremes(tile.values, 120).map((i) => tile.values[i]);
        tile.mark();
      }
    },
    held: () => Object.fromEntries([...known].map(([name, tile]) => [name, tile.values.length])),
  };
}

function shown(name, value) {
  if (!Number.isFinite(value)) return gettext("not finite");
  if (name === "mfu" || name.endsWith("accuracy")) return percent(value);
  if (name.endsWith("_bytes")) return memory(value);
  if (name.endsWith("_s") && !name.endsWith("per_s")) return duration(value);
  return quantity(value, name.includes("loss") ? 4 : 3);
}

/* ---- metrics that appeared after the page was rendered ---- */

const names = new Set(source.names);
function noticeNew(values) {
  const fresh = Object.keys(values).filter((name) => !names.has(name));
  fresh.forEach((name) => names.add(name));
  const unknown = fresh.filter((name) => !charts?.curves.has(name) && !source.quiet?.some((known) => (known.endsWith("/") ? name.startsWith(known) : name === known)));
  if (!charts || !unknown.length || !source.quiet || part("new-series")) return;
  const note = Object.assign(document.createElement("p"), { id: "new-series", className: "note" });
  const link = Object.assign(document.createElement("a"), { href: location.href, textContent: gettext("Reload to show them") });
  note.append(format(gettext("New metrics: %(names)s."), { names: unknown.slice(0, 4).join(", ") }), " ", link);
  part("charts").parentElement.before(note);
}
