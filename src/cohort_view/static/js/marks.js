// Marks of what happened to a run: thin lines for restarts, faults and warnings, ticks for checkpoints and evaluations.

const NEAR_PX = 5;
const DASHES = { restart: [6, 4], fault: [], warning: [2, 3] };
const FLAGS = { fault: "--bad", warning: "--warning" };
const TICK_PX = 5;
const FLAG_PX = 7;
const LINES_AT_MOST = 24;
const SHOWN_TEXTS = 3;

/** Draw marks into a chart, as its hook does. @param {{x: number, kind: string, text: string}[]} marks */
export function drawMarks(plot, marks, theme) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  for (const [kind, places] of placesByKind(plot, marks)) {
    // Of a kind that fills the chart, only the flags remain.
    const isLine = kind in DASHES && places.size <= LINES_AT_MOST;
    ctx.strokeStyle = theme.color("--border-strong");
    ctx.setLineDash((isLine ? DASHES[kind] : []).map((length) => length * devicePixelRatio));
    if (isLine || !(kind in DASHES))
      drawLines(
        ctx,
        places,
        isLine ? bbox.top : bbox.top + bbox.height - TICK_PX * devicePixelRatio,
        bbox.top + bbox.height,
      );
    if (FLAGS[kind]) drawFlags(ctx, places, bbox.top, theme.color(FLAGS[kind]));
  }
  ctx.restore();
}

/** The text of the marks under the cursor, or null. */
export function markAt(plot, marks, left) {
  const [low, high] = [plot.posToVal(left - NEAR_PX, "x"), plot.posToVal(left + NEAR_PX, "x")];
  const texts = [...new Set(marks.filter((mark) => mark.x >= low && mark.x <= high).map((mark) => mark.text))];
  if (!texts.length) return null;
  const rest = texts.length - SHOWN_TEXTS;
  return texts.slice(0, SHOWN_TEXTS).join(" · ") + (rest > 0 ? ` · and ${rest} more` : "");
}

/** The pixels at which marks of each kind are, each once however many there are. */
function placesByKind(plot, marks) {
  const { left, width } = plot.bbox;
  const { min, max } = plot.scales.x;
  const found = new Map();
  for (const mark of marks) {
    if (!(mark.x >= min && mark.x <= max)) continue;
    const x = Math.round(left + ((mark.x - min) / (max - min)) * width) + 0.5;
    if (!found.has(mark.kind)) found.set(mark.kind, new Set());
    found.get(mark.kind).add(x);
  }
  return found;
}

function drawLines(ctx, places, from, to) {
  ctx.beginPath();
  for (const x of places) {
    ctx.moveTo(x, from);
    ctx.lineTo(x, to);
  }
  ctx.stroke();
}

/** Triangles at the top, which point at their place. */
function drawFlags(ctx, places, top, color) {
  const size = FLAG_PX * devicePixelRatio;
  ctx.fillStyle = color;
  ctx.beginPath();
  for (const x of places) {
    ctx.moveTo(x - size * 0.6, top);
    ctx.lineTo(x + size * 0.6, top);
    ctx.lineTo(x, top + size);
    ctx.closePath();
  }
  ctx.fill();
}
