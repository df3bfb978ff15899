// What the reader has chosen, and who draws it. Changes are drawn together in the next frame.

const NONE = -1;
const fileItem = (file) => -2 - file; // an item is an entry, or a file below -1
const isFile = (item) => item < NONE;
const fileOf = (item) => (isFile(item) ? -2 - item : item === NONE ? NONE : entries[item].file);

const state = {
  item: NONE, // selected
  hover: NONE, // item under the pointer
  block: NONE, // block under the pointer
  window: NONE,
  mode: "role",
  filter: "messages",
  query: "",
  hits: [], // entries that the search found, in the order of rows
};

const drawers = [];
const changed = new Set();
let frame = 0;

const draws = (keys, draw) => drawers.push({ keys, draw });

const set = (patch) => {
  let any = false;
  for (const key in patch) {
    if (state[key] !== patch[key]) {
      state[key] = patch[key];
      changed.add(key);
      any = true;
    }
  }
  if (any) redraw();
};

const redraw = (key = null) => {
  if (key) changed.add(key);
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    const keys = new Set(changed);
    changed.clear();
    for (const drawer of drawers) if (drawer.keys.some((each) => keys.has(each))) drawer.draw(keys);
  });
};
