// One filter over the completions of a step or of the whole run: a text, a condition, or both; and what it finds.

import { runPath, stream } from "cohort/api.js";
import { count, isNumber, number, plural } from "cohort/format.js";
import { useData } from "cohort/hooks.js";
import { html, useEffect, useRef, useState } from "cohort/preact.js";
import { excerpt } from "cohort/text.js";
import { Chip, Failure, Fold, Problems, Progress, Segmented } from "cohort/ui.js";
import { visibleLine } from "cohort/visible.js";

export const KINDS = { step: "Trained", replaced: "Replaced", dropped: "Dropped", eval: "Held-out" };
const LIMIT = 200;
const MORE = 5000;
const SCOPES = [["run", "Whole run"], ["step", "This step"]];
const EXAMPLES = [
  ["reward < 0.2 and length > 500", "long completions with a low reward"],
  ['end == "length" or "wait" in text', "cut off at the token limit, or with a text (as written)"],
  ['matches(text, r"(?i)\\d+ = \\d+")', "a regular expression (RE2); (?i) ignores case"],
  ['kind == "eval" and not reward > 0', "held-out completions without a reward above 0, also those not scored"],
  ["error is not None or tool_errors > 0", "what the environment broke, and tool calls that failed"],
];

/**
 * What a search has found so far: {matches, progress, isDone, wrong: {error, position}, failure}; null if `query` has
 * neither text nor condition. `more()` shows more matches, `again()` repeats it.
 */
export function useSearch(id, { text = "", where = "", scope }, step, kind) {
  const [found, setFound] = useState(null);
  const [limit, setLimit] = useState(LIMIT);
  const [times, setTimes] = useState(0);
  const place = scope === "step" ? { step, kind } : {};
  const address = text || where ? runPath(id, "search", { text, where, ...place, limit }) : null;
  useEffect(() => setLimit(LIMIT), [text, where]);
  useEffect(() => {
    setFound(null);
    if (address === null) return undefined;
    const now = { matches: [], progress: null, isDone: false };
    let frame = 0;
    const flush = () => {
      frame = 0;
      setFound({ ...now });
    };
    const show = (changes) => {
      Object.assign(now, changes);
      frame ||= requestAnimationFrame(flush);
      if (now.isDone) source.close();
    };
    const source = stream(address, {
      match: (match) => show({ matches: (now.matches.push(match), now.matches) }),
      progress: (progress) => show({ progress }),
      done: (progress) => show({ progress, isDone: true }),
      error: (wrong) => show({ wrong, isDone: true }),
      failed: (failure) => show({ failure, isDone: true }),
    });
    return () => {
      source.close();
      cancelAnimationFrame(frame);
    };
  }, [address, times]);
  if (address === null) return null;
  const search = found ?? { matches: [], progress: null, isDone: false };
  return { ...search, more: () => setLimit(MORE), again: () => setTimes(times + 1) };
}

/** The fields. `query`: of the address; `wrong`: what is wrong with its condition; `onFilter({text, where, scope})`. */
export function Filter({ id, query, wrong, onFilter }) {
  const [text, setText] = useState(query.text ?? "");
  const [where, setWhere] = useState(query.where ?? "");
  const field = useRef(null);
  useEffect(() => {
    setText(query.text ?? "");
    setWhere(query.where ?? "");
  }, [query.text, query.where]);
  const submit = (event) => {
    event.preventDefault();
    onFilter({ text: text.trim() ? text : null, where: where.trim() || null });
  };
  const insert = (name) => {
    field.current.setRangeText(name, field.current.selectionStart, field.current.selectionEnd, "end");
    setWhere(field.current.value);
    field.current.focus();
  };
  const fields = { type: "search", maxlength: 1000, autocomplete: "off", autocapitalize: "off", spellcheck: false };
  const clear = () => onFilter({ text: null, where: null, scope: null });
  return html`<form class="filter row" role="search" onSubmit=${submit}>
    <input class="input" ...${fields} aria-label="Text" placeholder="Text of a completion, in any case"
      value=${text} onInput=${(event) => setText(event.target.value)} />
    <input class="input mono" ...${fields} aria-label="Condition" ref=${field}
      aria-invalid=${String(Boolean(wrong))} aria-describedby="filter-error"
      placeholder='Condition, such as reward < 0.2 and "train" in prompt'
      value=${where} onInput=${(event) => setWhere(event.target.value)} />
    <button class="button">Filter</button>
    ${(query.text || query.where) && html`<button type="button" class="button" onClick=${clear}>Clear</button>`}
    <${Segmented} label="Search in" options=${SCOPES} value=${query.scope ?? "run"}
      onChange=${(scope) => onFilter({ scope: scope === "step" ? scope : null })} />
    <${Fold} name="columns" title="Columns and examples">
      <${Columns} id=${id} onColumn=${insert} onExample=${setWhere} />
    <//>
    <div id="filter-error" class="filter-error" role="alert" hidden=${!wrong}>
      ${isNumber(wrong?.position) && html`<pre aria-hidden="true">${pointer(query.where ?? "", wrong.position)}</pre>`}
      ${wrong && html`<p>${visibleLine(wrong.error.charAt(0).toUpperCase() + wrong.error.slice(1))}</p>`}
    </div>
  </form>`;
}

/** A condition, and below it a caret at a position. */
const pointer = (where, position) => `${visibleLine(where)}\n${" ".repeat(visibleLine(where.slice(0, position)).length)}^`;

function Columns({ id, onColumn, onExample }) {
  const { data, error } = useData(runPath(id, "search/columns"));
  if (error) return html`<${Failure} error=${error} />`;
  const button = (text, use, props) =>
    html`<button type="button" ...${props} onClick=${() => use(text)}>${visibleLine(text)}</button>`;
  const column = ({ name, description }) => button(name, onColumn, { class: "chip mono", title: description });
  const example = ([where, what]) => html`<li>${button(where, onExample, { class: "link-button mono" })} ${what}</li>`;
  return html`<div class="filter-columns row" role="group" aria-label="Columns">${data?.columns.map(column)}</div>
    <ul>${EXAMPLES.map(example)}</ul>`;
}

/** What a search has found. `hrefOf(match)`; `isCurrent(match)`: whether it is open beside the list. */
export function Matches({ search, hrefOf, isCurrent }) {
  const { matches, progress, isDone, failure, more, again } = search;
  if (failure) return html`<${Failure} error=${failure} retry=${again} />`;
  const counted = Object.values(progress?.by_step ?? {}).reduce((sum, found) => sum + found, 0);
  const total = Math.max(matches.length, counted);
  const shown = isDone && total > matches.length ? `, the first ${count(matches.length)} below` : "";
  const [done, files] = [progress?.files_done ?? 0, progress?.files_total ?? 0];
  return html`
    ${!isDone && html`<${Progress} share=${files ? done / files : null} label="Files searched" />`}
    <div class="row spread">
      <h2><span role="status">${plural(total, "match", "matches")}${shown}</span></h2>
      <span class="small muted">in ${isDone ? "" : `${count(done)} of `}${plural(files, "file")}</span>
    </div>
    <${Problems} list=${progress?.problems} />
    ${mergeEqual(matches).map(
      ([match, times]) => html`<a key=${`${match.step} ${match.kind} ${match.row}`} class="match" href=${hrefOf(match)}
        aria-current=${isCurrent(match) ? "true" : null}><${Match} match=${match} times=${times} /></a>`,
    )}
    ${
      shown &&
      matches.length < MORE &&
      html`<button type="button" class="button" onClick=${more}>Show up to ${count(MORE)}</button>`
    }
  `;
}

function Match({ match: { step, kind, group, reward, prompt, column, parts }, times }) {
  const part = (text, index) => (index % 2 && text ? html`<mark>${visibleLine(text)}</mark>` : visibleLine(text));
  return html`
    <span class="match-facts">
      <b>Step ${count(step)}</b>
      <span>group ${count(group)}</span>
      ${kind !== "step" && html`<${Chip}>${KINDS[kind] ?? kind}<//>`}
      <span class="muted">${isNumber(reward) ? `reward ${number(reward)}` : "not scored"}</span>
      ${times > 1 && html`<${Chip} title="Equal excerpts in this group">× ${times}<//>`}
      <span class="muted match-prompt" dir="auto">${excerpt(prompt ?? "", 120)}</span>
    </span>
    <span class="match-text mono" dir="auto">
      ${column !== "text" && html`<span class="muted">${visibleLine(column)}: </span>`}
      ${parts.join("") ? parts.map(part) : html`<span class="muted">(empty)</span>`}
    </span>
  `;
}

/** Matches of one group that show the same, once: [the first, how many they are] each. */
function mergeEqual(matches) {
  const found = new Map();
  for (const match of matches) {
    const key = JSON.stringify([match.step, match.kind, match.group, match.reward, match.column, match.parts]);
    found.set(key, [found.get(key)?.[0] ?? match, (found.get(key)?.[1] ?? 0) + 1]);
  }
  return [...found.values()];
}
