/* Live overview: updates run cards and device rings from fleet frames, and refetches the rest on changes. */
import { inUnit, parse, percent, quantity, remaining } from "./format.js";
import { Live, showStatus } from "./live.js";
import { request } from "./request.js";
import { scheduler } from "./scheduler.js";
import { spark, sparks } from "./spark.js";
import { extremes } from "./store.js";

const PULSE_MS = 2000;
const RING = 2 * Math.PI * 20;
const { epoch, after } = document.body.dataset;
const FORMATS = {
  loss: (v) => quantity(v, 4), tokens_per_s: quantity, mfu: percent, eta_s: remaining,
  "inference/ttft_s": (v) => inUnit(v, "s"), "inference/tpot_s": (v) => inUnit(v, "s"),
  "inference/score_s": (v) => inUnit(v, "s"), "inference/scores_per_s": quantity,
  "inference/tokens_per_s": quantity, "inference/running": quantity,
};

const draw = scheduler.add({ draw: () => sparks(), visible: () => true, hz: 4, light: true });
draw();
addEventListener("resize", draw);
addEventListener("orrery:theme", draw);

const live = new Live({
  path: "/ws/fleet/", after, epoch, refetch: true, onStatus: showStatus,
  onFrame(frame) {
    if (frame.type === "progress") progress(frame);
    else if (frame.type === "samples") frame.nodes.forEach(sample);
    else schedulePulse();
  },
  onGap: () => pulse(),
});
window.orrery = { live, scheduler };

function progress({ run, summary }) {
  const card = document.querySelector(`[data-run="${CSS.escape(String(run))}"]`);
  if (!card) return;
  for (const [name, format] of Object.entries(FORMATS))
    if (summary[name] !== undefined) {
      const place = card.querySelector(`[data-n="${name}"]`);  // inference runs have no loss, training runs no first token
      if (place) place.textContent = format(parse(summary[name]));
    }
  if (summary.step && summary.steps) card.querySelector(".meter").style.setProperty("--part", `${(100 * summary.step) / summary.steps}%`);
  const canvas = card.querySelector("canvas");
  const drawn = summary.loss ?? summary["inference/tokens_per_s"] ?? summary["inference/scores_per_s"];
  if (drawn === undefined || String(summary.step) === canvas.dataset.step) return; // a repeated frame
  canvas.dataset.step = summary.step;
  let values = canvas.dataset.values ? canvas.dataset.values.split(",").map(Number) : [];
  values.push(parse(drawn));
  if (values.length > 160) values = extremes(values, 80).map((i) => values[i]);
  canvas.dataset.values = values.join(",");
  draw();
}

function sample({ node, devices }) {
  for (const device of devices ?? []) {
    const mark = document.querySelector(`[data-device="${CSS.escape(`${node}/${device.index}`)}"]`);
    const total = device.memory_bytes, used = device.memory_used_bytes;
    if (mark && total && used !== null && used !== undefined)
      mark.querySelector(".ring").setAttribute("stroke-dasharray", `${RING * Math.min(1, used / total)} ${RING}`);
  }
}

let timer = 0, last = 0;
function schedulePulse() {
  if (!timer) timer = setTimeout(pulse, Math.max(200, last + PULSE_MS - performance.now()));
}

async function pulse() {
  clearTimeout(timer);
  timer = 0;
  if (document.hidden) { last = 0; return; }
  last = performance.now();
  const answer = await request(`/pulse/${location.search}`).catch(() => null);
  if (!answer?.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const sentence = document.getElementById("sentence"), now = fresh.querySelector("[data-sentence]").textContent;
  if (sentence.textContent !== now) sentence.textContent = now;
  for (const part of fresh.querySelectorAll("[data-part]")) {
    const here = document.querySelector(`#overview-parts [data-part="${part.dataset.part}"]`);
    if (here && here.innerHTML !== part.innerHTML && !here.contains(document.activeElement)) here.innerHTML = part.innerHTML;
  }
  draw();
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) pulse(); });
setInterval(() => { if (!document.hidden && performance.now() - last > 15000) pulse(); }, 5000); // step ages show a hang

const describe = (event) => {
  const mark = event.target.closest?.("[data-description]"), text = document.getElementById("device-description");
  if (mark && text) text.textContent = mark.dataset.description;
};
document.addEventListener("pointerover", describe);
document.addEventListener("focusin", describe);
