/* The dialog "Add to dashboard": a chart becomes a panel of a dashboard. Loaded when it is first opened. */
import { gettext } from "./i18n.js";
import { announce, toast } from "./page.js";
import { request } from "./request.js";

/** Opens the dialog for a panel (as in panels/spec.py); `run`: the id of the run whose page this is, or "". */
export async function addToDashboard(panel, run = "") {
  const answer = await request(`/dashboards/add/?run=${run}`, { headers: { Accept: "text/html" } }).catch(() => null);
  if (answer?.status === 401) return; // the page shows that the login expired
  if (!answer?.ok) return toast(answer?.status === 403 ? gettext("Viewers cannot change dashboards.") : gettext("The server did not respond. Try again."), "bad");
  const dialog = Object.assign(document.createElement("dialog"), { className: "dialog", innerHTML: await answer.text() });
  dialog.setAttribute("aria-labelledby", "add-title");
  document.body.append(dialog);
  const form = dialog.querySelector("form"), error = dialog.querySelector("[data-error]");
  form.elements.title.value = panel.title ?? "";
  const showName = () => { dialog.querySelector("[data-new]").hidden = /^\d+$/.test(form.elements.target.value); };
  form.elements.target.addEventListener("change", showName);
  showName();
  dialog.querySelector("[data-cancel]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const body = new FormData(form);
    body.set("panel", JSON.stringify(panel));
    const result = await request(form.action, { method: "POST", body, headers: { Accept: "application/json" } }).catch(() => null);
    const outcome = await result?.json().catch(() => null);
    if (!result?.ok || !outcome?.url) {
      error.textContent = outcome?.detail ?? gettext("The server did not respond. Try again.");
      error.hidden = false;
      return;
    }
    dialog.close();
    added(outcome);
  });
  dialog.showModal();
}

function added({ message, url }) {
  const text = document.createElement("span"), link = Object.assign(document.createElement("a"), { href: url, textContent: gettext("Open it") });
  text.append(message, " ", link);
  announce(message);
  toast(text, "good");
}
