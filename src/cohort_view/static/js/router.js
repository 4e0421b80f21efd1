// Addresses of views, in the hash. `parse` reads one, `link` writes one; nothing else puts addresses together.

/**
 * @typedef {object} Params
 * @property {string | null} id run
 * @property {number | null} step
 * @property {number | null} group index of a group within the step
 * @property {number | null} row row of a completion within the step's file
 * @property {Record<string, string>} query
 */

/** @typedef {{view: string, params: Params}} Route */

const RUN_VIEWS = ["now", "curves", "step", "search", "eval", "machine", "config"];

/**
 * Read a hash such as "#/run/demo/step/12/group/3?kind=step".
 * @param {string} hash
 * @returns {Route}
 */
export function parse(hash) {
  const text = hash.replace(/^#\/?/, "");
  const cut = text.indexOf("?");
  const path = cut < 0 ? text : text.slice(0, cut);
  const query = Object.fromEntries(new URLSearchParams(cut < 0 ? "" : text.slice(cut + 1)));
  const parts = path.split("/").filter(Boolean).map(decode);
  const params = { id: null, step: null, group: null, row: null, query };
  if (!parts.length) return { view: "home", params };
  if (parts[0] === "runs" || parts[0] === "compare") return { view: parts[0], params };
  if (parts[0] !== "run" || parts.length < 2) return { view: "unknown", params };
  params.id = parts[1];
  const view = parts[2] ?? "now";
  if (!RUN_VIEWS.includes(view)) return { view: "unknown", params };
  if (view !== "step") return { view, params };
  params.step = integer(parts[3]);
  if (parts[4] === "group") {
    params.group = integer(parts[5]);
    return { view: params.group === null ? "unknown" : "group", params };
  }
  if (parts[4] === "completion") {
    params.row = integer(parts[5]);
    return { view: params.row === null ? "unknown" : "completion", params };
  }
  return { view: "step", params };
}

/** Hashes of all views. A query is an object of texts, numbers and lists; null, undefined and "" are left out. */
export const link = {
  home: () => "#/",
  runs: () => "#/runs",
  compare: (query) => `#/compare${search(query)}`,
  now: (id) => `#/run/${encodeURIComponent(id)}`,
  view: (id, view, query) => `#/run/${encodeURIComponent(id)}${view === "now" ? "" : `/${view}`}${search(query)}`,
  curves: (id, query) => link.view(id, "curves", query),
  step: (id, step, query) => link.view(id, step === null || step === undefined ? "step" : `step/${step}`, query),
  group: (id, step, index, query) => link.view(id, `step/${step}/group/${index}`, query),
  completion: (id, step, row, query) => link.view(id, `step/${step}/completion/${row}`, query),
  search: (id, query) => link.view(id, "search", query),
};

/** "?a=1&b=2,3" without empty values, or "". Commas and slashes stay readable. */
export function search(query) {
  const pairs = Object.entries(query ?? {}).map(([key, value]) => [key, Array.isArray(value) ? joinList(value) : value]);
  const given = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given.map(([key, value]) => [key, String(value)])).toString();
  return text ? `?${text.replaceAll("%2C", ",").replaceAll("%2F", "/")}` : "";
}

function joinList(values) {
  return values.map((value) => value.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");
}

/** The values of a list in a query, which `search` has joined by commas. @param {string | null | undefined} text */
export function splitList(text) {
  return (text ?? "").split(",").filter(Boolean).map(decode);
}

function integer(text) {
  return text !== undefined && /^\d+$/.test(text) ? Number(text) : null;
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
