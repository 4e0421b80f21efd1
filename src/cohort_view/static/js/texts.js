// Blocks of text that a model wrote: long ones with their middle left out, a shared beginning dimmed, differences marked.

import { h, replace } from "./dom.js";
import { count, plural } from "./format.js";

const FIRST = 1500; // characters shown at once; each click shows ten times as many
const HEAD = 2 / 3; // of them before those that are left out

/**
 * A block of text, isolated from the direction of what surrounds it: of a long one the beginning and, where the answer is,
 * the end. `same`: length of a beginning to dim; `cut`: the server left out the rest.
 */
export function textBlock(text, { same = 0, cut = false } = {}) {
  if (!text?.trim()) {
    const what = text ? `(only white space: ${plural(text.length, "character")})` : "(empty)";
    return h("div.text-block", null, h("span.muted", null, what));
  }
  const block = h("div.text-block", { dir: "auto" });
  const show = (shown) => {
    const isWhole = text.length <= shown;
    const end = isWhole ? text.length : wholeCharacters(text, Math.round(shown * HEAD));
    const start = isWhole ? end : wholeCharacters(text, text.length - (shown - end));
    const dimmed = Math.min(same, end);
    const label = `Show more (${count(start - end)} characters left out)`;
    replace(
      block,
      dimmed > 0 && h("span.same-prefix", null, text.slice(0, dimmed)),
      h("span", null, text.slice(dimmed, end)),
      !isWhole && [
        h("div.text-more", null, h("button.link-button", { type: "button", on: { click: () => show(10 * shown) } }, label)),
        h("span", null, text.slice(start)),
      ],
      cut && h("div.text-more.muted", null, `Cut at ${count(text.length)} characters; the file has the rest.`),
    );
  };
  show(FIRST);
  return block;
}

/** `text` with the beginning that it shares with `reference` dimmed. */
export function comparedBlock(text, reference, options = {}) {
  return textBlock(text, { ...options, same: reference === null ? 0 : sharedPrefix(text, reference) });
}

/** Differences as the server gives them: [kind, text before, text after] each. */
export function diffBlock(ops) {
  const marked = ([kind, before, after]) =>
    kind === "equal" ? after : [before && h("del", null, before), after && h("ins", null, after)];
  return h("div.text-block", { dir: "auto" }, ops.map(marked));
}

/** Length in UTF-16 units of the text that both begin with; never in the middle of a character. */
function sharedPrefix(a, b) {
  const limit = Math.min(a.length, b.length);
  let length = 0;
  while (length < limit && a.charCodeAt(length) === b.charCodeAt(length)) length++;
  const last = a.charCodeAt(length - 1);
  return length > 0 && last >= 0xd800 && last <= 0xdbff ? length - 1 : length;
}

/** The largest end up to `end` that does not split a surrogate pair. */
function wholeCharacters(text, end) {
  const code = text.charCodeAt(end - 1);
  return end < text.length && code >= 0xd800 && code <= 0xdbff ? end - 1 : end;
}
