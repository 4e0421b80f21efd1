// A field for a search: completes names of columns and shows where a query is wrong.

import { h, replace } from "./dom.js";

const MOST_CHOICES = 8;
const CHECK_AFTER_MS = 250;
const NAME = /[\p{L}_][\p{L}\p{N}_./-]*$/u;

/**
 * @param {{value: string, columns: {name: string, type: string, description: string}[],
 *          check: (query: string, onError: (error: {error: string, position: number} | null) => void) => () => void,
 *          onSubmit: (query: string) => void}} options
 *   `check` asks the server whether a query is valid and returns a function that cancels this.
 */
export class QueryBox {
  constructor({ value, columns, check, onSubmit }) {
    Object.assign(this, { columns, check, onSubmit });
    this.chosen = -1;
    this.choices = [];
    this.cancelCheck = () => {};
    this.list = h("ul.query-choices", { id: "query-choices", role: "listbox", "aria-label": "Columns", hidden: true });
    this.error = h("div.query-error", { id: "query-error", role: "status", hidden: true });
    this.input = h("input.input.query-input", {
      type: "search", value, role: "combobox", "aria-label": "Search query", "aria-expanded": "false", "aria-autocomplete": "list",
      "aria-controls": "query-choices", "aria-describedby": "query-error", placeholder: "Text, or a condition such as reward < 0.2",
      autocomplete: "off", autocapitalize: "off", spellcheck: "false", enterkeyhint: "search", maxlength: 10000,
      on: {
        input: () => this.#changed(),
        keydown: (event) => this.#press(event),
        blur: () => this.#close(),
      },
    });
    this.element = h("div.query-box", null, this.input, this.list);
  }

  get value() {
    return this.input.value.trim();
  }

  set value(text) {
    this.input.value = text;
    this.#close();
    this.showError(null);
  }

  /** Show what is wrong with the query, with a caret at the position, or nothing. */
  showError(error) {
    this.error.hidden = !error;
    this.input.setAttribute("aria-invalid", String(Boolean(error)));
    if (!error) return replace(this.error);
    const characters = Array.from(error.query ?? this.input.value);
    const at = error.position;
    replace(
      this.error,
      typeof at === "number" && characters.length > 0 && h("pre.query-place", { "aria-hidden": "true" },
        characters.slice(0, at).join(""), h("span.query-caret", null, characters[at] ?? " "), characters.slice(at + 1).join("")),
      h("p", null, sentence(error.error)),
    );
  }

  destroy() {
    clearTimeout(this.timer);
    this.cancelCheck();
  }

  #changed() {
    this.#offer();
    this.destroy();
    if (!this.value) return this.showError(null);
    this.timer = setTimeout(() => {
      const query = this.input.value;
      this.cancelCheck = this.check(query, (error) => this.showError(error && { ...error, query }));
    }, CHECK_AFTER_MS);
  }

  /** Offer the columns that begin with the word before the cursor, then those that contain it. */
  #offer() {
    const word = this.#word();
    const lower = word.toLowerCase().replace(".", "/");
    const beginning = this.columns.filter((column) => column.name.toLowerCase().startsWith(lower));
    const within = this.columns.filter((column) => !beginning.includes(column) && column.name.toLowerCase().includes(lower));
    const found = word.length === 0 ? [] : [...beginning, ...(word.length > 1 ? within : [])].slice(0, MOST_CHOICES);
    if (!found.length || found[0].name === word) return this.#close();
    this.choices = found;
    this.chosen = -1;
    replace(this.list, found.map((column, index) =>
      h("li.query-choice", {
        id: `query-choice-${index}`, role: "option", "aria-selected": "false",
        on: { mousedown: (event) => { event.preventDefault(); this.#accept(index); } },
      }, h("code", null, column.name), h("span.muted.small", null, column.description))));
    this.list.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
  }

  #word() {
    const before = this.input.value.slice(0, this.input.selectionStart);
    const inQuotes = (before.match(/"/g) ?? []).length % 2 === 1;
    return inQuotes ? "" : before.match(NAME)?.[0] ?? "";
  }

  #press(event) {
    const open = !this.list.hidden;
    if (event.key === "Enter" && !event.isComposing) {
      event.preventDefault();
      if (open && this.chosen >= 0) return this.#accept(this.chosen);
      this.#close();
      return this.onSubmit(this.value);
    }
    if (!open) return undefined;
    const delta = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (delta) {
      event.preventDefault();
      return this.#choose(this.chosen + delta);
    }
    if (event.key === "Tab" && this.chosen >= 0) {
      event.preventDefault();
      return this.#accept(this.chosen);
    }
    if (event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation();
      this.#close();
    }
    return undefined;
  }

  #choose(index) {
    this.chosen = Math.max(-1, Math.min(this.choices.length - 1, index));
    [...this.list.children].forEach((node, i) => {
      node.setAttribute("aria-selected", String(i === this.chosen));
      if (i === this.chosen) node.scrollIntoView({ block: "nearest" });
    });
    if (this.chosen < 0) this.input.removeAttribute("aria-activedescendant");
    else this.input.setAttribute("aria-activedescendant", `query-choice-${this.chosen}`);
  }

  #accept(index) {
    const end = this.input.selectionStart;
    const { name } = this.choices[index];
    const text = /^[\p{L}\p{N}_./-]+$/u.test(name) ? name : `\`${name.replaceAll("`", "``")}\``;
    this.input.setRangeText(text + " ", end - this.#word().length, end, "end");
    this.#close();
    this.#changed();
  }

  #close() {
    this.list.hidden = true;
    this.choices = [];
    this.chosen = -1;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
  }
}

/** A message as a sentence. */
function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}
