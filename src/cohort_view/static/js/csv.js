// Values of a chart as a CSV file, made in the browser.

import { h } from "./dom.js";

/** Save rows of numbers and texts; null is an empty field. */
export function saveCsv(name, header, rows) {
  const lines = [header, ...rows].map((row) => row.map(field).join(","));
  const address = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

function field(value) {
  if (typeof value === "number") return String(value);
  return value === null || value === undefined ? "" : `"${String(value).replaceAll('"', '""')}"`;
}
