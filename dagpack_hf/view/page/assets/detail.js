// What the chosen entry says, and what becomes of it.

const detail = byId("detail");

const TITLES = { text: "", thinking: "thinking", call: "call", result: "result", section: "section", tools: "", image: "image", error: "error", note: "" };

const partElement = (part) => {
  const title = [TITLES[part.kind], part.title ?? ""].filter(Boolean).join(" · ");
  const text = showText(element("pre", ""), part.text ?? "", state.query);
  const cut = part.cut ? element("p", "cut", `… ${plural(part.cut, "more character")} not in this page (--full-text)`) : null;
  return element("section", `part ${part.kind}`, title && showText(element("h3", ""), title, state.query), text, cut);
};

// Windows of some blocks: those that come first, and those that repeat them.
const windowsOf = (own) => {
  const first = new Set(own.map((block) => blocks.window[block]));
  const again = new Set(own.flatMap((block) => windowSets[blocks.windows[block]]).filter((each) => !first.has(each)));
  return [[...first].sort((a, b) => a - b), [...again].sort((a, b) => a - b)];
};

const facts = (own, entry) => {
  const found = [];
  const targets = own.filter((block) => blocks.target[block]);
  if (windows.length > 1 && own.length) {
    // Of context the longest piece: its first token, a control token, is often shared by more windows.
    const longestOf = own.reduce((most, block) => (blocks.length[block] > blocks.length[most] ? block : most));
    const [first, again] = windowsOf(targets.length ? targets : [longestOf]);
    found.push(["window", `${targets.length ? "trained" : "first"} in ${list(first)}${again.length ? `, replayed in ${list(again)}` : ""}`]);
  }
  const shared = new Set(own.flatMap((block) => fileSets[blocks.files[block]]));
  shared.delete(entry.file);
  if (shared.size) found.push(["shared with", [...shared].slice(0, 4).map((file) => files[file].title || files[file].name).join(", ") + (shared.size > 4 ? ` and ${plural(shared.size - 4, "more file")}` : "")]);
  return found;
};

const table = (pairs, name = "facts") =>
  element("dl", name, ...pairs.map(([key, value]) => element("div", "", element("dt", "", key), showText(element("dd", ""), value))));

const tokensText = (entry) => {
  if (!entry.tokens) return "no tokens: in no trained turn's request";
  const targets = entry.targets ? `${count(entry.targets)} of them targets` : "all context";
  return `${count(entry.tokens)}, ${targets}, from position ${count(entry.position)}`;
};

const statusPill = (entry) => {
  if (!entry.status) return null;
  return element("span", `pill ${entry.status === "trained" ? "good" : "off"}`, entry.status === "trained" ? "trained" : `not trained: ${entry.status}`);
};

const showEntry = (number) => {
  const entry = entries[number];
  const head = element("header", "detail-head", element("h3", `name ${entry.kind}`, entry.name), statusPill(entry));
  if (entry.label) head.append(element("span", "label", entry.label));
  const pairs = [["tokens", tokensText(entry)], ...facts(blocksOfEntry(number), entry), ...entry.details, ["entry", entry.id]];
  if (entry.children.length > 1) pairs.unshift(["branches", count(entry.children.length)]);
  detail.replaceChildren(head, table(pairs), ...entry.parts.map(partElement));
};

const showFile = (number) => {
  const file = files[number];
  const others = new Map();
  for (const block of blocksOfFile[number]) {
    for (const other of fileSets[blocks.files[block]]) {
      if (other !== number) others.set(other, (others.get(other) ?? 0) + blocks.length[block]);
    }
  }
  const pairs = [
    ["file", file.name],
    ["directory", file.cwd || "unknown"],
    ["turns", `${count(file.turns)}, ${count(file.trained ?? 0)} of them trained`],
    ["tokens", `${count(file.tokens)}, ${count(file.shared)} of them shared with other files`],
  ];
  const shares = [...others].sort((a, b) => b[1] - a[1]).slice(0, 20);
  const rows_ = shares.map(([other, tokens]) => [files[other].title || files[other].name, `${count(tokens)} tokens`]);
  detail.replaceChildren(
    element("header", "detail-head", showText(element("h3", "name"), file.title || file.name)),
    table(pairs, "facts lines"),
    ...(rows_.length ? [element("h3", "quiet", "shares its beginning with"), table(rows_, "facts lines")] : []),
  );
};

draws(["item", "query"], (keys) => {
  if (state.item === NONE) return detail.replaceChildren(element("p", "empty", "Choose an entry in the session tree, or a block of the token tree."));
  if (isFile(state.item)) showFile(fileOf(state.item));
  else showEntry(state.item);
  if (keys.has("item")) detail.scrollTop = 0;
  const hit = state.query && detail.querySelector("mark");
  if (hit) hit.scrollIntoView({ block: "nearest" });
});

const siblings = (item) => {
  const parent = isFile(item) ? NONE : entries[item].parent;
  return parent < 0 ? [] : entries[parent].children;
};
const goParent = () => state.item >= 0 && select(entries[state.item].parent >= 0 ? entries[state.item].parent : files.length > 1 ? fileItem(entries[state.item].file) : state.item);
const goChild = () => {
  const below = isFile(state.item) ? [files[fileOf(state.item)].first] : state.item >= 0 ? entries[state.item].children : [];
  if (below.length) select(below[0]);
};
// The next branch: of the entry itself, or of the nearest one above that has others beside it.
const goBranch = (step) => {
  let item = state.item;
  while (item >= 0 && siblings(item).length < 2) item = entries[item].parent;
  if (item < 0) return;
  const beside = siblings(item);
  select(beside[(beside.indexOf(item) + step + beside.length) % beside.length]);
};
byId("go-parent").addEventListener("click", goParent);
byId("go-child").addEventListener("click", goChild);
byId("go-branch").addEventListener("click", () => goBranch(1));
