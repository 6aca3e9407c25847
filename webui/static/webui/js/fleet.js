// Fleet, node and queue pages: writes device metrics into their cells; refetches the part on other changes.
import { format, gettext } from "./i18n.js";
import { Live, showStatus } from "./live.js";
import { announce } from "./page.js";
import { sparks } from "./spark.js";
import { memory, percent, quantity } from "./format.js";

const part = document.querySelector("[data-live-part]");
const kind = part.dataset.livePart;
const REFRESH_MS = 1000;
let waiting = 0;

const inUse = () => Boolean(part.querySelector("details[open]")) || (part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea"));

/** At most one request per second, none while a field of the part has focus. */
function refresh() {
  if (waiting) return;
  waiting = setTimeout(() => {
    waiting = 0;
    if (inUse()) return refresh();
    window.htmx?.trigger(part, "refresh");
  }, REFRESH_MS);
}
// a field got focus while the response was loading
part.addEventListener("htmx:beforeSwap", (event) => {
  if (event.target !== part || !inUse()) return;
  event.detail.shouldSwap = false;
  refresh();
});

sparks(part);
part.addEventListener("htmx:afterSettle", () => sparks(part));
for (const event of ["resize", "orrery:theme"]) addEventListener(event, () => sparks(part));

const put = (row, name, text) => { const cell = row?.querySelector(`[data-cell="${name}"]`); if (cell) cell.textContent = text; };
const bar = (row, name, share) => row?.querySelector(`[data-cell="${name}"]`)?.style.setProperty("--part", `${Math.min(100, Math.max(0, 100 * share))}%`);
const known = (value) => value !== null && value !== undefined;

function touchHeartbeat(row) {
  const time = row?.querySelector('[data-cell="heartbeat"] time');
  if (time) time.dateTime = new Date().toISOString();
}

function sample(frame) {
  if (kind === "fleet") {
    const row = part.querySelector(`tr[data-node="${CSS.escape(frame.node)}"]`);
    const uses = frame.devices.map((device) => device.utilization).filter(known);
    if (uses.length) put(row, "use", percent(uses.reduce((a, b) => a + b, 0) / uses.length));
    touchHeartbeat(row);
  }
  if (kind !== "node" || frame.node !== part.dataset.node) return;
  touchHeartbeat(part);
  for (const device of frame.devices) {
    const row = part.querySelector(`tr[data-device="${device.index}"]`);
    if (!row) continue;
    if (known(device.utilization)) { put(row, "use", percent(device.utilization)); bar(row, "use-meter", device.utilization); }
    if (known(device.memory_used_bytes)) {
      const total = Number(row.querySelector('[data-cell="memory-meter"]').dataset.total);
      put(row, "memory", total ? format(gettext("%(used)s of %(total)s"), { used: memory(device.memory_used_bytes), total: memory(total) }) : memory(device.memory_used_bytes));
      bar(row, "memory-meter", total ? device.memory_used_bytes / total : 0);
    }
    if (known(device.power_w)) put(row, "power", `${quantity(device.power_w)} W`);
    if (known(device.temperature_c)) put(row, "temperature", `${Math.round(device.temperature_c)} °C`);
  }
}

function onFrame(frame) {
  if (frame.type === "samples") return frame.nodes.forEach(sample);
  if (frame.type === "node") {
    announce(format(frame.drained ? gettext("Node %(node)s is %(health)s and drained") : gettext("Node %(node)s is %(health)s"), frame));
    if (kind !== "queue") refresh();
  } else if (frame.type === "state" || frame.type === "queue") refresh();
}

new Live({ path: "/ws/fleet/", after: part.dataset.after, epoch: part.dataset.epoch, onFrame, onGap: refresh, onStatus: showStatus });
