// The token tree: position to the right, one lane for each leaf downwards, one rectangle for each block.

const AXIS = 20;
const icicleBox = byId("icicle");
const [base, overlay] = icicleBox.querySelectorAll("canvas");
const view = { x0: 0, x1: longest, y0: 0, y1: laneCount };
const size = { width: 1, height: 1 };
let hatches = null;

const xOf = (position) => ((position - view.x0) / (view.x1 - view.x0)) * size.width;
const yOf = (lane) => AXIS + ((lane - view.y0) / (view.y1 - view.y0)) * (size.height - AXIS);

const fitCanvas = () => {
  const lanes = Math.max(Math.min(laneCount * 26, 2000), 64);
  icicleBox.style.setProperty("--natural", `${lanes + AXIS}px`);
  const { width, height } = icicleBox.getBoundingClientRect();
  size.width = Math.max(width, 1);
  size.height = Math.max(height, AXIS + 1);
  const ratio = devicePixelRatio || 1;
  for (const canvas of [base, overlay]) {
    canvas.width = Math.round(size.width * ratio);
    canvas.height = Math.round(size.height * ratio);
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  }
  hatches = null;
};

const hatch = (context) => {
  if (hatches) return hatches;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = palette.hatch;
  pen.lineWidth = 1.2;
  pen.beginPath();
  for (const at of [-6, 0, 6]) {
    pen.moveTo(at, 6);
    pen.lineTo(at + 6, 0);
  }
  pen.stroke();
  return (hatches = context.createPattern(tile, "repeat"));
};

// Whether a block is computed more than once: in the chosen window again, or in several windows.
const replayed = (block) => {
  const held = windowSets[blocks.windows[block]];
  return state.window === NONE ? held.length > 1 : blocks.window[block] !== state.window && held.includes(state.window);
};
const dimmed = (block) => state.window !== NONE && !windowSets[blocks.windows[block]].includes(state.window);

const rectangle = (node, from, length) => {
  const top = yOf(nodes.top[node]);
  const bottom = yOf(nodes.top[node] + nodes.lanes[node]);
  const gap = bottom - top > 5 ? 1 : 0;
  const left = xOf(from);
  return [left, top, xOf(from + length) - left, bottom - top - gap];
};

const outside = ([left, top, width, height]) => left > size.width || left + width < 0 || top > size.height || top + height < AXIS;

const drawBase = () => {
  const pen = base.getContext("2d");
  pen.clearRect(0, 0, size.width, size.height);
  pen.save();
  pen.beginPath();
  pen.rect(0, AXIS, size.width, size.height - AXIS);
  pen.clip();
  for (let node = 0; node < nodeCount; node++) {
    if (outside(rectangle(node, nodes.depth[node], nodes.length[node]))) continue;
    drawBlocks(pen, node);
    drawNames(pen, node);
  }
  pen.restore();
  drawAxis(pen);
};

// Neighbours that look alike are drawn as one, so that no seams show between them.
const drawBlocks = (pen, node) => {
  const end = firstBlock[node + 1];
  let look = null;
  for (let block = firstBlock[node], from = 0; block <= end; block++) {
    const next = block < end ? lookOf(block) : null;
    if (look && next && next.every((each, at) => each === look[at])) continue;
    const position = block < end ? blocks.position[block] : nodes.depth[node] + nodes.length[node];
    if (look) drawStretch(pen, rectangle(node, from, position - from), look);
    from = position;
    look = next;
  }
};

const lookOf = (block) => {
  const [color, strength] = blockColor(block);
  return [color, dimmed(block) ? 0.12 : strength, replayed(block)];
};

const drawStretch = (pen, place, [color, strength, repeated]) => {
  if (outside(place)) return;
  pen.globalAlpha = strength;
  pen.fillStyle = color;
  pen.fillRect(...place);
  pen.globalAlpha = 1;
  if (repeated) {
    pen.fillStyle = hatch(pen);
    pen.fillRect(...place);
  }
};

// Messages part at thin lines, and have their names where there is room.
const drawNames = (pen, node) => {
  let start = firstBlock[node];
  while (start < firstBlock[node + 1]) {
    let end = start + 1;
    while (end < firstBlock[node + 1] && blocks.entry[end] === blocks.entry[start]) end++;
    const from = blocks.position[start];
    const to = blocks.position[end - 1] + blocks.length[end - 1];
    const [left, top, width, height] = rectangle(node, from, to - from);
    if (width > 6 && left + width > 0 && left < size.width) {
      pen.fillStyle = palette.paper;
      pen.fillRect(left + width - 0.5, top, 1, height);
    }
    if (width > 44 && height > 13) drawName(pen, start, end, Math.max(left, 0), top, Math.min(left + width, size.width), height);
    start = end;
  }
};

const drawName = (pen, start, end, left, top, right, height) => {
  const entry = blocks.entry[start];
  const text = entry < 0 ? "prompt" : entries[entry].label || entries[entry].name;
  let most = start;
  for (let block = start; block < end; block++) if (blocks.length[block] > blocks.length[most]) most = block;
  pen.globalAlpha = dimmed(most) ? 0.35 : 1;
  pen.fillStyle = state.mode === "role" ? (blocks.target[most] ? palette.paper : palette.ink) : palette.ink;
  if (replayed(most) && !blocks.target[most]) pen.fillStyle = palette.ink;
  pen.save();
  pen.beginPath();
  pen.rect(left, top, right - left - 3, height);
  pen.clip();
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.fillText(text, left + 5, top + Math.min(height / 2, 40));
  pen.restore();
  pen.globalAlpha = 1;
};

const drawAxis = (pen) => {
  const span = view.x1 - view.x0;
  const rough = span / Math.max(size.width / 90, 2);
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough) ?? 10 * power;
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.fillStyle = palette.quiet;
  for (let at = Math.ceil(view.x0 / step) * step; at <= view.x1; at += step) {
    const x = xOf(at);
    pen.globalAlpha = 0.5;
    pen.fillRect(x, AXIS - 5, 1, 5);
    pen.globalAlpha = 1;
    const text = at === 0 ? "0 tokens" : count(Math.round(at));
    if (x + pen.measureText(text).width + 6 < size.width) pen.fillText(text, x + 4, AXIS / 2);
  }
};

const drawOverlay = () => {
  const pen = overlay.getContext("2d");
  pen.clearRect(0, 0, size.width, size.height);
  pen.save();
  pen.beginPath();
  pen.rect(0, AXIS, size.width, size.height - AXIS);
  pen.clip();
  outline(pen, state.item, 2.5);
  if (state.hover !== state.item) outline(pen, state.hover, 1.5);
  pen.restore();
  for (const entry of state.hits) markHit(pen, entry);
};

const outline = (pen, item, width) => {
  if (item === NONE) return;
  pen.strokeStyle = palette.accent;
  pen.lineWidth = width;
  for (const [node, from, to] of stretches(item)) {
    const [x, y, w, h] = rectangle(node, from, to - from);
    pen.strokeRect(x - width / 2, y + width / 2, w + width, Math.max(h - width, 1));
  }
};

// The tokens of an item as stretches of nodes.
const stretches = (item) => {
  const found = [];
  for (const block of isFile(item) ? blocksOfFile[fileOf(item)] : blocksOfEntry(item)) {
    const last = found.at(-1);
    const from = blocks.position[block];
    if (last && last[0] === blocks.node[block] && last[2] === from) last[2] = from + blocks.length[block];
    else found.push([blocks.node[block], from, from + blocks.length[block]]);
  }
  return found;
};

const markHit = (pen, entry) => {
  const first = entries[entry].blocks[0]?.[0];
  if (first === undefined) return;
  const [left, top] = rectangle(blocks.node[first], blocks.position[first], 1);
  pen.fillStyle = palette.accent;
  pen.beginPath();
  pen.arc(Math.max(left, 3), Math.max(top + 4, AXIS + 3), 3, 0, 7);
  pen.fill();
};

const blockAt = (x, y) => {
  const position = view.x0 + (x / size.width) * (view.x1 - view.x0);
  const lane = view.y0 + ((y - AXIS) / (size.height - AXIS)) * (view.y1 - view.y0);
  if (y < AXIS) return NONE;
  for (let node = 0; node < nodeCount; node++) {
    if (lane < nodes.top[node] || lane >= nodes.top[node] + nodes.lanes[node]) continue;
    if (position < nodes.depth[node] || position >= nodes.depth[node] + nodes.length[node]) continue;
    let block = firstBlock[node];
    while (block + 1 < firstBlock[node + 1] && blocks.position[block + 1] <= position) block++;
    return block;
  }
  return NONE;
};

const setView = (x0, x1, y0, y1) => {
  const width = Math.min(Math.max(x1 - x0, Math.min(20, longest)), longest);
  const height = Math.min(Math.max(y1 - y0, Math.min(1, laneCount)), laneCount);
  view.x0 = Math.min(Math.max(x0, 0), longest - width);
  view.x1 = view.x0 + width;
  view.y0 = Math.min(Math.max(y0, 0), laneCount - height);
  view.y1 = view.y0 + height;
  redraw("view");
};

const zoom = (factor, x = size.width / 2, y = size.height / 2) => {
  const atX = view.x0 + (x / size.width) * (view.x1 - view.x0);
  const atY = view.y0 + (Math.max(y - AXIS, 0) / (size.height - AXIS)) * (view.y1 - view.y0);
  const place = (low, at) => at - (at - low) * factor;
  setView(place(view.x0, atX), place(view.x1, atX), place(view.y0, atY), place(view.y1, atY));
};
const pan = (x, y) => {
  const dx = (x / size.width) * (view.x1 - view.x0);
  const dy = (y / (size.height - AXIS)) * (view.y1 - view.y0);
  setView(view.x0 + dx, view.x1 + dx, view.y0 + dy, view.y1 + dy);
};
const fitAll = () => setView(0, longest, 0, laneCount);
const zoomed = () => view.x1 - view.x0 < longest || view.y1 - view.y0 < laneCount;
const zoomToItem = () => {
  const found = state.item === NONE ? [] : stretches(state.item);
  if (!found.length) return;
  const low = Math.min(...found.map(([, from]) => from));
  const high = Math.max(...found.map(([, , to]) => to));
  const top = Math.min(...found.map(([node]) => nodes.top[node]));
  const bottom = Math.max(...found.map(([node]) => nodes.top[node] + nodes.lanes[node]));
  const margin = (high - low) * 0.6 + 4;
  setView(low - margin, high + margin, top - 1, bottom + 1);
};

draws(["view", "mode", "window", "theme", "size"], () => {
  drawBase();
  drawOverlay();
  icicleBox.classList.toggle("zoomed", zoomed());
});
draws(["item", "hover", "hits"], drawOverlay);

let drag = null;
const pointers = new Map();
const local = (event) => {
  const box = overlay.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};
overlay.addEventListener("pointerdown", (event) => {
  pointers.set(event.pointerId, local(event));
  drag = { at: local(event), moved: false };
});
overlay.addEventListener("pointermove", (event) => {
  const [x, y] = local(event);
  const before = pointers.get(event.pointerId);
  if (before && pointers.size === 2) {
    const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    const span = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]);
    zoom(span(before) / Math.max(span([x, y]), 1), (x + other[0]) / 2, (y + other[1]) / 2);
    drag.moved = true;
  } else if (before && (drag.moved || Math.hypot(x - drag.at[0], y - drag.at[1]) > 4)) {
    if (!drag.moved) overlay.setPointerCapture(event.pointerId);
    drag.moved = true;
    pan(before[0] - x, before[1] - y);
  }
  if (before) pointers.set(event.pointerId, [x, y]);
  else showBlock(blockAt(x, y), event);
});
const release = (event) => {
  pointers.delete(event.pointerId);
};
overlay.addEventListener("pointerup", (event) => {
  release(event);
  if (drag?.moved || pointers.size) return;
  const block = blockAt(...local(event));
  const entry = block < 0 ? NONE : blocks.entry[block];
  if (entry === NONE) return;
  select(entry);
  if (narrow()) showTab("message");
});
overlay.addEventListener("pointercancel", release);
overlay.addEventListener("pointerleave", () => {
  showBlock(NONE);
});
overlay.addEventListener("dblclick", zoomToItem);
overlay.addEventListener(
  "wheel",
  (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX || event.deltaY, 0);
    else zoom(1.0015 ** event.deltaY, ...local(event));
  },
  { passive: false },
);
byId("zoom-in").addEventListener("click", () => zoom(0.6));
byId("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
byId("zoom-fit").addEventListener("click", fitAll);

const showBlock = (block, event) => {
  set({ block, hover: block < 0 ? NONE : blocks.entry[block] });
  const tip = byId("tip");
  tip.hidden = block < 0 || event.pointerType !== "mouse";
  if (tip.hidden) return;
  const entry = blocks.entry[block];
  const head = entry < 0 ? "prompt of no single entry" : entries[entry].name;
  const text = entry < 0 ? "" : entries[entry].caption;
  tip.replaceChildren(element("strong", "", head), element("p", "", text), element("p", "quiet", blockFacts(block)));
  const { innerWidth, innerHeight } = globalThis;
  tip.style.left = `${Math.max(Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), 8)}px`;
  const below = event.clientY + 18;
  tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below}px`;
};

const blockFacts = (block) => {
  const held = windowSets[blocks.windows[block]];
  const entry = entries[blocks.entry[block]];
  const parts = [plural(entry ? entry.tokens : blocks.length[block], "token")];
  parts.push(entry?.targets ? `${count(entry.targets)} of them targets` : "context");
  if (windows.length > 1) parts.push(`${blocks.target[block] ? "trained" : "first"} in window ${blocks.window[block] + 1}`);
  if (held.length > 1) parts.push(`replayed in ${list(held.slice(1))}`);
  const shared = fileSets[blocks.files[block]].length;
  if (shared > 1) parts.push(`shared by ${plural(shared, "file")}`);
  return parts.join(" · ");
};
