// The new-run form: fields and JSON in step both ways, sections by kind, the server's problems beside their fields.
// What is right or wrong the server says; this file only places it.
import { specOf, valuesOf } from "./spec_form.js";
import { announce } from "./page.js";

const form = document.getElementById("run-form");
const json = document.getElementById("spec-json");
const jsonError = document.getElementById("json-error");
const table = JSON.parse(document.getElementById("spec-table").textContent);

const fieldOf = (path) => form.querySelector(`[data-field="${CSS.escape(path)}"]`);
const control = (path) => form.elements[path];

function values() {
  const found = { kind: control("kind").value };
  for (const section of table.sections)
    for (const field of section.fields) {
      const element = control(field.path);
      found[field.path] = element.type === "checkbox" ? (element.checked ? "on" : "") : element.value;
    }
  return found;
}

function parsed() {
  try {
    const spec = JSON.parse(json.value);
    if (spec === null || typeof spec !== "object" || Array.isArray(spec)) throw new Error("a spec is an object in braces");
    return [spec, ""];
  } catch (error) {
    return [null, `This is not JSON yet: ${error.message}`];
  }
}

function sayJson(error) {
  jsonError.hidden = !error;
  jsonError.textContent = error;
  json.setAttribute("aria-invalid", String(Boolean(error)));
  document.getElementById("json-state").textContent = error ? "the form waits for valid JSON" : "in step with the form";
  form.elements.from.value = error ? "json" : "form";
}

function fromForm() {
  const [base] = parsed();
  json.value = JSON.stringify(specOf(values(), base ?? {}, table), null, 2);
  sayJson("");
  show();
}

function fromJson() {
  const [spec, error] = parsed();
  sayJson(error);
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

/** A value that the list lacks becomes a choice of it, so that nothing typed in the JSON is lost. */
function setChoice(select, value) {
  if (![...select.options].some((option) => option.value === value)) select.add(new Option(value, value));
  select.value = value;
}

/** Shows what belongs to the kind, the plan's and the data's choice. */
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
  form.querySelectorAll('[data-section="plan"] details').forEach((fold) => { fold.hidden = !fold.querySelector(".field:not([hidden])"); });
  fieldOf("model.path").hidden = control("weights").value !== table.path;
  fieldOf("model.custom").hidden = control("model").value !== table.custom;
  const own = control("data.preset").value === table.file;
  for (const path of ["data.path", "data.format", "data.tokenizer", "data.document_masks"]) fieldOf(path).hidden = !own;
  for (const ticks of form.querySelectorAll("[data-ticks]")) {
    const words = document.getElementById(ticks.dataset.ticks).value.split(",").map((word) => word.trim());
    for (const tick of ticks.querySelectorAll("[data-tick]")) tick.checked = words.includes(tick.value);
  }
}

/** Ticks write the words of the field that they stand in. */
function fromTick(tick) {
  const ticks = tick.closest("[data-ticks]");
  const chosen = [...ticks.querySelectorAll("[data-tick]:checked")].map((each) => each.value);
  document.getElementById(ticks.dataset.ticks).value = chosen.join(", ");
}

/** Puts the answer's problems beside the fields they name, or the nearest field above. */
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

form.addEventListener("input", (event) => {
  if (event.target.matches("[data-tick]")) fromTick(event.target);
  if (event.target === json) fromJson();
  else if (!["name", "experiment"].includes(event.target.name)) fromForm();
});
document.addEventListener("htmx:afterSwap", (event) => {
  if (event.detail.target.id !== "verdict") return;
  // the server's own words of a refused submit have done their duty once the form was checked again
  for (const old of form.querySelectorAll('.field > .error[role="alert"]:not(#json-error)')) old.remove();
  place();
});
// a link of the problem list opens the field's fold and goes to it
document.getElementById("verdict").addEventListener("click", (event) => {
  const link = event.target.closest(".problems a");
  const element = link && document.getElementById(link.hash.slice(1));
  if (!element) return;
  event.preventDefault();
  element.closest("details")?.setAttribute("open", "");
  element.focus();
});
addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter" && form.contains(event.target)) form.requestSubmit();
});

fromJson();
document.getElementById("submit-says").textContent = "Ctrl+Enter";
document.getElementById("refusal")?.focus();
