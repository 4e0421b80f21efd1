// Characters that a reader could not see, or that would reorder what they read, as visible signs.

const NAMED = new Map([
  [0x00ad, "SHY"],
  [0x034f, "CGJ"],
  [0x061c, "ALM"],
  [0x180e, "MVS"],
  [0x200b, "ZWSP"],
  [0x200c, "ZWNJ"],
  [0x200d, "ZWJ"],
  [0x200e, "LRM"],
  [0x200f, "RLM"],
  [0x2028, "LS"],
  [0x2029, "PS"],
  [0x202a, "LRE"],
  [0x202b, "RLE"],
  [0x202c, "PDF"],
  [0x202d, "LRO"],
  [0x202e, "RLO"],
  [0x2060, "WJ"],
  [0x2066, "LRI"],
  [0x2067, "RLI"],
  [0x2068, "FSI"],
  [0x2069, "PDI"],
  [0xa0, "NBSP"],
  [0xfeff, "BOM"],
]);
const INVISIBLE =
  /[\u0000-\u001f\u007f-\u00a0\u00ad\u034f\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/u;
// Without what languages and emoji need, and without line ends
const CONTROLS = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]|\r(?!\n)/g;
const PIECES = new RegExp(`(${INVISIBLE.source}| )`, "u");

/** The sign of one invisible character: ⏎, ⇥, · or its abbreviation in brackets, such as ⟨RLO⟩. */
export function sign(character) {
  const code = character.codePointAt(0);
  if (character === " ") return "·";
  if (character === "\n") return "⏎";
  if (character === "\t") return "⇥";
  if (character === "\r") return "␍";
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  return `⟨${NAMED.get(code) ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`}⟩`;
}

/** Split text into [string, isSign] pairs in which everything invisible has become a sign. */
export function visiblePieces(text) {
  if (!text.includes(" ") && !INVISIBLE.test(text)) return text ? [[text, false]] : [];
  const pieces = [];
  for (const part of text.split(PIECES)) {
    if (!part) continue;
    const isSign = part === " " || (part.length <= 2 && INVISIBLE.test(part));
    const last = pieces.at(-1);
    const value = isSign ? sign(part) : part;
    if (last && last[1] === isSign) last[0] += value;
    else pieces.push([value, isSign]);
  }
  return pieces;
}

/** Text of several lines with control characters and those that reorder text as signs. */
export const visibleControls = (text) => text.replace(CONTROLS, sign);

/** One line of text with everything invisible as signs, except spaces; for labels and tooltips. */
export function visibleLine(text) {
  return text.replace(new RegExp(INVISIBLE.source, "gu"), sign);
}
