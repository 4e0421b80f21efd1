// Reads from the server; in an exported report, from the data embedded in the page (js/embedded.js).

import { embeddedAnswer, hasEmbedded, isExport } from "cohort/embedded.js";
import { search } from "cohort/router.js";

/** An answer that is not a success; the message is a sentence for the reader. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

export { isExport };

/** The address of a route: path("/api/curves", {runs: ["a", "b"], x: "step"}). */
export function path(route, query) {
  return route + search(query);
}

/** The route below one run: runPath("demo", "steps/3", {kind: "step"}). */
export function runPath(id, rest, query) {
  return path(`/api/runs/${encodeURIComponent(id)}/${rest}`, query);
}

/** Whether there is a page of a step: an exported report lacks some. */
export function hasStep(id, step, { kind = null } = {}) {
  return !isExport || hasEmbedded(runPath(id, `steps/${step}`, { kind }));
}

/**
 * JSON of a route. Throws ApiError with a sentence.
 * @param {string} address as from `path` or `runPath`
 */
export async function get(address) {
  if (isExport) return getEmbedded(address);
  let response;
  try {
    response = await fetch(address, { credentials: "same-origin", cache: "no-store" });
  } catch {
    throw new ApiError("The server cannot be reached. Is `cohort view` still running?", 0);
  }
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  if (response.status === 401 || response.status === 403) {
    throw new ApiError("This browser session is no longer valid. Open the address that `cohort view` printed.", response.status);
  }
  throw new ApiError(body?.error ?? `The server answered ${response.status} ${response.statusText}.`, response.status);
}

/**
 * Read server-sent events: stream(path, {match(data) {}, done(data) {}, failed(error) {}}). Handlers are named as the
 * events; `failed` is called once if the connection breaks. Returns {close()}, which cancels on the server too.
 * @param {string} address
 * @param {Record<string, (data: any) => void>} handlers
 */
export function stream(address, handlers) {
  if (isExport) {
    queueMicrotask(() => handlers.failed?.(new ApiError("This needs a running `cohort view`; it is not part of an exported report.", 0)));
    return { close() {} };
  }
  const source = new EventSource(address);
  let closed = false;
  const close = () => {
    closed = true;
    source.close();
  };
  for (const [name, handler] of Object.entries(handlers)) {
    if (name === "failed") continue;
    // The server's own "error" event has data; a broken connection's has none.
    source.addEventListener(name, (event) => !closed && event.data !== undefined && handler(JSON.parse(event.data)));
  }
  source.addEventListener("error", (event) => {
    if (closed || event.data !== undefined) return;
    close();
    handlers.failed?.(new ApiError("The connection to the server was lost.", 0));
  });
  return { close };
}

async function getEmbedded(address) {
  const answer = await embeddedAnswer(address);
  if (answer === null) throw new ApiError("This is not part of the exported report; `cohort view` shows all of the run.", 404);
  return answer;
}
