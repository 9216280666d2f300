"use strict";
// Follows the system's colour scheme until the reader chooses; a file: page may not remember it.
const root = document.documentElement, theme = document.getElementById("theme");
try { root.dataset.theme = localStorage.getItem("d2plm-theme") ?? ""; } catch { /* not remembered */ }
theme.hidden = false;
theme.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("d2plm-theme", root.dataset.theme); } catch { /* not remembered */ }
});
// Copy buttons; the text is selected if the browser does not allow writing to the clipboard.
for (const button of document.querySelectorAll("button.copy")) {
  const sequence = button.parentElement.querySelector(".sequence");
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(sequence.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(sequence);
      button.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
// A link to a protein opens it; printing opens all.
const open = (element) => { if (element instanceof HTMLDetailsElement) element.open = true; };
addEventListener("hashchange", () => open(document.getElementById(location.hash.slice(1))));
addEventListener("beforeprint", () => document.querySelectorAll("details.protein").forEach(open));
