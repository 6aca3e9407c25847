/* The dialog that adds or changes a panel: fields by kind, search of metrics, refusals next to their fields. */
import { format, gettext, ngettext } from "./i18n.js";
import { send } from "./panels.js";
import { request } from "./request.js";

const SEARCH_MS = 250;
const NUMBERS = ["smoothing", "bins", "x_min", "x_max", "y_min", "y_max"];
const PLAIN_MARKS = /[\\^$.*+?()[\]{}|]/;

export class PanelForm {
  /** `subject`: runs of panels that name none; `put(panel)` saves it, or throws a refusal with `fields`. */
  constructor(subject, put) {
    Object.assign(this, { subject, put, chosen: [], results: [] });
    this.dialog = document.getElementById("panel-dialog");
    this.form = document.getElementById("panel-form");
    this.fields = this.form.elements;
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    for (const name of ["kind", "source"]) this.fields[name].addEventListener("change", () => { this.showFields(); this.search(); });
    for (const name of ["source_runs", "source_experiment", "source_team", "source_query", "source_limit"]) this.fields[name].addEventListener("change", () => this.search());
    this.fields.pattern.addEventListener("input", () => this.later());
    this.fields.pattern.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); this.takeFirst(); } });
    document.getElementById("panel-results").addEventListener("change", (event) => this.choose(event.target.value, event.target.checked));
  }

  /** Opens the dialog for a panel, or for a new one with this id. */
  open(panel, id = panel?.id) {
    Object.assign(this, { id, chosen: [...(panel?.metrics ?? [])] });
    this.form.reset();
    const { fields } = this, given = panel ?? { kind: "line" };
    for (const name of ["kind", "title", "x", "x_metric", "aggregate", "text", "size", "pattern", ...NUMBERS]) if (given[name] !== undefined && given[name] !== null) fields[name].value = given[name];
    for (const name of ["x_log", "y_log", "pinned"]) fields[name].checked = Boolean(given[name]);
    fields.columns.value = (given.columns ?? []).join(", ");
    fields.show.value = given.pattern ? (given.combine ? "all" : "each") : "names";
    const source = given.runs ?? {}, kind = source.runs?.length ? "runs" : ["experiment", "team", "query"].find((name) => source[name] !== undefined) ?? "";
    fields.source.value = kind;
    if (kind) fields[`source_${kind}`].value = kind === "runs" ? source.runs.join(", ") : source[kind];
    fields.source_limit.value = source.limit ?? "";
    document.getElementById("panel-form-title").textContent = panel ? gettext("Change the panel") : gettext("Add a panel");
    this.showFields();
    this.showChosen();
    this.showErrors([]);
    this.dialog.showModal();
    (panel ? fields.title : fields.pattern).focus();
    this.search();
    this.readColumns();
  }

  showFields() {
    const { kind, source, show } = this.fields;
    for (const part of this.form.querySelectorAll("[data-kinds]")) part.hidden = !part.dataset.kinds.split(" ").includes(kind.value);
    for (const part of this.form.querySelectorAll("[data-source]")) part.hidden = !part.dataset.source.split(" ").includes(source.value);
    const all = this.form.querySelector('input[value="all"]');
    if (all.closest("label").hidden && show.value === "all") show.value = "each";
  }

  async readColumns() {
    const list = document.getElementById("column-names");
    if (list.childElementCount) return;
    const answer = await request("/api/v1/runs/columns", { headers: { Accept: "application/json" } });
    if (!answer.ok) return;
    list.append(...(await answer.json()).items.slice(0, 500).map((item) => Object.assign(document.createElement("option"), { value: item.name })));
  }

  /* ---- search ---- */

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.search(), SEARCH_MS);
  }

  async search() {
    const mine = (this.searched = Symbol("search")), { kind, pattern } = this.fields, count = document.getElementById("panel-search-count");
    if (kind.value === "markdown") return;
    count.textContent = gettext("Searching…");
    try {
      const result = await send("/api/v1/panels/names", { kind: kind.value, runs: this.source() ?? this.subject, pattern: pattern.value });
      if (this.searched !== mine) return;
      this.results = result.items;
      count.textContent = this.countText(result);
      this.showErrors([]);
    } catch (error) {
      if (this.searched !== mine) return;
      this.results = [];
      count.textContent = "";
      const first = error.problem?.errors?.[0];
      this.showErrors([{ field: first?.field.startsWith("runs") ? "runs" : "pattern", message: first?.message ?? gettext("The server did not respond."), hint: first?.hint ?? "", }]);
    }
    this.showResults();
  }

  countText({ items, total }) {
    if (!total) return this.fields.pattern.value ? gettext("No name matches.") : gettext("These runs have nothing of this kind yet.");
    if (items.length < total) return format(gettext("The first %(shown)s of %(total)s matches; type more letters."), { shown: items.length, total: total.toLocaleString("en-US") });
    return format(ngettext("%(total)s match", "%(total)s matches", total), { total });
  }

  showResults() {
    document.getElementById("panel-results").replaceChildren(...this.results.map((name) => {
      const label = Object.assign(document.createElement("label"), { className: "check" });
      label.append(Object.assign(document.createElement("input"), { type: "checkbox", value: name, checked: this.chosen.includes(name) }), ` ${name}`);
      return label;
    }));
  }

  takeFirst() {
    if (this.results.length === 1 || this.results.includes(this.fields.pattern.value)) this.choose(this.results.includes(this.fields.pattern.value) ? this.fields.pattern.value : this.results[0], true);
    this.showResults();
  }

  choose(name, on) {
    this.chosen = on ? [...new Set([...this.chosen, name])] : this.chosen.filter((each) => each !== name);
    if (on) this.fields.show.value = "names";
    this.showChosen();
  }

  showChosen() {
    document.getElementById("panel-chosen").replaceChildren(...this.chosen.map((name) => {
      const chip = Object.assign(document.createElement("button"), { type: "button", className: "chip", textContent: `${name} ×` });
      chip.setAttribute("aria-label", format(gettext("Remove %(name)s"), { name }));
      chip.onclick = () => { this.choose(name, false); this.showResults(); this.fields.pattern.focus(); };
      return chip;
    }));
  }

  /* ---- the panel ---- */

  source() {
    const { fields } = this, kind = fields.source.value, limit = Number(fields.source_limit.value) || undefined;
    if (!kind) return null;
    if (kind === "runs") return { runs: fields.source_runs.value.split(/[\s,]+/).filter(Boolean) };
    return { [kind]: fields[`source_${kind}`].value, ...(limit ? { limit } : {}) };
  }

  /** The fields as JSON: only those that the kind has, and that are not empty. */
  panel() {
    const { fields } = this, kind = fields.kind.value, panel = { id: this.id, kind };
    const has = (name) => !fields[name].closest("[data-kinds][hidden]") && !(fields[name].closest("[data-kinds]")?.hidden ?? false);
    const put = (name, value) => { if (value !== "" && value !== null && value !== undefined && value !== false) panel[name] = value; };
    for (const name of ["title", "x", "x_metric", "aggregate", "text", "size"]) if (has(name)) put(name, fields[name].value.trim());
    for (const name of NUMBERS) if (has(name) && fields[name].value.trim()) put(name, Number.isFinite(Number(fields[name].value)) ? Number(fields[name].value) : fields[name].value);
    for (const name of ["x_log", "y_log", "pinned"]) if (has(name)) put(name, fields[name].checked);
    if (has("columns")) panel.columns = fields.columns.value.split(",").map((name) => name.trim()).filter(Boolean);
    if (kind !== "markdown") {
      const show = fields.show.value;
      if (show === "names") panel.metrics = this.chosen.length ? this.chosen : this.typed();
      else Object.assign(panel, { pattern: fields.pattern.value || ".", combine: show === "all" });
      put("runs", this.source());
    }
    return panel;
  }

  /* A name typed in full without being selected. */
  typed() {
    const name = this.fields.pattern.value.trim();
    return name && (this.results.includes(name) || !PLAIN_MARKS.test(name)) && !(this.fields.kind.value === "table" && !this.results.includes(name)) ? [name] : [];
  }

  async submit() {
    const button = this.form.querySelector(".dialog-foot .primary");
    button.disabled = true;
    try {
      await this.put(this.panel());
      this.dialog.close();
    } catch (error) {
      const fields = error.fields?.length ? error.fields : [{ field: "", message: error.status ? error.message : gettext("The server did not respond. Nothing is saved."), hint: "" }];
      this.showErrors(fields);
      this.form.querySelector(".error:not([hidden]), .note.bad:not([hidden])")?.scrollIntoView({ block: "center" });
    } finally {
      button.disabled = false;
      delete this.form.dataset.sent;
    }
  }

  showErrors(errors) {
    for (const place of this.form.querySelectorAll("[data-error-of]")) place.hidden = true;
    for (const { field, message, hint } of errors) {
      const name = field.split(".")[0], place = this.form.querySelector(`[data-error-of="${CSS.escape(name)}"]`) ?? this.form.querySelector('[data-error-of=""]');
      const text = hint ? `${message} (${hint})` : message;
      place.textContent = !place.dataset.errorOf && field ? `${field}: ${text}` : text;
      place.hidden = false;
    }
  }
}
