/* Colors of runs in a panel: any number of them, all equally light, so that each reaches 3:1 on the page's ground. Known
   metrics have the colors of tokens.css. Does not depend on panels. */

const KNOWN = {
  loss: "loss", val_loss: "loss-2", tokens_per_s: "throughput", "inference/tokens_per_s": "throughput", mfu: "mfu", hfu: "hfu", grad_norm: "grad", lr: "lr",
  step_time_s: "time", data_time_s: "time-2",
};
let count = 0;

/** The name of the color of a metric that is drawn alone, or null. */
export const metricHue = (name) => KNOWN[name] ?? null;

/** The name of the color of the run at a place: a custom property on <html> as those of tokens.css. */
export function runHue(place) {
  if (place >= count) define(Math.max(16, place + 1));
  return `run-${place}`;
}

function define(most) {
  count = most;
  const root = document.documentElement, dark = isDark();
  for (let place = 0; place < count; place++) root.style.setProperty(`--run-${place}`, color(place, dark));
}

function isDark() {
  const choice = document.documentElement.dataset.theme;
  return choice ? choice === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/* Hues in OKLCH: eight that differ well, then by the golden angle, so that neighbors differ also with a hundred runs. */
const FIRST = [255, 35, 155, 310, 85, 205, 0, 125];
function color(place, dark) {
  const angle = (FIRST[place] ?? (20 + place * 137.508) % 360) * (Math.PI / 180), light = (dark ? 0.76 : 0.54) + (place % 3 - 1) * 0.035;
  let chroma = dark ? 0.13 : 0.15, rgb;
  do { // within sRGB
    rgb = srgb(light, chroma * Math.cos(angle), chroma * Math.sin(angle));
    chroma -= 0.01;
  } while (rgb.some((part) => part < 0 || part > 1) && chroma > 0);
  return `#${rgb.map((part) => Math.round(255 * Math.max(0, Math.min(1, part))).toString(16).padStart(2, "0")).join("")}`;
}

function srgb(light, a, b) {
  const l = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3, m = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3, s = (light - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s, -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s, -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s];
  return linear.map((part) => (part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055));
}

addEventListener("orrery:theme", () => { if (count) define(count); });
