/* Loads Plotly from our own static files after the first paint, and reads the theme that charts draw with. */
import { gettext } from "./i18n.js";

const RETRY_SECONDS = [1, 2, 4, 8, 16];
let loading = null;

/** The Plotly object; its file (data-plotly on <body>) loads once, after the first paint. A failed load is tried again. */
export function plotly() {
  loading ??= new Promise((done, fail) => requestAnimationFrame(() => setTimeout(() => load(done, fail, 0))));
  return loading;
}

function load(done, fail, tries) {
  const script = document.createElement("script");
  script.src = document.body.dataset.plotly;
  script.onload = () => done(window.Plotly);
  script.onerror = () => {
    script.remove();
    if (tries < RETRY_SECONDS.length) { setTimeout(load, RETRY_SECONDS[tries] * 1000, done, fail, tries + 1); return; }
    loading = null;
    fail(new Error(gettext("The chart library could not be loaded")));
  };
  document.head.append(script);
}

let cached = null;
const forget = () => { cached = null; };
addEventListener("orrery:theme", forget);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  forget();
  dispatchEvent(new CustomEvent("orrery:theme"));
});

/** Colors by the names of tokens.css without dashes in front: theme().loss, theme()["mem-params"]. */
export function theme() {
  if (cached) return cached;
  const style = getComputedStyle(document.documentElement);
  cached = new Proxy({}, { get: (known, name) => (known[name] ??= style.getPropertyValue(`--${String(name)}`).trim()) });
  return cached;
}

/** The same color, with another opacity; takes #rrggbb. */
export function faint(color, alpha) {
  const value = parseInt(color.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${alpha})`;
}
