// Numbers, times and sizes as text. A missing value (null, NaN) is always an en dash.

export const MISSING = "–";

/** Whether a value is a finite number. */
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/**
 * A number with about `digits` significant digits: 0.4123 -> "0.412", 12345 -> "12,345", 1234567 -> "1.23M".
 * @param {number | null | undefined} value
 */
export function number(value, digits = 3) {
  if (!isNumber(value)) return MISSING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return minus(value.toExponential(digits - 1).replace(/\.?0*e-/, "e\u2212"));
  if (size >= 1e12) return minus(value.toExponential(digits - 1).replace("e+", "e"));
  if (size >= 1e9) return minus(trim(value / 1e9, digits) + "B");
  if (size >= 1e6) return minus(trim(value / 1e6, digits) + "M");
  if (size >= 1000) return minus(Math.round(value).toLocaleString("en-US"));
  return minus(Number.isInteger(value) ? String(value) : trim(value, digits));
}

/** An integer with thousands separators. */
export function count(value) {
  return isNumber(value) ? minus(Math.round(value).toLocaleString("en-US")) : MISSING;
}

/** A count with its noun: plural(1, "run") -> "1 run", plural(3, "run") -> "3 runs". */
export function plural(value, noun, nouns = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : nouns}`;
}

/** A share as a percentage: 0.4123 -> "41.2 %" with a narrow space. */
export function percent(share, digits = 1) {
  if (!isNumber(share)) return MISSING;
  const value = share * 100;
  return minus(`${value.toFixed(value === 0 || Math.abs(value) >= 99.95 ? 0 : digits)}%`);
}

/** A change with its sign: +0.12, −0.03, ±0. */
export function change(value, format = number) {
  if (!isNumber(value)) return MISSING;
  if (value === 0) return "±0";
  return (value > 0 ? "+" : "\u2212") + format(Math.abs(value));
}

/** Bytes in decimal units, as the plan prints them: 706379776 -> "706 MB". */
export function bytes(value) {
  if (!isNumber(value)) return MISSING;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let power = 0;
  let size = Math.abs(value);
  while (size >= 999.5 && power < units.length - 1) {
    size /= 1000;
    power += 1;
  }
  return `${value < 0 ? "\u2212" : ""}${power === 0 ? Math.round(size) : trim(size, 3)}\u00a0${units[power]}`;
}

/** A duration: 0.0123 -> "12 ms", 75 -> "1 min 15 s", 8000 -> "2 h 13 min". */
export function seconds(value) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  const sign = value < 0 ? "\u2212" : "";
  if (size === 0) return "0\u00a0s";
  if (size < 1e-3) return `${sign}${trim(size * 1e6, 2)}\u00a0µs`;
  if (size < 1) return `${sign}${trim(size * 1e3, 3)}\u00a0ms`;
  if (size < 60) return `${sign}${trim(size, 3)}\u00a0s`;
  const whole = Math.round(size);
  const parts = [
    [Math.floor(whole / 86400), "d"],
    [Math.floor(whole / 3600) % 24, "h"],
    [Math.floor(whole / 60) % 60, "min"],
    [whole % 60, "s"],
  ];
  const first = parts.findIndex(([amount]) => amount > 0);
  return (
    sign +
    parts
      .slice(first, first + 2)
      .filter(([amount]) => amount > 0)
      .map(([amount, unit]) => `${amount}\u00a0${unit}`)
      .join(" ")
  );
}

/** How long ago a Unix time in seconds was, in its largest unit: "12 s ago"; older than two days, the date. */
export function ago(timestamp) {
  if (!isNumber(timestamp)) return MISSING;
  const age = Math.max(0, Date.now() / 1000 - timestamp);
  if (age < 5) return "just now";
  if (age >= 2 * 86400) return dateTime(timestamp);
  const unit = age < 60 ? 1 : age < 3600 ? 60 : age < 86400 ? 3600 : 86400;
  return `${seconds(Math.floor(age / unit) * unit)} ago`;
}

/** A Unix time in seconds as local date and time: "2026-11-23 14:05". */
export function dateTime(timestamp) {
  if (!isNumber(timestamp)) return MISSING;
  const date = new Date(timestamp * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/** A metric's value in its unit, as /api/runs/ID/metrics gives it. */
export function inUnit(value, unit) {
  if (unit === "s" || unit === "seconds") return seconds(value);
  if (unit === "bytes" || unit === "B") return bytes(value);
  if (unit === "share") return isNumber(value) ? percent(value) : MISSING;
  return number(value);
}

function trim(value, digits) {
  const text = value.toPrecision(digits);
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : String(Number(text));
}

function minus(text) {
  return text.replace(/^-/, "\u2212");
}
