/* The keyboard: `/` search, `?` help, two-key jumps from [data-key], arrows through lists and tabs, Esc closes. */

export function startKeyboard() {
  listKeys();
  for (const list of document.querySelectorAll("[data-list], .table:has(tr[data-href])")) prepare(list);
  document.addEventListener("htmx:afterSettle", () => document.querySelectorAll(".table:has(tr[data-href])").forEach(prepare));
  document.addEventListener("keydown", onKey);
}

let pending = "";
let timer = 0;

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return escape_(event);
  if (event.target.closest("input, textarea, select, [contenteditable]")) return;
  if (document.querySelector("dialog[open]")) return;
  if (["ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight", "Enter"].includes(event.key)) return move(event);
  if (event.key === "/") return act(event, () => document.querySelector("#search, [type=search]")?.focus());
  if (event.key === "?") return act(event, () => document.getElementById("help")?.showModal());
  const keys = pending ? `${pending} ${event.key}` : event.key;
  const target = [...document.querySelectorAll("[data-key]")].find((node) => node.dataset.key === keys);
  if (target) return act(event, () => { pending = ""; target.click(); });
  const starts = [...document.querySelectorAll("[data-key]")].some((node) => node.dataset.key.startsWith(`${event.key} `));
  pending = starts ? event.key : "";
  clearTimeout(timer);
  timer = setTimeout(() => { pending = ""; }, 1200);
}

function act(event, what) {
  event.preventDefault();
  what();
}

function escape_(event) {
  const menu = document.querySelector("details.menu[open]");
  if (menu) {
    menu.open = false;
    menu.querySelector("summary").focus();
  } else if (event.target.matches("input, textarea, select") && !event.target.closest("dialog")) event.target.blur();
}

/* Rows of a table or items of [data-list]: one stop for Tab, arrows move within. */
function prepare(list) {
  const items = rows(list);
  items.forEach((row, index) => { if (row.tabIndex < 0 && index === 0) row.tabIndex = 0; });
}
const rows = (list) => [...list.querySelectorAll("tr[data-href], [data-item]")].filter((row) => row.offsetParent !== null);

function move(event) {
  const tabs = event.target.closest("[role=tablist], .tabs");
  if (tabs && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    const links = [...tabs.querySelectorAll("a, button")];
    const next = links.indexOf(event.target) + (event.key === "ArrowRight" ? 1 : -1);
    return act(event, () => links.at((next + links.length) % links.length).focus());
  }
  const row = event.target.closest("tr[data-href], [data-item]");
  if (event.key === "Enter") {
    if (row && event.target === row) act(event, () => row.dataset.href ? location.assign(row.dataset.href) : row.querySelector("a")?.click());
    return;
  }
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  const list = row?.closest("table, [data-list]") ?? document.querySelector("main .table:has(tr[data-href]), main [data-list]");
  if (!list || (!row && event.target !== document.body && event.target.id !== "main")) return;
  const items = rows(list);
  if (!items.length) return;
  const at = row ? items.indexOf(row) + (event.key === "ArrowDown" ? 1 : -1) : 0;
  const next = items[Math.max(0, Math.min(items.length - 1, at))];
  act(event, () => { next.tabIndex = 0; next.focus(); });
}

function listKeys() {
  const list = document.querySelector("[data-keys]");
  for (const node of document.querySelectorAll("[data-key]")) {
    if (!list) break;
    const term = document.createElement("dt");
    for (const key of node.dataset.key.split(" ")) term.append(Object.assign(document.createElement("kbd"), { textContent: key }), " ");
    const description = document.createElement("dd");
    description.textContent = node.dataset.keyLabel ?? node.textContent.trim().toLowerCase();
    list.append(term, description);
  }
}
