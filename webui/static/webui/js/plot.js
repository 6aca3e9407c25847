/* Loads Plotly from our own static files after the first paint, and reads the theme that charts draw with. */

let loading = null;

/** The Plotly object; its file (data-plotly on <body>) loads once, after the first paint. */
export function plotly() {
  loading ??= new Promise((done, fail) => {
    const start = () => {
      const script = document.createElement("script");
      script.src = document.body.dataset.plotly;
      script.onload = () => done(window.Plotly);
      script.onerror = () => { loading = null; fail(new Error("could not load the chart library")); };
      document.head.append(script);
    };
    requestAnimationFrame(() => setTimeout(start));
  });
  return loading;
}

let cached = null;
const forget = () => { cached = null; };
addEventListener("orrery:theme", forget);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  forget();
  dispatchEvent(new CustomEvent("orrery:theme"));
});

/** Colours by the names of tokens.css without dashes in front: theme().loss, theme()["mem-params"]. */
export function theme() {
  if (cached) return cached;
  const style = getComputedStyle(document.documentElement);
  cached = new Proxy({}, { get: (known, name) => (known[name] ??= style.getPropertyValue(`--${String(name)}`).trim()) });
  return cached;
}

/** The same colour, with another opacity; takes #rrggbb. */
export function faint(colour, alpha) {
  const value = parseInt(colour.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${alpha})`;
}
