// A classic script that runs before the modules, so that an error in one of them (a file that did not load, a syntax
// error) is shown instead of an empty page. It also sets the theme early, which avoids a flash of the wrong one.
(() => {
  "use strict";
  try {
    const theme = localStorage.getItem("cohort-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage can be forbidden; the system's theme then applies.
  }

  function show(text) {
    const page = document.getElementById("page");
    if (!page) return;
    const box = document.createElement("div");
    box.className = "failure";
    box.setAttribute("role", "alert");
    const title = document.createElement("h1");
    title.textContent = "The page failed to load";
    const detail = document.createElement("pre");
    detail.textContent = text;
    const advice = document.createElement("p");
    advice.textContent = "Reload the page. If this happens again, please report the text above.";
    box.append(title, detail, advice);
    page.replaceChildren(box);
  }

  // app.js takes over as soon as it runs: it sets window.cohortFailure to its own handler.
  window.addEventListener(
    "error",
    (event) => {
      const source = event.target && (event.target.src || event.target.href);
      const text = source ? `Cannot load ${source}` : String((event.error && event.error.stack) || event.message);
      if (window.cohortFailure) window.cohortFailure(event.error || new Error(text));
      else show(text);
    },
    true,
  );
  window.addEventListener("unhandledrejection", (event) => {
    const reason = event.reason instanceof Error ? event.reason : new Error(String(event.reason));
    if (window.cohortFailure) window.cohortFailure(reason);
    else show(String(reason.stack || reason));
  });
})();
