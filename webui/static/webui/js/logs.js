/* Live log lines: grouped over ranks like webui/presentation/log_grouping.py; follows while scrolled to the end. */
import { gettext } from "./i18n.js";

const MOST = 1000; // lines kept on the page
const WINDOW = 200;
const ERROR = /\b(error|exception|traceback|fatal|critical|out of memory|sigkill|sigsegv|aborted)\b|\w+(Error|Exception)\b/i;
const WARNING = /\b(warn|warning|deprecat\w+)\b|\w+Warning\b/i;
const DEBUG = /\b(debug|trace)\b/i;
const LEVELS = ["debug", "info", "warning", "error"];

const level = (text) => (ERROR.test(text) ? "error" : WARNING.test(text) ? "warning" : DEBUG.test(text) ? "debug" : "info");
const normalize = (text) => text.replace(/^\W*(\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d([.,]\d+)?Z?\W*/, "").replace(/\brank[ =:]?\d+|\[\d+\]/gi, "rank");

export function startLog(list, empty, follow) {
  const { q, level: least, rank } = list.dataset;
  const needle = q.toLowerCase();
  let open = new Map();
  list.scrollTop = list.scrollHeight;
  list.addEventListener("scroll", () => { follow.checked = list.scrollHeight - list.scrollTop - list.clientHeight < 40; });
  follow.addEventListener("change", () => { if (follow.checked) list.scrollTop = list.scrollHeight; });

  function add(frame) {
    if (rank !== "" && Number(rank) !== frame.rank) return;
    for (const [, text] of frame.lines) {
      if (needle && !text.toLowerCase().includes(needle)) continue;
      const its = level(text);
      if (least && LEVELS.indexOf(its) < LEVELS.indexOf(least)) continue;
      put(text, its, frame.rank, frame.attempt ?? 0);
    }
    while (list.children.length > MOST) list.firstElementChild.remove();
    empty.hidden = list.children.length > 0;
    if (follow.checked) list.scrollTop = list.scrollHeight;
  }

  function put(text, its, rank, attempt) {
    const key = `${attempt}|${normalize(text)}`, before = open.get(key);
    if (before && !before.ranks.includes(rank) && rank >= 0 && before.ranks[0] >= 0) {
      before.ranks.push(rank);
      before.who.textContent = formatRanks(before.ranks);
      return;
    }
    const line = document.createElement("li"), who = document.createElement("span"), content = document.createElement("span");
    line.className = its;
    who.className = "who";
    who.textContent = formatRanks([rank]);
    content.textContent = text.replace(/^\[(rank)?\d+\]:?\s?/, "").slice(0, 400);
    line.append(who, content);
    list.append(line);
    open.set(key, { ranks: [rank], who });
    if (open.size > WINDOW) open.delete(open.keys().next().value);
  }

  /** After a gap, replaces all lines with the server's newest ones. */
  async function reload() {
    const answer = await fetch(location.href).catch(() => null);
    if (!answer?.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("log");
    if (!fresh) return;
    open = new Map();
    list.replaceChildren(...fresh.children);
    empty.hidden = list.children.length > 0;
    if (follow.checked) list.scrollTop = list.scrollHeight;
  }

  return { add, reload };
}

function formatRanks(ranks) {
  if (ranks[0] < 0) return gettext("supervisor");
  const ordered = [...ranks].sort((a, b) => a - b), groups = [];
  for (const rank of ordered) {
    if (groups.length && rank === groups.at(-1).at(-1) + 1) groups.at(-1).push(rank);
    else groups.push([rank]);
  }
  return groups.map((group) => (group.length === 1 ? group[0] : `${group[0]}–${group.at(-1)}`)).join(", ");
}
