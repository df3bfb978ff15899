// Elements. Text goes in as text only; marks of characters that do not show are set off.

const MARK = /⟨(?:[A-Z]{2,3}|U\+[0-9A-F]{4,6})⟩/g;
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

const element = (tag, name, ...children) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
};

const shape = (tag, name, attributes) => {
  const made = document.createElementNS(SVG, tag);
  if (name) made.setAttribute("class", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return made;
};

// A text with its marks and the places of a search set off.
const showText = (parent, text, query = "") => {
  const spots = [];
  for (const match of text.matchAll(MARK)) spots.push([match.index, match.index + match[0].length, "mark"]);
  if (query) {
    const lower = text.toLowerCase();
    // Where lower case changes the length, places do not agree, and nothing is set off.
    if (lower.length === text.length) {
      for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, at + query.length)) {
        spots.push([at, at + query.length, "hit"]);
      }
    }
  }
  spots.sort((a, b) => a[0] - b[0]);
  let behind = 0;
  for (const [start, end, name] of spots) {
    if (start < behind) continue;
    parent.append(text.slice(behind, start), element(name === "hit" ? "mark" : "span", name, text.slice(start, end)));
    behind = end;
  }
  parent.append(text.slice(behind));
  return parent;
};

const count = (number) => number.toLocaleString("en-US");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const list = (numbers) => {
  const shown = numbers.slice(0, 8).map((number) => number + 1).join(", ");
  return numbers.length > 8 ? `${shown} and ${count(numbers.length - 8)} more` : shown;
};
