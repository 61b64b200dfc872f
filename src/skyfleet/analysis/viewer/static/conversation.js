// One episode as a conversation.

import { count, el, outcomeMark, place, prose, reward, seconds } from "./dom.js";
import { episodePath } from "./address.js";

const FOLDED_FROM = 400;

export function conversation(episode) {
  return [
    verdict(episode),
    el("div", { class: "talk" },
      ...episode.prompt.map(promptMessage),
      ...episode.turns.map((turn, n) => turnBlock(turn, n + 1, episode.id))),
  ];

  function promptMessage(message) {
    const parts = messageParts(message, episode.id);
    const long = message.parts.reduce((sum, part) => sum + (part.text?.length ?? 0), 0) > FOLDED_FROM;
    const body = message.role === "system" && long
      ? [el("details", { class: "fold" }, el("summary", {}, firstLine(message)), ...parts)] : parts;
    return el("article", { class: `turn ${message.role}`, "aria-label": message.role },
      el("div", { class: "who" }, el("h3", {}, message.role)), el("div", { class: "content" }, ...body));
  }
}

// Name, outcome and numbers, above the conversation and above the tokens.
export function heading(episode, buttons, linkTo) {
  const facts = [
    episode.env, place(episode), `attempt ${episode.sample + 1}`, count(episode.n_turns, "turn"),
    count(episode.calls, "call"),
    episode.transcripts ? count(episode.tokens, "sampled token") : "tokens not recorded",
    episode.seconds ? seconds(episode.seconds) : "time not recorded",
  ];
  const ended = episode.ending === "done" ? [] : [`ended by ${episode.ending.replace("_", " ")}`];
  return el("header", { class: "heading" },
    el("h2", {}, episode.task),
    el("p", { class: "outcome-line" },
      el("span", { class: `badge ${episode.outcome}` }, outcomeMark(episode.outcome),
        `${episode.outcome}${episode.reward === null ? "" : `, reward ${reward(episode.reward)}`}`),
      ...[episode.class, ...ended, episode.errors ? count(episode.errors, "error") : ""]
        .filter(Boolean).map((tag) => el("span", { class: episode.outcome === "passed" ? "tag calm" : "tag" }, tag))),
    el("p", { class: "muted" }, facts.join(" · ")),
    attempts(episode, linkTo),
    el("div", { class: "buttons" }, ...buttons));
}

function attempts(episode, linkTo) {
  if (episode.attempts_total < 2) return null;
  const links = episode.attempts.flatMap((other, n, all) => [
    n && place(other) === place(all[n - 1]) ? null : el("span", { class: "muted" }, place(other)),
    el("a", {
    class: `attempt ${other.outcome}`, href: linkTo(other.id),
    "aria-current": other.id === episode.id ? "true" : null,
    title: `${place(other)}, attempt ${other.sample + 1}: ${other.outcome}, reward ${reward(other.reward)}`,
    "aria-label": `${place(other)}, attempt ${other.sample + 1}, ${other.outcome}`,
  }, outcomeMark(other.outcome))]);
  return el("nav", { class: "attempts", "aria-label": "Attempts at this task" },
    el("span", {}, `${count(episode.attempts_total, "attempt")} at this task:`), ...links);
}

function verdict({ grade, why, failure, failure_detail, outcome }) {
  const evidence = why.map((one, n) => el("p", { class: "why" },
    el("span", { class: n ? "tag calm" : "tag" }, one.class), one.turn ? `turn ${one.turn} ` : "",
    one.excerpt ? el("q", {}, one.excerpt) : null));
  const findings = count(evidence.length - 1, "other finding");
  return el("section", { class: `verdict ${outcome}`, "aria-label": "Grade" },
    el("h3", {}, grade ? `Graded ${reward(grade.reward)}` : "Not graded"),
    failure ? el("p", { class: "error-text" }, `${failure}: ${failure_detail}`) : null,
    grade && Object.keys(grade.parts).length
      ? el("dl", { class: "parts" }, ...Object.entries(grade.parts).flatMap(([name, value]) =>
        [el("dt", {}, name), el("dd", {}, reward(value))])) : null,
    grade?.explanation.trim() ? prose(grade.explanation.trim(), "code") : null,
    evidence[0],
    evidence.length > 1 ? el("details", { class: "fold" }, el("summary", {}, findings), ...evidence.slice(1)) : null);
}

function turnBlock(turn, number, id) {
  const { action } = turn;
  const paired = pair(action.calls, turn.replies);
  return el("article", { class: "turn assistant", "aria-label": `Turn ${number}`, id: `turn-${number}` },
    el("div", { class: "who" },
      el("h3", {}, `Turn ${number}`),
      turn.engine_seconds ? el("p", { class: "muted" }, `engine ${seconds(turn.engine_seconds)}`) : null,
      turn.env_seconds ? el("p", { class: "muted" }, `env ${seconds(turn.env_seconds)}`) : null,
      turn.reward ? el("p", { class: "muted" }, `reward ${reward(turn.reward)}`) : null),
    el("div", { class: "content" },
      action.reasoning ? el("details", { class: "fold reasoning" },
        el("summary", {}, `Reasoning, ${count(action.reasoning.split(/\s+/).length, "word")}`),
        prose(action.reasoning)) : null,
      ...messageParts(action, id),
      ...action.malformed.map((text) => el("div", { class: "call failed" },
        el("p", { class: "flag" }, "Malformed call"), prose(text, "code"))),
      ...paired.calls.map(([call, replies]) => callBlock(call, replies, id)),
      ...paired.rest.map((reply) => el("div", { class: `reply ${reply.is_error ? "failed" : ""}` },
        el("p", { class: "flag" }, reply.is_error ? `${reply.role}: error` : reply.role), ...messageParts(reply, id)))));
}

// A reply belongs to the call with its id; if ids repeat, in order.
function pair(calls, replies) {
  const left = [...replies];
  const taken = calls.map((call) => {
    const at = left.findIndex((reply) => reply.role === "tool" && reply.reply_to === call.id);
    return [call, at < 0 ? [] : left.splice(at, 1)];
  });
  return { calls: taken, rest: left };
}

function callBlock(call, replies, id) {
  const failed = replies.some((reply) => reply.is_error);
  return el("details", { class: `call ${failed ? "failed" : ""}` },
    el("summary", {},
      el("span", { class: "line" }, el("b", {}, call.name), el("span", { class: "brief" }, call.brief),
        call.repair ? el("span", { class: "flag" }, `repaired: ${call.repair}`) : null),
      ...replies.map((reply) => el("span", { class: "line answer" },
        reply.is_error && !/^error/i.test(firstLine(reply)) ? el("span", { class: "flag" }, "error") : null,
        firstLine(reply)))),
    el("h4", {}, "Arguments"), prose(call.arguments, "code"),
    ...replies.flatMap((reply) => [el("h4", {}, "Result"), ...messageParts(reply, id, "code")]));
}

function messageParts(message, id, className = "prose") {
  return message.parts.filter((part) => part.text !== "").map((part) => {
    if (part.text !== undefined) return prose(part.text, className);
    if (part.picture === null) return el("p", { class: "muted" }, `${part.media_type}, ${part.bytes} bytes: not shown`);
    return el("img", {
      class: "picture", loading: "lazy", alt: `Image ${part.picture + 1} of this episode`,
      src: `/api/picture/${episodePath(id)}/${part.picture}`,
    });
  });
}

function firstLine(message) {
  const text = message.parts.map((part) => part.text ?? "[image]").join(" ").trim();
  return text.slice(0, 300).replaceAll("\n", " ⏎ ");
}
