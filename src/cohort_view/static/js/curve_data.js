// Points of curves: requests of one moment go out together, answers are kept until the run has new ones.

/** @typedef {{curves: any[], marks: any[]}} Points */

const TOGETHER_MS = 30;
const POINTS = 800;

export class CurveData {
  /**
   * @param {object} api
   * @param {AbortSignal} signal
   * @param {{runs: string[], x: "step" | "time"}} what
   */
  constructor(api, signal, { runs, x }) {
    Object.assign(this, { api, signal, runs, x });
    /** @type {Map<string, Points>} */
    this.kept = new Map();
    this.waiting = new Map();
    this.generation = 0;
  }

  /** Forget all points, since there are new ones. */
  forget() {
    this.kept.clear();
    this.generation += 1;
  }

  /**
   * The curves of one metric, one per run that has it, and the marks of these runs.
   * @param {string} name
   * @param {[number, number] | null} range of x; null for all
   * @returns {Promise<Points>}
   */
  get(name, range = null) {
    const place = range ? range.join() : "";
    const kept = this.kept.get(`${place} ${name}`);
    if (kept) return Promise.resolve(kept);
    return new Promise((resolve, reject) => {
      if (!this.waiting.size) setTimeout(() => this.#send(), TOGETHER_MS);
      const batch = this.waiting.get(place) ?? { range, asked: [] };
      batch.asked.push({ name, resolve, reject });
      this.waiting.set(place, batch);
    });
  }

  #send() {
    const batches = [...this.waiting.entries()];
    this.waiting.clear();
    batches.forEach(([place, { range, asked }]) => this.#fetch(place, range, asked));
  }

  async #fetch(place, range, asked) {
    const { runs, x, generation } = this;
    const names = [...new Set(asked.map(({ name }) => name))];
    const query = { runs, names, x, points: POINTS, from: range?.[0] ?? null, to: range?.[1] ?? null };
    try {
      const answer = await this.api.get(this.api.path("/api/curves", query), { signal: this.signal });
      const marks = allMarks(answer.marks, runs);
      for (const name of names) {
        const curves = answer.curves.filter((curve) => curve.name === name && curve.x.length);
        curves.sort((a, b) => runs.indexOf(a.run) - runs.indexOf(b.run));
        const points = { curves, marks };
        if (generation === this.generation) this.kept.set(`${place} ${name}`, points);
        asked.filter((one) => one.name === name).forEach((one) => one.resolve(points));
      }
    } catch (error) {
      asked.forEach((one) => one.reject(error));
    }
  }
}

/** Marks of all runs; with several, each text says whose it is. */
function allMarks(byRun, runs) {
  return runs.flatMap((run) =>
    (byRun?.[run] ?? []).map((mark) => ({ ...mark, text: runs.length > 1 ? `${run}: ${mark.text}` : mark.text })),
  );
}
