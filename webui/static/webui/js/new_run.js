// New-run form: syncs fields and JSON, shows sections by kind, places the server's problems next to their fields.
import { format, gettext } from "./i18n.js";
import { exists, specOf, valuesOf } from "./spec_form.js";
import { announce } from "./page.js";

const form = document.getElementById("run-form");
const json = document.getElementById("spec-json");
const jsonError = document.getElementById("json-error");
const table = JSON.parse(document.getElementById("spec-table").textContent);

const fieldOf = (path) => form.querySelector(`[data-field="${CSS.escape(path)}"]`);
const control = (path) => form.elements[path];

function values() {
  const result = { kind: control("kind").value };
  for (const section of table.sections)
    for (const field of section.fields) {
      const element = control(field.path);
      result[field.path] = element.type === "checkbox" ? (element.checked ? "on" : "") : element.value;
    }
  return result;
}

function parsed() {
  try {
    const spec = JSON.parse(json.value);
    if (spec === null || typeof spec !== "object" || Array.isArray(spec)) throw new Error(gettext("the spec must be a JSON object"));
    return [spec, ""];
  } catch (error) {
    return [null, format(gettext("Invalid JSON: %(error)s"), { error: error.message })];
  }
}

function showJsonError(error) {
  jsonError.hidden = !error;
  jsonError.textContent = error;
  json.setAttribute("aria-invalid", String(Boolean(error)));
  document.getElementById("json-state").textContent = error ? gettext("waiting for valid JSON") : gettext("synced with the form");
  form.elements.from.value = error ? "json" : "form";
}

function fromForm() {
  const [base] = parsed();
  json.value = JSON.stringify(specOf(values(), base ?? {}, table), null, 2);
  showJsonError("");
  show();
}

function fromJson() {
  const [spec, error] = parsed();
  showJsonError(error);
  if (!spec) return;
  const found = valuesOf(spec, table);
  setChoice(control("kind"), found.kind);
  for (const section of table.sections)
    for (const field of section.fields) {
      const element = control(field.path), value = found[field.path] ?? "";
      if (element.type === "checkbox") element.checked = value === "on";
      else if (element.tagName === "SELECT") setChoice(element, value);
      else if (element.value !== value) element.value = value;
    }
  show();
}

/** Adds a value that the list lacks, so nothing typed in the JSON is lost. */
function setChoice(select, value) {
  if (![...select.options].some((option) => option.value === value)) select.add(new Option(value, value));
  select.value = value;
}

/** Shows the fields of the selected kind, plan and data. */
function show() {
  const kind = control("kind").value;
  for (const section of form.querySelectorAll("[data-section]")) {
    const kinds = section.dataset.kinds.split(" ").filter(Boolean);
    section.hidden = kinds.length > 0 && !kinds.includes(kind);
  }
  const trains = table.trains.includes(kind), auto = trains && control("plan").value === "auto";
  for (const field of form.querySelectorAll('[data-field^="plan."]')) field.hidden = auto;
  for (const section of table.sections)
    for (const field of section.fields)
      if (field.kinds.length) fieldOf(field.path).hidden = !field.kinds.includes(kind) || (auto && field.path !== "plan");
  const chosen = values();
  for (const section of table.sections)
    for (const field of section.fields) if (field.when) fieldOf(field.path).hidden = !exists(field, chosen, table);
  form.querySelectorAll("[data-section] details.more").forEach((fold) => { fold.hidden = !fold.querySelector(".field:not([hidden])"); });
  fieldOf("model.path").hidden = control("weights").value !== table.path;
  fieldOf("model.custom").hidden = control("model").value !== table.custom;
  const own = control("data.preset").value === table.file;
  for (const path of ["data.path", "data.format", "data.tokenizer", "data.document_masks"]) fieldOf(path).hidden = !own;
  for (const section of form.querySelectorAll("[data-section]:not([hidden])"))
    if (section.querySelector(".field")) section.hidden = !section.querySelector(".field:not([hidden])");
  for (const ticks of form.querySelectorAll("[data-ticks]")) {
    const words = document.getElementById(ticks.dataset.ticks).value.split(",").map((word) => word.trim());
    for (const tick of ticks.querySelectorAll("[data-tick]")) tick.checked = words.some((word) => word.split(":")[0].trim() === tick.value);
  }
}

/** Checkboxes write the comma-separated value of their field. */
function fromTick(tick) {
  const ticks = tick.closest("[data-ticks]");
  const input = document.getElementById(ticks.dataset.ticks);
  // a word keeps its weight, as in math:2
  const before = new Map(input.value.split(",").map((word) => [word.split(":")[0].trim(), word.trim()]));
  const chosen = [...ticks.querySelectorAll("[data-tick]:checked")].map((each) => before.get(each.value) ?? each.value);
  input.value = chosen.join(", ");
}

/** Shows problems next to the fields they name, or at the nearest parent field. */
function place() {
  for (const old of form.querySelectorAll("[data-placed]")) old.remove();
  for (const element of form.querySelectorAll('[aria-invalid="true"]')) if (element !== json) element.removeAttribute("aria-invalid");
  const items = [...document.querySelectorAll("#verdict [data-problem]")];
  for (const item of items) {
    let path = item.dataset.problem, field = fieldOf(path);
    while (!field && path.includes(".")) {
      path = path.slice(0, path.lastIndexOf("."));
      field = fieldOf(path);
    }
    if (!field || path === "") continue;
    if (path === "model" && control("model").value === table.custom) field = fieldOf("model.custom");
    const element = field.querySelector("input, select, textarea");
    const shown = Object.assign(document.createElement("span"), { className: "error", id: `${element.id}-error` });
    shown.dataset.placed = "";
    shown.textContent = item.querySelector("span").textContent;
    field.append(shown);
    element.setAttribute("aria-invalid", "true");
    element.setAttribute("aria-describedby", shown.id);
    field.closest("details:not([open])")?.setAttribute("open", "");
    item.querySelector("a").href = `#${element.id}`;
  }
  announce(document.querySelector("#verdict .verdict")?.textContent.trim() ?? "");
}

/** Moves what the check says about a field to that field. */
function placeHints() {
  for (const old of form.querySelectorAll("[data-placed-hint]")) old.remove();
  for (const hint of document.querySelectorAll("#verdict [data-hint-of]")) {
    const field = fieldOf(hint.dataset.hintOf);
    if (!field) continue;
    const shown = Object.assign(document.createElement("span"), { className: "hint", textContent: hint.textContent });
    shown.dataset.placedHint = "";
    field.append(shown);
    hint.hidden = true;
  }
}

form.addEventListener("input", (event) => {
  if (event.target.matches("[data-tick]")) fromTick(event.target);
  if (event.target === json) fromJson();
  else if (!["name", "experiment"].includes(event.target.name)) fromForm();
});
document.addEventListener("htmx:afterSwap", (event) => {
  if (event.detail.target.id !== "verdict") return;
  // errors of the refused submit are outdated once the form is checked again
  for (const old of form.querySelectorAll('.field > .error[role="alert"]:not(#json-error)')) old.remove();
  place();
  placeHints();
});
placeHints();
// a link of the problem list opens the field's section and focuses it
document.getElementById("verdict").addEventListener("click", (event) => {
  const fix = event.target.closest("[data-fix]");
  if (fix && control(fix.dataset.fix)) {
    const input = control(fix.dataset.fix);
    input.value = fix.dataset.value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    input.dispatchEvent(new Event("change", { bubbles: true }));
    input.focus();
    return;
  }
  const link = event.target.closest(".problems a");
  const element = link && document.getElementById(link.hash.slice(1));
  if (!element) return;
  event.preventDefault();
  element.closest("details")?.setAttribute("open", "");
  element.focus();
});
addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter" && !event.target.closest("dialog, form:not(#run-form)")) form.requestSubmit();
});

fromJson();
document.getElementById("submit-hint").textContent = "Ctrl+Enter";
document.getElementById("refusal")?.focus();
