/* The fleet over time: charts whose curves are in the page; the address chooses the period. */
import { ChartSet } from "./charts.js";
import { saveCsv } from "./csv.js";
import { toast } from "./page.js";
import { plotly } from "./plot.js";
import { scheduler } from "./scheduler.js";

const data = (id) => JSON.parse(document.getElementById(id).textContent);

class FleetCharts extends ChartSet {
  async fetchSeries(name) {
    return { x: [], y: [], ...this.source.curves[name], name, axis: "time" };
  }

  /** The whole period, also where nothing was recorded. */
  windowOf(panel) { return super.windowOf(panel) ?? this.source.period; }

  formatAxis(at) { return `${new Date(at * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`; }

  async downloadCsv(panel) {
    const rows = [["name", "time", "mean", "min", "max"]];
    for (const { name } of panel.series) {
      const curve = this.source.curves[name];
      curve?.x.forEach((time, i) => rows.push([name, new Date(time * 1000).toISOString(), curve.y[i], curve.low[i], curve.high[i]]));
    }
    saveCsv(this.fileName(panel), rows);
  }
}

const charts = new FleetCharts(document.getElementById("charts"), data("fleet-source"), data("fleet-panels"));
plotly().then(() => charts.dirty(), (error) => toast(error.message, "bad"));
window.orrery = { charts, scheduler };
