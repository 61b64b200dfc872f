// The page: navigation, keyboard actions, and polling for new episodes.

import { ask, count, el, find, place } from "./dom.js";
import * as address from "./address.js";
import * as filters from "./filters.js";
import { comparison } from "./comparing.js";
import { conversation, heading } from "./conversation.js";
import { List } from "./listing.js";
import { tokenView } from "./tokens.js";

const POLL_MS = 3000;

const reader = find("reader");
const list = new List({ onOpen: (row) => row && open(row.id, { push: true, focus: true }) });
let state = address.read();
let selected = null;
let opened = null;
let asked = new AbortController();
let run = null;
let totalRead = 0;

const linkTo = (id) => address.hashOf({ ...state, episode: id, with: "", tokens: "" });

function go(change, { push = false } = {}) {
  state = { ...state, ...change };
  address.write(state, { push });
}

function open(id, { push = false, focus = false } = {}) {
  go({ episode: id, with: "", tokens: "" }, { push });
  return show(focus);
}

// Show what the address names, on the right.
async function show(focus = false) {
  asked.abort();
  asked = new AbortController();
  const { signal } = asked;
  const { episode, with: other, tokens } = state;
  document.body.classList.toggle("reading", Boolean(episode));
  list.mark({ openId: episode, selectedId: selected?.id ?? "" });
  tray();
  if (!episode) {
    opened = null;
    overview();
    return;
  }
  const path = address.episodePath(episode);
  const slow = setTimeout(() => reader.setAttribute("aria-busy", "true"), 150);
  try {
    if (other) {
      const both = await ask(`/api/compare?${new URLSearchParams({ a: episode, b: other })}`, signal);
      fill(comparison(both, linkTo), "Comparison");
      find("parting")?.scrollIntoView({ block: "nearest" });
    } else {
      if (opened?.id !== episode) opened = await ask(`/api/episode/${path}`, signal);
      const body = tokens ? tokenView(await ask(`/api/tokens/${path}`, signal)) : conversation(opened);
      fill([heading(opened, buttons(), linkTo), ...body], opened.task);
    }
    if (focus) reader.focus({ preventScroll: true });
  } catch (error) {
    if (error.name !== "AbortError") fill([el("p", { class: "empty", role: "alert" }, error.message)], "Error");
  } finally {
    clearTimeout(slow);
    if (!signal.aborted) reader.removeAttribute("aria-busy");
  }
}

// If no episode is open: outcomes per environment, as links into the list.
function overview() {
  if (!run) return;
  document.title = `${run.name} · skyfleet`;
  const outcomes = ["passed", "failed", "unknown"];
  const rows = Object.entries(run.by_env).map(([env, counts]) => el("tr", {},
    el("th", { scope: "row" }, env),
    ...outcomes.map((outcome) => el("td", {}, counts[outcome]
      ? el("a", { href: address.hashOf({ env, outcome }) }, counts[outcome].toLocaleString("en")) : "–"))));
  reader.replaceChildren(el("div", { class: "overview" },
    el("h2", {}, run.total ? "Episodes" : "This run has no episodes yet"),
    run.total ? el("table", {},
      el("thead", {}, el("tr", {}, ...["environment", ...outcomes].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...rows)) : null,
    el("p", { class: "muted" }, "Select one on the left, or press ", el("kbd", {}, "j"), " and ", el("kbd", {}, "Enter"), ".")));
}

function fill(content, title) {
  const back = el("button", { type: "button", class: "back", onclick: goBack }, "← Episodes");
  reader.replaceChildren(back, ...content.filter(Boolean));
  reader.scrollTop = 0;
  document.title = `${title} · ${run?.name ?? ""} · skyfleet`;
}

function buttons() {
  const button = (label, key, onclick, pressed) =>
    el("button", { type: "button", onclick, "aria-pressed": pressed }, label, " ", el("kbd", {}, key));
  return [
    button(state.tokens ? "Conversation" : "Tokens", "t", ACTIONS.t),
    state.tokens ? null : button("Expand all", "f", ACTIONS.f),
    button("Select to compare", "c", ACTIONS.c, String(selected?.id === opened?.id)),
  ].filter(Boolean);
}

function tray() {
  const box = find("tray");
  box.hidden = !selected;
  if (!selected) return;
  const other = current();
  box.replaceChildren(
    el("p", {}, "Selected: ", el("b", {}, selected.task), ` ${place(selected)}, attempt ${selected.sample + 1}`),
    el("button", { type: "button", onclick: ACTIONS.x, disabled: !other || other.id === selected.id },
      "Compare with this one ", el("kbd", {}, "x")),
    el("button", { type: "button", onclick: () => select(null) }, "Clear"));
}

function select(row) {
  selected = row;
  list.mark({ openId: state.episode, selectedId: selected?.id ?? "" });
  tray();
  for (const button of reader.querySelectorAll("[aria-pressed]")) {
    button.setAttribute("aria-pressed", String(selected?.id === opened?.id));
  }
}

const current = () => (state.episode && !state.with && opened?.id === state.episode ? opened : list.current());

async function move(by) {
  const at = list.cursor + by;
  list.moveTo(at);
  if (!state.episode || list.cursor !== at) return tray();
  const row = await list.arrived(at);
  // Another key press may have moved the cursor while the row was loading.
  if (row && state.episode && list.cursor === at) open(row.id);
}

function goBack() {
  if (state.with) go({ with: "" }, { push: true });
  else if (state.tokens) go({ tokens: "" }, { push: true });
  else go({ episode: "" }, { push: true });
  show();
  if (!state.episode) find("list").focus();
}

const ACTIONS = {
  j: () => move(1),
  k: () => move(-1),
  ArrowDown: () => move(1),
  ArrowUp: () => move(-1),
  Enter: () => list.current() && open(list.current().id, { push: true, focus: true }),
  "/": () => filters.focusText(),
  t: () => {
    if (!state.episode || state.with) return;
    go({ tokens: state.tokens ? "" : "1" }, { push: true });
    show();
  },
  f: () => {
    const folds = [...reader.querySelectorAll("details")];
    const closed = folds.some((fold) => !fold.open);
    for (const fold of folds) fold.open = closed;
  },
  c: () => {
    const row = current();
    if (row) select(row.id === selected?.id ? null : row);
  },
  x: () => {
    const row = current();
    if (!selected || !row || row.id === selected.id) return;
    go({ episode: selected.id, with: row.id, tokens: "" }, { push: true });
    show(true);
  },
  r: () => refresh({ reload: true }),
  "?": () => find("help").showModal(),
  Escape: () => state.episode && goBack(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || find("help").open) return;
  const typing = event.target.matches("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") { event.target.blur(); find("list").focus(); }
    return;
  }
  const pressing = event.target.matches("button, a, summary");
  if (event.key === "Enter" && pressing) return;
  // Arrow keys scroll the episode, and move the cursor in the list.
  if (event.key.startsWith("Arrow") && event.target !== find("list")) return;
  const action = ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

async function refresh({ reload = false } = {}) {
  try {
    const before = run;
    const asked = address.params(state).toString();
    run = await ask(`/api/run?${asked}`);
    find("run-name").textContent = run.name;
    const busy = run.unclassified ? ` · classifying ${count(run.unclassified, "failed episode")}` : "";
    const trouble = run.trouble ? ` · some episodes are not classified: ${run.trouble}` : "";
    find("run-facts").textContent = `${run.model} · ${count(run.total, "episode")}${busy}${trouble}`;
    if (!state.episode && (!before || before.revision !== run.revision)) overview();
    list.pageRows = run.page_rows;
    // If the filters have changed meanwhile, the newer request fills the menus.
    if (asked === address.params(state).toString()) filters.fill(run, state);
    if (reload) await list.load(address.params(state), state.episode);
    else if (before && before.unclassified !== run.unclassified) await list.refresh();
    if (reload || !before) totalRead = run.total;
    const added = run.total - totalRead;
    find("new-episodes").hidden = added <= 0;
    find("new-episodes").textContent = `Load ${count(added, "new episode")}`;
  } catch (error) {
    find("run-facts").textContent = `The viewer does not respond: ${error.message}`;
  }
}

find("new-episodes").addEventListener("click", () => refresh({ reload: true }));
find("help-button").addEventListener("click", () => find("help").showModal());
window.addEventListener("popstate", () => {
  const before = address.params(state).toString();
  state = address.read();
  filters.show(state);
  if (address.params(state).toString() !== before) {
    list.load(address.params(state), state.episode);
    refresh();
  }
  show();
});
filters.listen((values) => {
  go({ ...values, sort: values.sort === "newest" ? "" : values.sort });
  filters.show(state);
  list.load(address.params(state), state.episode);
  refresh();
});
list.load(address.params(state), state.episode);
show();
await refresh();
filters.show(state);
find("list").focus();
setInterval(() => document.visibilityState === "visible" && refresh(), POLL_MS);
