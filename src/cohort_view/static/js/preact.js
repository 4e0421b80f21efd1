// Preact, its hooks, and `html`, which are the page's way to make elements: text in a template is text on the page.

import { Component, h, render } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import htm from "htm";

const html = htm.bind(h);

export { Component, html, render, useEffect, useLayoutEffect, useMemo, useRef, useState };
