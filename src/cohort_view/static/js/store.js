// A value that components follow.

import { useLayoutEffect, useState } from "cohort/preact.js";

export class Store {
  #listeners = new Set();

  constructor(value) {
    this.value = value;
  }

  /** Replace the value and tell all that follow it. */
  set(value) {
    this.value = value;
    [...this.#listeners].forEach((listener) => listener());
  }

  /** Call `listener` at each change; returns a function that stops it. */
  on(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }
}

/** The value of a store; the component is rendered anew when it changes. */
export function useStore(store) {
  const [, setTimes] = useState(0);
  useLayoutEffect(() => store.on(() => setTimes((times) => times + 1)), [store]);
  return store.value;
}
