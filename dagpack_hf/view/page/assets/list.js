// A list of which only the rows in sight exist.

class RowList {
  // make(): an empty row; fill(row, index): what it shows.
  constructor(box, height, make, fill) {
    this.box = box;
    this.height = height;
    this.make = make;
    this.fill = fill;
    this.count = 0;
    this.shown = new Map();
    this.spare = [];
    this.space = element("div", "space");
    this.space.setAttribute("role", "presentation");
    box.append(this.space);
    box.addEventListener("scroll", () => this.draw(false), { passive: true });
    new ResizeObserver(() => this.draw(false)).observe(box);
  }

  setCount(number) {
    this.count = number;
    this.space.style.height = `${number * this.height}px`;
    this.draw(true);
  }

  draw(refill = true) {
    const view = this.box.clientHeight || 1;
    const first = Math.max(Math.floor(this.box.scrollTop / this.height) - 4, 0);
    const last = Math.min(Math.ceil((this.box.scrollTop + view) / this.height) + 4, this.count);
    for (const [index, row] of this.shown) {
      if (index < first || index >= last) {
        this.shown.delete(index);
        this.spare.push(row);
        row.hidden = true;
      }
    }
    for (let index = first; index < last; index++) {
      let row = this.shown.get(index);
      if (row && !refill) continue;
      if (!row) {
        row = this.spare.pop() ?? this.space.appendChild(this.make());
        row.hidden = false;
        row.style.transform = `translateY(${index * this.height}px)`;
        this.shown.set(index, row);
      }
      this.fill(row, index);
    }
  }

  reveal(index) {
    const top = index * this.height;
    const view = this.box.clientHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = Math.max(top - this.height, 0);
    else if (top + this.height > this.box.scrollTop + view) this.box.scrollTop = top + 2 * this.height - view;
  }
}
