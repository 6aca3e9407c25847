/* The edit page of a report: preview while typing, toolbar, inserted blocks, unsaved changes. Texts of panels and tables
   are YAML; values are written as JSON, which YAML reads. */
import { format, gettext } from "./i18n.js";
import { drawPanels, forgetPanels } from "./report.js";
import { loginExpired, request } from "./request.js";

const form = document.getElementById("report-form"), source = document.getElementById("source");
const preview = document.getElementById("preview"), status = document.getElementById("preview-state");
const freeze = document.getElementById("freeze");
const FENCE = /^```(panel|runs)\b(.*)$/;
const saved = "unsaved" in form.dataset ? "" : fields();
let waiting = 0, sent = 0, leaving = false;

/* ---- preview ---- */

source.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(showPreview, 400);
  showFreeze();
});

async function showPreview() {
  const number = ++sent;
  const body = new FormData(form);
  body.delete("title");
  status.textContent = gettext("Updating…");
  try {
    const answer = await request(form.dataset.preview, { method: "POST", body });
    if (!answer.ok) throw Object.assign(new Error(), { status: answer.status });
    const html = await answer.text();
    if (number !== sent) return;
    replacePreview(html);
    status.textContent = "";
  } catch (error) {
    if (number !== sent) return;
    status.textContent = loginExpired(error) || (error.status
      ? format(gettext("No preview: the server answered %(status)s."), { status: error.status })
      : gettext("No preview: the server is unreachable. Your text is still here."));
  }
}

/* Panels that did not change stay as they are: they do not flash, and are not read again. */
function replacePreview(html) {
  const fresh = document.createElement("template");
  fresh.innerHTML = html; // rendered by the server, which escapes what people wrote
  const old = new Map([...preview.querySelectorAll("[data-panel-spec]")].map((panel) => [identity(panel), panel]));
  const reused = [];
  for (const panel of fresh.content.querySelectorAll("[data-panel-spec]")) {
    const same = old.get(identity(panel));
    if (!same) continue;
    old.delete(identity(panel));
    reused.push([panel, same]);
  }
  const added = [...fresh.content.querySelectorAll("[data-panel-spec]")].filter((panel) => !reused.some(([each]) => each === panel));
  for (const [panel, same] of reused) panel.replaceWith(same);
  const top = preview.scrollTop;
  preview.replaceChildren(fresh.content);
  preview.scrollTop = top;
  for (const panel of added) drawPanels({ querySelectorAll: () => [panel] });
  forgetPanels();
}

/* A panel by what it shows: its id depends on its place in the text. */
function identity(panel) {
  const { id, ...shown } = JSON.parse(panel.dataset.panelSpec);
  return JSON.stringify([shown, panel.querySelector(".panel-data")?.textContent ?? ""]);
}

/* ---- text ---- */

/** Replaces the selection so that the browser's undo still works. */
function type(text, start = source.selectionStart, end = source.selectionEnd) {
  source.focus();
  source.setSelectionRange(start, end);
  if (!document.execCommand("insertText", false, text)) {
    source.setRangeText(text, start, end, "end");
    source.dispatchEvent(new Event("input"));
  }
}

function wrap(mark) {
  const { selectionStart: start, selectionEnd: end, value } = source;
  type(`${mark}${value.slice(start, end)}${mark}`);
  source.setSelectionRange(start + mark.length, end + mark.length);
}

function startLine(mark) {
  const start = source.value.lastIndexOf("\n", source.selectionStart - 1) + 1;
  type(mark, start, start);
}

/** Inserts a block as paragraphs of its own. */
function insertBlock(lines) {
  const at = source.selectionEnd, before = source.value.slice(0, at), after = source.value.slice(at);
  const open = fenceAt(before.split("\n").length - 1) ? source.value.length : at; // not into another block
  const gap = (text, end) => (text === "" || text.endsWith("\n\n") ? "" : text.endsWith("\n") || !end ? "\n" : "\n\n");
  const head = open === at ? gap(before, true) : "\n\n";
  type(`${head}${lines.join("\n")}\n${open === at && after.startsWith("\n") ? "" : "\n"}`, open, open);
}

document.querySelector(".editor-tools").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.wrap) wrap(button.dataset.wrap);
  else if (button?.dataset.start) startLine(button.dataset.start);
});

source.addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
  const mark = { b: "**", i: "*" }[event.key.toLowerCase()];
  if (!mark) return;
  event.preventDefault();
  wrap(mark);
});
document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "s") {
    event.preventDefault();
    form.requestSubmit(document.getElementById("save"));
  }
});

/* ---- the block at the cursor ---- */

/** The opening fence `{line, kind, rest}` of the block that holds a line; null outside of blocks. */
function fenceAt(line) {
  let open = null, other = false;
  const lines = source.value.split("\n");
  for (let i = 0; i <= Math.min(line, lines.length - 1); i++) {
    if (open || other) {
      if (/^```\s*$/.test(lines[i]) && i < line) open = other = null;
    } else if (FENCE.test(lines[i])) {
      const [, kind, rest] = FENCE.exec(lines[i]);
      open = { line: i, kind, rest: rest.trim() };
    } else if (lines[i].startsWith("```")) other = true;
  }
  return open;
}

const cursorLine = () => source.value.slice(0, source.selectionStart).split("\n").length - 1;

function showFreeze() {
  const fence = fenceAt(cursorLine());
  freeze.disabled = !fence;
  freeze.textContent = fence?.rest.startsWith("frozen") ? gettext("Unfreeze") : gettext("Freeze");
}

freeze.addEventListener("click", () => {
  const fence = fenceAt(cursorLine());
  if (!fence) return;
  const lines = source.value.split("\n"), at = lines.slice(0, fence.line).join("\n").length + (fence.line ? 1 : 0);
  const head = fence.rest.startsWith("frozen") ? fence.kind : `${fence.kind} ${frozen()}`;
  type(`\`\`\`${head}`, at, at + lines[fence.line].length);
  source.setSelectionRange(at, at);
  showFreeze();
});
for (const name of ["keyup", "click", "focus"]) source.addEventListener(name, showFreeze);

/** Names the time, so that a block that is frozen again is another block. */
const frozen = () => `frozen ${new Date().toISOString().slice(0, 16)}Z`;

/* ---- dialogs ---- */

const field = (name, value) => `${name}: ${JSON.stringify(value)}`;
const listed = (text) => text.split(",").map((part) => part.trim()).filter(Boolean);
const isNumbers = (text) => /^[\d\s,]+$/.test(text);

for (const dialog of document.querySelectorAll("form[data-insert]")) {
  dialog.addEventListener("submit", (event) => {
    if (event.submitter?.value !== "insert") return;
    const value = Object.fromEntries(new FormData(dialog)), kind = dialog.dataset.insert;
    const head = `\`\`\`${kind}${value.frozen ? ` ${frozen()}` : ""}`;
    const lines = kind === "panel" ? panelLines(value) : tableLines(value);
    dialog.closest("dialog").addEventListener("close", () => insertBlock([head, ...lines, "```"]), { once: true });
  });
}

function panelLines(value) {
  const lines = [field("kind", value.kind), field("metrics", listed(value.metrics))];
  if (value.kind === "scatter" && value.x_metric) lines.push(field("x_metric", value.x_metric));
  if (value.title) lines.push(field("title", value.title));
  if (value.y_log) lines.push(field("y_log", true));
  lines.push("runs:", isNumbers(value.runs) ? `  ${field("runs", listed(value.runs))}` : `  ${field("query", value.runs)}`);
  return lines;
}

function tableLines(value) {
  const lines = [isNumbers(value.runs) ? field("runs", listed(value.runs)) : field("query", value.runs)];
  if (value.columns) lines.push(field("columns", value.columns));
  if (value.sort) lines.push(field("sort", value.sort));
  if (value.limit && value.limit !== "20") lines.push(field("limit", Number(value.limit)));
  return lines;
}

const kinds = document.querySelector("#insert-panel [name=kind]");
kinds.addEventListener("change", () => {
  for (const each of document.querySelectorAll("#insert-panel [data-for]")) {
    each.hidden = each.dataset.for !== kinds.value;
    each.querySelector("input").required = !each.hidden;
  }
});

/* ---- run links ---- */

const search = document.getElementById("run-search"), choices = document.getElementById("run-choices");
let searching = 0, searches = 0;
search.addEventListener("input", () => {
  clearTimeout(searching);
  searching = setTimeout(findRuns, 250);
});
search.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  choices.querySelector("button")?.click();
});
document.querySelector('[data-dialog="#insert-run"]').addEventListener("click", findRuns);

async function findRuns() {
  const number = ++searches, text = search.value.trim();
  const wanted = new URLSearchParams({ limit: "20", ...(/^\d+$/.test(text) ? { query: `id=${text}` } : { q: text }) });
  let shown;
  try {
    const answer = await request(`/api/v1/runs?${wanted}`, { headers: { Accept: "application/json" } });
    if (!answer.ok) throw Object.assign(new Error(), { status: answer.status });
    const { items } = await answer.json();
    shown = items.map(choice);
    if (!shown.length) shown = [note(gettext("No run matches."))];
  } catch (error) {
    shown = [note(loginExpired(error) || (error.status ? format(gettext("The server returned status %(status)s."), { status: error.status }) : gettext("The server is unreachable.")))];
  }
  if (number === searches) choices.replaceChildren(...shown);
}

function choice(run) {
  const item = document.createElement("li"), button = document.createElement("button");
  const id = Object.assign(document.createElement("span"), { className: "muted", textContent: run.id });
  button.type = "button";
  button.append(id, run.name);
  button.addEventListener("click", () => {
    const dialog = button.closest("dialog");
    dialog.addEventListener("close", () => type(`run:${run.id}`, source.selectionEnd, source.selectionEnd), { once: true });
    dialog.close();
  });
  item.append(button);
  return item;
}

const note = (text) => Object.assign(document.createElement("li"), { className: "muted", textContent: text });

/* ---- unsaved changes ---- */

function fields() {
  return JSON.stringify([...new FormData(form)].filter(([name]) => ["title", "text", "note"].includes(name)));
}
form.addEventListener("submit", () => { leaving = true; });
addEventListener("pageshow", () => { leaving = false; });
addEventListener("beforeunload", (event) => {
  if (!leaving && fields() !== saved) event.preventDefault();
});

showFreeze();
