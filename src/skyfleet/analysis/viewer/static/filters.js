// The filter menus, built from the values that occur in the run.

import { el, find } from "./dom.js";
import { FILTERS } from "./address.js";

const TYPING_MS = 300;
const ORDERS = {
  newest: "Newest step first", oldest: "Oldest step first", task: "By task",
  reward: "Highest reward first", turns: "Most turns first", errors: "Most errors first",
  tokens: "Most tokens first", seconds: "Slowest first",
};

const form = find("filters");
const field = (name) => form.elements.namedItem(name);

export function listen(onChange) {
  let typing;
  const changed = () => {
    clearTimeout(typing);
    onChange(Object.fromEntries(FILTERS.map((name) => [name, field(name).value.trim()])));
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); changed(); });
  form.addEventListener("change", (event) => { if (event.target !== field("text")) changed(); });
  field("text").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(changed, TYPING_MS);
  });
}

export const focusText = () => { field("text").focus(); field("text").select(); };

// Each option with the number of episodes it would select; the current selection stays. With a
// search text there are no counts.
export function fill({ menus, sorts }, state) {
  const withCounts = (all, name = displayName) =>
    Object.entries(all).map(([value, n]) => [value, name(value), state.text ? undefined : n]);
  const evals = Object.entries(menus.where).filter(([value]) => value !== "train");
  const where = evals.length ? { ...menus.where, eval: evals.reduce((sum, [, n]) => sum + n, 0) } : menus.where;
  menu("env", "All environments", withCounts(menus.env), state);
  menu("outcome", "All outcomes", withCounts(menus.outcome), state);
  menu("where", "All sets", withCounts(where, NAMES.where).sort(([a], [b]) => rank(a) - rank(b)), state);
  menu("step", "All steps", withCounts(menus.step, NAMES.step), state);
  menu("sort", "", sorts.map((name) => [name, ORDERS[name] ?? name]), state);
  menu("class", "All failure classes", withCounts(menus.class), state);
}

const NAMES = { where: (where) => setLabel(where), step: (step) => `step ${step}` };
const displayName = (name) => name.replaceAll("_", " ");
const setLabel = (where) =>
  ({ train: "training", eval: "all evaluations" })[where] ?? displayName(where.slice("eval:".length));
const rank = (where) => ["train", "eval"].indexOf(where) + 1 || 3;

export function show(state) {
  for (const name of FILTERS) {
    field(name).value = state[name] || (name === "sort" ? "newest" : "");
    field(name).classList.toggle("set", Boolean(state[name]));
  }
}

function menu(name, everything, options, state) {
  const select = field(name);
  const listed = options.some(([value]) => value === state[name]) || !state[name];
  const all = listed ? options : [...options, [state[name], NAMES[name]?.(state[name]) ?? displayName(state[name])]];
  const label = ([, text, n]) => (n === undefined ? text : `${text}  ${n.toLocaleString("en")}`);
  const signature = JSON.stringify([everything, all]);
  // Do not replace the options of a menu that may be open.
  const mayBeOpen = select.dataset.signature && document.activeElement === select;
  if (mayBeOpen || select.dataset.signature === signature) return;
  select.dataset.signature = signature;
  select.replaceChildren(
    ...(everything ? [el("option", { value: "" }, everything)] : []),
    ...all.map((option) => el("option", { value: option[0] }, label(option))));
  select.value = state[name] || (name === "sort" ? "newest" : "");
}
