// The address of a state: #/run/0/step/12?sort=worst. Everything that a reader can choose is in it.

const safeDecode = (part) => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
};

export function parse(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(safeDecode), query: Object.fromEntries(new URLSearchParams(query || "")) };
}

// Parts of the path, and a query of which empty values are left out.
export function address(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return "#/" + parts.map((part) => encodeURIComponent(part)).join("/") + (search ? "?" + search : "");
}

export const ofRun = (run, parts, query) => address(["run", run, ...parts], query);

export const current = () => parse(location.hash);

// Changes some of the query. `quietly` keeps what is drawn.
export function change(query, quietly = false) {
  const here = current();
  const target = address(here.parts, { ...here.query, ...query });
  if (target === location.hash) return;
  if (quietly) history.replaceState(null, "", target);
  else location.hash = target;
}

export const go = (target) => {
  location.hash = target;
};
