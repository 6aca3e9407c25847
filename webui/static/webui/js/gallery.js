/* The gallery's charts, fed from the page itself instead of a server. */
import { ChartSet } from "./charts.js";
import "./heat.js";
import { gettext } from "./i18n.js";
import { toast } from "./page.js";
import { startPanels } from "./panels.js";
import { plotly } from "./plot.js";
import { scheduler } from "./scheduler.js";
import { sparks } from "./spark.js";

const data = (id) => JSON.parse(document.getElementById(id).textContent);
const source = data("run-source");

class GallerySet extends ChartSet {
  async fetchSeries(name) {
    const curve = this.source.curves[name] ?? { x: [], y: [] }, axis = this.view.x;
    if (axis === "time" && curve.time) return { ...curve, x: curve.time, name, axis };
    const factor = axis === "step" ? 1 : axis === "time" ? 1 / 6 : source.per_step[axis];
    const start = axis === "time" ? 1768487400 : 0;
    return { ...curve, x: curve.x.map((step) => start + step * factor), name, axis };
  }
}

const charts = new GallerySet(document.getElementById("charts"), source, data("run-panels"), data("run-marks"));
const bad = new GallerySet(document.getElementById("bad-charts"), { ...data("bad-source"), per_step: source.per_step }, data("bad-panels"));
plotly().then(() => { charts.dirty(); bad.dirty(); }, (error) => toast(error.message, "bad"));
window.orrery = { charts, scheduler, panels: startPanels(document.getElementById("dashboard-panels")) };
const draw = scheduler.add({ draw: () => sparks(), visible: () => true, hz: 5 });
draw();
addEventListener("orrery:theme", draw);
document.getElementById("toasts-try").onclick = () => toast(gettext("This message disappears after a few seconds."), "good");
