// The header: name, run, navigation, theme, shortcuts.

import { isExport } from "./api.js";
import { h, replace, svg } from "./dom.js";
import { link } from "./router.js";
import { stateChip } from "./ui.js";

const LABELS = {
  now: "Now",
  curves: "Curves",
  step: "Steps",
  search: "Search",
  eval: "Held-out",
  machine: "Machine",
  config: "Config",
};
const THEME_LABELS = { system: "System theme", light: "Light theme", dark: "Dark theme" };
const THEME_SIGNS = { system: "◐", light: "☀", dark: "☾" };
const PARENTS = { group: "step", completion: "step" };

/** Build the header; returns {update(route, runs), nextTheme, labels}. */
export function buildHeader({ theme, keys, navigate, current }) {
  const picker = h("div.header-run");
  const nav = h("nav.nav", { "aria-label": "Views" });
  const themeButton = h("button.icon-button", { type: "button", on: { click: nextTheme } });
  const help = h(
    "button.icon-button",
    {
      type: "button",
      title: "Keyboard shortcuts (?)",
      "aria-label": "Keyboard shortcuts",
      on: { click: () => keys.showHelp() },
    },
    "?",
  );
  replace(
    document.getElementById("header"),
    h(
      "div.header-top",
      null,
      h("a.brand", { href: link.home(), "aria-label": "Cohort, home" }, mark(), h("span", null, "Cohort")),
      picker,
      h("div.header-tools", null, isExport && h("span.chip", null, "Exported report"), themeButton, help),
    ),
    nav,
  );
  showTheme();
  let shown = "";

  function nextTheme() {
    theme.next();
    showTheme();
  }

  function showTheme() {
    themeButton.textContent = THEME_SIGNS[theme.choice];
    themeButton.title = `${THEME_LABELS[theme.choice]}. Click for the next (t)`;
    themeButton.setAttribute("aria-label", themeButton.title);
  }

  function choose(event) {
    const id = event.target.value;
    const route = current();
    if (id === "") return navigate(link.runs());
    const view = route && LABELS[PARENTS[route.view] ?? route.view] ? (PARENTS[route.view] ?? route.view) : "now";
    return navigate(link.view(id, view));
  }

  function update(route, runs) {
    const id = route.params.id;
    const run = runs.find((entry) => entry.id === id);
    const state = JSON.stringify([route.view, id, runs.map((entry) => [entry.id, entry.name, entry.state])]);
    if (state === shown) return;
    shown = state;
    const [wasInPicker, wasInNav] = [picker, nav].map((part) => part.contains(document.activeElement));
    const select =
      runs.length > 1 &&
      h(
        "select.run-select",
        { "aria-label": "Run", value: id ?? "", on: { change: choose } },
        h("option", { value: "" }, "All runs"),
        runs.map((entry) => h("option", { value: entry.id }, entry.id)),
      );
    replace(
      picker,
      runs.length > 1 ? select : h("span.run-name", null, runs[0]?.name ?? ""),
      run && stateChip(run.state),
    );
    const place = PARENTS[route.view] ?? route.view;
    const entry = (view, href, label) => h("a", { href, "aria-current": place === view ? "page" : null }, label);
    replace(
      nav,
      id &&
        Object.entries(LABELS)
          .filter(([view]) => !(isExport && view === "search"))
          .map(([view, label]) => entry(view, link.view(id, view), label)),
      !id && runs.length > 1 && entry("runs", link.runs(), "Runs"),
      !id &&
        runs.length > 1 &&
        entry(
          "compare",
          link.compare({ runs: runs.slice(0, 8).map((r) => r.id) }),
          "Compare",
        ),
    );
    // What had the focus was replaced.
    if (wasInPicker) picker.querySelector("select")?.focus();
    if (wasInNav) nav.querySelector("[aria-current]")?.focus();
    nav.hidden = !nav.childElementCount;
    nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  return { update, nextTheme, labels: LABELS };
}

function mark() {
  return svg(
    "svg.brand-mark",
    { viewBox: "0 0 32 32", "aria-hidden": "true" },
    svg("rect", { width: 32, height: 32, rx: 7 }),
    svg("path", { d: "M6 24 12 17l5 3 9-12" }),
  );
}
