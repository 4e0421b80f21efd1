// Search over all completions of a run, by a text and a condition. Matches appear as the server finds them, newest step first.

import { append, h, replace } from "../dom.js";
import { count, isNumber, number, plural } from "../format.js";
import { link } from "../router.js";
import { empty, failure, problems, progress, table, title } from "../ui.js";

const LIMIT = 200;
const MORE = 5000;
const KINDS = { replaced: "Replaced", dropped: "Dropped", eval: "Held-out" };

/** The last search, for the way back from a match. */
let last = null;

export async function render(root, { id, query }, context) {
  context.setTitle("Search");
  if (!last?.isAbout(id, query)) {
    const { columns } = await context.api.get(context.api.runPath(id, "search/columns"), { signal: context.signal });
    last = new SearchView(id, columns, context);
  }
  last.show(root, query, context);
  return last;
}

class SearchView {
  constructor(id, columns, context) {
    Object.assign(this, { id, columns, context, query: {}, state: null, stream: null });
    this.text = h("input.input", {
      type: "search", maxlength: 1000, autocomplete: "off", placeholder: "Text of the completion, in any case", "aria-label": "Text",
    });
    this.where = h("input.input.mono", {
      type: "search", maxlength: 1000, autocomplete: "off", autocapitalize: "off", spellcheck: "false",
      placeholder: 'Condition, such as reward < 0.2 and "train" in prompt', "aria-label": "Condition", "aria-describedby": "search-error",
    });
    this.button = h("button.button.primary", { on: { click: (event) => this.#click(event) } }, "Search");
    this.error = h("div.search-error", { id: "search-error", role: "alert", hidden: true });
    this.status = h("div.search-status", null);
    this.results = h("div.search-results", null);
    const chip = ({ name, description }) =>
      h("button.chip.mono", { type: "button", title: description, on: { click: () => this.#insert(name) } }, name);
    this.nodes = [
      title("Search"),
      h("form.search-form", { role: "search", on: { submit: (event) => this.#submit(event) } }, this.text, this.where, this.button),
      h("div.search-columns", { role: "group", "aria-label": "Columns" }, columns.map(chip)),
      this.error, this.status, this.results,
    ];
  }

  /** Whether this has the results of a query. */
  isAbout(id, { text = "", where = "" }) {
    return this.state !== null && this.id === id && this.query.text === text && this.query.where === where;
  }

  show(root, query, context) {
    this.context = context;
    replace(root, this.nodes);
    context.keys.addList(() => [...this.results.querySelectorAll("a.search-match")], "match");
    if (this.state) requestAnimationFrame(() => requestAnimationFrame(() => window.scrollTo(0, this.scroll)));
    else this.navigate({ query });
  }

  navigate({ query: { text = "", where = "" } }) {
    this.text.value = text;
    this.where.value = where;
    if (text || where) this.#run({ text, where }, LIMIT);
    else {
      this.#clear({});
      replace(this.results, this.#examples());
      if (window.matchMedia("(pointer: fine)").matches) requestAnimationFrame(() => this.text.focus());
    }
    return true;
  }

  update(change) {
    if (!change.parts.includes("completions") || !this.state || this.stale) return;
    this.stale = true;
    append(this.status, h("p.row", null, h("span.muted", null, "The run has written new completions since."), this.#again("Search again", LIMIT)));
  }

  destroy() {
    this.#stop();
    this.scroll = window.scrollY;
  }

  #insert(name) {
    this.where.setRangeText(name, this.where.selectionStart, this.where.selectionEnd, "end");
    this.where.focus();
  }

  #submit(event) {
    event.preventDefault();
    const hash = link.search(this.id, { text: this.text.value, where: this.where.value });
    if (hash === window.location.hash) this.navigate({ query: { text: this.text.value, where: this.where.value } });
    else this.context.navigate(hash);
  }

  #click(event) {
    const isEnterInField = event.detail === 0 && document.activeElement !== this.button; // clicks the button, too
    if (!this.stream || isEnterInField) return;
    event.preventDefault();
    this.#cancel();
  }

  #clear(query) {
    this.#stop();
    Object.assign(this, { query, stale: false, waiting: [], state: null, progress: null });
    this.#showError(null);
    replace(this.results);
    replace(this.status);
  }

  #run(query, limit) {
    this.#clear(query);
    const failed = (error) => (this.#stop(), replace(this.status, failure(error, () => this.#run(query, limit))));
    this.stream = this.context.api.stream(this.context.api.runPath(this.id, "search", { ...query, limit }), {
      match: (match) => this.#add(match),
      progress: (state) => this.#progress(state),
      done: (state) => this.#finish(state, limit),
      error: (error) => (this.#clear(query), this.#showError(error), replace(this.results, this.#examples())),
      failed,
    });
    this.button.textContent = "Cancel";
    this.button.classList.remove("primary");
  }

  #again(label, limit) {
    return h("button.button.small", { type: "button", on: { click: () => this.#run(this.query, limit) } }, label);
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
    replace(this.status, h("p", null, `Canceled. ${found(this.progress)}`), problems(this.progress?.problems));
  }

  /** Say what is wrong with the search, with a caret below its place in the condition, or nothing. */
  #showError(error) {
    this.error.hidden = !error;
    this.where.setAttribute("aria-invalid", String(Boolean(error)));
    const place = isNumber(error?.position) && h("pre", { "aria-hidden": "true" }, `${this.query.where}\n${" ".repeat(error.position)}^`);
    replace(this.error, error && [place, h("p", null, sentence(error.error))]);
  }

  #add(match) {
    this.waiting.push(match);
    if (this.waiting.length === 1) this.frame = requestAnimationFrame(() => this.#flush());
  }

  #flush() {
    append(this.results, this.waiting.splice(0).map((match) => this.#card(match)));
  }

  #progress(state) {
    this.progress = state;
    replace(
      this.status,
      progress(state.files_total ? state.files_done / state.files_total : null, "Files searched"),
      h("p", { role: "status" }, found(state)),
    );
  }

  #finish(state, limit) {
    this.#stop();
    this.#flush();
    this.state = state;
    if (!state.files_total) {
      replace(this.status, empty("This run has no completions to search yet.", "They appear after its first step. If they never do, check run.completions_every."));
      return;
    }
    replace(
      this.status,
      h("p.row", { role: "status" }, found(state), state.reason === "limit" && limit < MORE && this.#again(`Show up to ${count(MORE)}`, MORE)),
      problems(state.problems),
    );
    if (!state.matches) replace(this.results, this.#examples());
  }

  #card(match) {
    const kind = match.kind === "step" ? null : match.kind;
    return h("a.search-match", { href: link.completion(this.id, match.step, match.row, { kind }) },
      h("span.search-facts", null,
        h("span.search-where", null, `Step ${count(match.step)}, completion ${count(match.row)}`),
        kind && h("span.chip", null, KINDS[kind] ?? kind),
        h("span.muted", null, isNumber(match.reward) ? `reward ${number(match.reward)}` : "not scored"),
        isNumber(match.length) && h("span.muted", null, plural(match.length, "token")),
        match.column !== "text" && h("span.muted", null, `in ${match.column}`)),
      h("span.search-text.mono", { dir: "auto" },
        match.parts.join("") ? match.parts.map((part, index) => (index % 2 && part ? h("mark", null, part) : part)) : h("span.muted", null, "(no text)")));
  }

  #examples() {
    const reward = this.columns.find((column) => column.name.startsWith("rewards/"));
    const examples = [
      ["reward < 0.2 and length > 500", "Long completions with a low reward"],
      ['end == "length" or "wait" in text', "Cut off at the token limit, or with a text (as written)"],
      ['matches(text, r"(?i)\\d+ = \\d+")', "A regular expression (RE2); (?i) ignores case"],
      reward && [`${reward.name} == 0 and advantage > 0`, "Pushed up in spite of this reward"],
      ['kind == "eval" and not reward > 0', "Held-out prompts without a reward above 0, also those not scored"],
      ['kind in ("replaced", "dropped") or error is not None', "Groups that were not trained, and what the environment broke"],
    ].filter(Boolean);
    const example = ([where]) => h("a.mono", { href: link.search(this.id, { where }) }, where);
    return h("section.stack", null, h("h2", null, "Conditions in Python's syntax"),
      table([{ label: "Condition", value: example }, { label: "Finds", value: ([, meaning]) => meaning }], examples, { caption: "Examples of conditions" }));
  }
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}

/** How far a search is, as a sentence. */
function found(state) {
  if (!state) return "0 matches.";
  const down = isNumber(state.step) && state.files_done < state.files_total ? `, down to step ${count(state.step)}` : "";
  const files = `${plural(state.files_total, "file")}${down}`;
  return `${plural(state.matches, "match", "matches")} in ${down ? `${count(state.files_done)} of ` : ""}${files}.`;
}
