// A completion token by token, colored by what the policy thought of each token or what the update did to it.

import { runPath } from "cohort/api.js";
import { count, number, plural } from "cohort/format.js";
import { useData } from "cohort/hooks.js";
import { html, useLayoutEffect, useMemo, useRef, useState } from "cohort/preact.js";
import { asText, LEVELS, quantitiesOf, scaleOf } from "cohort/steps/quantities.js";
import { TextBlock } from "cohort/text.js";
import { Failure, Loading, Problems, Segmented } from "cohort/ui.js";
import { visibleLine, visiblePieces } from "cohort/visible.js";

const CHUNK = 400; // tokens; a chunk ends at the next line break, or at twice as many
const CHUNKS_PER_FRAME = 5;

/** The tokens of a completion. `color`: name of the quantity, by default the first; `onColor(name)`: choose another. */
export function Tokens({ id, step, kind, row, text, advantage, color, onColor }) {
  const [offset, setOffset] = useState(0);
  const { data, error } = useData(runPath(id, `steps/${step}/completions/${row}`, { kind, offset: offset || null }));
  if (error && !data) return html`<${Failure} error=${error} /><${TextBlock} text=${text} />`;
  if (!data) return html`<${Loading} />`;
  const { limit, num_tokens: total } = data;
  const range = `Tokens ${count(offset + 1)} to ${count(Math.min(total, offset + limit))} of ${count(total)}`;
  const to = (start, label) =>
    html`<button type="button" class="button small" onClick=${() => setOffset(Math.max(0, start))}>${label}</button>`;
  return html`
    <${Problems} list=${data.problems} />
    ${
      total > limit &&
      html`<p class="row muted">
        ${range} ${offset > 0 && to(offset - limit, "Previous")} ${offset + limit < total && to(offset + limit, "Next")}
      </p>`
    }
    ${!total && html`<p class="muted">No tokens were recorded.</p>`}
    ${total > 0 && html`<${Colored} ...${{ data, kind, advantage, color, onColor }} />`}
  `;
}

function Colored({ data, kind, advantage, color, onColor }) {
  const { sequences } = data;
  const [pointed, setPointed] = useState(null); // [sequence, index]
  const quantities = useMemo(() => quantitiesOf(sequences), [sequences]);
  const quantity = quantities.find(({ name }) => name === color) ?? quantities[0];
  const columns = useMemo(() => sequences.map((sequence) => quantity.values(sequence)), [sequences, quantity]);
  const scale = useMemo(() => scaleOf(quantity, columns), [quantity, columns]);
  const isKnown = columns.some((column) => column?.some((value) => value !== null));
  const options = quantities.map(({ name, label }) => [name, label]);
  const shown = ({ tokens, prompt, prompt_tokens: total, offset, loss_mask: mask }, index) => html`
    ${sequences.length > 1 && html`<h4>Sequence ${index + 1}</h4>`}
    ${total > 0 && offset === 0 && html`<${PromptTokens} tokens=${prompt} total=${total} />`}
    ${
      tokens.ids.length > 0 &&
      html`<${TokenText} tokens=${tokens} mask=${mask} values=${columns[index]} scale=${scale}
        onToken=${(token) => setPointed([index, token])} />`
    }
  `;
  return html`<div class=${scale?.isSequential ? "token-view sequential" : "token-view"}>
    <div class="row">
      <${Segmented} label="Color by" options=${options} value=${quantity.name} onChange=${onColor} />
      ${scale && html`<${Legend} quantity=${quantity} scale=${scale} />`}
    </div>
    <p class="small muted">${scale ? quantity.help : missing(quantity, { ...data, kind, advantage }, isKnown)}</p>
    <div>${sequences.map(shown)}<${Numbers} data=${data} quantities=${quantities} pointed=${pointed} /></div>
  </div>`;
}

/** The scale from its low end to its high end, and what a hatched token means. */
function Legend({ quantity, scale }) {
  const first = scale.isSequential ? 0 : -LEVELS;
  const levels = Array.from({ length: LEVELS - first + 1 }, (_, index) => first + index);
  const [low, high] = [scale.low, scale.high].map((value) => asText(quantity, value));
  const sample = (level) =>
    html`<i key=${level} class=${level < 0 ? "token is-down" : "token"} style=${{ "--level": Math.abs(level) }}></i>`;
  return html`
    <span class="legend-scale small" role="img" aria-label=${`Colors from ${low} to ${high}`}>
      ${low}<span>${levels.map(sample)}</span>${high}
    </span>
    <span class="small muted"><span class="token masked">abc</span> not trained</span>
  `;
}

/** The tokens of a prompt, folded; the server sends the last of a long one. */
function PromptTokens({ tokens, total }) {
  const [isOpen, setOpen] = useState(false);
  const left = total - tokens.ids.length;
  const size = ` ${plural(total, "token")}${left > 0 ? `, without the first ${count(left)}` : ""}`;
  return html`<details class="folded" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><b>Prompt</b>${size}</summary>
    ${isOpen && html`<${TokenText} tokens=${tokens} />`}
  </details>`;
}

/** Why a quantity colors nothing, and what would record it. */
function missing({ name, label }, { kind, advantage, recorded, trained, problems }, isKnown) {
  if (isKnown) return `Every value is 0: ${advantage === 0 ? "the advantage is 0" : "every token was certain"}.`;
  if (name === "probability") return "This completion has no logprobs.";
  if (kind !== "step") return `${label} is recorded only of completions that are trained on.`;
  if (recorded && advantage === 0) return "Not computed: this completion's advantage is 0, so it was not trained on.";
  if (recorded && trained === false) return "Not computed: the loss leaves this completion out.";
  const isExplained = recorded || problems.some((text) => text.includes("run.record_tokens"));
  return `${label} was not recorded.${isExplained ? "" : " Set run.record_tokens: true to record it."}`;
}

/** All numbers of the token that the reader points at. */
function Numbers({ data, quantities, pointed }) {
  const hint = "Point at a token, or move with the arrow keys, to see its numbers.";
  if (!pointed) return html`<p class="token-numbers muted">${hint}</p>`;
  const [which, index] = pointed;
  const sequence = data.sequences[which];
  const { ids, texts, special } = sequence.tokens;
  const value = (name) => number(sequence[name]?.[index] ?? null);
  const rows = [
    ...quantities.map((quantity) => [quantity.label, asText(quantity, quantity.values(sequence)?.[index] ?? null)]),
    ["Logprob, sampler", value("sampling_logprobs")],
    ["trainer", value("logprobs")],
    ["reference", value("reference_logprobs")],
    ["Advantage", value("advantages")],
    ["Loss weight", value("loss_weights")],
    ["Position", count(sequence.offset + index + 1)],
    ["Id", String(ids[index])],
    ["Trained", sequence.loss_mask[index] ? "–" : "no"],
  ].filter(([, text]) => text !== "–");
  const name = texts ? visibleLine(texts[index] ?? "").replaceAll(" ", "·") : `id ${ids[index]}`;
  return html`<dl class="token-numbers" aria-live="polite">
    <div><dt>${special?.[index] ? "Special token" : "Token"}</dt><dd class="token-name">${name}</dd></div>
    ${rows.map(([label, text]) => html`<div key=${label}><dt>${label}</dt><dd>${text}</dd></div>`)}
  </dl>`;
}

/** One span per token, made by hand: there may be tens of thousands, and a new color changes only their class. */
function TokenText({ tokens, mask = null, values = null, scale = null, onToken = null }) {
  const root = useRef(null);
  const spans = useRef([]);
  const tint = useRef(null);
  tint.current = (span, index) => {
    const value = values?.[index] ?? null;
    const level = value === null || !scale ? 0 : scale.level(value);
    span.classList.toggle("is-tinted", level !== 0);
    span.classList.toggle("is-down", level < 0);
    span.style.setProperty("--level", Math.abs(level));
  };
  useLayoutEffect(() => {
    spans.current = [];
    root.current.replaceChildren();
    const chunks = chunksOf(tokens);
    let frame = 0;
    const fill = () => {
      for (const [from, to] of chunks.splice(0, CHUNKS_PER_FRAME)) {
        const chunk = document.createElement("div");
        chunk.className = "token-chunk";
        for (let index = from; index < to; index++) {
          const [span, isWord, numLines] = tokenSpan(tokens, index, mask);
          span.tabIndex = onToken && !index ? 0 : -1;
          tint.current(span, index);
          spans.current.push(span);
          chunk.append(...(isWord ? [document.createElement("wbr")] : []), span);
          for (let line = 0; line < numLines; line++) chunk.append(document.createElement("br"));
        }
        root.current.append(chunk);
      }
      if (chunks.length) frame = requestAnimationFrame(fill);
      else root.current.dataset.complete = "";
    };
    fill();
    return () => cancelAnimationFrame(frame);
  }, [tokens, mask]);
  useLayoutEffect(() => spans.current.forEach(tint.current), [values, scale]);
  const point = ({ target }) => {
    const span = target.closest?.(".token");
    if (span) onToken?.(Number(span.dataset.index));
  };
  const press = (event) => {
    const now = spans.current.indexOf(event.target.closest(".token"));
    const next = now < 0 ? null : moved(spans.current, now, event.key);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    spans.current[now].tabIndex = -1;
    const span = spans.current[Math.max(0, Math.min(spans.current.length - 1, next))];
    span.tabIndex = 0;
    span.focus({ preventScroll: true });
    span.scrollIntoView({ block: "nearest" });
  };
  return html`<div class="tokens" dir="ltr" role="group" aria-label="Tokens" ref=${root}
    onPointerOver=${point} onFocusIn=${point} onKeyDown=${press}></div>`;
}

/** The element of a token, whether it begins a word, and how many lines end with it. */
function tokenSpan({ ids, texts, special }, index, mask) {
  const text = texts?.[index] ?? `${ids[index]} `;
  const span = document.createElement("span");
  span.dataset.index = index;
  span.className = `token${special?.[index] ? " special" : ""}${mask && !mask[index] ? " masked" : ""}`;
  for (const [piece, isSign] of texts ? visiblePieces(text) : [[text, false]])
    span.append(isSign ? Object.assign(document.createElement("i"), { textContent: piece }) : piece);
  return [span, text.startsWith(" "), texts ? Math.min(text.split("\n").length - 1, 3) : 0];
}

/** Beginnings and ends of chunks. */
function chunksOf({ ids, texts }) {
  const chunks = [];
  for (let from = 0, index = 0; index < ids.length; index++) {
    const length = index - from + 1;
    const isLine = length >= CHUNK && texts?.[index]?.includes("\n");
    if (!isLine && length < 2 * CHUNK && index < ids.length - 1) continue;
    chunks.push([from, index + 1]);
    from = index + 1;
  }
  return chunks;
}

/** Where a key moves from a token: arrows by token and by line, Home and End to the ends; null for other keys. */
function moved(spans, now, key) {
  const moves = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: spans.length - 1 };
  if (key in moves) return moves[key];
  const direction = { ArrowDown: 1, ArrowUp: -1 }[key];
  if (!direction) return null;
  const from = spans[now].getBoundingClientRect();
  let [best, top, least] = [now, null, Infinity];
  for (let index = now + direction; spans[index]; index += direction) {
    const box = spans[index].getBoundingClientRect();
    if (direction * (box.top - from.top) <= 4) continue; // the same line
    top ??= box.top;
    if (Math.abs(box.top - top) > 4) break;
    const distance = Math.abs(box.left - from.left);
    if (distance < least) [best, least] = [index, distance];
  }
  return best;
}
