/* Shared by all pages: theme, keyboard, dialogs, menus, ages, toasts. */
import { format, gettext } from "./i18n.js";
import { startKeyboard } from "./keyboard.js";
import { ago } from "./format.js";
import { atLogin, showLoginExpired } from "./request.js";

export const theme = () => document.documentElement.dataset.theme ?? "system";

export function setTheme(choice) {
  if (choice === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  try { localStorage.setItem("orrery-theme", choice); } catch { /* kept for this page only */ }
  showTheme();
  dispatchEvent(new CustomEvent("orrery:theme"));
}

function showTheme() {
  for (const button of document.querySelectorAll("[data-theme-choice]"))
    button.setAttribute("aria-pressed", String(button.dataset.themeChoice === theme()));
}

/** Announces a text to screen readers. */
export function announce(text) {
  const region = document.getElementById("announce");
  if (region) region.textContent = text;
}

/** Shows a toast for a few seconds; `kind` is "", good, warn or bad. Bad ones stay until closed. */
export function toast(text, kind = "") {
  const box = document.createElement("div");
  box.className = `note toast ${kind}`;
  box.append(text);
  const close = Object.assign(document.createElement("button"), { className: "button quiet small", textContent: gettext("Close") });
  close.onclick = () => box.remove();
  box.append(close);
  document.getElementById("toasts").append(box);
  if (kind !== "bad") setTimeout(() => box.remove(), 6000);
}

/* ---- a note of success leaves by itself, unless the pointer or the focus is on it ---- */

for (const note of document.querySelectorAll("[data-passing]")) {
  const leave = () => (note.matches(":hover, :focus-within") ? setTimeout(leave, 2000) : note.remove());
  setTimeout(leave, 8000);
}

/* ---- wide tables and rows of tiles scroll: by keyboard too ---- */

const WRAPS = ".table-wrap:not([tabindex]), #tiles:not([tabindex])", resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const wrap = target.closest(WRAPS);
    if (wrap && wrap.scrollWidth > wrap.clientWidth) wrap.tabIndex = 0;
  }
});
// the content may grow in a wrap of constant size
const watchTables = (root) => {
  for (const wrap of root.querySelectorAll?.(WRAPS) ?? []) for (const each of [wrap, ...wrap.children]) resized.observe(each);
};
watchTables(document);
document.addEventListener("htmx:load", (event) => watchTables(event.target));

/* ---- no network: shown at once, on every page ---- */

function showNetwork() {
  const notice = document.getElementById("connection");
  if (!notice) return;
  if (!navigator.onLine) {
    notice.textContent = gettext("You are offline: these are the last known values. Reconnecting…");
    notice.dataset.offline = "";
    notice.hidden = false;
  } else if ("offline" in notice.dataset) {
    delete notice.dataset.offline;
    notice.hidden = true;
  }
}
addEventListener("offline", showNetwork);
addEventListener("online", showNetwork);
showNetwork();

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-theme-choice], [data-dialog], [data-copy], tr[data-href]");
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  if (!target) return;
  if (target.dataset.themeChoice) setTheme(target.dataset.themeChoice);
  else if (target.dataset.dialog) document.querySelector(target.dataset.dialog)?.showModal();
  else if (target.dataset.copy) copy(document.querySelector(target.dataset.copy)?.textContent ?? "");
  else if (target.dataset.href && !event.target.closest("a, button, input, label") && !getSelection().toString())
    location.assign(target.dataset.href);
});

// a click outside a dialog closes it
document.addEventListener("pointerdown", (event) => {
  if (event.target instanceof HTMLDialogElement && event.target.open) {
    const box = event.target.getBoundingClientRect();
    const inside = event.clientX >= box.left && event.clientX <= box.right && event.clientY >= box.top && event.clientY <= box.bottom;
    if (!inside) event.target.close();
  }
});

/** Shows a question in a dialog; resolves to whether the person confirmed it. */
export function confirmed(question) {
  const dialog = document.createElement("dialog"), text = document.createElement("p"), foot = document.createElement("form");
  const [back, confirm] = [gettext("Back"), gettext("Confirm")].map((label) => Object.assign(document.createElement("button"), { className: "button", textContent: label }));
  Object.assign(text, { textContent: question, id: "confirm-question" });
  Object.assign(dialog, { className: "dialog", id: "confirm-dialog" });
  dialog.setAttribute("aria-labelledby", text.id);
  Object.assign(foot, { method: "dialog", className: "dialog-foot" });
  confirm.classList.add("danger");
  confirm.value = "confirm";
  back.value = "";
  back.autofocus = true;
  const body = document.createElement("div");
  body.className = "dialog-body";
  body.append(text);
  foot.append(back, confirm);
  dialog.append(body, foot);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => {
    dialog.remove();
    done(dialog.returnValue === "confirm");
  }));
}

// a form with a question is sent after it is confirmed
document.addEventListener("submit", async (event) => {
  const form = event.target, { submitter } = event, question = submitter?.dataset.confirm ?? form.dataset.confirm;
  if (!question) return;
  if (form.dataset.confirmed) return void delete form.dataset.confirmed;
  event.preventDefault();
  event.stopImmediatePropagation();
  if (!await confirmed(question)) return;
  form.dataset.confirmed = "1";
  form.requestSubmit(submitter);
}, true);

// ignore repeated submits while one is in progress
document.addEventListener("submit", (event) => {
  if (event.target.dataset.sent) event.preventDefault();
  else if (event.target.method === "post") event.target.dataset.sent = "1";
});
addEventListener("pageshow", () => document.querySelectorAll("form[data-sent]").forEach((form) => delete form.dataset.sent));

// A filter in `hx-trigger` would need `eval`, which the content security policy refuses.
document.addEventListener("htmx:beforeRequest", (event) => {
  if (document.hidden && event.detail.elt.getAttribute("hx-trigger")?.includes("every ")) event.preventDefault();
});
// htmx follows the redirect to the login page, too: it must not replace a part of the page
document.addEventListener("htmx:beforeSwap", (event) => {
  const { xhr } = event.detail;
  if (xhr.status !== 401 && !atLogin(xhr.responseURL)) return;
  event.detail.shouldSwap = event.detail.isError = false; // one notice is enough
  showLoginExpired();
});
document.addEventListener("htmx:responseError", (event) => toast(format(gettext("The server returned status %(status)s. Reload the page, then repeat the action."), { status: event.detail.xhr.status }), "bad"));
document.addEventListener("htmx:sendError", () => toast(gettext("The server is unreachable. Nothing was changed."), "bad"));

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast(gettext("Copied."), "good");
  } catch {
    toast(gettext("The browser does not allow copying here. Select and copy the text manually."), "warn");
  }
}

setInterval(() => {
  if (document.hidden) return;
  for (const node of document.querySelectorAll("time[data-ago]"))
    node.textContent = ago((Date.now() - Date.parse(node.dateTime)) / 1000);
}, 5000);

showTheme();
startKeyboard();
document.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });

// the part that names outages cannot be fetched: the web process or its database is down
for (const event of ["htmx:sendError", "htmx:responseError"])
  document.addEventListener(event, ({ detail }) => {
    if (detail.elt.id !== "outages") return;
    const note = Object.assign(document.createElement("div"), { className: "note bad" });
    note.setAttribute("role", "alert");
    note.textContent = gettext("The control plane does not answer. Runs continue; this page shows what was last known.");
    detail.elt.replaceChildren(note);
  });
