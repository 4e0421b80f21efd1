// Search over all completions of a run. Matches appear as the server finds them, newest step first.

import { append, h, replace } from "../dom.js";
import { count, isNumber, number, plural } from "../format.js";
import { QueryBox } from "../query_box.js";
import { link } from "../router.js";
import { empty, failure, problems, progress, title } from "../ui.js";

const LIMIT = 200;
const MORE = 5000;
const KINDS = { replaced: "Replaced", dropped: "Dropped", eval: "Held-out" };

export async function render(root, params, context) {
  context.setTitle("Search");
  if (context.api.isExport) {
    replace(root, title("Search"), empty("An exported report cannot search the completions.", "Open the run with cohort view to search."));
    return {};
  }
  const { columns } = await context.api.get(context.api.runPath(params.id, "search/columns"), { signal: context.signal });
  return new SearchView(root, params, columns, context);
}

/** The last finished search, for the way back from a match: {id, query, limit, matches, latest, state, scroll}. */
let last = null;

class SearchView {
  constructor(root, params, columns, context) {
    Object.assign(this, { id: params.id, context, columns, query: "", stream: null, state: null });
    this.box = new QueryBox({
      value: params.query.q ?? "", columns,
      check: (query, onError) => this.#check(query, onError),
      onSubmit: (query) => this.#submit(query),
    });
    this.button = h("button.button.primary", { type: "button", on: { click: () => (this.stream ? this.#cancel() : this.#submit(this.box.value)) } }, "Search");
    this.status = h("div.search-status", null);
    this.results = h("div.search-results", null);
    replace(root, title("Search"), h("div.search-form", { role: "search" }, this.box.element, this.button), this.box.error, this.status, this.results);
    context.keys.addList(() => [...this.results.querySelectorAll("a.search-match")], "match");
    if (last?.id === this.id && last.query === params.query.q) this.#restore();
    else if (params.query.q) this.#run(params.query.q, LIMIT);
    else {
      this.#showHelp();
      if (window.matchMedia("(pointer: fine)").matches) requestAnimationFrame(() => this.box.input.focus());
    }
  }

  update(change) {
    if (!change.parts.includes("completions") || !this.query || this.stream || this.stale) return;
    this.stale = true;
    append(this.status, h("p.row", null, h("span.muted", null, "The run has written new completions since."),
      h("button.button.small", { type: "button", on: { click: () => this.#run(this.query, LIMIT) } }, "Search again")));
  }

  navigate({ query }) {
    this.box.value = query.q ?? "";
    if (query.q) this.#run(query.q, LIMIT);
    else {
      this.#stop();
      Object.assign(this, { query: "", state: null });
      replace(this.status);
      this.#showHelp();
    }
    return true;
  }

  destroy() {
    this.#stop();
    this.box.destroy();
    const { id, query, limit, matches, latest, state } = this;
    if (state) last = { id, query, limit, matches, latest, state, scroll: window.scrollY };
  }

  /** Show the results of the last search again, as they were. */
  #restore() {
    const { query, limit, matches, latest, state, scroll } = last;
    this.#begin(query, limit);
    Object.assign(this, { latest, waiting: matches });
    this.#finish(state);
    requestAnimationFrame(() => requestAnimationFrame(() => window.scrollTo(0, scroll)));
  }

  #path(q, limit) {
    return this.context.api.runPath(this.id, "search", { q, limit });
  }

  #check(query, onError) {
    const stream = this.context.api.stream(this.#path(query, 0), {
      error: (error) => (stream.close(), onError(error)),
      done: () => (stream.close(), onError(null)),
    });
    return () => stream.close();
  }

  #submit(query) {
    if (!query) return;
    const hash = link.search(this.id, { q: query });
    if (hash === window.location.hash) this.#run(query, LIMIT);
    else this.context.navigate(hash);
  }

  #begin(query, limit) {
    this.#stop();
    this.box.destroy();
    this.box.showError(null);
    Object.assign(this, { query, limit, stale: false, waiting: [], matches: [], latest: null, state: null });
    replace(this.results);
    replace(this.status);
  }

  #run(query, limit) {
    this.#begin(query, limit);
    this.stream = this.context.api.stream(this.#path(query, limit), {
      match: (match) => this.#add(match),
      progress: (state) => this.#progress(state),
      done: (state) => this.#finish(state),
      error: (error) => {
        this.#stop();
        replace(this.status);
        if (!isNumber(error.position)) replace(this.status, failure({ message: error.error }, () => this.#run(query, limit)));
        else this.box.showError({ ...error, query });
      },
      failed: (error) => {
        this.#stop();
        replace(this.status, failure(error, () => this.#run(query, limit)));
      },
    });
    this.button.textContent = "Cancel";
    this.button.classList.remove("primary");
  }

  #stop() {
    this.stream?.close();
    this.stream = null;
    cancelAnimationFrame(this.frame);
    this.button.textContent = "Search";
    this.button.classList.add("primary");
  }

  #cancel() {
    this.#stop();
    this.#flush();
    const state = this.latest;
    replace(this.status, h("p", null, `Canceled after ${place(state)}: ${plural(this.matches.length, "match", "matches")}.`), problems(state?.problems));
  }

  #add(match) {
    this.waiting.push(match);
    if (this.waiting.length === 1) this.frame = requestAnimationFrame(() => this.#flush());
  }

  #flush() {
    const matches = this.waiting.splice(0);
    append(this.results, matches.map((match) => this.#card(match)));
    this.matches.push(...matches);
  }

  #progress(state) {
    this.latest = state;
    if (!this.stream) return;
    replace(
      this.status,
      progress(state.files_total ? state.files_done / state.files_total : null, "Files searched"),
      h("p.row", { role: "status" }, h("span", null, `Searched ${place(state)}: ${plural(state.matches, "match", "matches")}.`), this.#understood()),
    );
  }

  #finish(state) {
    this.#stop();
    this.#flush();
    this.state = state;
    if (!state.files_total) {
      replace(this.status, empty("This run has no completions to search yet.", "They appear after its first step. If they never do, check run.completions_every."));
      return;
    }
    const files = plural(state.files_total, "file");
    if (!state.matches) {
      replace(this.status, this.#understood(), problems(state.problems));
      replace(this.results, empty(`No completion in ${files} matches.`, "All words must occur in the completion's text, in any order and case. Write or between alternatives, and quotes around a phrase."), this.#help());
      return;
    }
    const text = state.reason === "limit"
      ? `The ${state.matches === 1 ? "newest match" : `newest ${count(state.matches)} matches`}, from ${count(state.files_done)} of ${files}.`
      : `${plural(state.matches, "match", "matches")} in ${files}.`;
    replace(
      this.status,
      h("p.row", { role: "status" }, h("span", null, text), this.#understood(),
        state.reason === "limit" && this.limit < MORE && h("button.button.small", { type: "button", on: { click: () => this.#run(this.query, MORE) } }, `Show up to ${count(MORE)}`)),
      problems(state.problems),
    );
  }

  /** The query as the server understood it, if that is not just what was typed. */
  #understood() {
    const plain = (text) => text.replaceAll('"', "").replace(/\s+/g, " ").trim();
    const query = this.latest?.query ?? "";
    return plain(query) === plain(this.query) ? null : h("span.muted.small", null, "Understood as ", h("code", null, query));
  }

  #card(match) {
    const kind = match.kind === "step" ? null : match.kind;
    const where = [`Step ${count(match.step)}`, `completion ${count(match.row)}`].join(", ");
    return h("a.search-match", { href: link.completion(this.id, match.step, match.row, { kind }) },
      h("span.search-facts", null,
        h("span.search-where", null, where),
        kind && h("span.chip", null, KINDS[kind] ?? kind),
        h("span.muted", null, isNumber(match.reward) ? `reward ${number(match.reward)}` : "not scored"),
        isNumber(match.length) && h("span.muted", null, plural(match.length, "token")),
        match.column !== "text" && h("span.muted", null, `in ${match.column}`)),
      h("span.search-text.mono", { dir: "auto" }, match.text ? highlighted(match.text, match.spans) : h("span.muted", null, "(no text)")));
  }

  #showHelp() {
    replace(this.results, this.#help());
  }

  #help() {
    const known = new Set(this.columns.map((column) => column.name));
    const reward = this.columns.find((column) => column.name.startsWith("rewards/"));
    const examples = [
      ["reward < 0.2 and length > 500", "Long completions with a low reward"],
      ['"the answer is"', "A phrase, in any case"],
      ["wait or \"let me check\"", "Either of two texts"],
      ['text ~ "\\d+ = \\d+"', "A regular expression"],
      ["end == length", "Cut off at the token limit"],
      reward && [`${reward.name} == 0 and advantage > 0`, "Pushed up in spite of this reward"],
      known.has("error") && ["error is not null", "Broken by the environment"],
      ["kind == eval and reward == 0", "Wrong answers to held-out prompts"],
    ].filter(Boolean);
    const card = (heading, terms) => h("section.card", null, h("h2", null, heading),
      h("dl.search-terms", null, terms.map(([term, text]) => [h("dt", null, term), h("dd.muted", null, text)])));
    const code = (text) => h("code", null, text);
    return h("div.search-help", null,
      h("div.stack", null,
        card("Examples", examples.map(([query, text]) => [h("a", { href: link.search(this.id, { q: query }) }, code(query)), text])),
        card("Operators", OPERATORS.map(([operator, text]) => [code(operator), text]))),
      card("Columns of this run", this.columns.map((column) => [code(column.name), column.description])));
  }
}

const OPERATORS = [
  ["word \"a phrase\"", "the text contains both, in any case"],
  ["< <= > >= == !=", "compare with a number; == and != also with text"],
  ["contains", "a column of text contains this, in any case"],
  ["~ !~", "a regular expression (RE2) matches, or does not; (?i) ignores case"],
  ["in (a, b)", "one of several values"],
  ["is null, is not null", "without or with a value; other comparisons with null are false"],
  ["and or not ( )", "combine conditions; and may be left out"],
];

function place(state) {
  if (!state) return "0 files";
  const down = isNumber(state.step) ? `, down to step ${count(state.step)}` : "";
  return `${count(state.files_done)} of ${plural(state.files_total, "file")}${down}`;
}

/** Text with its matches marked. Spans count characters, not UTF-16 units. */
function highlighted(text, spans) {
  const characters = Array.from(text);
  const parts = [];
  let end = 0;
  for (const [start, stop] of spans) {
    if (start < end) continue;
    parts.push(characters.slice(end, start).join(""), h("mark", null, characters.slice(start, stop).join("")));
    end = stop;
  }
  return [...parts, characters.slice(end).join("")];
}
