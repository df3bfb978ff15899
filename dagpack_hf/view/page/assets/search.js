// Search in every text of the page, as it is shown.

const found = new Set();
let texts = null;

// Made once, when it is needed.
const haystack = () =>
  (texts ??= entries.map((entry) =>
    [entry.name, entry.caption, entry.label, entry.id, ...entry.parts.flatMap((part) => [part.title ?? "", part.text ?? ""])]
      .join("\n")
      .toLowerCase(),
  ));

const search = (words) => {
  const query = words.trim().toLowerCase();
  found.clear();
  if (query) haystack().forEach((text, entry) => text.includes(query) && found.add(entry));
  const hits = rows.map((row) => row.item).filter((item) => found.has(item));
  for (const entry of found) if (!rowOf.has(entry)) hits.push(entry);
  set({ query, hits });
  showHits();
};

const showHits = () => {
  const at = state.hits.indexOf(state.item);
  byId("hits").textContent = !state.query ? "" : !state.hits.length ? "nothing" : at >= 0 ? `${at + 1} of ${count(state.hits.length)}` : count(state.hits.length);
};
draws(["item", "hits"], showHits);

const nextHit = (step) => {
  if (!state.hits.length) return;
  const here = state.hits.indexOf(state.item);
  const row = rowOfItem(state.item);
  // Without a hit chosen, go on from the row that is.
  const after = here >= 0 ? here + step : step > 0 ? Math.max(state.hits.findIndex((item) => (rowOf.get(item) ?? 0) > row), 0) : -1;
  select(state.hits[(after + state.hits.length) % state.hits.length]);
};

const queryBox = byId("query");
queryBox.addEventListener("input", () => search(queryBox.value));
queryBox.addEventListener("keydown", (event) => {
  if (event.key === "Enter") {
    event.preventDefault();
    nextHit(event.shiftKey ? -1 : 1);
  } else if (event.key === "Escape") {
    event.preventDefault();
    event.stopPropagation();
    queryBox.value = "";
    search("");
    tree.box.focus({ preventScroll: true });
  }
});
