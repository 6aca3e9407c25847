/* The data page's histogram of lengths, drawn by Plotly from the JSON in the page. */
import { gettext } from "./i18n.js";
import { plotly, theme } from "./plot.js";

const place = document.querySelector("#data-histogram");
const source = document.querySelector("#data-histogram-values");

async function draw() {
  if (!place || !source) return;
  const { width, counts, seq_len: length } = JSON.parse(source.textContent);
  const colors = theme();
  let Plotly;
  try { Plotly = await plotly(); } catch (error) { place.textContent = error.message; return; }
  const axis = { color: colors["text-2"], gridcolor: colors.grid, zeroline: false, rangemode: "tozero" };
  const most = width * counts.length;
  const bars = {
    type: "bar", x: counts.map((_, i) => (i + 0.5) * width), y: counts, width,
    customdata: counts.map((_, i) => [i * width, (i + 1) * width - 1]),
    marker: { color: counts.map((_, i) => (i * width > length ? colors.fail : colors.accent)) },
    hovertemplate: `%{customdata[0]}–%{customdata[1]} ${gettext("tokens")}: %{y}<extra></extra>`,
  };
  const limit = length <= most ? [{ type: "line", x0: length, x1: length, yref: "paper", y0: 0, y1: 1, line: { color: colors.event, dash: "dot" } }] : [];
  Plotly.react(place, [bars], {
    margin: { l: 44, r: 8, t: 8, b: 40 }, bargap: 0.06, showlegend: false, shapes: limit,
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: colors["text-2"], size: 12 },
    xaxis: { ...axis, title: { text: gettext("tokens per example") } },
    yaxis: { ...axis, title: { text: gettext("examples") } },
  }, { displayModeBar: false, responsive: true });
}

draw();
addEventListener("orrery:theme", draw);
