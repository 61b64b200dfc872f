// The address: filters and the open episode, in the fragment of the URL.

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

// `push` adds an entry to the browser history; otherwise the current entry is replaced.
export function write(state, { push = false } = {}) {
  const hash = hashOf(state);
  if (hash === (location.hash || "#")) return;
  history[push ? "pushState" : "replaceState"](null, "", hash);
}

// The filters as parameters of the API.
export function params(state) {
  const { where, ...filters } = Object.fromEntries(FILTERS.map((name) => [name, state[name]]));
  const [kind, set] = where.split(/:(.*)/s);
  const given = Object.entries({ ...filters, kind, set }).filter(([, value]) => value);
  return new URLSearchParams(given);
}

export const episodePath = (id) => id.split("/").map(encodeURIComponent).join("/");
