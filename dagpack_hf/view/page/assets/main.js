// The head of the page, panes, theme; and the first drawing.

const about = byId("about");
const narrow = () => matchMedia("(max-width: 760px)").matches;

const showTab = (tab) => {
  document.body.dataset.tab = tab;
  for (const button of document.querySelectorAll(".tabs button")) button.setAttribute("aria-current", button.dataset.tab === tab);
  resize();
  tree.draw(false);
};
for (const button of document.querySelectorAll(".tabs button")) button.addEventListener("click", () => showTab(button.dataset.tab));

const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const switchTheme = () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  retheme();
};
const retheme = () => {
  readPalette();
  hatches = null;
  redraw("theme");
};
byId("theme").addEventListener("click", switchTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);

const resize = () => {
  fitCanvas();
  redraw("size");
};
new ResizeObserver(resize).observe(icicleBox);

const figure = (name, value, note, title) => {
  const made = element("div", "figure", element("dt", "", name), element("dd", "", element("b", "", value), note ? element("span", "", note) : null));
  made.title = title;
  return made;
};
const approximate = (number) => (figures.approximate ? `≈ ${count(number)}` : count(number));

const showHead = () => {
  byId("title").textContent = data.title;
  const { turns, trained, logical, unique, reuse, executed, replay, bound, maxLength, targets } = figures;
  byId("figures").append(
    figure("turns", count(turns), trained === turns ? "all trained" : `${count(trained)} trained`, "Assistant messages, and how many of them are trained"),
    figure("logical tokens", approximate(logical), "turn by turn", "What training costs with one sequence for each turn"),
    figure("unique tokens", approximate(unique), `${count(targets)} targets`, "What is left when every shared prefix counts once"),
    figure("reuse", `${reuse < 100 ? reuse.toFixed(1) : count(Math.round(reuse))}×`, "logical / unique", "Logical tokens over unique tokens: what sharing could save at best"),
    figure("executed", approximate(executed), replay ? `${count(replay)} replay` : "no replay", "What the windows compute: unique tokens and what has to be repeated"),
    figure("windows", count(windows.length), `of ${count(maxLength)}, at least ${count(bound)}`, "Windows, their length, and how many any packing needs at least"),
  );
};

const showAbout = () => {
  const close = element("button", "small", "Close");
  close.type = "button";
  close.addEventListener("click", () => about.close());
  const notes = data.notes.map((note) => element("li", "", note));
  about.append(
    element("header", "detail-head", element("h2", "", "Keys"), close),
    table(KEYS, "facts lines"),
    element("h2", "", "Notes"),
    element("ul", "", ...notes, element("li", "", `tokenizer ${figures.tokenizer}`)),
    element("p", "quiet", "This page is one file. It loads nothing and sends nothing."),
  );
  byId("help").addEventListener("click", () => about.showModal());
};

byId("filter").addEventListener("change", (event) => set({ filter: event.target.value }));

readPalette();
showHead();
showAbout();
layTree();
windowList.setCount(windows.length);
windowList.box.style.setProperty("--rows", Math.min(Math.max(windows.length, 1), 4));
showTab("session");
for (const key of ["mode", "item", "window", "theme", "size"]) redraw(key);

// The first turn to begin with.
const firstTurn = rows.find((row) => row.item >= 0 && kindOf(row.item) === "turn") ?? rows[0];
if (firstTurn) select(firstTurn.item);
