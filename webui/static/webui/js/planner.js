/* Planner page: sends the form to the server on change, drops stale answers, keeps the state in the URL.
   The page also works without scripts. */
import { format, gettext } from "./i18n.js";
import { announce, toast } from "./page.js";
import { request as answerOf } from "./request.js";

const WAIT_MS = 60; // debounce of sliders and keys
const form = document.getElementById("planner-form");
const dialog = document.getElementById("opened");
document.documentElement.classList.add("scripted");

let timer = 0, pending = null, announceTimer = 0;

/* ---- request and result ---- */

function schedule(wait = WAIT_MS, quick = false) {
  clearTimeout(timer);
  timer = setTimeout(() => request(readForm(), quick), wait);
}

function readForm() {
  const params = new URLSearchParams();
  for (const [name, value] of new FormData(form)) {
    if (typeof value !== "string" || name === "csrfmiddlewaretoken") continue;
    if (name === "plan" && !value) continue;
    params.append(name, value);
  }
  const top = new URLSearchParams(location.search).get("top"); // keep the number of plans shown
  if (top) params.set("top", top);
  return params;
}

async function request(params = readForm(), quick = false) {
  clearTimeout(timer);
  if (quick) params.set("quick", "1");
  pending?.abort();
  const controller = (pending = new AbortController());
  const answer = document.getElementById("answer");
  answer.setAttribute("aria-busy", "true");
  try {
    const response = await answerOf(`${form.dataset.answer}?${params}`, { signal: controller.signal, headers: { Accept: "text/html" } });
    if (response.status === 401) return; // the page shows that the login expired
    if (!response.ok) throw new Error(statusText(response));
    show(await response.text());
  } catch (error) {
    if (error.name === "AbortError") return;
    toast(`${error.message} ${gettext("The numbers shown are outdated.")}`, "bad");
  } finally {
    if (pending === controller) document.getElementById("answer").removeAttribute("aria-busy");
  }
}

function show(text) {
  const focused = document.activeElement?.closest("#answer") ? document.activeElement : null;
  const place = focused && (focused.id ? `#${CSS.escape(focused.id)}` : focused.dataset.why ? `#answer [data-why="${focused.dataset.why}"].${focused.classList[0]}`
    : focused.matches("[name=compare]") ? `#answer [name=compare][value="${CSS.escape(focused.value)}"]`
      : focused.dataset.plan ? `#answer .point[data-plan="${CSS.escape(focused.dataset.plan)}"]` : focused.dataset.keyOf ? `#answer tr[data-key-of="${CSS.escape(focused.dataset.keyOf)}"]` : "");
  const open = [...document.querySelectorAll("#answer details[open] > summary")].map((node) => node.textContent.trim());
  const parts = new DOMParser().parseFromString(text, "text/html");
  for (const id of ["headline", "plan-actions", "answer"]) {
    const fresh = parts.getElementById(id), old = document.getElementById(id);
    if (id === "plan-actions" && old.querySelector("details[open]")) old.querySelector("details").open = false;
    old.replaceWith(document.adoptNode(fresh));
  }
  for (const summary of document.querySelectorAll("#answer details > summary"))
    if (open.includes(summary.textContent.trim())) summary.parentElement.open = true;
  rows();
  const again = place ? document.querySelector(place) : null;
  if (again?.matches("tr")) again.tabIndex = 0;
  if (again) again.focus({ preventScroll: true });
  const state = document.getElementById("answer").dataset.query;
  if (state !== undefined) history.replaceState(null, "", `?${state}`);
  errors();
  clearTimeout(announceTimer);
  announceTimer = setTimeout(() => announce(document.getElementById("headline").textContent.trim()), 900);
}

const statusText = (response) => format(gettext("The server returned status %(status)s."), { status: response.status });

/** Shows the server's problems at their fields. */
function errors() {
  for (const place of form.querySelectorAll("[data-errors]")) place.textContent = "";
  for (const control of form.querySelectorAll('[aria-invalid="true"]')) control.removeAttribute("aria-invalid");
  for (const item of document.querySelectorAll("#answer [data-problem]")) {
    const place = form.querySelector(`[data-errors="${CSS.escape(item.dataset.problem)}"]`);
    const control = form.elements[item.dataset.problem];
    if (!place || !control) continue;
    const message = Object.assign(document.createElement("span"), { className: "error", id: `e-${item.dataset.problem}` });
    message.textContent = item.querySelector("span").textContent;
    place.append(message);
    control.setAttribute("aria-invalid", "true");
    control.setAttribute("aria-describedby", message.id);
    control.closest("details:not([open])")?.setAttribute("open", "");
  }
}

/* ---- the form ---- */

const stops = (slider) => slider.dataset.stops.split(",").map(Number);

function updateSlider(slider) {
  slider.style.setProperty("--done", `${(100 * slider.value) / (slider.max || 1)}%`);
  slider.setAttribute("aria-valuetext", form.elements[slider.dataset.for].value || gettext("any"));
}

function toSlider(control) {
  const slider = form.querySelector(`.slider[data-for="${control.name}"]`);
  if (!slider) return;
  const list = stops(slider), value = Number(control.value.replaceAll(",", "")) || 0;
  slider.value = list.reduce((best, stop, at) => (Math.abs(stop - value) < Math.abs(list[best] - value) ? at : best), 0);
  updateSlider(slider);
}

function updateCustomFields() {
  const model = form.elements.model.value === "own", device = form.elements.device.value === "own";
  form.querySelector('[data-field="shape"]').hidden = !model;
  for (const part of form.querySelectorAll("[data-own]")) part.hidden = !(part.dataset.own === "model" ? model : device);
}

function onInput(event) {
  const control = event.target;
  if (control.id === "p-file") return;
  if (control.matches(".slider")) {
    const value = stops(control)[control.value];
    form.elements[control.dataset.for].value = value === 0 ? "" : String(value);
    updateSlider(control);
    return schedule(WAIT_MS, event.type === "input");
  }
  if (control.name === "compare") return;
  toSlider(control);
  updateCustomFields();
  schedule(control.matches("textarea, input") ? 250 : WAIT_MS);
}

async function file(event) {
  const [chosen] = event.target.files;
  if (!chosen) return;
  if (chosen.size > 4 * 2 ** 20) return toast(gettext("The file is too large for a config.json."), "bad");
  const text = await chosen.text();
  try {
    form.elements.shape.value = JSON.stringify(JSON.parse(text));
  } catch {
    form.elements.shape.value = text.slice(0, 2000);
  }
  schedule(0);
}

/** At most two boxes are checked: a third unchecks the oldest. */
function onCompare(event) {
  if (event.target.name !== "compare") return;
  // a compared plan outside of the table has a hidden field
  const on = [...document.querySelectorAll("#answer [name=compare]")].filter((box) => box.type === "hidden" || box.checked);
  const oldest = on.length > 2 && on.find((box) => box !== event.target);
  if (oldest?.type === "hidden") oldest.remove();
  else if (oldest) oldest.checked = false;
  if (on.length !== 1) schedule(0);
  else announce(gettext("One plan selected. Select another one to compare."));
}

/** Sets the form from a link. */
function applyLink(address) {
  const params = new URL(address, location.href).searchParams;
  for (const control of form.elements) {
    if (!control.name || control.type === "file" || control.name === "compare") continue;
    if (params.has(control.name)) control.value = params.get(control.name);
    else if (control.name === "plan") control.value = "";
    if (control.name && !control.matches(".slider")) toSlider(control);
  }
  updateCustomFields();
  request(params);
}

/* ---- rows, links, dialog ---- */

function rows() {
  const list = [...document.querySelectorAll(".plans tr[data-item]")];
  (list.find((row) => row.classList.contains("selected")) ?? list[0])?.setAttribute("tabindex", "0");
}

function choose(key) {
  form.elements.plan.value = key;
  request();
}

function onClick(event) {
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  const link = event.target.closest("a"), row = event.target.closest("tr[data-key-of]");
  if (link?.dataset.plan && form) {
    event.preventDefault();
    choose(link.dataset.plan);
  } else if (link && "take" in link.dataset && form) {
    event.preventDefault();
    applyLink(link.href);
  } else if (link?.dataset.why && dialog) {
    event.preventDefault();
    openDialog(link.href, link.dataset.why);
  } else if (link?.dataset.opens && dialog) {
    event.preventDefault();
    openDialog(link.href, "", link.dataset.opens);
  } else if (event.target.closest("[data-copy-link]")) {
    navigator.clipboard.writeText(location.href).then(() => toast(gettext("Link copied."), "good"),
      () => toast(gettext("The browser does not allow copying here. Copy the URL from the address bar."), "warn"));
  } else if (link?.closest(".problems") && link.hash) {
    const control = document.getElementById(link.hash.slice(1));
    if (!control) return;
    event.preventDefault();
    control.closest("details")?.setAttribute("open", "");
    control.focus();
  } else if (row && !event.target.closest("a, button, input, label") && !getSelection().toString()) choose(row.dataset.keyOf);
}

let opener = null;

async function openDialog(address, why, title) {
  const body = document.getElementById("opened-body"), head = document.getElementById("opened-title");
  head.textContent = title ?? gettext("How this number is computed");
  body.innerHTML = '<div class="skeleton tall"></div>';
  opener = document.activeElement;
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (menu.contains(opener)) opener = menu.querySelector("summary");
    menu.open = false;
  }
  if (!dialog.open) dialog.showModal();
  setWhy(why);
  const html = await part(address, "whole");
  if (!html) return dialog.close();
  body.innerHTML = html;
  if (why) head.textContent = body.querySelector(".why")?.dataset.label || gettext("How this number is computed");
  body.focus();
}

async function part(address, kind) {
  try {
    const response = await answerOf(address, { headers: { "X-Part": kind } });
    if (response.ok) return await response.text();
    if (response.status === 401) return null;
    const text = new DOMParser().parseFromString(await response.text(), "text/html").querySelector("main p");
    toast(text?.textContent.trim() || statusText(response), "bad");
  } catch {
    toast(gettext("The server is unreachable. Repeat the action."), "bad");
  }
  return null;
}

function setWhy(why) {
  const now = new URLSearchParams(location.search);
  why ? now.set("why", why) : now.delete("why");
  history.replaceState(null, "", `?${now}`);
}

// inputs are loaded when a branch is opened
document.addEventListener("toggle", async (event) => {
  const branch = event.target;
  if (!branch.open || !branch.dataset?.deeper) return;
  const address = branch.dataset.deeper;
  delete branch.dataset.deeper;
  const html = await part(address, "inner");
  if (html) branch.querySelector(".why-inputs").innerHTML = html;
}, true);

document.addEventListener("click", onClick);
dialog?.addEventListener("close", () => {
  setWhy("");
  opener?.focus?.({ preventScroll: true });
});

if (form) {
  form.addEventListener("input", onInput);
  form.addEventListener("change", (event) => { if (event.target.matches(".slider")) onInput(event); }); // slider released: search all plans
  form.addEventListener("submit", (event) => {
    if (event.submitter?.hasAttribute("formaction")) return;
    event.preventDefault();
    request();
  });
  document.addEventListener("change", onCompare);
  document.getElementById("p-file")?.addEventListener("change", file);
  // highlight the hovered row in the scatter plot
  document.addEventListener("pointerover", (event) => {
    const key = event.target.closest?.("tr[data-key-of]")?.dataset.keyOf;
    for (const point of document.querySelectorAll(".point.near")) point.classList.remove("near");
    if (key) document.querySelector(`.point[data-plan="${CSS.escape(key)}"]`)?.classList.add("near");
  });
  for (const slider of form.querySelectorAll(".slider")) updateSlider(slider);
  rows();
  const why = new URLSearchParams(location.search).get("why");
  if (why) {
    const link = document.querySelector(`#answer [data-why="${CSS.escape(why)}"]`);
    const now = new URLSearchParams(location.search);
    openDialog(link?.href ?? `/planner/why/?${now}`, why);
  }
  window.orrery = { ...window.orrery, planner: { request, readForm } };
}
