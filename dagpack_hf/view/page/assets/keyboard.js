// Keys. Arrows walk the tree while it, or nothing, has the focus; the others work everywhere but in the search box.

const KEYS = [
  ["↑ ↓", "the row above, below"],
  ["← →", "the entry before, the entry after: along the branch"],
  ["[ ]", "the branch before, after, at the nearest branch point"],
  ["Home End", "first, last row"],
  ["Enter", "to the message; Esc goes back"],
  ["/", "search; Enter and Shift+Enter, or n and N, go from hit to hit"],
  ["w W", "next, earlier window; Esc shows all"],
  ["c", "other colours"],
  ["+ - 0 z", "zoom in, out, to everything, to what is chosen"],
  ["t", "light or dark"],
  ["?", "these keys"],
];

const stepRow = (step) => {
  if (!rows.length) return;
  const at = rowOfItem(state.item);
  select(rows[Math.min(Math.max(at < 0 ? 0 : at + step, 0), rows.length - 1)].item);
};
const page = () => Math.max(Math.floor(tree.box.clientHeight / ROW) - 2, 1);
const cycle = (step) => windows.length && chooseWindow(((state.window + 1 + step + windows.length + 1) % (windows.length + 1)) - 1);

const WALK = {
  ArrowDown: () => stepRow(1),
  ArrowUp: () => stepRow(-1),
  j: () => stepRow(1),
  k: () => stepRow(-1),
  ArrowLeft: goParent,
  ArrowRight: goChild,
  PageDown: () => stepRow(page()),
  PageUp: () => stepRow(-page()),
  Home: () => stepRow(-rows.length),
  End: () => stepRow(rows.length),
  Enter: () => {
    if (narrow()) showTab("message");
    detail.focus({ preventScroll: true });
  },
};
const ANYWHERE = {
  "[": () => goBranch(-1),
  "]": () => goBranch(1),
  "/": () => {
    queryBox.focus();
    queryBox.select();
  },
  n: () => nextHit(1),
  N: () => nextHit(-1),
  w: () => cycle(1),
  W: () => cycle(-1),
  c: () => set({ mode: MODES[(MODES.findIndex(([mode]) => mode === state.mode) + 1) % MODES.length][0] }),
  t: () => switchTheme(),
  "+": () => zoom(0.6),
  "-": () => zoom(1 / 0.6),
  0: fitAll,
  z: zoomToItem,
  "?": () => about.showModal(),
  Escape: () => {
    if (document.activeElement === detail) {
      if (narrow()) showTab("session");
      tree.box.focus({ preventScroll: true });
    } else if (state.query) {
      queryBox.value = "";
      search("");
    } else set({ window: NONE });
  },
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, select, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const button = event.target.closest("button, summary");
  const inTree = event.target === document.body || event.target === tree.box;
  const action = ANYWHERE[event.key] ?? (inTree && !button ? WALK[event.key] : undefined);
  if (!action) return;
  event.preventDefault();
  action();
});
