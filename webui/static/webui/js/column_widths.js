// Runs list: widths of columns, by pointer and keyboard, kept in the address and so in saved views.
import { format, gettext } from "./i18n.js";

const LEAST = 48, MOST = 900, STEP = 10, LARGE_STEP = 50; // pixels

/** `key:120,other:80` as a map; wrong entries are left out. */
export function readWidths(text) {
  const widths = new Map();
  for (const part of text.split(",")) {
    const at = part.lastIndexOf(":"), width = Number(part.slice(at + 1));
    if (at > 0 && Number.isInteger(width) && width >= LEAST && width <= MOST) widths.set(part.slice(0, at), width);
  }
  return widths;
}

/** Adds a grip to each head of `table`; `changed` runs after each change of a width. */
export function startWidths(table, changed) {
  const widths = readWidths(new URLSearchParams(location.search).get("widths") ?? "");
  const heads = [...table.tHead.rows[0].cells];

  function show(key) {
    const i = heads.findIndex((head) => head.dataset.key === key), width = widths.get(key);
    for (const row of table.rows) {
      const cell = row.cells[i];
      cell?.classList.toggle("sized", width !== undefined);
      if (width === undefined) cell?.style.removeProperty("--width");
      else cell?.style.setProperty("--width", `${width}px`);
    }
    heads[i].querySelector(".column-grip").setAttribute("aria-valuenow", String(width ?? Math.round(heads[i].offsetWidth)));
    changed();
  }

  function set(key, width) {
    if (width === null) widths.delete(key);
    else widths.set(key, Math.max(LEAST, Math.min(MOST, Math.round(width))));
    show(key);
  }

  for (const head of heads) {
    const key = head.dataset.key;
    if (!key) continue;
    const grip = Object.assign(document.createElement("span"), { className: "column-grip", tabIndex: 0, title: gettext("Drag, or press the arrow keys, to change the width; double-click or Home resets it") });
    const values = { role: "separator", "aria-orientation": "vertical", "aria-valuemin": LEAST, "aria-valuemax": MOST, "aria-valuenow": Math.round(head.offsetWidth), "aria-label": format(gettext("Width of %(name)s"), { name: head.textContent.trim() }) };
    for (const [name, value] of Object.entries(values)) grip.setAttribute(name, String(value));
    grip.addEventListener("keydown", (event) => {
      const step = event.shiftKey ? LARGE_STEP : STEP, now = widths.get(key) ?? head.offsetWidth;
      const next = { ArrowLeft: now - step, ArrowRight: now + step, Home: null }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      set(key, next);
      keep(widths);
    });
    grip.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      const from = event.clientX, width = head.offsetWidth;
      grip.setPointerCapture(event.pointerId);
      const drag = ({ clientX }) => set(key, width + clientX - from);
      const end = () => { grip.removeEventListener("pointermove", drag); keep(widths); };
      grip.addEventListener("pointermove", drag);
      grip.addEventListener("pointerup", end, { once: true });
      grip.addEventListener("pointercancel", end, { once: true });
    });
    grip.addEventListener("click", (event) => event.stopPropagation());
    grip.addEventListener("dblclick", () => { set(key, null); keep(widths); });
    head.append(grip);
    if (widths.has(key)) show(key);
  }
}

/* Writes the widths into the address, the links to other pages and orders, and the forms of the page. */
function keep(widths) {
  const text = [...widths].map(([key, width]) => `${key}:${width}`).join(",");
  const changed = (search) => {
    const query = new URLSearchParams(search);
    if (text) query.set("widths", text);
    else query.delete("widths");
    return `?${query}`;
  };
  history.replaceState(null, "", changed(location.search));
  for (const link of document.querySelectorAll("#runs thead a, a[data-list], .chips a[href^='?']:not([data-view])")) link.setAttribute("href", changed(link.search));
  for (const form of document.querySelectorAll("#filters, #columns-form")) {
    const field = form.elements.widths ?? form.appendChild(Object.assign(document.createElement("input"), { type: "hidden", name: "widths" }));
    field.value = text;
    field.disabled = !text;
  }
  const view = document.querySelector("#view-dialog input[name='query']"), next = document.querySelector("#bulk input[name='next']");
  if (view) view.value = changed(view.value);
  if (next) next.value = location.pathname + location.search;
}
