// Keyboard shortcuts. Keys typed into a field are left to the field, except Escape. The latest shortcut wins.

/** @typedef {{key: string, label: string, run: (event: KeyboardEvent) => void, group: string}} Shortcut */

/** @type {Set<Shortcut>} */
const shortcuts = new Set();

/**
 * Add a shortcut; returns a function that removes it.
 * @param {string} key such as "j"
 * @param {string} label what it does, for the list of shortcuts
 * @param {(event: KeyboardEvent) => void} run
 */
export function addKey(key, label, run, group = "This view") {
  const shortcut = { key, label, run, group };
  shortcuts.add(shortcut);
  return () => shortcuts.delete(shortcut);
}

/** All shortcuts by group. */
export function listKeys() {
  return ["This view", "Everywhere"]
    .map((group) => [group, [...shortcuts].filter((shortcut) => shortcut.group === group)])
    .filter(([, found]) => found.length);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (document.querySelector("dialog[open]")) return;
  const target = /** @type {HTMLElement} */ (event.target);
  if (target.matches("select, textarea, input:not([type=checkbox], [type=radio]), [contenteditable]")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const hit = [...shortcuts].findLast((shortcut) => shortcut.key === event.key);
  if (!hit) return;
  event.preventDefault();
  hit.run(event);
});
