// The address: filters and what is open, in the part of the URL behind the #.

export const FILTERS = ["text", "env", "outcome", "where", "step", "class", "sort"];
const OPEN = ["episode", "with", "tokens"];

export function read() {
  const params = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries([...FILTERS, ...OPEN].map((name) => [name, params.get(name) ?? ""]));
}

export function hashOf(state) {
  const params = new URLSearchParams();
  for (const name of [...FILTERS, ...OPEN]) if (state[name]) params.set(name, state[name]);
  return "#" + params.toString().replaceAll("%2F", "/");
}

// A step to come back to with the browser's own button, unless it only refines the last one.
export function write(state, { push = false } = {}) {
  const hash = hashOf(state);
  if (hash === (location.hash || "#")) return;
  history[push ? "pushState" : "replaceState"](null, "", hash);
}

// What the server calls the filters.
export function params(state) {
  const { where, ...filters } = Object.fromEntries(FILTERS.map((name) => [name, state[name]]));
  const [kind, set] = where.split(/:(.*)/s);
  const given = Object.entries({ ...filters, kind, set }).filter(([, value]) => value);
  return new URLSearchParams(given);
}

export const episodePath = (id) => id.split("/").map(encodeURIComponent).join("/");
