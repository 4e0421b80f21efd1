// Keyboard shortcuts: single keys and sequences such as "g c". Keys typed into a field are left to the field, except
// Escape. A view's shortcuts end with the view.

import { h, replace } from "./dom.js";

/** @typedef {{keys: string, label: string, run: (event: KeyboardEvent) => void, group: string}} Shortcut */

const SEQUENCE_MS = 1200;
const NAMES = { ArrowUp: "↑", ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→", Enter: "⏎", Escape: "Esc" };

export class Keys {
  constructor() {
    /** @type {Shortcut[]} */
    this.shortcuts = [];
    this.pending = "";
    this.pendingUntil = 0;
    document.addEventListener("keydown", (event) => this.#press(event));
  }

  /**
   * Add a shortcut; returns a function that removes it. Several keys for one action: separate them with " | ".
   * @param {string} keys such as "j", "ArrowDown", "g c", "j | ArrowDown"
   * @param {string} label what it does, for the list of shortcuts
   * @param {(event: KeyboardEvent) => void} run
   */
  add(keys, label, run, group = "This view") {
    const shortcut = { keys, label, run, group };
    this.shortcuts.push(shortcut);
    return () => {
      this.shortcuts = this.shortcuts.filter((other) => other !== shortcut);
    };
  }

  /**
   * Let j/k and the arrows move the focus over elements that `elements()` returns in order.
   * @param {() => HTMLElement[]} elements
   */
  addList(elements, noun = "row") {
    const move = (delta) => {
      const all = elements();
      if (!all.length) return;
      const now = all.findIndex(
        (element) => element === document.activeElement || element.contains(document.activeElement),
      );
      const next = now < 0 ? (delta > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, now + delta));
      all[next].focus();
      all[next].scrollIntoView({ block: "nearest" });
    };
    const removers = [
      this.add("j | ArrowDown", `Next ${noun}`, () => move(1)),
      this.add("k | ArrowUp", `Previous ${noun}`, () => move(-1)),
    ];
    return () => removers.forEach((remove) => remove());
  }

  /** Drop the shortcuts of the view that ends. */
  clearView() {
    this.shortcuts = this.shortcuts.filter((shortcut) => shortcut.group !== "This view");
  }

  /** Show all shortcuts in a dialog. */
  showHelp() {
    document.querySelector("dialog.keys-dialog")?.remove();
    const groups = ["This view", "Everywhere", "Go to"];
    const sections = groups.map((group) => {
      const shortcuts = this.shortcuts.filter((shortcut) => shortcut.group === group);
      return shortcuts.length > 0 && h("section", null, h("h3", null, group), h("dl.keys-list", null, shortcuts.map(row)));
    });
    const dialog = h("dialog.keys-dialog", { "aria-label": "Keyboard shortcuts" });
    replace(
      dialog,
      h(
        "div.row.spread",
        null,
        h("h2", null, "Keyboard shortcuts"),
        h("button.button.quiet", { type: "button", on: { click: () => dialog.close() } }, "Close"),
      ),
      h("div.keys-columns", null, sections),
    );
    dialog.addEventListener("close", () => dialog.remove());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    document.body.append(dialog);
    dialog.showModal();
  }

  #press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]")) return;
    const target = /** @type {HTMLElement} */ (event.target);
    const typing = target.matches("select, textarea, input:not([type=checkbox], [type=radio]), [contenteditable]");
    if (typing) {
      if (event.key === "Escape") target.blur();
      return;
    }
    const sequence = this.pending && performance.now() < this.pendingUntil ? `${this.pending} ${event.key}` : event.key;
    this.pending = "";
    const hit = this.#find(sequence) ?? this.#find(event.key);
    if (hit) {
      event.preventDefault();
      hit.run(event);
    } else if (
      this.shortcuts.some((shortcut) => shortcut.keys.split(" | ").some((k) => k.startsWith(`${event.key} `)))
    ) {
      this.pending = event.key;
      this.pendingUntil = performance.now() + SEQUENCE_MS;
    }
  }

  /** The latest shortcut wins, so a view may take over a key. */
  #find(sequence) {
    return this.shortcuts.findLast((shortcut) => shortcut.keys.split(" | ").includes(sequence));
  }
}

function row(shortcut) {
  const alternatives = shortcut.keys
    .split(" | ")
    .map((keys, index) => [index > 0 && " or ", keys.split(" ").map((key) => h("kbd", null, NAMES[key] ?? key))]);
  return [h("dt", null, alternatives), h("dd", null, shortcut.label)];
}
