// Colours of blocks: by what they are, by file, by window. All come from the style, so they follow the theme.

const KINDS = {
  system: "system prompt",
  user: "user",
  tool: "tool result",
  shell: "shell command",
  summary: "summary",
  turn: "turn",
  other: "other",
};
const kindOf = (entry) => (entry < 0 ? "system" : entries[entry].kind.replace(/^(un)?trained$/, "turn"));
const WHEEL = 6;

let palette = {};

const readPalette = () => {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  palette = { ink: read("ink"), quiet: read("quiet"), paper: read("paper"), line: read("line"), target: read("target"), accent: read("accent"), shared: read("shared"), hatch: read("hatch") };
  palette.context = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, read(`context-${kind}`)]));
  palette.wheel = Array.from({ length: WHEEL }, (_, at) => read(`wheel-${at}`));
};

const fileColor = (file) => palette.wheel[file % WHEEL];

// Fill and strength of a block.
const blockColor = (block) => {
  const target = blocks.target[block];
  if (state.mode === "files") {
    const set_ = fileSets[blocks.files[block]];
    return [set_.length > 1 ? palette.shared : fileColor(set_[0] ?? 0), target ? 1 : 0.42];
  }
  if (state.mode === "windows") return [palette.wheel[Math.max(blocks.window[block], 0) % WHEEL], target ? 1 : 0.42];
  return target ? [palette.target, 1] : [palette.context[kindOf(blocks.entry[block])], 1];
};

const MODES = [
  ["role", "Targets"],
  ...(files.length > 1 ? [["files", "Files"]] : []),
  ...(windows.length > 1 ? [["windows", "Windows"]] : []),
];

const legendItem = (color, text, name = "") => {
  const swatch = element("span", `swatch ${name}`);
  swatch.style.setProperty("--color", color);
  return element("span", "legend-item", swatch, text);
};

const legend = () => {
  const items = [];
  if (state.mode === "role") {
    items.push(legendItem(palette.target, "target: trained"), element("span", "legend-head", "context:"));
    const present = new Set(Array.from({ length: blockCount }, (_, block) => (blocks.target[block] ? "" : kindOf(blocks.entry[block]))));
    for (const kind in KINDS) {
      if (!present.has(kind)) continue;
      items.push(legendItem(palette.context[kind], kind === "turn" ? "prompt and earlier turns" : KINDS[kind]));
    }
  } else if (state.mode === "files") {
    items.push(legendItem(palette.shared, "shared by several files"));
    files.slice(0, WHEEL).forEach((file, at) => items.push(legendItem(fileColor(at), file.title || file.name)));
    if (files.length > WHEEL) items.push(element("span", "quiet", `and ${plural(files.length - WHEEL, "more file")}, in the same colours again`));
  } else {
    windows.slice(0, WHEEL).forEach((_, at) => items.push(legendItem(palette.wheel[at], `first in window ${at + 1}`)));
    if (windows.length > WHEEL) items.push(element("span", "quiet", "and so on, in the same colours again"));
  }
  if (state.mode !== "role") items.push(element("span", "quiet", "pale: context"));
  if (windows.length > 1) items.push(legendItem(palette.hatch, state.window === NONE ? "in several windows: replayed" : "replayed here", "hatched"));
  byId("legend").replaceChildren(...items);
};

draws(["mode", "theme", "window"], legend);
draws(["mode"], () => {
  for (const button of byId("modes").children) button.setAttribute("aria-pressed", button.dataset.mode === state.mode);
});
byId("modes").hidden = MODES.length < 2;
for (const [mode, text] of MODES) {
  const button = element("button", "small", text);
  button.type = "button";
  button.dataset.mode = mode;
  button.addEventListener("click", () => set({ mode }));
  byId("modes").append(button);
}
