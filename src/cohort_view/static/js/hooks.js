// What components use of the page: data that follows the run, the address, shortcuts, theme and time.

import { get } from "cohort/api.js";
import { addKey } from "cohort/keys.js";
import { useEffect, useLayoutEffect, useRef, useState } from "cohort/preact.js";
import { parse, search } from "cohort/router.js";
import { Store, useStore } from "cohort/store.js";
import { theme } from "cohort/theme.js";

const KEPT = 60; // answers that nobody shows, for the way back

/** @type {Store} the route of the address */
export const route = new Store(parse(location.hash));
/** @type {Store} entries of /api/runs */
export const runs = new Store([]);

/** An answer of the server: loaded when a component shows it, and again when its run has changed. */
class Answer extends Store {
  parts = new Set();
  users = 0;
  isStale = true;
  #loading = false;

  constructor(address) {
    super({ data: null, error: null });
    this.address = address;
    this.reload = () => this.load();
  }

  async load() {
    this.isStale = true;
    if (this.#loading) return;
    this.#loading = true;
    while (this.isStale) {
      this.isStale = false;
      try {
        this.set({ data: await get(this.address), error: null });
      } catch (error) {
        this.isStale = false;
        this.set({ data: this.value.data, error });
      }
    }
    this.#loading = false;
  }

  /** Whether a change of a run changes this answer. */
  isOf(run, parts) {
    const [path, query] = this.address.split("?");
    const place = path.split("/");
    const about = place[2] === "runs" && place[3] ? [place[3]] : (new URLSearchParams(query).get("runs") ?? "").split(",");
    return about.includes(encodeURIComponent(run)) && parts.some((part) => this.parts.has(part));
  }
}

/** @type {Map<string, Answer>} by address, those used last at the end */
const answers = new Map();

function answerAt(address) {
  const found = answers.get(address) ?? new Answer(address);
  answers.delete(address);
  answers.set(address, found);
  for (const [old, answer] of answers) {
    if (answers.size <= KEPT) break;
    if (!answer.users && answer !== found) answers.delete(old);
  }
  return found;
}

/** The answer to no address. */
class Nothing extends Store {
  parts = new Set();
  reload = () => {};
}

const NOTHING = new Nothing({ data: null, error: null });

/**
 * The answer to an address, null for none. It is loaded anew, with the old data on the screen meanwhile, whenever its run
 * has changed in one of `parts`: "metrics", "status", "events" or "completions".
 */
export function useData(address, parts = []) {
  const answer = address === null ? NOTHING : answerAt(address);
  parts.forEach((part) => answer.parts.add(part));
  useEffect(() => {
    if (address === null) return undefined;
    answer.users += 1;
    if (answer.isStale) answer.load();
    return () => (answer.users -= 1);
  }, [answer]);
  return { ...useStore(answer), reload: answer.reload };
}

/** Take what the server says of a changed run. @param {string[]} parts */
export function runChanged(run, parts) {
  for (const answer of answers.values()) {
    if (!answer.isOf(run, parts)) continue;
    if (answer.users) answer.load();
    else answer.isStale = true;
  }
}

/** The route of the address. */
export const useRoute = () => useStore(route);

/** Entries of /api/runs, kept up to date. */
export const useRuns = () => useStore(runs);

/** Colors of the theme: {color(name), series(index)}. */
export function useTheme() {
  useStore(theme);
  return theme;
}

/** Go to another view. @param {string} hash as of `link` */
export function navigate(hash) {
  location.hash = hash;
}

/** The query of the address, and a function that changes it: `push` adds an entry to the history. */
export function useQuery() {
  return [useRoute().query, setQuery];
}

function setQuery(changes, { push = false } = {}) {
  const query = { ...route.value.query, ...changes };
  const hash = (location.hash || "#/").split("?")[0] + search(query);
  if (hash === location.hash) return;
  if (push) {
    history.pushState({ top: window.scrollY }, "", hash);
  } else history.replaceState(history.state, "", hash);
  route.set(parse(hash));
}

/** Shortcuts while a component is shown: [key, label, handler] each. */
export function useKeys(list) {
  const latest = useRef(list);
  latest.current = list;
  useLayoutEffect(() => {
    const removers = list.map(([key, label], index) => addKey(key, label, (event) => latest.current[index]?.[2](event)));
    return () => removers.forEach((remove) => remove());
  }, [list.map(([key, label]) => key + label).join()]);
}

/** Render anew every `ms` while `on` and the tab is visible. */
export function useTick(ms, on) {
  const [, setTimes] = useState(0);
  useEffect(() => {
    if (!on) return undefined;
    const timer = setInterval(() => document.hidden || setTimes((times) => times + 1), ms);
    return () => clearInterval(timer);
  }, [ms, on]);
}

/** Whether a media query holds. */
export function useMedia(query) {
  const [media] = useState(() => matchMedia(query));
  const [, setMatches] = useState(media.matches);
  useEffect(() => {
    const listen = () => setMatches(media.matches);
    media.addEventListener("change", listen);
    return () => media.removeEventListener("change", listen);
  }, [media]);
  return media.matches;
}

/** Whether an element is in view, or has been, as of when `ref` is set: [ref, isSeen]. */
export function useSeen() {
  const ref = useRef(null);
  const [isSeen, setSeen] = useState(false);
  useEffect(() => {
    if (isSeen) return undefined;
    const observer = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && setSeen(true), {
      rootMargin: "200px",
    });
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, [isSeen]);
  return [ref, isSeen];
}
