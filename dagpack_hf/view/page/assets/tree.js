// The session tree: one row for each entry, as in the graph of a version-control log.

const COARSE = matchMedia("(pointer: coarse)").matches;
const ROW = COARSE ? 36 : 26;
const LANE = 13;
const GLYPHS = {
  trained: "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0",
  untrained: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
  user: "M-4 -5L5 0L-4 5Z",
  tool: "M-3 -3H3V3H-3Z",
  shell: "M-4 -4H4V4H-4Z",
  system: "M-5 -5H5V5H-5Z",
  summary: "M0 -6L6 0L0 6L-6 0Z",
  other: "M-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
};

let rows = [];
let rowOf = new Map();

const makeRow = () => {
  const row = element("div", "row");
  row.setAttribute("role", "treeitem");
  return row;
};

const graph = (row, index) => {
  const width = LANE * (Math.min(rows.lanes, 12) + 1);
  const svg = shape("svg", "graph", { width, height: ROW, "aria-hidden": "true" });
  const x = (lane) => LANE * (Math.min(lane, 12) + 1) - 3;
  const middle = ROW / 2;
  let lines = row.through.map((lane) => `M${x(lane)} 0V${ROW}`).join("");
  if (row.from >= 0) {
    lines +=
      row.from === row.lane
        ? `M${x(row.lane)} 0V${middle}`
        : `M${x(row.from)} 0Q${x(row.from)} ${middle} ${x(row.lane)} ${middle}`;
  }
  if (row.lastChild > index) lines += `M${x(row.lane)} ${middle}V${ROW}`;
  svg.append(shape("path", "edge", { d: lines || "M0 0" }));
  const kind = entries[row.item].kind;
  svg.append(shape("path", `glyph ${kind}`, { d: GLYPHS[kind], transform: `translate(${x(row.lane)} ${middle})` }));
  return svg;
};

const fillRow = (element_, index) => {
  const row = rows[index];
  const selected = row.item === state.item;
  element_.id = `row-${index}`;
  element_.dataset.index = index;
  element_.setAttribute("aria-level", row.level);
  element_.setAttribute("aria-selected", selected);
  element_.className = `row${selected ? " selected" : ""}${row.item === state.hover ? " hover" : ""}`;
  if (isFile(row.item)) return fillFile(element_, fileOf(row.item));
  const entry = entries[row.item];
  const caption = showText(element("span", "caption"), entry.caption, state.query);
  const name = element("span", `name ${entry.kind}`, entry.name);
  const label = entry.label ? element("span", "label", entry.label) : null;
  const tokens = element("span", "tokens", entry.tokens ? count(entry.tokens) : "");
  if (found.has(row.item)) element_.classList.add("found");
  if (!entry.tokens) element_.classList.add("absent");
  element_.replaceChildren(graph(row, index), name, ...(label ? [label] : []), caption, tokens);
};

const fillFile = (element_, file) => {
  const { title, name, turns, tokens, shared } = files[file];
  element_.classList.add("file");
  const swatch = element("span", "swatch");
  swatch.style.background = fileColor(file);
  const caption = element("span", "caption", `${plural(turns, "turn")}${tokens ? `, ${Math.round((100 * shared) / tokens)} % shared` : ""}`);
  element_.replaceChildren(swatch, element("span", "name", title || name), caption, element("span", "tokens", tokens ? count(tokens) : ""));
};

const tree = new RowList(byId("tree"), ROW, makeRow, fillRow);

const layTree = () => {
  rows = treeRows(state.filter);
  rowOf = new Map(rows.map((row, index) => [row.item, index]));
  tree.setCount(rows.length);
};

// The row of an item; of one that is not shown that of the nearest entry above it that is.
const rowOfItem = (item) => {
  while (item >= 0 && !rowOf.has(item)) item = entries[item].parent;
  return rowOf.get(item) ?? NONE;
};

const select = (item, { reveal = true } = {}) => {
  set({ item });
  const index = rowOfItem(item);
  if (index >= 0 && reveal) tree.reveal(index);
  if (index >= 0) tree.box.setAttribute("aria-activedescendant", `row-${index}`);
};

draws(["filter"], () => {
  layTree();
  const index = rowOfItem(state.item);
  if (index >= 0) tree.reveal(index);
});
draws(["item", "hover", "query", "hits", "theme"], () => tree.draw());

const rowUnder = (event) => {
  const row = event.target.closest(".row");
  return row ? rows[row.dataset.index] : null;
};
tree.box.addEventListener("click", (event) => {
  const row = rowUnder(event);
  if (!row) return;
  select(row.item, { reveal: false });
  tree.box.focus({ preventScroll: true });
  if (narrow()) showTab("message");
});
tree.box.addEventListener("pointermove", (event) => event.pointerType === "mouse" && set({ hover: rowUnder(event)?.item ?? NONE, block: NONE }));
tree.box.addEventListener("pointerleave", () => set({ hover: NONE }));
