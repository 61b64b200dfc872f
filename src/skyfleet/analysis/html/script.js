// The page is whole without this: it adds the theme, copying, and walking through charts.
"use strict";

const root = document.documentElement;
const themes = ["auto", "light", "dark"];

function showTheme(theme) {
  root.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
}

function keptTheme() {
  try {
    const kept = localStorage.getItem("skyfleet-theme");
    return themes.includes(kept) ? kept : "auto";
  } catch {
    return "auto"; // a browser may keep nothing for files
  }
}

const button = document.getElementById("theme");
button.hidden = false;
showTheme(keptTheme());
button.addEventListener("click", () => {
  const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
  showTheme(next);
  try {
    localStorage.setItem("skyfleet-theme", next);
  } catch {
    // then only for now
  }
});

for (const copy of document.querySelectorAll("button.copy")) {
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    const code = copy.previousElementSibling;
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Marked";
    }
  });
}

function read(mark) {
  const figure = mark.closest("figure");
  let readout = figure.querySelector(".readout");
  if (!readout) {
    readout = document.createElement("p");
    readout.className = "readout";
    readout.setAttribute("aria-hidden", "true"); // a reader says the mark's own title
    figure.append(readout);
  }
  readout.textContent = mark.querySelector("title").textContent;
}

function nearest(marks, event) {
  const distance = (mark) => {
    const box = mark.getBoundingClientRect();
    const x = box.x + box.width / 2 - event.clientX;
    const y = box.y + box.height / 2 - event.clientY;
    return mark.matches("rect") ? Math.abs(x) : Math.hypot(x, y / 4);
  };
  return marks.reduce((best, mark) => (distance(mark) < distance(best) ? mark : best));
}

for (const chart of document.querySelectorAll("svg.walked")) {
  const marks = [...chart.querySelectorAll(".dot, .bar")];
  const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  chart.addEventListener("keydown", (event) => {
    if (!(event.key in steps)) return;
    event.preventDefault();
    const at = marks.indexOf(document.activeElement);
    const wanted = at < 0 && event.key === "ArrowLeft" ? marks.length - 1 : at + steps[event.key];
    marks[Math.min(marks.length - 1, Math.max(0, wanted))].focus();
  });
  chart.addEventListener("focusin", (event) => {
    if (event.target !== chart) read(event.target);
  });
  chart.addEventListener("pointermove", (event) => read(nearest(marks, event)));
  const clear = () => chart.closest("figure").querySelector(".readout")?.remove();
  chart.addEventListener("pointerleave", clear);
  chart.addEventListener("focusout", clear);
}
