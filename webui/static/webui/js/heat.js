/* Heat maps: describes the cell under the pointer or arrow keys; the server renders the picture. */
import { gettext } from "./i18n.js";

const read = new WeakMap();

function cellsOf(figure) {
  if (!read.has(figure)) read.set(figure, JSON.parse(figure.querySelector('script[type="application/json"]').textContent));
  return read.get(figure);
}

function show(field, row, column) {
  const figure = field.closest("figure"), cells = cellsOf(figure), mark = field.querySelector(".heat-cell");
  const rows = cells.names.length, columns = cells.edges.length;
  row = Math.max(0, Math.min(rows - 1, row));
  column = Math.max(0, Math.min(columns - 1, column));
  field.dataset.row = row;
  field.dataset.column = column;
  const [from, to] = cells.edges[column].map((value) => value.toLocaleString("en-US"));
  const place = cells.places ? cells.places[column] : from === to ? `${cells.across} ${from}` : `${cells.across}s ${from}–${to}, ${cells.of}`;
  figure.querySelector("[data-heat-text]").textContent = `${cells.names[row]}, ${place}: ${cells.text[row][column] ?? gettext("no data")}`;
  mark.hidden = false;
  mark.style.cssText = `left:${(100 * column) / columns}%;top:${(100 * row) / rows}%;width:${100 / columns}%;height:${100 / rows}%`;
}

function hide(field) {
  field.querySelector(".heat-cell").hidden = true;
  field.closest("figure").querySelector("[data-heat-text]").textContent = "\u00a0";
}

document.addEventListener("pointermove", (event) => {
  const field = event.target.closest?.(".heat-field");
  if (!field) return;
  const box = field.getBoundingClientRect(), cells = cellsOf(field.closest("figure"));
  show(field, Math.floor(((event.clientY - box.top) / box.height) * cells.names.length), Math.floor(((event.clientX - box.left) / box.width) * cells.edges.length));
});
document.addEventListener("pointerout", (event) => {
  const field = event.target.closest?.(".heat-field");
  if (field && !field.contains(event.relatedTarget) && document.activeElement !== field) hide(field);
});
document.addEventListener("focusout", (event) => { if (event.target.matches?.(".heat-field")) hide(event.target); });
document.addEventListener("keydown", (event) => {
  const field = event.target, move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!move || !field.matches?.(".heat-field")) return;
  event.preventDefault();
  show(field, Number(field.dataset.row ?? 0) + move[0], Number(field.dataset.column ?? -1) + move[1]);
});

// do not refresh a figure while it is open, hovered or focused
document.addEventListener("htmx:beforeRequest", (event) => {
  const figure = event.target;
  if (figure.matches?.("figure.heat-card, figure.timeline-card, .samples, .node-history") && (figure.querySelector("details[open]") || figure.matches(":hover, :focus-within"))) event.preventDefault();
});
