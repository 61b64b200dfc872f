// The only place that creates elements. Text of models and environments is passed to `append` as a
// string, so it is never parsed as markup.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const find = (id) => document.getElementById(id);

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

export function seconds(value) {
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 120 ? `${value.toFixed(value < 10 ? 2 : 0)} s` : `${Math.round(value / 60)} min`;
}

export const reward = (value) => (value === null ? "–" : String(Math.round(value * 1000) / 1000));

export const setName = (row) => (row.kind === "train" ? "training" : row.set.replaceAll("_", " "));

export const place = (row) => `${setName(row)} · step ${row.step}`;

const GLYPHS = { passed: "✓", failed: "✕", unknown: "?" };

export const outcomeMark = (outcome) =>
  el("span", { class: `mark-outcome ${outcome}`, role: "img", "aria-label": outcome }, GLYPHS[outcome]);

const CHARACTERS_SHOWN = 20_000;

// Text; a very long one is truncated, with a button that shows the rest.
export function prose(text, className = "prose") {
  if (text.length <= CHARACTERS_SHOWN) return el("div", { class: className }, text);
  const shown = el("div", { class: className }, text.slice(0, CHARACTERS_SHOWN));
  const more = el("button", { type: "button", class: "more", onclick: () => {
    shown.textContent = text;
    more.remove();
  } }, `… show all ${text.length.toLocaleString("en")} characters`);
  return el("div", {}, shown, more);
}

export async function ask(path, signal) {
  const response = await fetch(path, { signal });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}
