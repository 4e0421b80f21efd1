// The tokens of a sequence as text: one span per token, colored by a quantity, in chunks that render as they come near.

import { h } from "./dom.js";
import { levelClass } from "./quantities.js";
import { visiblePieces } from "./visible.js";

const CHUNK = 400; // tokens; a chunk ends at the next line break, or at twice as many
const CHUNKS_PER_FRAME = 5;

/**
 * Tokens, given as columns {ids, texts, special}; `mask`: which are trained, null for none. `recolor(values, scale)` changes
 * the colors without making nodes anew; `onFocus(index)` is told which token the reader points at or has moved to.
 */
export class TokenText {
  constructor(tokens, mask, onFocus) {
    Object.assign(this, { tokens, mask, onFocus });
    this.spans = [];
    this.values = null;
    this.scale = null;
    this.node = h("div.tokens", {
      dir: "ltr",
      on: {
        pointerover: (event) => this.#point(event.target),
        focusin: (event) => this.#point(event.target),
        keydown: (event) => this.#press(event),
      },
    });
    this.#render(this.#chunks());
  }

  /** Color every token by its value on the scale. */
  recolor(values, scale) {
    this.values = values;
    this.scale = scale;
    this.spans.forEach((span, index) => this.#color(span, index));
  }

  destroy() {
    this.isDestroyed = true;
  }

  /** Ends of chunks. */
  #chunks() {
    const { ids, texts } = this.tokens;
    const chunks = [];
    let from = 0;
    for (let index = 0; index < ids.length; index++) {
      const length = index - from + 1;
      const isLine = texts?.[index]?.includes("\n");
      if ((length >= CHUNK && isLine) || length >= 2 * CHUNK || index === ids.length - 1) {
        chunks.push([from, index + 1]);
        from = index + 1;
      }
    }
    return chunks;
  }

  /** The first chunks at once, the others a few per frame. */
  #render(chunks) {
    for (const [from, to] of chunks.splice(0, CHUNKS_PER_FRAME)) {
      const chunk = h("div.token-chunk", null);
      for (let index = from; index < to; index++) chunk.append(...this.#token(index));
      this.node.append(chunk);
    }
    if (chunks.length) requestAnimationFrame(() => this.isDestroyed || this.#render(chunks));
    else this.node.dataset.complete = "";
  }

  /** The span of a token, and a line break after one that has any. */
  #token(index) {
    const { ids, texts, special } = this.tokens;
    const text = texts?.[index] ?? `${ids[index]} `;
    const span = document.createElement("span");
    span.dataset.index = index;
    span.tabIndex = this.spans.length ? -1 : 0;
    this.spans.push(span);
    for (const [piece, isSign] of texts ? visiblePieces(text) : [[text, false]]) {
      if (!isSign) span.append(piece);
      else {
        const sign = document.createElement("i");
        sign.textContent = piece;
        span.append(sign);
      }
    }
    span.dataset.base = `token${special?.[index] ? " special" : ""}${this.mask?.[index] ? "" : " masked"}`;
    this.#color(span, index);
    const numLines = texts ? text.split("\n").length - 1 : 0;
    const breaks = Array.from({ length: Math.min(numLines, 3) }, () => document.createElement("br"));
    return texts && text.startsWith(" ") ? [document.createElement("wbr"), span, ...breaks] : [span, ...breaks];
  }

  #color(span, index) {
    const value = this.values?.[index];
    const level = value === null || value === undefined ? 0 : this.scale.level(value);
    span.className = `${span.dataset.base} ${levelClass(level)}`;
  }

  #point(target) {
    const span = target.closest?.(".token");
    if (span) this.onFocus(Number(span.dataset.index), span);
  }

  /** Arrows move by token and by line, Home and End to the ends. */
  #press(event) {
    const now = this.spans.indexOf(event.target.closest(".token"));
    if (now < 0) return;
    const moves = {
      ArrowRight: () => now + 1,
      ArrowLeft: () => now - 1,
      ArrowDown: () => this.#line(now, 1),
      ArrowUp: () => this.#line(now, -1),
      Home: () => 0,
      End: () => this.spans.length - 1,
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    const next = this.spans[Math.max(0, Math.min(this.spans.length - 1, move()))];
    this.spans[now].tabIndex = -1;
    next.tabIndex = 0;
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
  }

  /** The token of the line below (1) or above (-1) that is nearest in x. */
  #line(now, direction) {
    const from = this.spans[now].getBoundingClientRect();
    let best = now;
    let bestTop = null;
    let bestDistance = Infinity;
    for (let index = now + direction; index >= 0 && index < this.spans.length; index += direction) {
      const box = this.spans[index].getBoundingClientRect();
      const isOther = direction > 0 ? box.top > from.top + 4 : box.top < from.top - 4;
      if (!isOther) continue;
      bestTop ??= box.top;
      if (Math.abs(box.top - bestTop) > 4) break;
      const distance = Math.abs(box.left - from.left);
      if (distance < bestDistance) [best, bestDistance] = [index, distance];
    }
    return best;
  }
}
