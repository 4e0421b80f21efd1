// Blocks of text that a model wrote: long ones cut with "show more", a shared beginning dimmed, differences marked.

import { h } from "./dom.js";
import { count } from "./format.js";

const FIRST = 1500; // characters shown at once; each click shows ten times as many

/**
 * A block of text, isolated from the direction of what surrounds it. `same`: length of a beginning to dim; `cut`: the
 * server left out the rest.
 */
export function textBlock(text, { same = 0, cut = false, limit = FIRST } = {}) {
  const body = h("span");
  const more = h("div.text-more", null);
  const block = h("div.text-block", { dir: "auto" }, body, more);
  let shown = limit;
  if (!text) {
    body.replaceChildren(h("span.muted", null, "(empty)"));
    return block;
  }
  const showMore = () => {
    shown *= 10;
    show();
  };
  const show = () => {
    const end = wholeCharacters(text, Math.min(text.length, shown));
    const dimmed = Math.min(same, end);
    body.replaceChildren();
    if (dimmed > 0) body.append(h("span.same-prefix", null, text.slice(0, dimmed)));
    body.append(text.slice(dimmed, end));
    const left = text.length - end;
    more.replaceChildren();
    if (left > 0) {
      const label = `Show more (${count(left)} characters left)`;
      more.append(h("button.link-button", { type: "button", on: { click: showMore } }, label));
    } else if (cut) {
      more.append(h("span.muted", null, `Cut at ${count(text.length)} characters; the file has the rest.`));
    }
  };
  show();
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
