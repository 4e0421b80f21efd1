// The page: header, the view of the address, live updates, errors. See js/hooks.js for what views use.

import { get, isExport } from "cohort/api.js";
import { navigate, route, runChanged, runs, useRoute, useRuns, useTheme } from "cohort/hooks.js";
import { addKey, listKeys } from "cohort/keys.js";
import { Live } from "cohort/live.js";
import { Component, html, render, useEffect, useRef } from "cohort/preact.js";
import { link, parse } from "cohort/router.js";
import { Store, useStore } from "cohort/store.js";
import { theme } from "cohort/theme.js";
import { Empty, Failure, stateChip } from "cohort/ui.js";
import { QuestionsView } from "cohort/views/questions.js";
import { RunView } from "cohort/views/run.js";
import { RunsView } from "cohort/views/runs.js";
import { StepsView } from "cohort/views/steps.js";
import { visibleLine } from "cohort/visible.js";

const TABS = { run: "Run", steps: "Steps", questions: "Questions" };
const THEMES = { system: ["◐", "System theme"], light: ["☀", "Light theme"], dark: ["☾", "Dark theme"] };
const NOTICES = {
  lost: "The connection to `cohort view` was lost. Trying again…",
  refused: "`cohort view` was started again: open the new address that it printed.",
};
const ALL_PARTS = ["metrics", "status", "events", "completions"];

const notice = new Store(null);
const failure = new Store(null);
const help = new Store(false);

/** Everything on the page. */
function Page() {
  const error = useStore(failure);
  const list = useRuns();
  const asked = useRoute();
  const place = resolved(asked, list);
  // A second run must not take away the one that is shown. Effects run later: the reader may have left home since.
  useEffect(() => {
    if (parse(location.hash).view === "home" && place.id !== null) location.replace(link.run(place.id));
  }, [asked, place.id]);
  const text = NOTICES[useStore(notice)];
  const skip = (event) => {
    event.preventDefault(); // the hash is the address of the view
    document.getElementById("main").focus();
  };
  return html`
    <a class="skip-link" href="#main" onClick=${skip}>Skip to content</a>
    <${Header} place=${place} />
    <div class="notice-bar" role="status" aria-live="polite" hidden=${!text}>${text}</div>
    <main id="main" class="main" tabindex="-1">
      ${error && html`<div class="unexpected"><${Failure} error=${error} retry=${null} />
        <button type="button" class="button small" onClick=${() => failure.set(null)}>Dismiss</button></div>`}
      <${Boundary} key=${`${place.view} ${place.id}`}><${View} place=${place} /><//>
    </main>
    <${Help} />
  `;
}

/** Turn "home" into the one run, or the list of runs. */
function resolved(place, list) {
  if (place.view !== "home") return place;
  return list.length === 1 ? { ...place, view: "run", id: list[0].id } : { ...place, view: "runs" };
}

function View({ place }) {
  const { view, id, step } = place;
  const entry = useRuns().find((run) => run.id === id);
  useEffect(() => {
    document.title = [step !== null && view === "steps" && `Step ${step}`, id, "Cohort"].filter(Boolean).join(" · ");
  }, [view, id, step]);
  if (view === "unknown") return html`<${Missing} title="There is no such page." advice="Choose a view above." />`;
  if (view === "runs") return html`<${RunsView} />`;
  if (!entry) {
    const title = `There is no run named ${visibleLine(id)} here.`;
    return html`<${Missing} title=${title} advice="Choose a run from the list above." />`;
  }
  if (entry.gone) return html`<${Missing} title=${visibleLine(entry.gone)} advice="The run is shown again if its files come back." />`;
  if (view === "steps") return html`<${StepsView} id=${id} step=${step} />`;
  if (view === "questions") return html`<${QuestionsView} id=${id} />`;
  return html`<${RunView} id=${id} />`;
}

const Missing = (props) => html`<h1 class="visually-hidden">Nothing to show</h1><${Empty} ...${props} />`;

/** Shows an error of a view in its place. */
class Boundary extends Component {
  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }

  render({ children }, { error }) {
    return error ? html`<${Failure} error=${error} retry=${() => this.setState({ error: null })} />` : children;
  }
}

function Header({ place }) {
  const list = useRuns();
  const [sign, name] = THEMES[useTheme().choice];
  const run = list.find((entry) => entry.id === place.id);
  const choose = ({ target }) => navigate(target.value === "" ? link.runs() : hrefs(target.value)[place.view] ?? link.run(target.value));
  const tab = (view, href, label) => html`<a key=${view} href=${href} aria-current=${place.view === view ? "page" : null}>${label}</a>`;
  return html`<header class="header">
    <div class="header-row">
      <a class="brand" href=${link.home()} aria-label="Cohort, home">
        <svg class="brand-mark" viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="7" /><path d="M6 24 12 17l5 3 9-12" /></svg>
        <span>Cohort</span>
      </a>
      ${
        list.length > 1
          ? html`<select class="select run-select" aria-label="Run" value=${place.id ?? ""} onChange=${choose}>
              <option value="" selected=${place.id === null}>All runs</option>
              ${list.map(({ id }) => html`<option key=${id} value=${id} selected=${id === place.id}>${visibleLine(id)}</option>`)}
            </select>`
          : html`<span class="run-name">${list[0] ? visibleLine(list[0].name) : ""}</span>`
      }
      ${run && stateChip(run.state)}
      <nav class="tabs" aria-label="Views">
        ${place.id !== null && Object.entries(TABS).map(([view, label]) => tab(view, hrefs(place.id)[view], label))}
      </nav>
      <div class="header-tools">
        ${isExport && html`<span class="chip">Exported report</span>`}
        <button type="button" class="icon-button" title=${`${name}. Click for the next (t)`} aria-label=${name} onClick=${() => theme.next()}>${sign}</button>
        <button type="button" class="icon-button" title="Keyboard shortcuts (?)" aria-label="Keyboard shortcuts" onClick=${() => help.set(true)}>?</button>
      </div>
    </div>
  </header>`;
}

const hrefs = (id) => ({ run: link.run(id), steps: link.steps(id), questions: link.questions(id) });

/** The list of shortcuts. */
function Help() {
  const isOpen = useStore(help);
  const dialog = useRef(null);
  useEffect(() => void (isOpen && dialog.current.showModal()), [isOpen]);
  if (!isOpen) return null;
  const close = () => dialog.current.close();
  return html`<dialog class="keys-dialog" aria-label="Keyboard shortcuts" ref=${dialog} onClose=${() => help.set(false)} onClick=${(event) => event.target === dialog.current && close()}>
    <div class="row spread"><h2>Keyboard shortcuts</h2><button type="button" class="button" onClick=${close}>Close</button></div>
    ${listKeys().map(
      ([group, found]) => html`<section key=${group}>
        <h3>${group}</h3>
        <dl class="keys-list">${found.map(({ key, label }) => html`<dt><kbd>${key === "Escape" ? "Esc" : key}</kbd></dt><dd>${label}</dd>`)}</dl>
      </section>`,
    )}
  </dialog>`;
}

const SCROLL_BACK_MS = 2000;
const SCROLL_KEPT_MS = 100;
let scrolled = 0;

function rememberScroll() {
  clearTimeout(scrolled);
  scrolled = setTimeout(() => history.replaceState({ ...history.state, top: window.scrollY }, ""), SCROLL_KEPT_MS);
}

/** Scroll to where the reader was, once as much of the view is there: groups and charts fill in later. */
function scrollTo(top) {
  const until = performance.now() + SCROLL_BACK_MS;
  const { hash } = location;
  const follow = () => {
    if (location.hash !== hash || performance.now() > until) return;
    if (document.documentElement.scrollHeight - window.innerHeight >= top) window.scrollTo(0, top);
    else requestAnimationFrame(follow);
  };
  requestAnimationFrame(follow); // when the new view is there
}

/** The address has changed by a link or by the browser's buttons, which keep in the history where the reader was. */
function follow() {
  const before = resolved(route.value, runs.value);
  route.set(parse(location.hash));
  const now = resolved(route.value, runs.value);
  const isSame = before.view === now.view && before.id === now.id;
  const top = history.state?.top;
  if (top !== undefined || !isSame) scrollTo(top ?? 0);
  // The link that led here may be gone; Tab and screen readers go on from the new view.
  const focus = () => document.activeElement === document.body && document.getElementById("main").focus({ preventScroll: true });
  if (!isSame) setTimeout(focus);
}

async function loadRuns() {
  try {
    runs.set((await get("/api/runs")).runs);
  } catch (error) {
    if (!runs.value.length) throw error;
  }
}

async function onChange({ run, state, gone, parts }) {
  const known = runs.value.find((entry) => entry.id === run);
  const isNew = !known || known.state !== state || known.gone !== gone;
  if (isNew || (resolved(route.value, runs.value).view === "runs" && parts.includes("metrics"))) await loadRuns();
  runChanged(run, parts);
}

function reportError(error) {
  console.error(error);
  failure.set(new Error(`Something on this page failed: ${error.message || error}`));
}

/** Put the cursor into the view's search field. */
function goToSearch() {
  const { view, id } = resolved(route.value, runs.value);
  if (id !== null && view !== "steps" && !document.querySelector("main input[type=search]")) navigate(link.steps(id));
  setTimeout(() => document.querySelector("main input[type=search]")?.focus(), 100);
}

async function start() {
  history.scrollRestoration = "manual";
  addKey("?", "Show the keyboard shortcuts", () => help.set(true), "Everywhere");
  addKey("t", "Switch the theme", () => theme.next(), "Everywhere");
  addKey("/", "Search", goToSearch, "Everywhere");
  addKey("Escape", "Leave a field, close a dialog", () => document.activeElement?.blur(), "Everywhere");
  const page = document.getElementById("page");
  try {
    await loadRuns();
  } catch (error) {
    render(html`<main class="main"><${Failure} error=${error} retry=${() => location.reload()} /></main>`, page);
    return;
  }
  page.replaceChildren();
  route.set(parse(location.hash)); // which may have changed meanwhile
  render(html`<${Page} />`, page);
  window.cohortFailure = reportError;
  window.addEventListener("hashchange", follow);
  window.addEventListener("scroll", rememberScroll);
  if (history.state?.top) scrollTo(history.state.top);
  new Live(onChange, (state) => {
    notice.set(state);
    if (state === "again") runs.value.forEach((run) => runChanged(run.id, ALL_PARTS));
  }).start();
}

start();
