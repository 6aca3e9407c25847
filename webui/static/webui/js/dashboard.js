/* A dashboard: starts its panels, smooths all lines, and in edit mode loads what arranges and changes them. */
import { startPanels } from "./panels.js";

const data = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
const root = document.getElementById("panels"), subject = data("panels-subject");
const views = root ? startPanels(root, subject) : new Map();
const slider = document.querySelector("[data-panel-smooth]"), query = new URLSearchParams(location.search);

function smooth(value) {
  document.querySelector("[data-panel-smooth-value]").textContent = value;
  for (const view of views.values()) view.smooth(value);
}

slider?.addEventListener("input", () => {
  smooth(Number(slider.value));
  const address = new URLSearchParams(location.search);
  address.set("smooth", slider.value);
  history.replaceState(null, "", `?${address}`);
});
const wanted = Number(query.get("smooth"));
if (slider && query.has("smooth") && wanted >= 0 && wanted < 1) {
  slider.value = wanted;
  smooth(wanted);
}

document.addEventListener("click", (event) => { if (event.target.closest?.("[data-close]")) event.target.closest("dialog").close(); });
document.querySelector("[data-choose-dashboard]")?.addEventListener("change", (event) => event.target.form.submit());

const state = data("dashboard-state");
if (state) import("./dashboard_edit.js").then(({ Editor }) => { window.orreryDashboard = new Editor({ root, subject, views, state }); });
