/* The menu of a chart of Compare: its picture, and the chart as a panel of a dashboard. */
import { gettext } from "./i18n.js";
import { toast } from "./page.js";
import { plotly, theme } from "./plot.js";

const PICTURE = { width: 1200, height: 620 };

/** `panel()` returns what the card draws as a panel of a dashboard, or null if no panel draws that. */
export function startMenu(card, panel) {
  const menu = card.querySelector("details.menu"), button = menu.querySelector('[data-do="dashboard"]');
  menu.addEventListener("toggle", () => { if (button && menu.open) button.hidden = panel() === null; });
  button?.addEventListener("click", async () => {
    menu.open = false;
    const { addToDashboard } = await import("./dashboard_add.js");
    await addToDashboard(panel());
  });
  menu.querySelector('[data-do="png"]').addEventListener("click", async () => {
    menu.open = false;
    const place = card.querySelector(".compare-plot");
    if (!place.data) return toast(gettext("The chart is not drawn. Wait until it is, or reload the page."), "bad");
    const Plotly = await plotly(), { data, layout } = picture(place);
    await Plotly.downloadImage({ data, layout }, { format: "png", scale: 2, filename: "compare", ...PICTURE });
  });
}

/** A picture that stands alone: a title, the names of the runs, and a background. */
export function picture(place) {
  const colors = theme(), { data, layout } = place, title = layout.yaxis?.title?.text || layout.xaxis?.title?.text || "";
  const named = data.map((trace) => (trace.name && trace.mode !== "markers" ? { ...trace, showlegend: true } : trace));
  return {
    data: named,
    layout: {
      ...layout, ...PICTURE, title: { text: title, x: 0.02, xanchor: "left", font: { size: 18, color: colors.text } }, showlegend: named.some((trace) => trace.showlegend),
      legend: { font: { size: 11 } }, margin: { l: 72, r: 24, t: 64, b: 56 }, paper_bgcolor: colors.surface, plot_bgcolor: colors.surface,
    },
  };
}
