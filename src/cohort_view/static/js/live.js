// Live updates: server-sent events about changed files, with a retry of its own when the connection is lost.

import { isExport } from "cohort/api.js";

/** @typedef {{run: string, step: number | null, state: string, gone: string | null, parts: string[]}} Change */

const RETRY_MS = [1000, 2000, 4000, 8000, 15000];
const TOGETHER_MS = 250;

export class Live {
  /**
   * @param {(change: Change) => void} onChange called at most once per run and 250 ms; parts of several events together
   * @param {(state: "live" | "lost" | "again" | "refused") => void} onState
   */
  constructor(onChange, onState) {
    this.onChange = onChange;
    this.onState = onState;
    this.source = null;
    this.failures = 0;
    this.timer = 0;
    /** @type {Map<string, Change>} */
    this.waiting = new Map();
    window.addEventListener("pagehide", () => this.source?.close());
    // A laptop that wakes up, or a tab that comes back, does not wait for the next retry.
    window.addEventListener("online", () => this.failures && this.#open());
    document.addEventListener("visibilitychange", () => !document.hidden && this.failures && this.#open());
  }

  /** Follow all runs, also those that start later. */
  start() {
    if (!isExport) this.#open();
  }

  #open() {
    clearTimeout(this.timer);
    this.source?.close();
    const source = new EventSource("/events");
    this.source = source;
    source.addEventListener("open", () => {
      const wasLost = this.failures > 0;
      this.failures = 0;
      this.onState(wasLost ? "again" : "live");
    });
    source.addEventListener("changed", (event) => this.#take(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      source.close();
      this.failures += 1;
      if (this.failures > 1) this.#tell(); // one quick reconnect stays unnoticed
      const wait = RETRY_MS[Math.min(this.failures - 1, RETRY_MS.length - 1)];
      this.timer = setTimeout(() => this.#open(), wait);
    });
  }

  /** Say that the connection is lost, or that the server has started again and does not know this tab. */
  async #tell() {
    const answer = await fetch("/api/runs").catch(() => null);
    if (this.failures) this.onState(answer?.status === 403 ? "refused" : "lost");
  }

  #take(change) {
    const earlier = this.waiting.get(change.run);
    const parts = [...new Set([...(earlier?.parts ?? []), ...(change.parts ?? [])])];
    if (!this.waiting.size) setTimeout(() => this.#give(), TOGETHER_MS);
    this.waiting.set(change.run, { ...change, parts });
  }

  #give() {
    const changes = [...this.waiting.values()];
    this.waiting.clear();
    changes.forEach((change) => this.onChange(change));
  }
}
