/* Builds webui/static/plotly: the minified bundle, its Brotli and gzip forms, the licenses of all packages in it, and
   bundle.json with versions and digests, which a test compares with the files. `npm ci && npm run build` in this folder. */
import { createHash } from "node:crypto";
import { readFile, readdir, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { brotliCompressSync, constants, gzipSync } from "node:zlib";
import { build } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url)), TARGET = join(HERE, "../../webui/static/plotly");
const NAME = "plotly-orrery.min.js";
const TRACES = ["scatter", "bar", "box", "heatmap"]; // as in entry.cjs

/* Plotly's own style sheet is a script already; the one of maps is not needed. */
const withoutStyles = { name: "without-styles", setup(bundler) { bundler.onLoad({ filter: /\.css$/ }, () => ({ contents: "", loader: "js" })); } };

/* Every attribute of Plotly carries its documentation, which no page reads: a fifth of the bundle. Removes each
   `description: …` that is a property on a line of its own, up to the comma or brace after its value. */
function withoutDescriptions(text) {
  const start = /^[ \t]*description:/gm;
  let result = "", position = 0;
  for (let match; (match = start.exec(text)); ) {
    let depth = 0, quote = "", at = start.lastIndex;
    for (; ; at++) {
      const sign = text[at];
      if (sign === undefined) throw new Error("a description without an end");
      if (quote) {
        if (sign === "\\") at += 1;
        else if (sign === quote) quote = "";
      } else if (text.startsWith("//", at)) at = text.indexOf("\n", at);
      else if ("'\"`".includes(sign)) quote = sign;
      else if ("([{".includes(sign)) depth += 1;
      else if (depth && ")]}".includes(sign)) depth -= 1;
      else if (!depth && (sign === "," || sign === "}")) break;
    }
    result += text.slice(position, match.index);
    position = start.lastIndex = text[at] === "," ? at + 1 : at;
  }
  return result + text.slice(position);
}
const short = {
  name: "without-descriptions",
  setup(bundler) {
    bundler.onLoad({ filter: /plotly\.js\/src\/.*\.js$/ }, async ({ path }) => ({ contents: withoutDescriptions(await readFile(path, "utf8")), loader: "js" }));
  },
};

const built = await build({
  absWorkingDir: HERE, entryPoints: ["entry.cjs"], format: "iife", globalName: "Plotly", bundle: true, minify: true, write: false,
  metafile: true, legalComments: "none", target: "es2022", plugins: [withoutStyles, short], logLevel: "warning",
  alias: { stream: "stream-browserify" }, define: { global: "window", "define.amd": "false", "process.env.NODE_DEBUG": "false" },
});
const packages = new Map();
for (const path of Object.keys(built.metafile.inputs)) {
  const folder = /^(?:.*\/)?node_modules\/(?:@[^/]+\/)?[^/]+/.exec(path)?.[0];
  if (!folder || packages.has(folder)) continue;
  packages.set(folder, JSON.parse(await readFile(join(HERE, folder, "package.json"), "utf8")));
}
const version = [...packages.values()].find(({ name }) => name === "plotly.js").version;
const head = `/* Plotly ${version} with ${TRACES.join(", ")}; MIT license, see LICENSES.txt; built by tools/plotly */\n`;
const script = Buffer.from(head + built.outputFiles[0].text);
const files = {
  [NAME]: script,
  [`${NAME}.gz`]: gzipSync(script, { level: 9 }),
  [`${NAME}.br`]: brotliCompressSync(script, { params: { [constants.BROTLI_PARAM_QUALITY]: 11, [constants.BROTLI_PARAM_SIZE_HINT]: script.length } }),
};

const licenses = [];
for (const [folder, { name, version: own, license }] of [...packages].sort()) {
  const file = (await readdir(join(HERE, folder))).find((entry) => /^licen[sc]e/i.test(entry));
  const text = file ? (await readFile(join(HERE, folder, file), "utf8")).trim() : `License: ${license}`;
  licenses.push(`${name} ${own}\n${"-".repeat(72)}\n${text}\n`);
}
files["LICENSES.txt"] = Buffer.from(licenses.join("\n").replaceAll("\r", "").replace(/[ \t]+$/gm, ""));

for (const entry of await readdir(TARGET)) await rm(join(TARGET, entry));
for (const [name, bytes] of Object.entries(files)) await writeFile(join(TARGET, name), bytes);
const digests = Object.fromEntries(Object.entries(files).map(([name, bytes]) => [name, createHash("sha256").update(bytes).digest("hex")]));
await writeFile(join(TARGET, "bundle.json"), `${JSON.stringify({ version, traces: TRACES, sha256: digests }, null, 2)}\n`);
for (const [name, bytes] of Object.entries(files)) console.log(`${name}: ${(bytes.length / 1000).toFixed(1)} kB`);
