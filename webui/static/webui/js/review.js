// The review page: reads lines one by one, shows them, and sends decisions. Buttons have their keys in [data-key].
import { format, gettext } from "./i18n.js";
import { announce, toast } from "./page.js";
import { request } from "./request.js";

const part = (id) => document.getElementById(id);
const config = JSON.parse(part("review-config").textContent);
const place = part("review-place"), box = part("review-line"), state = part("review-state"), actions = part("review-actions");
let current = null, editing = false, base = null, chain = Promise.resolve(), order = [0, 1];

async function call(path, method = "GET", body = null) {
  const csrf = JSON.parse(document.body.getAttribute("hx-headers"))["X-CSRFToken"];
  const answer = await request(path ? `${config.url}/${path}` : config.url, {
    method, body: body && JSON.stringify(body), headers: { "Content-Type": "application/json", "X-CSRFToken": csrf },
  });
  const document_ = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(document_.detail ?? `${answer.status}`), { status: answer.status });
  return document_;
}

/** Runs actions one after the other; one about a line is dropped if another line is open by then. A failure is shown,
    and after a conflict the line is read again; texts that the person edits stay. */
function once(action, { about = null } = {}) {
  chain = chain.then(async () => {
    if (about !== null && current?.line !== about) return;
    try {
      await action();
    } catch (error) {
      toast(error.message, "bad");
      if (error.status === 409 && current) await (editing ? refresh() : open(current.line)).catch(() => {});
    }
  });
}

const decide = (action) => once(action, { about: current.line });

async function open(number) {
  const line = await call(`lines/${number}`);
  current = line;
  editing = false;
  place.elements.line.value = number;
  const url = new URL(location);
  url.searchParams.set("line", number);
  history.replaceState(null, "", url);
  show();
}

/** Reads the line's version and state again, under the texts that the person edits. */
async function refresh() {
  current = await call(`lines/${current.line}`);
  facts();
}

/** The next line in the direction with the chosen decision; null at the end. */
async function following(step) {
  const shown = place.elements.show.value;
  if (shown === "undecided" && step > 0 && config.may_review) return (await call("next", "POST", { after: current?.line ?? 0 })).line;
  const number = (current?.line ?? 0) + step;
  if (shown === "all") return number >= 1 && number <= config.lines ? number : null;
  if (step > 0) return (await call(`lines?show=${shown}&limit=1&cursor=${number}`)).items[0]?.line ?? null;
  for (let from = Math.max(1, number - 199); number >= 1; from -= 200) {
    const { items } = await call(`lines?show=${shown}&limit=200&cursor=${Math.max(1, from)}`);
    const before = items.filter((item) => item.line <= number);
    if (before.length) return before.at(-1).line;
    if (from <= 1) return null;
  }
  return null;
}

async function move(step) {
  const number = await following(step);
  if (number !== null) return open(number);
  if (current) show();
  announce_(step > 0 ? gettext("No further line.") : gettext("This is the first line."));
}

function announce_(text) {
  announce(text);
  toast(text);
}

async function change(fields, { forward = false } = {}) {
  const before = current.decision;
  const line = await call(`lines/${current.line}`, "PATCH", { version: current.version, ...fields });
  current = line;
  if (before !== line.decision || "content" in fields) count();
  if (forward) await move(1);
  else if (editing && !("content" in fields)) facts(); // a note
  else show();
}

/** Brings the sentence and the bar up to date. */
async function count() {
  const { counts, lines } = await call("").catch(() => ({}));
  if (!counts) return;
  const done = lines - counts.undecided, bar = part("review-progress");
  bar.style.setProperty("--part", `${(100 * done) / lines}%`);
  bar.setAttribute("aria-valuenow", ((100 * done) / lines).toFixed(1));
  const texts = [["keep", gettext("%(count)s kept")], ["swap", gettext("%(count)s swapped")], ["drop", gettext("%(count)s dropped")], ["edited", gettext("%(count)s edited")]];
  const parts = texts.filter(([name]) => counts[name]).map(([name, text]) => format(text, { count: counts[name].toLocaleString("en") }));
  part("data-sentence").textContent = format(gettext("%(decided)s of %(lines)s lines decided: %(parts)s."), {
    decided: done.toLocaleString("en"), lines: lines.toLocaleString("en"), parts: parts.join(", "),
  });
}

/** The editable texts of a line: [where, title, group]. `group` places answers of a pair side by side. */
function texts(content) {
  const fields = [];
  const add = (value, path, title, group = "") => {
    if (typeof value === "string") fields.push({ path, title, group, text: value });
    else if (Array.isArray(value)) value.forEach((message, index) => {
      const key = "content" in message ? "content" : "value";
      if (typeof message[key] === "string") fields.push({ path: [...path, index, key], title: message.role ?? message.from ?? title, group, text: message[key] });
    });
  };
  for (const name of ["system", "messages", "conversations", "prompt", "instruction", "input", "output", "completion"]) add(content[name], [name], name);
  for (const name of ["chosen", "rejected"]) add(content[name], [name], name, name);
  return fields;
}

/** Shows the line's number, decision and authors. */
function facts() {
  const line = current;
  part("line-title").textContent = format(gettext("Line %(line)s of %(lines)s"), { line: line.line.toLocaleString("en"), lines: config.lines.toLocaleString("en") });
  const names = { keep: gettext("kept"), drop: gettext("dropped"), swap: gettext("swapped") };
  const known = [line.decision ? names[line.decision] : gettext("undecided")];
  if (line.original) known.push(gettext("edited"));
  if (line.by) known.push(format(gettext("by %(who)s, %(time)s"), { who: line.by, time: new Date(line.time).toLocaleString() }));
  const origin = line.content.provenance;
  if (line.content.task_type) known.push(line.content.task_type.replaceAll("_", " "));
  if (!config.pairs && origin?.scores) for (const [name, value] of Object.entries(origin.scores)) known.push(`${name.replaceAll("_", " ")} ${value}`);
  state.textContent = known.join(" · ");
  state.dataset.decision = line.decision;
}

function show() {
  const line = current;
  facts();
  // of pairs, which answer is left is drawn by the line's number, so its name shows nothing
  order = config.pairs && ((line.line * 2654435761) >>> 7) & 1 ? [1, 0] : [0, 1];
  box.replaceChildren(...blocks(line));
  if (!actions) return;
  for (const button of actions.querySelectorAll("[data-rating]")) button.setAttribute("aria-pressed", String(Number(button.dataset.rating) === line.rating));
  const decided = config.pairs ? { keep: 0, swap: 1 }[line.decision] : undefined;
  for (const button of actions.querySelectorAll("[data-decision], [data-better]")) {
    const better = button.dataset.better === undefined ? undefined : order[Number(button.dataset.better)];
    const on = better !== undefined ? better === decided : line.decision !== "" && button.dataset.decision === line.decision;
    button.setAttribute("aria-pressed", String(on));
  }
  for (const button of actions.querySelectorAll("button")) button.hidden = ["review-save", "review-cancel", "review-restore"].includes(button.id) ? !editing : editing;
  part("review-restore").hidden = !(editing && line.original);
  part("review-rating").hidden = editing;
  part("review-note").value = line.note;
}

function blocks(line) {
  const fields = texts(line.content);
  const block = (field) => {
    const item = document.createElement("div");
    item.className = `review-text ${field.title}`;
    const title = Object.assign(document.createElement("span"), { className: "badge", textContent: field.title });
    const text = document.createElement(editing ? "textarea" : "p");
    if (editing) {
      text.value = field.text;
      text.rows = Math.min(24, 2 + field.text.split("\n").length + Math.floor(field.text.length / 90));
      text.dataset.path = JSON.stringify(field.path);
      text.setAttribute("aria-label", field.title);
    } else {
      text.textContent = field.text;
      const before = line.original && read(line.original, field.path);
      if (before !== undefined && before !== null && before !== field.text) {
        item.classList.add("edited");
        text.title = before;
      }
    }
    item.append(title, text);
    return item;
  };
  const shown = fields.filter((field) => !field.group).map(block);
  if (!config.pairs) return shown;
  const sides = document.createElement("div");
  sides.className = "review-pair";
  for (const side of order) {
    const name = ["chosen", "rejected"][side];
    const column = document.createElement("div");
    column.append(...fields.filter((field) => field.group === name).map((field) => block(editing ? field : { ...field, title: gettext("answer") })));
    sides.append(column);
  }
  return [...shown, sides];
}

const read = (value, path) => path.reduce((inner, key) => inner?.[key], value);

function edited() {
  const content = structuredClone(base);
  for (const area of box.querySelectorAll("textarea")) {
    const path = JSON.parse(area.dataset.path), name = path.pop();
    path.reduce((inner, key) => inner[key], content)[name] = area.value;
  }
  return content;
}

function edit() {
  editing = true;
  base = current.content; // which the paths of the texts refer to
  show();
  const areas = box.querySelectorAll("textarea");
  areas[areas.length - 1]?.focus();
}

place.addEventListener("submit", (event) => {
  event.preventDefault();
  const number = Number(place.elements.line.value.replaceAll(",", ""));
  if (Number.isInteger(number) && number >= 1 && number <= config.lines) once(() => open(number));
  else toast(format(gettext("Lines are numbered from 1 to %(lines)s."), { lines: config.lines.toLocaleString("en") }), "warn");
});
place.addEventListener("click", (event) => {
  const button = event.target.closest("[data-step]");
  if (button) once(() => move(Number(button.dataset.step)));
});
place.elements.show.addEventListener("change", () => once(async () => {
  if (place.elements.show.value === "all") return;
  const line = current;
  current = { line: 0 };
  const number = await following(1);
  current = line;
  if (number === null) announce_(gettext("No line has this decision."));
  else await open(number);
}));
actions?.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || !current) return;
  if (button.dataset.better !== undefined) {
    const decision = order[Number(button.dataset.better)] === 0 ? "keep" : "swap";
    decide(() => change({ decision }, { forward: true }));
  } else if (button.dataset.decision !== undefined) decide(() => change({ decision: button.dataset.decision }, { forward: button.dataset.decision !== "" }));
  else if (button.dataset.rating) {
    const rating = Number(button.dataset.rating);
    decide(() => change({ rating: rating === current.rating ? null : rating }));
  } else if (button.id === "review-edit") edit();
  else if (button.id === "review-save") save();
  else if (button.id === "review-restore") decide(async () => { await change({ content: null }); editing = false; show(); });
  else if (button.id === "review-cancel") {
    editing = false;
    show();
  }
});
function save() {
  const content = edited();
  decide(async () => {
    await change({ content });
    editing = false;
    show();
  });
}
box.addEventListener("keydown", (event) => {
  if (!event.target.matches("textarea")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    save();
  }
});
part("review-note")?.addEventListener("change", (event) => {
  const note = event.target.value;
  decide(() => change({ note }));
});

const wanted = Number(new URL(location).searchParams.get("line"));
once(async () => {
  if (wanted >= 1 && wanted <= config.lines) return open(wanted);
  const first = await call("lines?show=undecided&limit=1");
  await open(first.items[0]?.line ?? 1);
});
