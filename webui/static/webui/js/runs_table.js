// Runs list: completion of queries, and the dialog that chooses, orders and pins columns.
import { startWidths } from "./column_widths.js";
import { format, gettext } from "./i18n.js";
import { request } from "./request.js";

const input = document.getElementById("query");
const list = document.getElementById("query-list");
const OPERATORS = ["=", "!=", "<", "<=", ">", ">=", "~", "in"];
const VALUES = {
  state: ["queued", "starting", "running", "stopping", "paused", "finished", "failed", "cancelled"],
  kind: ["train", "generate", "serve", "evaluate", "produce", "script", "external", "benchmark"],
};
const MOST = 12;

let names = null;
async function known() {
  if (!names) {
    const answer = await request("/api/v1/runs/columns", { headers: { Accept: "application/json" } });
    names = answer.ok ? (await answer.json()).items : [];
  }
  return names;
}

/** Completions at the cursor: `{from, word, options}`; `options` are `[text, description]`. */
export function completion(text, cursor, items) {
  const before = text.slice(0, cursor);
  const word = /[^\s"'`<>=!~(),]*$/.exec(before)[0];
  const rest = before.slice(0, before.length - word.length).trimEnd();
  const from = before.length - word.length;
  const compared = /([^\s"'`<>=!~(),]+)\s*(=|!=|in\s*\(.*)$/.exec(rest);
  if (compared && VALUES[compared[1]]) return { from, word, options: matching(VALUES[compared[1]].map((value) => [value, ""]), word) };
  if (/(^|\(|\b(and|or|not))$/i.test(rest)) return { from, word, options: matching(items.map((item) => [item.name, item.source]), word) };
  if (/[=<>~]$/.test(rest)) return { from, word, options: [] };
  if (/[^\s"'`<>=!~(),]$|\)$|["']$/.test(rest)) {
    const joined = /([=<>~]\s*\S+|\))$/.test(rest);
    return { from, word, options: matching((joined ? ["and", "or"] : OPERATORS).map((value) => [value, ""]), word) };
  }
  return { from, word, options: [] };
}

function matching(options, word) {
  const wanted = word.toLowerCase();
  const starts = ([text]) => text.toLowerCase().startsWith(wanted) || text.toLowerCase().split(/[./_]/).some((part) => part.startsWith(wanted));
  return options.filter(starts).sort(([a], [b]) => b.toLowerCase().startsWith(wanted) - a.toLowerCase().startsWith(wanted)).slice(0, MOST);
}

let shown = null, at = -1;
function close() {
  list.hidden = true;
  input.setAttribute("aria-expanded", "false");
  input.removeAttribute("aria-activedescendant");
  at = -1;
}

async function open() {
  shown = completion(input.value, input.selectionStart, await known());
  if (!shown.options.length || (shown.options.length === 1 && shown.options[0][0] === shown.word)) return close();
  list.replaceChildren(...shown.options.map(([text, source], i) => {
    const entry = Object.assign(document.createElement("li"), { id: `query-option-${i}`, role: "option", textContent: text });
    entry.append(Object.assign(document.createElement("span"), { className: "muted small", textContent: source }));
    entry.onpointerdown = (event) => { event.preventDefault(); take(i); };
    return entry;
  }));
  list.hidden = false;
  input.setAttribute("aria-expanded", "true");
  at = -1;
}

function take(i) {
  const [text] = shown.options[i];
  const written = /[\s"'<>=!~(),]/.test(text) && !OPERATORS.includes(text) ? `\`${text}\`` : text;
  const end = shown.from + shown.word.length;
  input.setRangeText(`${written} `, shown.from, end, "end");
  open();
}

function move(step) {
  at = (at + step + shown.options.length) % shown.options.length;
  [...list.children].forEach((entry, i) => entry.setAttribute("aria-selected", String(i === at)));
  input.setAttribute("aria-activedescendant", `query-option-${at}`);
}

input?.addEventListener("input", open);
input?.addEventListener("focus", open);
input?.addEventListener("blur", close);
input?.addEventListener("keydown", (event) => {
  if (list.hidden) return;
  if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); move(event.key === "ArrowDown" ? 1 : -1); }
  else if ((event.key === "Enter" || event.key === "Tab") && at >= 0) { event.preventDefault(); take(at); }
  else if (event.key === "Escape") { event.stopPropagation(); close(); }
});

// --- columns ------------------------------------------------------------------------------------------------------
const form = document.getElementById("columns-form");
const columns = document.getElementById("column-list");

function tools(entry) {
  const title = entry.textContent.trim();
  entry.append(...[["↑", gettext("Move %(name)s up"), () => entry.previousElementSibling?.before(entry)],
    ["↓", gettext("Move %(name)s down"), () => entry.nextElementSibling?.after(entry)],
    ["⚲", gettext("Pin %(name)s"), (button) => { entry.toggleAttribute("data-pinned"); button.setAttribute("aria-pressed", String("pinned" in entry.dataset)); }],
    ["×", gettext("Remove %(name)s"), () => entry.remove()]].map(([text, label, act]) => {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "button quiet small button-icon", textContent: text });
    button.setAttribute("aria-label", format(label, { name: title }));
    if (text === "⚲") button.setAttribute("aria-pressed", String("pinned" in entry.dataset));
    button.onclick = () => { act(button); if (button.isConnected) button.focus(); };
    return button;
  }));
}
columns?.querySelectorAll("li").forEach(tools);

function add() {
  const field = document.getElementById("column-add"), key = field.value.trim();
  if (!key) return false;
  const entry = Object.assign(document.createElement("li"), { draggable: true, textContent: key });
  entry.dataset.key = key;
  tools(entry);
  columns.append(entry);
  field.value = "";
  return true;
}
document.getElementById("column-add")?.addEventListener("change", add);
document.getElementById("column-add")?.addEventListener("keydown", (event) => { if (event.key === "Enter" && add()) event.preventDefault(); });
document.getElementById("columns-usual")?.addEventListener("click", () => {
  form.elements.columns.value = "";
  form.elements.pin.value = "";
  send();
});
form?.addEventListener("submit", () => {
  add();
  const entries = [...columns.children];
  form.elements.columns.value = entries.map((entry) => entry.dataset.key).join(",");
  form.elements.pin.value = entries.filter((entry) => "pinned" in entry.dataset).map((entry) => entry.dataset.key).join(",");
  shorten();
});
function shorten() { for (const field of form.elements) if (field.name && !field.value) field.disabled = true; }
function send() { shorten(); form.submit(); }

let dragged = null;
columns?.addEventListener("dragstart", (event) => { dragged = event.target.closest("li"); });
columns?.addEventListener("dragover", (event) => {
  const over = event.target.closest("li");
  if (!dragged || !over || over === dragged) return;
  event.preventDefault();
  const box = over.getBoundingClientRect();
  if (event.clientY < box.top + box.height / 2) over.before(dragged);
  else over.after(dragged);
});

/** Keeps pinned columns in place while the others scroll. */
function pin() {
  const table = document.getElementById("runs");
  if (!table) return;
  const heads = [...table.tHead.rows[0].cells];
  let left = 0;
  heads.forEach((head, i) => {
    if (!head.classList.contains("pinned")) return;
    for (const row of table.rows) {
      const cell = row.cells[i];
      cell?.classList.add("pinned");
      cell?.style.setProperty("left", `${left}px`);
    }
    left += head.offsetWidth;
  });
}
if (document.getElementById("runs")) startWidths(document.getElementById("runs"), pin);
pin();
