// The data of an exported report: what the server would answer, packed into the page. `cohort view --export` writes it.
//
// The element #cohort-data has base64 of deflated JSON: {"PATH": answer, ...}. A step's groups are there once, in the order of
// their file, and sorted here; curves once for each x with all names.

import { splitList } from "cohort/router.js";

const node = document.getElementById("cohort-data");

/** Whether this page is an exported report: no live updates, no search, only some steps. */
export const isExport = node !== null;

const data = node ? unpack(node.textContent) : null;
let answers = {}; // all of the data, once it is unpacked

const SORT_KEYS = {
  spread: (group) => group.reward_std,
  length: (group) => group.length_mean,
  equal: (group) => Number(group.equal),
  staleness: (group) => group.staleness,
  reward: (group) => group.reward_mean,
};

/** The answer to an address, or null if the report does not have it. */
export async function embeddedAnswer(address) {
  answers = await data;
  const [route, text] = address.split("?");
  const query = new URLSearchParams(text);
  if (route === "/api/curves") return pickCurves(answers[`/api/curves?x=${query.get("x") ?? "step"}`], query);
  if (!hasEmbedded(address)) return null;
  if (Object.hasOwn(answers, address)) return answers[address];
  return isStep(route) ? pickGroups(answers[route], query) : answers[route];
}

/** Whether the report has the answer to an address other than that of curves. False before the first answer. */
export function hasEmbedded(address) {
  const [route, text] = address.split("?");
  const query = new URLSearchParams(text);
  if (Object.hasOwn(answers, address)) return true;
  // Only training completions are part of a report.
  return Object.hasOwn(answers, route) && (query.get("kind") ?? "step") === "step";
}

const isStep = (route) => /\/steps\/\d+$/.test(route);

function pickCurves(all, query) {
  if (!all) return { curves: [], marks: {} };
  const [runs, names] = ["runs", "names"].map((name) => new Set(splitList(query.get(name))));
  return { curves: all.curves.filter((curve) => runs.has(curve.run) && names.has(curve.name)), marks: all.marks };
}

function pickGroups(step, query) {
  const key = SORT_KEYS[query.get("sort") ?? "spread"];
  const sign = (query.get("descending") ?? "1") === "1" ? -1 : 1;
  const groups = [...step.groups];
  if (key) {
    const isMissing = (group) => key(group) === null;
    groups.sort((a, b) => isMissing(a) - isMissing(b) || sign * (key(a) - key(b)) || a.index - b.index);
  }
  const offset = Number(query.get("offset") ?? 0);
  return { ...step, groups: groups.slice(offset, offset + Number(query.get("limit") ?? 50)) };
}

async function unpack(text) {
  if (!globalThis.DecompressionStream) throw new Error("This report needs a newer browser: Chrome 123, Firefox 120, Safari 17.5 or later.");
  const bytes = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}
