// Runs list: sparklines, live cells, selected rows.
import { format, gettext, ngettext } from "./i18n.js";
import { Live, showStatus } from "./live.js";
import { announce, confirmed } from "./page.js";
import { quantity, parse } from "./format.js";
import { request } from "./request.js";
import { spark, sparks } from "./spark.js";
import "./runs_table.js";

const table = document.getElementById("runs");
const bulk = document.getElementById("bulk");
const MOST_SPARK = 60;
const REFRESH_MS = 10_000; // of the cells of metrics

sparks();
addEventListener("resize", () => sparks());
addEventListener("orrery:theme", () => sparks());

// --- live ---------------------------------------------------------------------------------------------------------
const rowOf = (run) => table?.querySelector(`tr[data-run="${CSS.escape(String(run))}"]`);
const cell = (row, name) => row.querySelector(`[data-cell="${name}"]`);

function setState(row, state) {
  const badge = cell(row, "state").querySelector(".state");
  if (badge.classList.contains(`state-${state}`)) return;
  badge.className = `state state-${state}`;
  badge.querySelector("use").setAttribute("href", `#state-${state}`);
  badge.querySelector("span").textContent = state;
  announce(format(gettext("Run %(run)s is %(state)s"), { run: row.dataset.run, state }));
}

function setProgress(row, summary) {
  const loss = parse(summary.loss);
  const canvas = row.querySelector("canvas.spark:not([data-fixed])");
  const put = (name, text) => { const found = cell(row, name); if (found) { found.textContent = text; found.closest("td").classList.remove("none"); } };
  if (summary.loss !== undefined) put("loss", quantity(loss, 4));
  if (summary.tokens !== undefined) put("tokens", quantity(parse(summary.tokens)));
  const meter = cell(row, "meter");
  if (meter && summary.step && summary.steps) meter.style.setProperty("--part", `${(100 * summary.step) / summary.steps}%`);
  if (canvas && Number.isFinite(loss) && summary.step !== Number(canvas.dataset.step)) {
    canvas.dataset.step = summary.step;
    const values = canvas.dataset.values ? canvas.dataset.values.split(",") : [];
    canvas.dataset.values = [...values, loss].slice(-MOST_SPARK).join(",");
    if (!document.hidden) spark(canvas, canvas.dataset.values.split(",").map(Number));
  }
}

function onFrame(frame) {
  const row = rowOf(frame.run);
  if (!row) {
    if (frame.type === "state" && frame.state === "queued" && Number(frame.run) > newest()) showNewRuns();
    return;
  }
  if (frame.type === "state") {
    setState(row, frame.state);
    if (frame.summary) setProgress(row, frame.summary);
    const reason = cell(row, "reason");
    if (reason) reason.textContent = frame.state === "queued" ? (frame.wait_reason ?? "") : "";
    const hours = cell(row, "hours");
    if (hours) setGrowing(hours, ["starting", "running", "stopping"].includes(frame.state));
  } else if (frame.type === "progress") {
    progressed = true;
    setProgress(row, frame.summary ?? {});
  }
}

const newest = () => Math.max(0, ...[...table.querySelectorAll("tr[data-run]")].map((row) => Number(row.dataset.run)));
let fresh = 0;
function showNewRuns() {
  fresh += 1;
  let note = document.getElementById("fresh");
  if (!note) {
    note = Object.assign(document.createElement("a"), { id: "fresh", className: "note", href: location.href });
    table.closest(".card").before(note);
  }
  note.textContent = format(ngettext("%(count)s new run. Reload to show it.", "%(count)s new runs. Reload to show them.", fresh), { count: fresh });
}

/** Device-hours grow while the run holds devices, not while it waits or is paused. */
function setGrowing(cell, grows) {
  if (grows === "growing" in cell.dataset) return;
  if (!grows) addHours(cell);
  cell.toggleAttribute("data-growing", grows);
  cell.dataset.at = performance.now();
  if (Number(cell.dataset.deviceCount)) cell.classList.remove("none");
}

function addHours(cell) {
  const now = performance.now(), since = Number(cell.dataset.at ?? 0);
  cell.dataset.hours = Number(cell.dataset.hours) + Number(cell.dataset.deviceCount) * (now - since) / 3.6e6;
  cell.dataset.at = now;
  cell.textContent = quantity(Number(cell.dataset.hours));
}

function growHours() {
  if (document.hidden) return;
  for (const cell of table.querySelectorAll('[data-cell="hours"][data-growing]')) if (Number(cell.dataset.deviceCount)) addHours(cell);
}
if (table) setInterval(growHours, 5000);

/** The rows as the server shows them now. */
async function freshRows() {
  const answer = await request(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) throw new Error(`cannot refetch rows: ${answer.status}`);
  return new DOMParser().parseFromString(await answer.text(), "text/html").querySelectorAll("tr[data-run]");
}

/* Medians, minima and other aggregates are not in the frames: while shown runs progress, they are read again. */
let progressed = false, refreshAfter = REFRESH_MS;
async function refreshMetrics() {
  const started = performance.now();
  if (progressed && !document.hidden) {
    progressed = false;
    for (const row of await freshRows().catch(() => [])) {
      const cells = rowOf(row.dataset.run)?.cells ?? [];
      [...row.cells].forEach((cell, i) => {
        if (!("refresh" in cell.dataset) || !("refresh" in (cells[i]?.dataset ?? {})) || cells[i].textContent === cell.textContent) return;
        cells[i].innerHTML = cell.innerHTML;
        cells[i].classList.toggle("none", cell.classList.contains("none"));
      });
    }
    refreshAfter = Math.max(REFRESH_MS, 30 * (performance.now() - started)); // at most a thirtieth of the time
  }
  setTimeout(refreshMetrics, refreshAfter);
}
if (table?.querySelector("[data-refresh]")) setTimeout(refreshMetrics, REFRESH_MS);

/** Refetches the rows after a gap in the stream. */
async function refill() {
  for (const row of await freshRows()) {
    const old = rowOf(row.dataset.run);
    if (!old) continue;
    row.querySelector("input").checked = old.querySelector("input").checked;
    old.replaceWith(row);
  }
  sparks();
}

if (table && "live" in table.dataset)
  new Live({ path: "/ws/fleet/", after: table.dataset.after, epoch: table.dataset.epoch, refetch: true, onFrame, onGap: refill, onStatus: showStatus });

// --- chosen rows --------------------------------------------------------------------------------------------------
function updateSelection() {
  const boxes = [...bulk.querySelectorAll('input[name="run"]')];
  const count = boxes.filter((box) => box.checked).length;
  for (const box of boxes) box.closest("tr").classList.toggle("selected", box.checked);
  document.getElementById("bulk-bar").hidden = !count;
  document.getElementById("bulk-count").textContent = format(gettext("%(count)s selected"), { count });
  const all = document.getElementById("pick-all");
  all.checked = count === boxes.length;
  all.indeterminate = count > 0 && count < boxes.length;
}

if (table) {
  updateSelection();
  let last = null;
  bulk.addEventListener("click", (event) => {
    const box = event.target.closest('input[name="run"]');
    if (!box) return;
    if (event.shiftKey && last) {
      const boxes = [...bulk.querySelectorAll('input[name="run"]')];
      const [from, to] = [boxes.indexOf(last), boxes.indexOf(box)].sort((a, b) => a - b);
      for (const between of boxes.slice(from, to + 1)) between.checked = box.checked;
    }
    last = box;
  });
  bulk.addEventListener("change", (event) => {
    if (event.target.id === "pick-all")
      for (const box of bulk.querySelectorAll('input[name="run"]')) box.checked = event.target.checked;
    updateSelection();
  });
  bulk.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target.name !== "tag") return;
    event.preventDefault();
    bulk.querySelector('button[value="tag"]').click();
  });
  bulk.addEventListener("submit", (event) => {
    const count = bulk.querySelectorAll('input[name="run"]:checked').length;
    if (event.submitter?.value !== "cancel") return;
    if (bulk.dataset.confirmed) return void delete bulk.dataset.confirmed;
    const { submitter } = event;
    event.preventDefault();
    event.stopImmediatePropagation();
    const question = ngettext("Cancel %(count)s run? Progress since the last checkpoint is lost.", "Cancel %(count)s runs? Progress since the last checkpoint is lost.", count);
    confirmed(format(question, { count })).then((yes) => {
      if (!yes) return;
      bulk.dataset.confirmed = "1";
      bulk.requestSubmit(submitter);
    });
  });
  addEventListener("keydown", (event) => {
    const row = event.target.closest?.("tr[data-run]");
    if (event.key !== "x" || !row || event.target !== row) return;
    row.querySelector("input").click();
  });
}

document.getElementById("filters")?.addEventListener("change", (event) => {
  if (!event.target.matches("select")) return;
  for (const field of event.currentTarget.elements) if (!field.value) field.disabled = true; // a short address
  event.currentTarget.submit();
});
