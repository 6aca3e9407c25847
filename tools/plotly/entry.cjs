/* Plotly with the traces, components and methods that the pages use.
   Like plotly.js/src/core.js, without sliders, menus, images, three-dimensional annotations and their methods. */
"use strict";

exports.version = require("plotly.js/src/version").version;
require("plotly.js/build/plotcss");

const { register } = require("plotly.js/src/registry");
const api = {
  ...require("plotly.js/src/plot_api/plot_api"),
  toImage: require("plotly.js/src/plot_api/to_image"),
  downloadImage: require("plotly.js/src/snapshot/download"),
};
for (const [name, fn] of Object.entries(api)) {
  if (typeof fn !== "function") continue;
  if (!name.startsWith("_")) exports[name] = fn;
  register({ moduleType: "apiMethod", name, fn });
}

register([
  require("plotly.js/src/traces/scatter"),
  require("plotly.js/lib/bar"),
  require("plotly.js/lib/box"),
  require("plotly.js/lib/heatmap"),
]);
register([
  require("plotly.js/src/components/annotations"),
  require("plotly.js/src/components/selections"),
  require("plotly.js/src/components/shapes"),
  require("plotly.js/src/components/colorscale"),
  require("plotly.js/src/components/colorbar"),
  require("plotly.js/src/components/legend"), // after shapes: its defaults read theirs
  require("plotly.js/src/components/fx"), // after the legend, for the same reason
  require("plotly.js/src/components/modebar"),
]);
register([require("plotly.js/src/locale-en"), require("plotly.js/src/locale-en-us")]);

exports.Plots = { resize: require("plotly.js/src/plots/plots").resize };
