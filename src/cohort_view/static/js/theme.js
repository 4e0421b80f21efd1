// The theme: the system's, or the one the reader chose. `theme.on(listener)` tells charts to redraw.

const KEY = "cohort-theme";
const CHOICES = ["system", "light", "dark"];

export class Theme {
  constructor() {
    this.listeners = new Set();
    this.colors = new Map();
    this.media = matchMedia("(prefers-color-scheme: dark)");
    this.media.addEventListener("change", () => this.#tell());
  }

  /** "system", "light" or "dark". */
  get choice() {
    return document.documentElement.dataset.theme ?? "system";
  }

  get isDark() {
    return this.choice === "system" ? this.media.matches : this.choice === "dark";
  }

  /** Switch to the next choice: system, light, dark. */
  next() {
    this.set(CHOICES[(CHOICES.indexOf(this.choice) + 1) % CHOICES.length]);
  }

  /** @param {"system" | "light" | "dark"} choice */
  set(choice) {
    if (choice === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    try {
      if (choice === "system") localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, choice);
    } catch {
      // Storage can be forbidden; the choice then lasts until the page closes.
    }
    this.#tell();
  }

  /** Value of a CSS custom property, such as color("--text"). */
  color(name) {
    if (!this.colors.has(name))
      this.colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
    return this.colors.get(name);
  }

  /** Color of the i-th run or line. */
  series(index) {
    return this.color(`--series-${(index % 8) + 1}`);
  }

  /** Call `listener` when colors change; returns a function that stops it. */
  on(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  #tell() {
    this.colors.clear();
    this.listeners.forEach((listener) => listener());
  }
}
