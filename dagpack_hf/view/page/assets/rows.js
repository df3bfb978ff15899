// Rows of the session tree: the preorder, branches as lanes, the largest branch last and in its parent's lane.

const FILTERS = {
  messages: (entry) => entry.kind !== "other" || entry.label,
  turns: (entry) => (entry.kind !== "tool" && entry.kind !== "other") || entry.label,
  users: (entry) => ["user", "shell", "summary"].includes(entry.kind) || entry.label || entry.children.length > 1,
  labels: (entry) => entry.label || entry.kind === "summary",
  all: () => true,
};

const treeRows = (filter) => {
  const keep = FILTERS[filter];
  const shownAbove = new Int32Array(entries.length).fill(NONE);
  const children = new Map();
  const visible = entries.map((entry) => Boolean(keep(entry)));
  const order = files.flatMap((file) => preorder(file));
  for (const number of order) {
    const parent = entries[number].parent;
    shownAbove[number] = parent < 0 ? NONE : visible[parent] ? parent : shownAbove[parent];
    if (!visible[number]) continue;
    const above = shownAbove[number] === NONE ? fileItem(entries[number].file) : shownAbove[number];
    if (!children.has(above)) children.set(above, []);
    children.get(above).push(number);
  }
  for (const below of children.values()) below.sort((a, b) => a - b);
  const sizes = new Map();
  for (let at = order.length - 1; at >= 0; at--) {
    if (visible[order[at]]) {
      sizes.set(order[at], 1 + (children.get(order[at]) ?? []).reduce((sum, child) => sum + sizes.get(child), 0));
    }
  }
  const rows = [];
  files.forEach((file, number) => placeFile(number, children, sizes, rows));
  return drawLanes(rows);
};

// Entries of a file, parents before children; a parent may stand behind its child in the file.
const preorder = (file) => {
  const found = [];
  for (let number = file.first; number < file.first + file.count; number++) {
    if (entries[number].parent < 0) found.push(number);
  }
  for (let at = 0; at < found.length; at++) found.push(...entries[found[at]].children);
  return found;
};

const placeFile = (file, children, sizes, rows) => {
  if (files.length > 1) rows.push({ item: fileItem(file), lane: 0, parent: NONE, level: 1, below: 0 });
  const level = files.length > 1 ? 2 : 1;
  const pending = [...(children.get(fileItem(file)) ?? [])].reverse().map((number) => [number, 0, NONE, level]);
  while (pending.length) {
    const [number, lane, parent, depth] = pending.pop();
    const here = rows.length;
    const below = children.get(number) ?? [];
    rows.push({ item: number, lane, parent, level: depth, below: below.length });
    if (!below.length) continue;
    const heavy = below.reduce((most, child) => (sizes.get(child) > sizes.get(most) ? child : most));
    pending.push([heavy, lane, here, depth + (below.length > 1 ? 1 : 0)]);
    for (let at = below.length - 1; at >= 0; at--) {
      if (below[at] !== heavy) pending.push([below[at], lane + 1, here, depth + 1]);
    }
  }
};

// For each row the lanes that pass it, and how it hangs on the one above.
const drawLanes = (rows) => {
  const lastChild = new Int32Array(rows.length).fill(NONE);
  rows.forEach((row, at) => row.parent >= 0 && (lastChild[row.parent] = at));
  const open = [];
  let most = 0;
  rows.forEach((row, at) => {
    const from = row.parent < 0 ? NONE : rows[row.parent].lane;
    row.through = [];
    open.forEach((until, lane) => {
      if (until > at || (until === at && lane !== from)) row.through.push(lane);
    });
    row.from = from;
    row.lastChild = lastChild[at];
    open[row.lane] = lastChild[at];
    if (isFile(row.item)) open.length = 0;
    most = Math.max(most, row.lane);
  });
  rows.lanes = most + 1;
  return rows;
};
