// Tokens as the learner sees them: prompt or sampled, with the probability of each sampled one.

import { count, el } from "./dom.js";

const TOKENS_PER_PAGE = 3000;
const PROBABILITY_LEVELS = [0.9, 0.5, 0.2, 0.05];

export function tokenView({ transcripts }) {
  if (!transcripts.length) {
    return [el("p", { class: "empty" }, "No tokens are recorded: the agent used a chat API, or the run was imported.")];
  }
  return [legend(), ...transcripts.map(strip)];
}

function legend() {
  const sample = (className, text) => el("span", { class: `token ${className}` }, text);
  return el("p", { class: "legend" }, sample("given", "prompt"), " tokens; ",
    "sampled with probability ", sample("chosen p0", "above 0.9"), " ", sample("chosen p1", "0.5"), " ",
    sample("chosen p2", "0.2"), " ", sample("chosen p3", "0.05"), " ", sample("chosen p4", "below"));
}

function strip(transcript, number) {
  const chosen = transcript.chosen.reduce((sum, one) => sum + one, 0);
  const known = transcript.logprobs.filter((value, n) => transcript.chosen[n] && value !== null);
  const mean = known.reduce((sum, value) => sum + value, 0) / (known.length || 1);
  const versions = [...new Set(transcript.policy_versions)].join(", ");
  const box = el("div", { class: transcript.texts ? "tokens" : "tokens ids" });
  const more = el("button", { type: "button", class: "more", onclick: () => add() });
  let shown = 0;
  add();
  return el("section", { class: "transcript", "aria-label": `Transcript ${number + 1}` },
    el("h3", {}, `Transcript ${number + 1}`),
    el("p", { class: "muted" }, `${count(transcript.ids.length, "token")}, ${chosen} sampled · ` +
      `mean logprob ${mean.toFixed(3)} · policy version ${versions || "unknown"}` +
      (transcript.reason ? ` · new transcript: ${transcript.reason}` : "") +
      (transcript.texts ? "" : " · ids only: the checkpoints of the run have no readable tokenizer")),
    box, more);

  function add() {
    const stop = Math.min(transcript.ids.length, shown + TOKENS_PER_PAGE);
    for (; shown < stop; shown++) box.append(token(transcript, shown));
    more.textContent = `… ${count(transcript.ids.length - shown, "more token")}`;
    more.hidden = shown === transcript.ids.length;
  }
}

function token({ ids, chosen, logprobs, texts }, n) {
  const text = texts ? texts[n].replaceAll("\n", "↵\n") || "∅" : String(ids[n]);
  if (!chosen[n]) return el("span", { class: "token given", title: `${n}: id ${ids[n]}, prompt` }, text);
  const p = logprobs[n] === null ? 0 : Math.exp(logprobs[n]);
  const level = PROBABILITY_LEVELS.findIndex((bound) => p >= bound);
  const title = `${n}: id ${ids[n]}, sampled, logprob ${logprobs[n] ?? "unknown"}, probability ${p.toFixed(3)}`;
  return el("span", { class: `token chosen p${level < 0 ? PROBABILITY_LEVELS.length : level}`, title }, text);
}
