// A virtual list: only the rows on the screen have elements.

import { ask, count, el, find, outcomeMark, place, reward } from "./dom.js";

const ROW = 50, ROW_WITH_PASSAGE = 70, ROWS_BEYOND = 6;
// Browsers limit the height of an element to about 33 million pixels.
const MAX_ROWS = 400_000;
const SEARCH_POLL_MS = 300;

export class List {
  constructor({ onOpen, pageRows = 200 }) {
    this.box = find("list");
    this.inner = find("list-inner");
    this.shown = find("list-rows");
    this.pageRows = pageRows;
    this.onOpen = onOpen;
    this.cursor = -1;
    this.openId = this.selectedId = "";
    this.total = 0;
    this.revision = 0;
    this.pages = new Map();
    this.coming = new Map();
    this.request = new AbortController();
    this.drawn = false;
    this.box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest("[data-index]");
      if (row) this.onOpen(this.moveTo(Number(row.dataset.index)));
    });
  }

  // The filters changed: load everything again, around the open episode or from the top.
  async load(params, openId) {
    this.request.abort();
    this.request = new AbortController();
    Object.assign(this, { params, openId });
    this.rowHeight = params.get("text") ? ROW_WITH_PASSAGE : ROW;
    this.box.classList.toggle("with-passage", Boolean(params.get("text")));
    this.box.setAttribute("aria-busy", "true");
    try {
      let first = await ask(`/api/episodes?${params}&open=${encodeURIComponent(openId)}`, this.request.signal);
      this.revision = first.revision;
      this.cursor = -1;
      this.box.scrollTop = 0;
      this.take(first);
      if (this.cursor >= 0) this.jumpTo(this.cursor);
      while (first.search?.running) {
        await new Promise((resolve) => setTimeout(resolve, SEARCH_POLL_MS));
        first = await this.askPage(0);
        this.take(first);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      find("count").textContent = error.message;
    }
    this.box.setAttribute("aria-busy", "false");
  }

  // Reload the same rows, whose failure classes may be known now.
  async refresh() {
    if (!this.params) return;
    const wanted = new Set([0, ...this.window().map((at) => Math.floor(at / this.pageRows))]);
    for (const page of wanted) {
      const answer = await this.askPage(page).catch(() => null);
      if (answer) {
        this.pages.set(page, answer.rows);
        this.resize(answer);
      }
    }
    this.draw();
  }

  askPage(page) {
    const open = encodeURIComponent(this.openId);
    const query = `${this.params}&page=${page}&revision=${this.revision}&open=${open}`;
    return ask(`/api/episodes?${query}`, this.request.signal);
  }

  take(first) {
    this.pages = new Map([[0, first.rows]]);
    this.resize(first);
    if (this.openId) this.cursor = first.open_at ?? -1;
    this.draw();
  }

  resize(answer) {
    this.total = Math.min(answer.total, MAX_ROWS);
    this.inner.style.height = `${this.total * this.rowHeight}px`;
    find("count").textContent = sentence(answer);
  }

  row(index) {
    const page = Math.floor(index / this.pageRows);
    if (!this.pages.has(page)) {
      this.pages.set(page, []);
      this.coming.set(page, this.askPage(page).then(
        (answer) => { this.pages.set(page, answer.rows); this.draw(); },
        () => this.pages.delete(page),
      ));
    }
    return this.pages.get(page)[index % this.pageRows];
  }

  // Wait until the row is loaded.
  async arrived(index) {
    if (!this.row(index)) await this.coming.get(Math.floor(index / this.pageRows));
    return this.row(index);
  }

  window() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight) - ROWS_BEYOND);
    const fits = Math.ceil(this.box.clientHeight / this.rowHeight) + 2 * ROWS_BEYOND;
    const last = Math.min(this.total, first + fits);
    return Array.from({ length: Math.max(0, last - first) }, (_, n) => first + n);
  }

  draw() {
    if (this.drawn || !this.rowHeight) return;
    this.drawn = true;
    requestAnimationFrame(() => {
      this.drawn = false;
      const window = this.window();
      this.shown.style.transform = `translateY(${(window[0] ?? 0) * this.rowHeight}px)`;
      this.shown.replaceChildren(...window.map((index) => this.element(index)));
      if (window.includes(this.cursor)) this.box.setAttribute("aria-activedescendant", `row-${this.cursor}`);
      else this.box.removeAttribute("aria-activedescendant");
    });
  }

  element(index) {
    const row = this.row(index);
    const at = {
      id: `row-${index}`, class: "row", role: "option", "data-index": index,
      "aria-posinset": index + 1, "aria-setsize": this.total,
      "aria-selected": index === this.cursor ? "true" : "false",
    };
    if (!row) return el("div", { ...at, class: "row waiting" });
    if (row.id === this.openId) at.class += " open";
    if (row.id === this.selectedId) at.class += " selected";
    return el("div", at,
      outcomeMark(row.outcome),
      el("span", { class: "task", title: row.task }, row.task),
      el("span", { class: "reward" }, reward(row.reward)),
      facts(row),
      row.passage ? el("span", { class: "passage" }, row.passage) : null);
  }

  // Move the cursor to a row and scroll it into view; undefined if it does not exist.
  moveTo(index) {
    if (index < 0 || index >= this.total) return undefined;
    this.cursor = index;
    const top = index * this.rowHeight, bottom = top + this.rowHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (bottom > this.box.scrollTop + this.box.clientHeight) {
      this.box.scrollTop = bottom - this.box.clientHeight;
    }
    this.draw();
    return this.row(index);
  }

  // Scroll a row to the centre unless it is already visible.
  jumpTo(index) {
    const top = index * this.rowHeight, space = this.box.clientHeight - this.rowHeight;
    const visible = top >= this.box.scrollTop && top <= this.box.scrollTop + space;
    if (!visible) this.box.scrollTop = top - space / 2;
    this.moveTo(index);
  }

  current() {
    return this.cursor < 0 ? undefined : this.row(this.cursor);
  }

  mark({ openId, selectedId }) {
    Object.assign(this, { openId, selectedId });
    const loading = this.box.getAttribute("aria-busy") === "true"; // it is found when loading ends
    if (openId && !loading && this.current()?.id !== openId) this.findOpen();
    this.draw();
  }

  // An episode opened from a link may be far down, or not in the list.
  async findOpen() {
    const { openId, revision } = this;
    for (const [page, rows] of this.pages) {
      const at = rows.findIndex((row) => row.id === openId);
      if (at >= 0) return void this.jumpTo(page * this.pageRows + at);
    }
    const answer = await this.askPage(0).catch(() => null);
    if (answer?.open_at != null && this.openId === openId && this.revision === revision) this.jumpTo(answer.open_at);
  }
}

function facts(row) {
  const text = [
    row.task.startsWith(row.env) ? "" : row.env, place(row), count(row.n_turns, "turn"),
    row.errors ? count(row.errors, "error") : "",
  ].filter(Boolean).join(" · ");
  const tag = row.class || row.failure || (row.ending === "done" ? "" : row.ending.replace("_", " "));
  return el("span", { class: "facts" }, el("span", { class: "line-end" }, text),
    tag ? el("span", { class: row.outcome === "passed" ? "tag calm" : "tag" }, tag) : null);
}

function sentence({ total, search }) {
  const episodes = count(total, "episode");
  if (!search) return total ? episodes : "No episode matches. Widen the filters.";
  if (search.error) return `${episodes} found; the search stopped early: ${search.error}`;
  if (search.running) {
    return `Searching, ${Math.round((100 * search.seen) / Math.max(1, search.total))} % · ${episodes} found`;
  }
  if (search.at_most) return `First ${search.at_most.toLocaleString("en")} matches; narrow the search`;
  return total ? `${episodes} found` : "No episode contains this text.";
}
