/* Images, texts and tables of a panel as elements, and the control of their step. */
import { inUnit, parse, quantity } from "./format.js";
import { format, gettext, ngettext } from "./i18n.js";

const make = (tag, values = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), values);
  element.append(...children);
  return element;
};

/** The elements of a panel of images, texts or tables. */
export function mediaElements({ spec, data }) {
  if (spec.kind === "table" && data.content.of === "runs") return [runsTable(data)];
  const alone = data.runs.length === 1, names = new Map(data.runs.map((run) => [run.id, run])), several = new Set(data.content.items.map((item) => item.name)).size > 1;
  const grid = make("div", { className: "media-items" });
  grid.classList.toggle("stacked", spec.kind !== "image");
  for (const item of data.content.items) {
    const run = names.get(item.run), place = format(gettext("step %(step)s"), { step: item.step.toLocaleString("en-US") });
    const caption = make("figcaption", {}, [item.caption, several ? item.name : "", place].filter(Boolean).join(" · "));
    if (!alone) caption.prepend(runLink(run), " · ");
    grid.append(make("figure", { className: "media-item" }, itemElement(spec.kind, item, data.title), caption));
  }
  const parts = [grid];
  if (data.content.more) parts.push(make("p", { className: "muted small", textContent: format(ngettext("%(count)s more in this step", "%(count)s more in this step", data.content.more), { count: data.content.more }) }));
  return parts;
}

/* A shared report has no links to pages of this server. */
const runLink = ({ id, name }) => {
  const textContent = `${id} ${name}`;
  return document.body.classList.contains("shared") ? make("span", { textContent }) : make("a", { href: `/runs/${id}/`, textContent });
};

function itemElement(kind, item, title) {
  if (kind === "image") {
    const { url, width, height } = item.image;
    if (url.startsWith("data:")) return make("img", { src: url, width, height, alt: item.caption || item.name });
    return make("a", { href: url, title: gettext("Open the image") }, make("img", { src: url, width, height, alt: item.caption || item.name, loading: "lazy" }));
  }
  if (kind === "text") return make("pre", { className: "verbatim", tabIndex: 0, textContent: item.data });
  const wrap = table(item.data.columns.map((name) => [name, false]), item.data.rows.map((row) => row.map((cell) => [cell === null ? "" : String(cell), typeof cell === "number"])), title);
  if (item.data.more) wrap.append(make("p", { className: "foot muted small", textContent: format(ngettext("%(count)s more row; the API returns all of them.", "%(count)s more rows; the API returns all of them.", item.data.more), { count: item.data.more }) }));
  return wrap;
}

function runsTable(data) {
  const names = new Map(data.runs.map((run) => [run.id, run])), { columns, rows } = data.content;
  const isNumber = columns.map((_, place) => rows.some((row) => typeof row.cells[place] === "number"));
  // a unit that all rows share is shown in the head
  const scaled = (unit) => ["bytes", "fraction", "seconds", "s"].includes(unit), head = ({ title, unit }) => (unit && !scaled(unit) ? `${title} (${unit})` : title);
  const plain = (value) => (Number.isFinite(value) && Math.abs(value) < 1e4 ? String(Number(value.toPrecision(4))) : quantity(value, 4)); // 0.0033, not 0.003300
  const number = (value, unit) => (scaled(unit) ? inUnit(value, unit) : unit ? quantity(value, 4) : plain(value));
  const time = (value) => (/^\d{4}-\d\d-\d\dT\d\d:\d\d/.test(value) ? value.slice(0, 16).replace("T", " ") : value);
  const cell = (value, place) => (value === null ? "–" : typeof value === "number" || /^(-?Infinity|NaN)$/.test(value) ? number(parse(value), columns[place].unit) : time(value));
  const body = rows.map((row) => [[runLink(names.get(row.run)), false], ...row.cells.map((value, place) => [cell(value, place), isNumber[place]])]);
  return table([[gettext("run"), false], ...columns.map((column, place) => [head(column), isNumber[place]])], body, data.title);
}

function table(head, body, title) {
  const cells = (list, tag) => list.map(([content, number]) => make(tag, { className: number ? "num" : "", ...(tag === "th" ? { scope: "col" } : {}) }, content));
  const element = make("table", { className: "table" }, make("thead", {}, make("tr", {}, ...cells(head, "th"))), make("tbody", {}, ...body.map((row) => make("tr", {}, ...cells(row, "td")))));
  const wrap = make("div", { className: "table-wrap", tabIndex: 0 }, element);
  wrap.setAttribute("role", "region");
  wrap.setAttribute("aria-label", title);
  return wrap;
}

/** A slider over the steps that have media; `choose(step)` is called when it rests. Null for one step. */
export function stepControl(steps, current, choose) {
  if (steps.length < 2) return null;
  const at = current === null ? steps.length - 1 : Math.max(0, steps.findLastIndex((step) => step <= current));
  const input = make("input", { type: "range", min: 0, max: steps.length - 1, value: at });
  const output = make("output", { textContent: steps[at].toLocaleString("en-US") });
  const text = () => format(gettext("step %(step)s"), { step: steps[Number(input.value)].toLocaleString("en-US") });
  input.setAttribute("aria-label", gettext("Step"));
  input.setAttribute("aria-valuetext", text());
  input.addEventListener("input", () => {
    output.textContent = steps[Number(input.value)].toLocaleString("en-US");
    input.setAttribute("aria-valuetext", text());
  });
  input.addEventListener("change", () => choose(steps[Number(input.value)]));
  return make("label", { className: "row nowrap small panel-step" }, gettext("Step"), input, output);
}

/** The rows of a table panel for its CSV file. */
export function tableRows(data) {
  if (data.content.of === "runs") {
    const names = new Map(data.runs.map((run) => [run.id, run.name]));
    return [["run", "name", ...data.content.columns.map((column) => column.title)], ...data.content.rows.map((row) => [row.run, names.get(row.run), ...row.cells])];
  }
  return data.content.items.flatMap((item) => [["run", "step", ...item.data.columns], ...item.data.rows.map((row) => [item.run, item.step, ...row])]);
}
