// Addresses of views, in the hash. `parse` reads one, `link` writes one; nothing else puts addresses together.

/** @typedef {{view: string, id: string | null, step: number | null, query: Record<string, string>}} Route */

/**
 * Read a hash such as "#/run/demo/steps/12?group=3".
 * @param {string} hash
 * @returns {Route}
 */
export function parse(hash) {
  const text = hash.replace(/^#\/?/, "");
  const cut = text.indexOf("?");
  const [first, id = null, tab = null, step = null, ...more] = (cut < 0 ? text : text.slice(0, cut))
    .split("/")
    .filter(Boolean)
    .map(decode);
  const query = Object.fromEntries(new URLSearchParams(cut < 0 ? "" : text.slice(cut + 1)));
  const route = (view) => ({ view, id, step: step === null ? null : Number(step), query });
  if (first === undefined) return route("home");
  if (first === "runs" && id === null) return route("runs");
  if (first !== "run" || id === null || more.length) return route("unknown");
  if (tab === null) return route("run");
  if (tab === "steps" && (step === null || /^\d{1,15}$/.test(step))) return route("steps");
  return route(tab === "questions" && step === null ? "questions" : "unknown");
}

const ofRun = (id, rest, query) => `#/run/${encodeURIComponent(id)}${rest}${search(query)}`;

/** Hashes of all views. A query is an object of texts, numbers and lists; null, undefined and "" are left out. */
export const link = {
  home: () => "#/",
  runs: () => "#/runs",
  run: (id, query) => ofRun(id, "", query),
  steps: (id, step, query) => ofRun(id, step === null || step === undefined ? "/steps" : `/steps/${step}`, query),
  questions: (id, query) => ofRun(id, "/questions", query),
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

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
