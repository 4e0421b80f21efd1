// Parts that several views share: states without content, banners, controls, tables, bars.

import { useQuery } from "cohort/hooks.js";
import { isNumber } from "cohort/format.js";
import { html, useEffect, useRef, useState } from "cohort/preact.js";
import { splitList } from "cohort/router.js";
import { visibleLine } from "cohort/visible.js";

/** A place with nothing to show: why, and what to do. */
export function Empty({ title, advice = null }) {
  return html`<div class="empty"><p>${visibleLine(title)}</p>${advice && html`<p class="muted"><${Linkify} text=${advice} /></p>`}</div>`;
}

/** A failure within a view: the sentence, and a button if `retry` is given. */
export function Failure({ error, retry = null }) {
  return html`<div class="failure" role="alert">
    <p>${visibleLine(error.message || String(error))}</p>
    ${retry && html`<p><button type="button" class="button" onClick=${retry}>Try again</button></p>`}
  </div>`;
}

/** Says that something is on its way, after a moment. */
export function Loading() {
  const [isLong, setLong] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setLong(true), 200);
    return () => clearTimeout(timer);
  }, []);
  return html`<p class="muted loading" role="status">${isLong ? "Loading…" : ""}</p>`;
}

/** What is wrong with the run's files. @param {{list: string[]}} props */
export function Problems({ list }) {
  if (!list?.length) return null;
  if (list.length === 1) return html`<p class="problems">${visibleLine(list[0])}</p>`;
  return html`<details class="problems">
    <summary>${list.length} problems in the run's files</summary>
    <ul>${list.map((text) => html`<li key=${text}>${visibleLine(text)}</li>`)}</ul>
  </details>`;
}

const LEVELS = { good: ["✓", "Good"], info: ["i", "Note"], warning: ["!", "Warning"], bad: ["✕", "Problem"] };

/** The sign of a level; never color alone. */
export function LevelIcon({ level }) {
  const known = Object.hasOwn(LEVELS, level) ? level : "info";
  const [sign, name] = LEVELS[known];
  return html`<span class=${`level-icon level-${known}`} role="img" aria-label=${name}>${sign}</span>`;
}

/** A sentence with its level, advice and what else there is to say. */
export function Banner({ level, text, advice = null, large = false, children }) {
  return html`<div class=${`banner level-${level} ${large ? "large" : ""}`}>
    <${LevelIcon} level=${level} />
    <div class="banner-body">
      <span class="banner-text">${visibleLine(text)}</span>
      ${advice && html`<p class="banner-advice"><${Linkify} text=${advice} /></p>`}
      ${children}
    </div>
  </div>`;
}

/** A word in a frame. @param {{kind?: "good" | "warning" | "bad"}} props */
export function Chip({ kind = "", title, children }) {
  return html`<span class=${`chip ${kind && `chip-${kind}`}`} title=${title}>${children}</span>`;
}

const STATES = { running: "Running", finished: "Finished", stopped: "Stopped", starting: "Starting" };

/** The state of a run as a chip. */
export function stateChip(state) {
  return html`<span class=${`chip state-${state}`}><span class="dot" aria-hidden="true"></span>${STATES[state] ?? state}</span>`;
}

/** Text with its http links made into links, and everything invisible as signs. */
export function Linkify({ text }) {
  return visibleLine(String(text))
    .split(/(https?:\/\/[^\s)]+[^\s).,;])/)
    .map((part, index) =>
      index % 2 ? html`<a href=${part} target="_blank" rel="noopener noreferrer">${part}</a>` : part,
    );
}

/** Buttons of which one is chosen. @param {{label: string, options: [string, any][], value: string}} props */
export function Segmented({ label, options, value, onChange }) {
  const root = useRef(null);
  const move = (event, index) => {
    const delta = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!delta) return;
    event.preventDefault();
    event.stopPropagation();
    const next = (index + delta + options.length) % options.length;
    root.current.children[next].focus();
    onChange(options[next][0]);
  };
  return html`<div class="segmented" role="radiogroup" aria-label=${label} ref=${root}>
    ${options.map(
      ([key, text], index) =>
        html`<button
          key=${key}
          type="button"
          role="radio"
          aria-checked=${String(key === value)}
          tabindex=${key === value ? 0 : -1}
          onClick=${() => onChange(key)}
          onKeyDown=${(event) => move(event, index)}
        >${text}</button>`,
    )}
  </div>`;
}

/** A labelled choice. @param {{label: string, options: [string, string][], value: string}} props */
export function Select({ label, options, value, onChange }) {
  return html`<label class="field">${label}
    <select class="select" value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${options.map(([key, text]) => html`<option key=${key} value=${key} selected=${key === value}>${text}</option>`)}
    </select>
  </label>`;
}

/** Something to unfold. The address has the names of all that are open; what is folded is not rendered. */
export function Fold({ name, title, summary = null, children }) {
  const [query, setQuery] = useQuery();
  const opened = splitList(query.open);
  const isOpen = opened.includes(name);
  const toggle = (event) => {
    if (event.currentTarget.open === isOpen) return;
    setQuery({ open: isOpen ? opened.filter((other) => other !== name) : [...opened, name] });
  };
  return html`<details class="fold" open=${isOpen} onToggle=${toggle}>
    <summary><h2>${title}</h2>${summary && html`<span class="muted fold-summary">${summary}</span>`}</summary>
    ${isOpen && html`<div class="fold-body">${children}</div>`}
  </details>`;
}

/** A table. Columns: {label, value(row), align?: "right", class?, title?}. */
export function Table({ caption, columns, rows, keyOf = null }) {
  const cell = (row, { label, value, align, class: name }) =>
    html`<td key=${label} class=${`${align ?? ""} ${name ?? ""}`}>${value(row)}</td>`;
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label=${caption}>
    <table class="table">
      <caption class="visually-hidden">${caption}</caption>
      <thead>
        <tr>${columns.map((column) => html`<th key=${column.label} scope="col" class=${column.align} title=${column.title}>${column.label}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map((row, place) => html`<tr key=${keyOf ? keyOf(row) : place}>${columns.map((column) => cell(row, column))}</tr>`)}
      </tbody>
    </table>
  </div>`;
}

/** A progress bar, or a bar of unknown length if `share` is not a number. */
export function Progress({ share, label }) {
  const known = isNumber(share);
  const width = known ? Math.min(1, Math.max(0, share)) : 1;
  return html`<div
    class=${`progress ${known ? "" : "unknown"}`}
    role="progressbar"
    aria-label=${label}
    aria-valuemin="0"
    aria-valuemax="100"
    aria-valuenow=${known ? Math.round(share * 100) : null}
  ><div class="progress-fill" style=${{ width: `${100 * width}%` }}></div></div>`;
}

const SAID_MS = 1500;

/** A button that copies a text, which is computed at the click. */
export function CopyButton({ label, text }) {
  const [said, setSaid] = useState(null);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text());
      setSaid("Copied");
    } catch {
      setSaid("Not allowed here");
    }
    setTimeout(() => setSaid(null), SAID_MS);
  };
  return html`<button type="button" class="button small" onClick=${copy}><span aria-live="polite">${said ?? label}</span></button>`;
}
