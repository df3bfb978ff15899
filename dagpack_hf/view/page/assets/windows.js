// The windows: how full each is, what it trains, and what it repeats.

const WINDOW_ROW = COARSE ? 40 : 30;

const makeWindow = () => {
  const row = element("div", "window");
  row.setAttribute("role", "option");
  row.append(element("span", "name"), element("canvas"), element("span", "tokens", element("b"), element("span")));
  return row;
};

const fillWindow = (row, index) => {
  const { size: used, trained = 0, replay = 0 } = windows[index];
  row.dataset.index = index;
  row.id = `window-${index}`;
  row.className = `window${state.window === index ? " selected" : ""}`;
  row.setAttribute("aria-selected", state.window === index);
  row.children[0].textContent = `Window ${index + 1}`;
  row.children[2].children[0].textContent = count(used);
  row.children[2].children[1].textContent = ` · ${count(trained)} targets${replay ? ` · ${count(replay)} replay` : ""}`;
  row.title = `${count(used)} of ${count(figures.maxLength)} positions, ${count(trained)} targets trained, ${count(replay)} positions that another window computes too`;
  drawWindow(row.children[1], index);
};

const drawWindow = (canvas, index) => {
  const ratio = devicePixelRatio || 1;
  const width = Math.max(canvas.clientWidth, 1);
  const height = 14;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.fillStyle = palette.line;
  pen.globalAlpha = 0.5;
  pen.fillRect(0, 0, width, height);
  const scale = width / figures.maxLength;
  let at = 0;
  for (const block of blocksOfWindow[index]) {
    const [color, strength] = blockColor(block);
    const length = blocks.length[block] * scale;
    pen.globalAlpha = strength;
    pen.fillStyle = color;
    pen.fillRect(at, 0, length, height);
    pen.globalAlpha = 1;
    if (blocks.window[block] !== index) {
      pen.fillStyle = hatch(pen);
      pen.fillRect(at, 0, length, height);
    }
    at += length;
  }
};

const windowList = new RowList(byId("windows"), WINDOW_ROW, makeWindow, fillWindow);

const chooseWindow = (index) => {
  set({ window: index });
  if (index >= 0) {
    windowList.reveal(index);
    windowList.box.setAttribute("aria-activedescendant", `window-${index}`);
  }
};

draws(["window", "mode", "theme", "size"], () => {
  windowList.draw();
  const chosen = state.window === NONE ? "click one to see what it holds" : "Esc shows all again";
  const bound = figures.bound === figures.windows ? "no packing needs fewer" : `no packing needs fewer than ${count(figures.bound)}`;
  byId("windows-note").textContent = windows.length
    ? `${plural(windows.length, "window")} of ${count(figures.maxLength)} · ${bound} · ${chosen}`
    : "nothing to train, so no windows";
});

windowList.box.addEventListener("click", (event) => {
  const row = event.target.closest(".window");
  if (row) chooseWindow(Number(row.dataset.index) === state.window ? NONE : Number(row.dataset.index));
});
windowList.box.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || !windows.length) return;
  event.preventDefault();
  event.stopPropagation();
  chooseWindow(Math.min(Math.max(state.window + step, 0), windows.length - 1));
});
