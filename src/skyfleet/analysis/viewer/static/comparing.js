// Two episodes side by side: equal turns face each other, and where they part is marked.

import { el, outcomeMark, place, reward } from "./dom.js";

export function comparison(both, linkTo) {
  const { left, right, rows, first_difference: parted } = both;
  return [
    el("header", { class: "heading" },
      el("h2", {}, "Two episodes"),
      el("p", { class: "muted" }, sentence(both))),
    el("div", { class: "pairs" },
      side(left, linkTo), side(right, linkTo),
      ...(both.same_opening
        ? [prompt(both.opening.left, "cell both")]
        : ["left", "right"].map((name) => prompt(both.opening[name], "cell"))),
      ...rows.flatMap((row, n) => [
        n === parted ? el("p", { class: "parting", id: "parting" }, "First different action") : null,
        cell(row, "left"), cell(row, "right"),
      ].filter(Boolean))),
  ];
}

function sentence({ left, right, rows, first_difference: parted, same_opening }) {
  const tasks = left.task === right.task ? "The same task. " : "Two tasks. ";
  const prompts = same_opening ? "" : "Their prompts differ. ";
  if (parted === null) return `${tasks}${prompts}Every action is the same.`;
  const alike = rows.filter((row) => row.same_action).length;
  return `${tasks}${prompts}They part at turn ${parted + 1}; ${alike} of ${rows.length} turns do the same.`;
}

function side(row, linkTo) {
  return el("div", { class: "cell top" },
    el("a", { href: linkTo(row.id) }, row.task),
    el("p", {}, el("span", { class: `badge ${row.outcome}` }, outcomeMark(row.outcome),
      `${row.outcome}, reward ${reward(row.reward)}`)),
    el("p", { class: "muted" }, `${place(row)} · attempt ${row.sample + 1}`));
}

function prompt(said, className) {
  // The last thing said in it is the task.
  const task = said.map(([text]) => text).join("").split("\n\n").at(-1);
  return el("details", { class: `${className} fold` },
    el("summary", {}, "Prompt: ", task.slice(0, 300)), pieces(said, "prose"));
}

function cell(row, name) {
  const turn = row[name];
  if (!turn) return el("div", { class: "cell none", "aria-label": "no such turn" });
  const kind = `${row.same_action ? "same" : "other"}${turn.is_error ? " failed" : ""}`;
  const said = turn.replies.some(([text]) => text);
  return el("article", { class: `cell ${kind}`, "aria-label": `Turn ${turn.turn}, ${name}` },
    el("h3", {}, `Turn ${turn.turn}`, turn.is_error ? el("span", { class: "flag" }, "error") : ""),
    pieces(turn.action, "code"),
    said ? el("details", { class: "fold", open: row.same_action && !row.same_replies },
      el("summary", {}, row.same_replies ? "Answer, the same" : "Answer, different"),
      pieces(turn.replies, "code")) : null);
}

function pieces(list, className) {
  return el("div", { class: className },
    ...list.map(([text, marked]) => (marked ? el("mark", {}, text) : text)));
}
