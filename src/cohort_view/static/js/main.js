// The shell: header, navigation, router, live updates, errors.
//
// Conventions for views
// ---------------------
// A view is a module js/views/NAME.js that exports
//
//     export async function render(root, params, context) { ...; return { update(change) {}, destroy() {} }; }
//
// and is listed in js/views/index.js. `render` fills `root` (an empty <section>). All of the handle is optional:
//   update(change)   something about a shown run changed: {run, step, state, gone, parts: ["metrics" | "status" | "events" |
//                    "completions"]}. Called at most every 250 ms per run. Change what differs; keep scroll, focus and folds.
//   navigate(params) only the query of the address changed (back, a link within the view): return true if handled, else
//                    the view is rendered anew.
//   destroy()        stop streams, observers and charts. Keys added through context.keys end by themselves.
// An error thrown in render, update or a handler is shown with its text; throw ApiError or let api.get throw.
//
// params   {id, step, group, row: number or null, query: {name: text}}                                 (js/router.js)
// context  navigate(hash, {replace})  go to link.step(...) and so on
//          setQuery({sort: "length"})  change the address's query without rendering anew; null removes a key
//          runs        entries of /api/runs, kept up to date
//          run         the entry of params.id (or null), api {get, stream, path, runPath, isExport}, theme
//          keys        keys.add("j | ArrowDown", "Next group", handler), keys.addList(() => elements, "group")
//          signal      AbortSignal that ends with the view: api.get(path, {signal: context.signal})
//          setTitle("Step 12")  the window's title
// Links: `link` of js/router.js. DOM: `h` of js/dom.js; never innerHTML. Numbers: js/format.js. Shared parts (empty states,
// banners, tables, bars): js/ui.js. Charts: js/chart.js. CSS: tokens in css/base.css, the frame in css/layout.css, parts in
// css/components.css, charts in css/charts.css, a model's text in css/texts.css; what only one view needs goes into
// css/views.css or the view's own css/NAME.css (add its <link> to index.html).
// Modules use static imports with relative paths and named exports only, so that an export can bundle them.

import * as api from "./api.js";
import { h, replace } from "./dom.js";
import { buildHeader } from "./header.js";
import { Keys } from "./keys.js";
import { Live } from "./live.js";
import { link, parse, search } from "./router.js";
import { Theme } from "./theme.js";
import { empty, failure } from "./ui.js";
import { views } from "./views/index.js";
import { visibleLine } from "./visible.js";

const main = document.getElementById("main");
const notice = document.getElementById("notice");
const theme = new Theme();
const keys = new Keys();

/** What is shown: its route, handle and the controller of its requests. */
let current = { hash: "", route: null, handle: null, abort: new AbortController() };
let runs = [];
let root = null;

const navigate = (hash, { replace: instead = false } = {}) => {
  if (!instead) location.hash = hash;
  else {
    history.replaceState(null, "", hash);
    show();
  }
};

const NOTICES = {
  lost: "The connection to `cohort view` was lost. Trying again…",
  refused: "`cohort view` was started again: open the new address that it printed.",
};

const SCROLL_BACK_MS = 2000;
const SCROLL_KEPT_MS = 100;

const header = buildHeader({ theme, keys, navigate, current: () => current.route });
const live = new Live(onChange, (state) => {
  showNotice(NOTICES[state] ?? "");
  if (state === "again") live.catchUp(runs.map((run) => run.id));
});

/** Render the view of the current address. */
async function show() {
  const hash = location.hash || "#/";
  const top = history.state?.top ?? 0; // where the reader had left this entry of the history
  const route = resolve(parse(hash));
  if (!route) return;
  const sameView = current.route && samePlace(current.route, route);
  current.hash = hash;
  if (sameView && current.handle?.navigate?.(route.params)) {
    current.route = route;
    return;
  }
  current.abort.abort();
  keys.clearView();
  runSafely(() => current.handle?.destroy?.());
  const abort = new AbortController();
  current = { hash, route, handle: null, abort };
  header.update(route, runs);
  const section = h("section.view", { class: `view-${route.view}` });
  const loading = setTimeout(() => section.isConnected || replace(main, h("p.muted", null, "Loading…")), 200);
  try {
    const view = views[route.view];
    const run = runs.find((entry) => entry.id === route.params.id) ?? null;
    document.title = [route.params.id, "Cohort"].filter(Boolean).join(" · ");
    if (!view) replace(section, empty("There is no such page.", "Choose a view above."));
    else if (route.params.id && !run)
      replace(section, empty(`There is no run named ${route.params.id} here.`, "Choose a run from the list above."));
    else if (run?.gone) replace(section, empty(visibleLine(run.gone), "The run is shown again if its files come back."));
    else {
      const handle = await view.render(section, route.params, buildContext(run, route, abort.signal));
      if (abort.signal.aborted) return runSafely(() => handle?.destroy?.());
      current.handle = handle ?? {};
    }
  } catch (error) {
    if (abort.signal.aborted) return;
    const isLeftOut = api.isExport && error instanceof api.ApiError;
    replace(section, isLeftOut ? empty(error.message, "The line below says what the report has.") : failure(error, show));
    if (!(error instanceof api.ApiError)) console.error(error);
  } finally {
    clearTimeout(loading);
  }
  if (abort.signal.aborted) return;
  replace(main, section);
  if (!sameView || top > 0) scrollBack(top, abort.signal);
  // The link that led here is gone; Tab and screen readers go on from the new view.
  if (document.activeElement === document.body) main.focus({ preventScroll: true });
}

/** Scroll to where the reader was, once as much of the view is there: groups and charts fill in later. */
function scrollBack(top, signal) {
  const until = performance.now() + SCROLL_BACK_MS;
  window.scrollTo(0, 0);
  const follow = () => {
    if (signal.aborted || performance.now() > until) return;
    if (document.documentElement.scrollHeight - window.innerHeight >= top) window.scrollTo(0, top);
    else requestAnimationFrame(follow);
  };
  follow();
}

let scrolled = 0;

function rememberScroll() {
  clearTimeout(scrolled);
  scrolled = setTimeout(() => history.replaceState({ top: window.scrollY }, ""), SCROLL_KEPT_MS);
}

/** Turn "home" into the one run's view or the list of runs. */
function resolve(route) {
  if (route.view !== "home") return route;
  return runs.length === 1
    ? { view: "now", params: { ...route.params, id: runs[0].id } }
    : { view: "runs", params: route.params };
}

function samePlace(a, b) {
  return a.view === b.view && ["id", "step", "group", "row"].every((key) => a.params[key] === b.params[key]);
}

function buildContext(run, route, signal) {
  return {
    navigate,
    api,
    theme,
    keys,
    run,
    signal,
    get runs() {
      return runs;
    },
    setQuery(changes) {
      const query = { ...parse(location.hash).params.query, ...changes };
      const hash = (location.hash || "#/").split("?")[0] + search(query);
      history.replaceState(history.state, "", hash);
      route.params.query = parse(hash).params.query;
    },
    setTitle(text) {
      document.title = [text, route.params.id, "Cohort"].filter(Boolean).join(" · ");
    },
  };
}

async function onChange(change) {
  const known = runs.find((run) => run.id === change.run);
  const showsNumbers = ["runs", "compare"].includes(current.route?.view) && change.parts.includes("metrics");
  const isNew = !known || known.state !== change.state || known.gone !== change.gone;
  if (isNew || showsNumbers) await loadRuns();
  const isGone = runs.find((run) => run.id === change.run)?.gone ?? null;
  if (known && known.gone !== isGone && current.route?.params.id === change.run) {
    current.route = null; // render anew
    return show();
  }
  if (current.route) header.update(current.route, runs);
  runSafely(() => current.handle?.update?.(change));
}

async function loadRuns() {
  try {
    ({ runs } = await api.get("/api/runs"));
  } catch (error) {
    if (!runs.length) throw error;
  }
}

function showNotice(text) {
  notice.hidden = !text;
  notice.textContent = text;
}

async function runSafely(action) {
  try {
    await action();
  } catch (error) {
    if (error.name !== "AbortError") reportError(error);
  }
}

/** Show an unexpected error above what is there, so that nothing on the page disappears. */
function reportError(error) {
  if (error.name === "AbortError") return;
  const isAnswer = error instanceof api.ApiError; // a sentence already
  if (!isAnswer) console.error(error);
  document.querySelector(".failure.unexpected")?.remove();
  const box = failure(isAnswer ? error : new Error(`Something on this page failed: ${error.message || error}`));
  box.classList.add("unexpected");
  box.append(h("button.button", { type: "button", on: { click: () => box.remove() } }, "Dismiss"));
  main.prepend(box);
}

function addKeys() {
  keys.add("?", "Show the keyboard shortcuts", () => keys.showHelp(), "Everywhere");
  keys.add("t", "Switch the theme", () => header.nextTheme(), "Everywhere");
  keys.add(
    "/",
    "Search",
    () => {
      const field = main.querySelector("input[type=search]");
      const id = current.route?.params.id ?? runs[0]?.id;
      if (field) field.focus();
      else if (id && !api.isExport) navigate(link.search(id));
    },
    "Everywhere",
  );
  keys.add("Escape", "Leave a field, close a dialog", () => document.activeElement?.blur(), "Everywhere");
  const go = { n: "now", c: "curves", s: "step", f: "search", h: "eval", m: "machine", i: "config" };
  for (const [key, view] of Object.entries(go)) {
    const id = () => current.route?.params.id ?? runs[0]?.id;
    keys.add(`g ${key}`, header.labels[view], () => id() && navigate(link.view(id(), view)), "Go to");
  }
  keys.add("g r", "Runs", () => navigate(link.runs()), "Go to");
  keys.add(
    "g p",
    "Compare",
    () =>
      navigate(
        link.compare({ runs: runs.slice(0, 8).map((run) => run.id) }),
      ),
    "Go to",
  );
}

async function start() {
  window.cohortFailure = reportError;
  window.addEventListener("hashchange", show);
  history.scrollRestoration = "manual";
  window.addEventListener("scroll", rememberScroll);
  document.querySelector(".skip-link").addEventListener("click", (event) => {
    event.preventDefault(); // the hash is the address of the view
    main.focus();
  });
  addKeys();
  try {
    await loadRuns();
  } catch (error) {
    replace(
      main,
      failure(error, () => location.reload()),
    );
    return;
  }
  await show();
  live.start();
}

start();
