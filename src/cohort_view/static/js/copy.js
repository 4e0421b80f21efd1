// Copy to the clipboard, also where the page has no permission for it.

import { h } from "./dom.js";

/** Copy `text`; true if it worked. Pages that are not served from localhost or HTTPS have no clipboard interface. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea.off-screen", { readonly: true, "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** A button that copies what `makeText` returns and says for two seconds whether it did. */
export function copyButton(label, makeText) {
  const button = h("button.button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    const copied = await copyText(makeText());
    button.textContent = copied ? "Copied" : "Not allowed here";
    setTimeout(() => (button.textContent = label), 2000);
  });
  return button;
}
