// Parts that several views share: states without content, banners, tables, bars, small charts.

import { hasStep } from "./api.js";
import { h, svg } from "./dom.js";
import { isNumber } from "./format.js";
import { link } from "./router.js";
import { visibleLine } from "./visible.js";

/** A view's title with what belongs next to it: title("Step 12", "finished", buttons). */
export function title(text, ...beside) {
  return h("div.view-title", null, h("h1", null, text), ...beside);
}

/** A place with nothing to show: why, and what to do. */
export function empty(sentence, advice = null) {
  return h("div.empty", null, h("p", null, sentence), advice && h("p.muted", null, linkify(advice)));
}

/** A link to a step; only its text in an exported report without the step. */
export function stepLink(id, step, text) {
  return hasStep(id, step) ? h("a", { href: link.step(id, step) }, text) : h("span", null, text);
}

/** A failure within a view: the sentence, and a retry button if `retry` is given. */
export function failure(error, retry = null) {
  return h(
    "div.failure",
    { role: "alert" },
    h("p", null, error.message || String(error)),
    retry && h("p", null, h("button.button", { type: "button", on: { click: retry } }, "Try again")),
  );
}

/** What is wrong with the run's files, or null. @param {string[]} list */
export function problems(list) {
  if (!list?.length) return null;
  if (list.length === 1) return h("p.problems", null, list[0]);
  return h(
    "details.problems",
    null,
    h("summary", null, `${list.length} problems in the run's files`),
    h(
      "ul",
      null,
      list.map((text) => h("li", null, text)),
    ),
  );
}

const LEVELS = { good: ["✓", "Good"], info: ["i", "Note"], warning: ["!", "Warning"], bad: ["✕", "Problem"] };

/** The sign of a level; never color alone. */
export function levelIcon(level) {
  const [sign, name] = LEVELS[level] ?? LEVELS.info;
  return h(`span.level-icon.level-${level in LEVELS ? level : "info"}`, { role: "img", "aria-label": name }, sign);
}

/** A banner of the contract, as a card whose sentence links to its evidence. */
export function banner(data, { large = false } = {}) {
  const sentence = data.link
    ? h("a.banner-text", { href: data.link }, data.text)
    : h("span.banner-text", null, data.text);
  return h(
    `div.banner.level-${data.level}`,
    { class: large ? "large" : "" },
    levelIcon(data.level),
    h("div.banner-body", null, sentence, data.advice && h("p.banner-advice", null, linkify(data.advice))),
  );
}

const STATES = { running: "Running", finished: "Finished", stopped: "Stopped", starting: "Starting" };

/** The state of a run as a chip. */
export function stateChip(state) {
  return h(`span.chip.state-${state}`, null, h("span.dot", { "aria-hidden": "true" }), STATES[state] ?? state);
}

/** Text with its https links made into links, and everything invisible as signs. */
export function linkify(text) {
  return visibleLine(String(text))
    .split(/(https?:\/\/[^\s)]+[^\s).,;])/)
    .map((part, index) =>
      index % 2 ? h("a", { href: part, target: "_blank", rel: "noopener noreferrer" }, part) : part,
    );
}

/** One number with its label and what goes below it. */
export function stat(label, value, below = null, props = null) {
  return h(
    "div.stat",
    props,
    h("div.stat-label", null, label),
    h("div.stat-value", null, value),
    below !== null && h("div.stat-below", null, below),
  );
}

/** A progress bar, or a bar of unknown length if `share` is not a number. */
export function progress(share, label) {
  const known = isNumber(share);
  return h(
    "div.progress",
    {
      role: "progressbar",
      "aria-label": label,
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-valuenow": known ? Math.round(share * 100) : null,
      class: known ? "" : "unknown",
    },
    h("div.progress-fill", { style: { "--share": known ? Math.min(1, Math.max(0, share)) : 1 } }),
  );
}

/** A line of at most some hundred values, without axes; missing values leave gaps. @param {(number | null)[]} values */
export function sparkline(values, label, { width = 160, height = 32 } = {}) {
  const known = (values ?? []).filter(isNumber);
  if (known.length < 2) return h("div.sparkline.none", { "aria-hidden": "true" });
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const x = (index) => 2 + (index / (values.length - 1)) * (width - 4);
  const y = (value) => height - 3 - ((value - low) / span) * (height - 6);
  let path = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (!isNumber(value)) pen = "M";
    else {
      path += `${pen}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    }
  });
  const last = values.findLastIndex(isNumber);
  return svg(
    "svg.sparkline",
    { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("path", { d: path, "vector-effect": "non-scaling-stroke" }),
    svg("path.sparkline-end", { d: `M${x(last)} ${y(values[last])}h0`, "vector-effect": "non-scaling-stroke" }),
  );
}

/**
 * A table. Columns: {label, value(row) -> Child, align?: "right", class?, title?}. `rowProps(row)` gives the properties of
 * a row (a class, tabindex, a click handler). `stacked`: on narrow screens a row's first cell is above the others.
 */
export function table(columns, rows, { caption = null, rowProps = null, stacked = false } = {}) {
  return h(
    "div.table-scroll",
    { tabindex: 0, role: "region", "aria-label": caption ?? "Table" },
    h(
      "table.table",
      { class: stacked ? "stacked" : "" },
      caption && h("caption.visually-hidden", null, caption),
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          columns.map((column) =>
            h(
              "th",
              { scope: "col", class: column.align === "right" ? "right" : "", title: column.title },
              column.label,
            ),
          ),
        ),
      ),
      h(
        "tbody",
        null,
        rows.map((row) =>
          h(
            "tr",
            rowProps?.(row) ?? null,
            columns.map((column) =>
              h("td", { class: `${column.align === "right" ? "right" : ""} ${column.class ?? ""}` }, column.value(row)),
            ),
          ),
        ),
      ),
    ),
  );
}

/** Buttons of which one is chosen: segmented("x axis", [["step", "Step"], ["time", "Time"]], "step", (value) => ...). */
export function segmented(label, choices, chosen, onChoose) {
  const group = h("div.segmented", { role: "radiogroup", "aria-label": label });
  const buttons = choices.map(([value, text]) =>
    h(
      "button",
      {
        type: "button",
        role: "radio",
        "aria-checked": String(value === chosen),
        dataset: { value },
        tabindex: value === chosen ? 0 : -1,
      },
      text,
    ),
  );
  const choose = (value) => {
    buttons.forEach((button) => {
      button.setAttribute("aria-checked", String(button.dataset.value === value));
      button.tabIndex = button.dataset.value === value ? 0 : -1;
    });
    onChoose(value);
  };
  buttons.forEach((button, index) => {
    button.addEventListener("click", () => choose(button.dataset.value));
    button.addEventListener("keydown", (event) => {
      const delta = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!delta) return;
      event.preventDefault();
      event.stopPropagation();
      const next = buttons[(index + delta + buttons.length) % buttons.length];
      next.focus();
      choose(next.dataset.value);
    });
  });
  group.append(...buttons);
  return group;
}

/** Where the reader is: [["Step 12", href], ["Group 3", null]]. */
export function breadcrumbs(run, crumbs) {
  return h(
    "nav.breadcrumbs",
    { "aria-label": "Breadcrumbs" },
    [[run, link.now(run)], ...crumbs].map(([text, href], index) => [
      index > 0 && h("span", { "aria-hidden": "true" }, "/"),
      href ? h("a", { href }, text) : h("span", { "aria-current": "page" }, text),
    ]),
  );
}
