// Converts form values to a spec and back, like webui/forms/spec_form.py. Does not depend on the page or a server.

const SPECIAL = new Set(["model", "model.custom", "weights", "model.path", "data.preset", "plan"]);
const NO_FILTERS = "none";
const FILTER_NUMBERS = new Set(["threshold", "min_chars", "max_chars", "tolerance", "n"]);
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** Returns the spec of the field values (path → text), laid over `base`. `table`: {sections, bodies, trains, answers, custom, file, json, first, path, presets, packages}. */
export function specOf(values, base, table) {
  const kind = values.kind || "train";
  const rest = structuredClone(base || {});
  delete rest.kind;
  const spec = { kind, ...rest };
  for (const body of table.bodies) if (body !== kind) delete spec[body];
  const byForm = [...table.trains, ...table.answers];
  if (byForm.includes(kind) && !isObject(spec[kind])) spec[kind] = {};
  const has = (section) => !section.kinds.length || section.kinds.includes(kind);
  const own = new Set(table.sections.filter(has).flatMap((section) => section.owns));
  const preset = (values["data.preset"] || "shakespeare") !== table.file;
  for (const section of table.sections) {
    if (!has(section)) {
      if ([...byForm, "script", "external"].includes(kind)) for (const key of section.owns) if (!own.has(key)) delete spec[key];
      continue;
    }
    if (section.key === "model") putModel(spec, values, table);
    if (section.key === "data" && values["data.preset"] !== table.json) putData(spec, values, preset, table);
    if (section.key === "weights") putWeights(spec, values, table);
    if (section.key === "plan" && values.plan === "auto" && table.trains.includes(kind)) {
      spec.plan = "auto";
      continue;
    }
    for (const field of section.fields) {
      if (field.kinds.length && !field.kinds.includes(kind)) continue;
      if (!exists(field, values, table)) {
        put(spec, field, null);
        continue;
      }
      if (SPECIAL.has(field.path) || (field.path.startsWith("data.") && preset)) continue;
      put(spec, field, parse(field, values[field.path] || "", table));
    }
  }
  for (const section of table.sections)
    for (const field of section.fields)
      if (field.gates && (!(values[field.path] || "").trim() || !exists(field, values, table))) remove(spec, field.path.replace(/\.[^.]*$/, ""));
  return tidy(spec);
}

/** Whether the field exists with the selected choices, which may depend on others. */
export function exists(field, values, table) {
  if (!field.when) return true;
  const [path, wanted] = field.when;
  const chosen = table.sections.flatMap((section) => section.fields).find((each) => each.path === path);
  return wanted.includes(values[path] || chosen.default) && exists(chosen, values, table);
}

/** Returns the field values of a spec. */
export function valuesOf(spec, table) {
  const values = { kind: String(spec.kind ?? "train") };
  for (const section of table.sections) {
    for (const field of section.fields) {
      if (!SPECIAL.has(field.path)) values[field.path] = shown(field, at(spec, field.path), table);
      if (field.kind === "choice" && !values[field.path]) values[field.path] = field.default;
    }
  }
  const model = spec.model ?? (at(spec, "train.init_from") != null ? table.initial : "llama-tiny");
  values.model = typeof model === "string" ? model : table.custom;
  values["model.custom"] = typeof model === "string" ? "" : JSON.stringify(model, null, 2);
  Object.assign(values, weightsOf(spec, table));
  const byJson = at(spec, "data.sources") != null || isObject(at(spec, "data.tokenizer"));
  if (byJson) values["data.tokenizer"] = "";
  values["data.preset"] = byJson ? table.json : dataChoice(spec, table);
  values.plan = spec.plan === "auto" ? "auto" : "hand";
  return values;
}

export function parse(field, input, table) {
  const text = input.trim();
  if (field.kind === "flag") return ["on", "true", "1"].includes(text) ? true : null;
  if (!text) return null;
  switch (field.kind) {
    case "int":
      return /^[+-]?\d+$/.test(text) ? Number(text) : text;
    case "float":
      return number(text) ?? text;
    case "ints":
    case "floats": {
      const parts = text.replaceAll(",", " ").split(/\s+/).filter(Boolean).map(number);
      return parts.includes(null) ? text : parts;
    }
    case "words":
      return text.split(",").map((word) => word.trim()).filter(Boolean);
    case "weighted": {
      const tasks = text.split(",").map((word) => word.trim()).filter(Boolean).map(task);
      return tasks.includes(null) ? text : tasks;
    }
    case "filters":
      return filters(text) ?? text;
    case "argv":
      return split(text) ?? text;
    case "pairs":
      return Object.fromEntries(text.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => {
        const cut = line.indexOf("=");
        return cut < 0 ? [line, ""] : [line.slice(0, cut).trim(), line.slice(cut + 1)];
      }));
    case "json":
      try { return JSON.parse(text); } catch { return text; }
    case "model":
      return reference(text, table);
    case "choice":
      if (text === "true" || text === "false") return text === "true";
      return field.path === "plan.zero" ? Number(text) : text;
    default:
      return text;
  }
}

export function shown(field, value, table) {
  if (field.kind === "choice" && typeof value === "boolean") return String(value);
  if (field.kind === "json" && typeof value === "object" && value !== null) return JSON.stringify(value);
  if (field.kind === "filters" && Array.isArray(value)) return value.map(filterText).join("\n") || NO_FILTERS;
  if (value == null || value === false) return "";
  if (value === true) return "on";
  if (["words", "floats", "ints"].includes(field.kind) && Array.isArray(value)) return value.join(", ");
  if (field.kind === "weighted" && Array.isArray(value)) return value.map(taskText).join(", ");
  if (field.kind === "model") return named(value, table);
  if (field.kind === "argv" && Array.isArray(value)) return value.map(quoted).join(" ");
  if (field.kind === "pairs" && isObject(value))
    return Object.entries(value).map(([name, item]) => `${name}=${item}`).join("\n");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** A task type, or one with its weight after a colon; null if the weight is no number. */
function task(word) {
  const cut = word.indexOf(":");
  if (cut < 0) return word;
  const weight = number(word.slice(cut + 1).trim());
  return weight === null ? null : { task_type: word.slice(0, cut).trim(), weight };
}

function taskText(item) {
  if (!isObject(item) || !("task_type" in item)) return String(item);
  return item.weight == null ? String(item.task_type) : `${item.task_type}:${item.weight}`;
}

/** Filters by line: `kind name=value …`, quoted like a shell's words; null if a quote is not closed. */
function filters(text) {
  if (text === NO_FILTERS) return [];
  const lines = text.split("\n").filter((line) => line.trim()).map(split);
  if (lines.includes(null)) return null;
  return lines.map(([kind, ...options]) => {
    const item = { kind };
    for (const option of options) {
      const cut = option.indexOf("="), name = cut < 0 ? option : option.slice(0, cut), value = cut < 0 ? "" : option.slice(cut + 1);
      item[name] = FILTER_NUMBERS.has(name) ? number(value) ?? value : value;
    }
    return item;
  });
}

function filterText(item) {
  if (!isObject(item)) return String(item);
  const options = Object.entries(item).filter(([name]) => name !== "kind").map(([name, value]) => `${name}=${value}`);
  return [String(item.kind ?? ""), ...options].map(quoted).join(" ");
}

/** A preset, a package of weights, a ModelSpec as JSON, or else a path. */
function reference(text, table) {
  if (table.presets.includes(text)) return text;
  if (text.startsWith("{")) {
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  }
  return table.packages.includes(text) ? { package: text } : { path: text };
}

/** The text that `reference` parses to this value. */
function named(value, table) {
  if (isObject(value) && Object.keys(value).length === 1) {
    if (typeof value.path === "string") return value.path;
    if (table.packages.includes(value.package)) return value.package;
  }
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Splits a line like a POSIX shell; null if a quote is not closed. */
export function split(text) {
  const words = [];
  const token = /'([^']*)'|"((?:[^"\\]|\\[^])*)"|\\([^])|([^\s'"\\]+)|(\s+)/y;
  let word = null;
  for (let place = 0; place < text.length; place = token.lastIndex) {
    token.lastIndex = place;
    const match = token.exec(text);
    if (!match) return null;
    if (match[5] !== undefined) {
      if (word !== null) words.push(word);
      word = null;
    } else word = (word ?? "") + (match[1] ?? match[2]?.replace(/\\(["\\])/g, "$1") ?? match[3] ?? match[4]);
  }
  if (word !== null) words.push(word);
  return words;
}

export function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", `'"'"'`)}'`;
}

function number(text) {
  return /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) ? Number(text) : null;
}

function putModel(spec, values, table) {
  const chosen = (values.model || "").trim() || "llama-tiny";
  if (chosen === table.initial) {
    delete spec.model;
    return;
  }
  if (chosen !== table.custom) {
    spec.model = chosen;
    return;
  }
  const text = (values["model.custom"] || "").trim();
  try {
    spec.model = text ? JSON.parse(text) : {};
  } catch {
    spec.model = text;
  }
}

function putWeights(spec, values, table) {
  const chosen = (values.weights || "").trim() || table.first;
  if (chosen !== table.json) spec.model = chosen === table.path ? { path: (values["model.path"] || "").trim() } : { package: chosen };
}

/** Other models stay in the JSON; non-inference kinds preselect the first package. */
function weightsOf(spec, table) {
  const model = isObject(spec.model) ? spec.model : {}, lone = Object.keys(model).length === 1;
  if (typeof model.path === "string" && lone) return { weights: table.path, "model.path": model.path };
  const first = !table.answers.includes(spec.kind) || (model.package === table.first && lone);
  return { weights: first ? table.first : table.json, "model.path": "" };
}

function dataChoice(spec, table) {
  const name = at(spec, "data.dataset");
  if (typeof name === "string") return table.dataset + name;
  return at(spec, "data.path") != null ? table.file : "shakespeare";
}

function putData(spec, values, preset, table) {
  const chosen = values["data.preset"] || "shakespeare";
  if (chosen.startsWith(table.dataset)) {
    if (valuesOf(spec, table)["data.preset"] !== chosen) spec.data = { dataset: chosen.slice(table.dataset.length) };
    return;
  }
  if (preset) {
    spec.data = { preset: chosen };
    return;
  }
  const { preset: _, sources: __, dataset: ___, fingerprint: ____, ...data } = isObject(spec.data) ? spec.data : {};
  spec.data = { ...data, path: (values["data.path"] || "").trim() };
}

function put(spec, field, value) {
  const parents = field.path.split(".");
  const name = parents.pop();
  let place = spec;
  for (const parent of parents) {
    if (!isObject(place[parent])) {
      if (value === null) return;
      place[parent] = {};
    }
    place = place[parent];
  }
  if (value === null) {
    if (field.path !== "data.path") delete place[name];
  } else if (name in place || field.kind !== "choice" || String(value) !== field.default) place[name] = value;
}

function remove(spec, path) {
  const parents = path.split(".");
  const name = parents.pop();
  const place = parents.length ? at(spec, parents.join(".")) : spec;
  if (isObject(place)) delete place[name];
}

function at(spec, path) {
  return path.split(".").reduce((place, name) => (isObject(place) ? place[name] : undefined), spec);
}

function tidy(spec) {
  const empty = (value) => isObject(value) && !Object.keys(value).length;
  if (isObject(spec.plan) && empty(spec.plan.loss_scale)) delete spec.plan.loss_scale;
  for (const key of ["plan", "resources", "retries"]) if (empty(spec[key])) delete spec[key];
  for (const kind of ["serve", "generate"])
    if (isObject(spec[kind]) && empty(spec[kind].speculate)) delete spec[kind].speculate;
  for (const judged of [spec.evaluate, spec.train?.evaluate]) if (isObject(judged) && empty(judged.judge)) delete judged.judge;
  if (isObject(spec.produce)) for (const key of ["judge", "score"]) if (empty(spec.produce[key])) delete spec.produce[key];
  for (const policy of [spec.train?.grpo, spec.train?.ppo])
    if (isObject(policy)) for (const key of ["kl", "clip", "rollout", "staleness", "gae", "value"]) if (empty(policy[key])) delete policy[key];
  if (isObject(spec.train)) for (const key of ["optimizer", "lr_schedule", "sft", "dpo", "reward", "distill", "grpo", "ppo"]) if (empty(spec.train[key])) delete spec.train[key];
  return spec;
}
