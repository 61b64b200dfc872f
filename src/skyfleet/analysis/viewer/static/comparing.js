// Two episodes side by side: equal turns are aligned, and the first difference is marked.

import { el, outcomeMark, place, reward } from "./dom.js";

export function comparison(both, linkTo) {
  const { left, right, rows, first_difference: firstDifference } = both;
  return [
    el("header", { class: "heading" },
      el("h2", {}, "Two episodes"),
      el("p", { class: "muted" }, sentence(both))),
    el("div", { class: "pairs" },
      side(left, linkTo), side(right, linkTo),
      ...(both.same_prompt
        ? [prompt(both.prompt.left, "cell both")]
        : ["left", "right"].map((name) => prompt(both.prompt[name], "cell"))),
      ...rows.flatMap((row, n) => [
        n === firstDifference ? el("p", { class: "parting", id: "parting" }, "First different action") : null,
        cell(row, "left"), cell(row, "right"),
      ].filter(Boolean))),
  ];
}

function sentence({ left, right, rows, first_difference: firstDifference, same_prompt }) {
  const tasks = left.task === right.task ? "The same task. " : "Different tasks. ";
  const prompts = same_prompt ? "" : "Their prompts differ. ";
  if (firstDifference === null) return `${tasks}${prompts}All actions are equal.`;
  const alike = rows.filter((row) => row.same_action).length;
  return `${tasks}${prompts}First difference at turn ${firstDifference + 1}; ${alike} of ${rows.length} turns have the same action.`;
}

function side(row, linkTo) {
  return el("div", { class: "cell top" },
    el("a", { href: linkTo(row.id) }, row.task),
    el("p", {}, el("span", { class: `badge ${row.outcome}` }, outcomeMark(row.outcome),
      `${row.outcome}, reward ${reward(row.reward)}`)),
    el("p", { class: "muted" }, `${place(row)} · attempt ${row.sample + 1}`));
}

function prompt(parts, className) {
  // The last paragraph is the task.
  const task = parts.map(([text]) => text).join("").split("\n\n").at(-1);
  return el("details", { class: `${className} fold` },
    el("summary", {}, "Prompt: ", task.slice(0, 300)), pieces(parts, "prose"));
}

function cell(row, name) {
  const turn = row[name];
  if (!turn) return el("div", { class: "cell none", "aria-label": "no turn" });
  const kind = `${row.same_action ? "same" : "other"}${turn.is_error ? " failed" : ""}`;
  const hasReplies = turn.replies.some(([text]) => text);
  return el("article", { class: `cell ${kind}`, "aria-label": `Turn ${turn.turn}, ${name}` },
    el("h3", {}, `Turn ${turn.turn}`, turn.is_error ? el("span", { class: "flag" }, "error") : ""),
    pieces(turn.action, "code"),
    hasReplies ? el("details", { class: "fold", open: row.same_action && !row.same_replies },
      el("summary", {}, row.same_replies ? "Reply, equal" : "Reply, different"),
      pieces(turn.replies, "code")) : null);
}

function pieces(list, className) {
  return el("div", { class: className },
    ...list.map(([text, marked]) => (marked ? el("mark", {}, text) : text)));
}
