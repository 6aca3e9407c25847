/* CSV files that the browser saves. */

/** A field; a text that a spreadsheet would run as a formula gets an apostrophe in front. */
export function csvCell(value) {
  const text = value === null || value === undefined ? "" : typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Saves rows of values. */
export function saveCsv(name, rows) {
  saveLines(name, rows.map((row) => row.map(csvCell).join(",")));
}

/** Saves lines that are CSV already. */
export function saveLines(name, lines) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
  link.download = `${name}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
