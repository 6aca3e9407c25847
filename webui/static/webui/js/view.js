/* How a page's charts are looked at, kept in the URL: axis, smoothing, range, zoom, scales, hidden series. */

export const DEFAULTS = (x = "step") => ({ x, smooth: 0, range: "all", from: null, to: null, logx: false, logy: new Set(), hidden: new Set() });

/** `axis`: the page's usual x axis, which the URL leaves out. */
export function readView(axis, search = location.search) {
  const query = new URLSearchParams(search), view = DEFAULTS(axis);
  const number = (key) => (query.has(key) && Number.isFinite(Number(query.get(key))) ? Number(query.get(key)) : null);
  const words = (key) => new Set((query.get(key) ?? "").split(",").filter(Boolean));
  if (["step", "time", "tokens", "flops"].includes(query.get("x"))) view.x = query.get("x");
  view.smooth = Math.min(0.999, Math.max(0, number("smooth") ?? 0));
  if (/^(all|last-\d+)$/.test(query.get("range") ?? "")) view.range = query.get("range");
  view.from = number("from");
  view.to = number("to");
  if (view.from === null || view.to === null) view.from = view.to = null;
  view.logx = query.get("logx") === "1";
  view.logy = words("logy");
  view.hidden = words("hide");
  return view;
}

export function writeView(view, axis) {
  const query = new URLSearchParams(location.search), plain = DEFAULTS(axis);
  const put = (key, value, usual) => (value === usual || value === null || value === "" ? query.delete(key) : query.set(key, value));
  put("x", view.x, plain.x);
  put("smooth", view.smooth, plain.smooth);
  put("range", view.range, plain.range);
  put("from", view.from === null ? null : +view.from.toPrecision(12), null);
  put("to", view.to === null ? null : +view.to.toPrecision(12), null);
  put("logx", view.logx ? "1" : "", "");
  put("logy", [...view.logy].join(","), "");
  put("hide", [...view.hidden].join(","), "");
  const text = query.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
}
