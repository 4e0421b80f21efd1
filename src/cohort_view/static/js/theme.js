// The theme: the system's, or the one the reader chose.

import { Store } from "cohort/store.js";

const KEY = "cohort-theme";
const CHOICES = ["system", "light", "dark"];
const media = matchMedia("(prefers-color-scheme: dark)");

class Theme extends Store {
  #colors = new Map();

  constructor() {
    super(0); // a number of the version of all colors
    media.addEventListener("change", () => this.#changed());
  }

  /** "system", "light" or "dark". */
  get choice() {
    return document.documentElement.dataset.theme ?? "system";
  }

  /** Switch to the next choice: system, light, dark. */
  next() {
    const choice = CHOICES[(CHOICES.indexOf(this.choice) + 1) % CHOICES.length];
    if (choice === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    try {
      if (choice === "system") localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, choice);
    } catch {
      // Storage can be forbidden; the choice then lasts until the page closes.
    }
    this.#changed();
  }

  /** Computed value of a CSS custom property that is a color, such as color("--text"). */
  color(name) {
    if (!this.#colors.has(name)) {
      const probe = document.createElement("span");
      probe.style.color = `var(${name})`;
      document.body.append(probe);
      this.#colors.set(name, getComputedStyle(probe).color);
      probe.remove();
    }
    return this.#colors.get(name);
  }

  /** Color of the i-th run or line. */
  series(index) {
    return this.color(`--series-${(index % 8) + 1}`);
  }

  #changed() {
    this.#colors.clear();
    this.set(this.value + 1);
  }
}

export const theme = new Theme();
