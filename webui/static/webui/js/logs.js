/* Live log lines: grouped over ranks like webui/presentation/log_grouping.py; follows while scrolled to the end. */
import { gettext } from "./i18n.js";
import { request } from "./request.js";

const MOST = 1000; // lines kept on the page
const WINDOW = 200;
const ERROR = /\b(error|exception|traceback|fatal|critical|out of memory|sigkill|sigsegv|aborted)\b|\w+(Error|Exception)\b/i;
const WARNING = /\b(warn|warning|deprecat\w+)\b|\w+Warning\b/i;
const DEBUG = /\b(debug|trace)\b/i;
const LEVELS = ["debug", "info", "warning", "error"];

const level = (text) => (ERROR.test(text) ? "error" : WARNING.test(text) ? "warning" : DEBUG.test(text) ? "debug" : "info");
const normalize = (text) => text.replace(/^\W*(\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d([.,]\d+)?Z?\W*/, "").replace(/\brank[ =:]?\d+|\[\d+\]/gi, "rank");

/** An ended run's log opens at its first error; a running one follows its newest lines. */
export function startLog(list, empty, follow, ended = false) {
  const { q, level: least, rank } = list.dataset;
  const needle = q.toLowerCase();
  let open = new Map();
  const cause = ended && document.getElementById("first-cause");
  follow.checked = !cause;
  list.scrollTop = cause ? cause.offsetTop - list.offsetTop - 96 : list.scrollHeight;
  list.addEventListener("scroll", () => { follow.checked = list.scrollHeight - list.scrollTop - list.clientHeight < 40; });
  follow.addEventListener("change", () => { if (follow.checked) list.scrollTop = list.scrollHeight; });

  function add(frame) {
    if (rank !== "" && Number(rank) !== frame.rank) return;
    for (const [, text] of frame.lines) {
      if (needle && !text.toLowerCase().includes(needle)) continue;
      const its = level(text);
      if (least && LEVELS.indexOf(its) < LEVELS.indexOf(least)) continue;
      put(text, its, frame.rank, frame.attempt ?? 0, frame.time);
    }
    while (list.children.length > MOST) list.firstElementChild.remove();
    empty.hidden = list.children.length > 0;
    if (follow.checked) list.scrollTop = list.scrollHeight;
  }

  function put(text, its, rank, attempt, time) {
    const key = `${attempt}|${normalize(text)}`, before = open.get(key);
    if (before && !before.ranks.includes(rank) && rank >= 0 && before.ranks[0] >= 0) {
      before.ranks.push(rank);
      before.who.textContent = formatRanks(before.ranks);
      return;
    }
    const line = document.createElement("li"), who = part("who", formatRanks([rank])), at = document.createElement("time");
    line.className = its;
    at.dateTime = at.title = new Date((time || Date.now() / 1000) * 1000).toISOString();
    at.textContent = at.dateTime.slice(11, 19);
    line.append(at, part("level", its), who, part("text", text.replace(/^\[(rank)?\d+\]:?\s?/, "").slice(0, 400)));
    list.append(line);
    open.set(key, { ranks: [rank], who });
    if (open.size > WINDOW) open.delete(open.keys().next().value);
  }

  /** After a gap, replaces all lines with the server's newest ones. */
  async function reload() {
    const answer = await request(location.href).catch(() => null);
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

function part(name, text) {
  return Object.assign(document.createElement("span"), { className: name, textContent: text });
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
