// The filters: menus made of what the run holds.

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

// What can be chosen, with how many there are of each; what was chosen stays.
export function fill(run, state) {
  const counted = (all) => Object.entries(all).map(([value, n]) => [value, value.replaceAll("_", " "), n]);
  const known = (order) => Object.fromEntries(order.filter((k) => run.outcomes[k]).map((k) => [k, run.outcomes[k]]));
  const evals = Object.entries(run.sets).map(([name, n]) => [`eval:${name}`, name.replaceAll("_", " "), n]);
  const allEvals = evals.reduce((sum, [, , n]) => sum + n, 0);
  menu("env", "Every environment", counted(run.envs), state);
  menu("outcome", "Every outcome", counted(known(["passed", "failed", "unknown"])), state);
  menu("where", "Every set",
    [["train", "training", run.training], ["eval", "every evaluation", allEvals], ...evals], state);
  menu("step", "Every step", Object.entries(run.steps).map(([step, n]) => [step, `step ${step}`, n]), state);
  menu("sort", "", run.sorts.map((name) => [name, ORDERS[name] ?? name]), state);
  menu("class", "Every failure class", counted(run.classes), state);
}

export function show(state) {
  for (const name of FILTERS) {
    field(name).value = state[name] || (name === "sort" ? "newest" : "");
    field(name).classList.toggle("set", Boolean(state[name]));
  }
}

function menu(name, everything, options, state) {
  const select = field(name);
  const listed = options.some(([value]) => value === state[name]) || !state[name];
  const all = listed ? options : [...options, [state[name], state[name]]];
  const label = ([, text, n]) => (n === undefined ? text : `${text}  ${n.toLocaleString("en")}`);
  const signature = JSON.stringify([everything, all]);
  // A menu that may be open would close under the reader's hand.
  const held = select.dataset.signature && document.activeElement === select;
  if (held || select.dataset.signature === signature) return;
  select.dataset.signature = signature;
  select.replaceChildren(
    ...(everything ? [el("option", { value: "" }, everything)] : []),
    ...all.map((option) => el("option", { value: option[0] }, label(option))));
  select.value = state[name] || (name === "sort" ? "newest" : "");
}
