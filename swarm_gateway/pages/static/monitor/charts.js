// The charts of measurements over time, one for each quantity.

import { el } from "../base.js";
import { clock, setText } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 132;
const TOP = 8;
const BOTTOM = 20;
const LEFT = 44;
const GAP = 2.5; // a longer distance, in units of the resolution, is a gap without measurements

function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export class Chart {
  /** Set up the chart. `value` gets the number from a sample of /api/v1/history; `text` formats it. */
  constructor({ title, value, text, least = 1 }) {
    Object.assign(this, { title, value, text, least });
    this.points = [];
    this.now = el("span", { class: "chart-now" });
    this.at = el("span", { class: "chart-at muted" });
    this.svg = svg("svg", { class: "chart", role: "img", height: String(HEIGHT), width: "100%", "aria-label": `${title}: nothing measured yet` });
    this.element = el("figure", { class: "chart-box" }, el("figcaption", {}, el("span", { class: "chart-title" }, title), this.now, this.at), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  /** Show `samples` of /api/v1/history between the times `from` and `to`. */
  show(samples, resolution, from, to) {
    Object.assign(this, { resolution, from, to });
    this.points = samples.map((sample) => ({ time: sample.time, value: this.value(sample) }));
    const last = this.points.at(-1);
    const most = Math.max(0, ...this.points.map(({ value }) => value));
    this.svg.setAttribute("aria-label", last ? `${this.title}: ${this.text(last.value)} at last, at most ${this.text(most)} since ${clock(from)}` : `${this.title}: nothing measured yet`);
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || this.from === undefined) return;
    const highest = niceAbove(Math.max(this.least, ...this.points.map(({ value }) => value)));
    this.x = (time) => LEFT + ((time - this.from) / (this.to - this.from)) * (width - LEFT - 6);
    this.y = (value) => TOP + (1 - value / highest) * (HEIGHT - TOP - BOTTOM);
    const parts = [0, highest / 2, highest].flatMap((value) => [
      svg("line", { class: "grid", x1: LEFT, x2: width - 6, y1: this.y(value), y2: this.y(value) }),
      svg("text", { class: "axis", x: LEFT - 7, y: this.y(value) + 3.5, "text-anchor": "end" }, this.text(value)),
    ]);
    for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      const time = this.from + share * (this.to - this.from);
      parts.push(svg("text", { class: "axis", x: this.x(time), y: HEIGHT - 4, "text-anchor": anchor }, clock(time, { seconds: false })));
    }
    for (const run of this.runs()) {
      const line = run.map(({ time, value }) => `${this.x(time).toFixed(1)} ${this.y(value).toFixed(1)}`).join("L");
      const [first, last] = [this.x(run[0].time), this.x(run.at(-1).time)].map((x) => x.toFixed(1));
      parts.push(svg("path", { class: "area", d: `M${first} ${this.y(0)}L${line}L${last} ${this.y(0)}Z` }), svg("path", { class: "line", d: `M${line}` }));
    }
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.svg.replaceChildren(...parts, this.cursor);
    this.point(null);
  }

  /** Return the runs of points without a gap. */
  runs() {
    const found = [];
    for (const point of this.points) {
      const run = found.at(-1);
      if (run && point.time - run.at(-1).time <= GAP * this.resolution) run.push(point);
      else found.push([point]);
    }
    return found.map((run) => (run.length > 1 ? run : [run[0], { ...run[0], time: run[0].time + this.resolution / 2 }]));
  }

  /** Show the value at `x` in pixels; null: the last value. */
  point(x) {
    let found = this.points.at(-1);
    if (x !== null && this.x) for (const point of this.points) if (Math.abs(this.x(point.time) - x) < Math.abs(this.x(found.time) - x)) found = point;
    const isPast = x !== null && found;
    setText(this.now, found ? this.text(found.value) : "–");
    setText(this.at, isPast ? clock(found.time, { seconds: this.resolution < 60 }) : "");
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", isPast ? "visible" : "hidden");
    if (isPast) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.x(found.time));
  }
}

/** Return the next of 1, 2, 4 or 10 × 10ⁿ; the halves of these numbers are short labels. */
function niceAbove(value) {
  const size = 10 ** Math.floor(Math.log10(value));
  return size * [1, 2, 4, 10].find((each) => each * size >= value * 0.999);
}
