// Optional: adds the theme button, copy buttons and keyboard navigation of charts.
"use strict";

const root = document.documentElement;
const themes = ["auto", "light", "dark"];

function showTheme(theme) {
  root.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
}

function storedTheme() {
  try {
    const stored = localStorage.getItem("skyfleet-theme");
    return themes.includes(stored) ? stored : "auto";
  } catch {
    return "auto"; // a browser may block storage for local files
  }
}

const button = document.getElementById("theme");
button.hidden = false;
showTheme(storedTheme());
button.addEventListener("click", () => {
  const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
  showTheme(next);
  try {
    localStorage.setItem("skyfleet-theme", next);
  } catch {
    // the theme then lasts until the page is reloaded
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
      copy.textContent = "Selected";
    }
  });
}

function read(mark) {
  const figure = mark.closest("figure");
  let readout = figure.querySelector(".readout");
  if (!readout) {
    readout = document.createElement("p");
    readout.className = "readout";
    readout.setAttribute("aria-hidden", "true"); // a screen reader reads the title of the mark
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

for (const chart of document.querySelectorAll("svg.navigable")) {
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
