// The map of servers and blocks: a row for each server, a column for each block, and the number of replicas above.

import { el } from "../base.js";
import { count, keep, milliseconds, plural, rate, setText, stateOf } from "./format.js";

const MOST_COLUMNS = 160; // in the strip of replicas; blocks of a longer model share columns
const MANY_ROWS = 24; // with this many servers, rows are lower
const DIGIT_PX = 6;
const CELL_PX = 5; // the width of a cell without its digits

export const ORDERS = {
  blocks: ["blocks", (a, b) => a.start - b.start || a.end - b.end],
  speed: ["speed", (a, b) => b.decode_tokens_per_s - a.decode_tokens_per_s],
  work: ["tokens/s now", (a, b) => b.tokens_per_s - a.tokens_per_s],
  load: ["load", (a, b) => b.queue_delay_s - a.queue_delay_s],
  distance: ["distance", (a, b) => (a.rtt_s ?? Infinity) - (b.rtt_s ?? Infinity)],
  contributed: ["contributed", (a, b) => b.contributed_tokens - a.contributed_tokens],
  state: ["state", (a, b) => a.state.localeCompare(b.state)],
};

export class BlockMap {
  constructor({ details }) {
    this.details = details;
    this.search = el("input", { class: "input", type: "search", placeholder: "Find a server", "aria-label": "Find a server by id, address, version or adapter", oninput: () => this.draw() });
    this.filter = this.select("State", { "": "all states", good: "online", busy: "joining or moving", bad: "cannot be used" });
    this.order = this.select("Order", Object.fromEntries(Object.entries(ORDERS).map(([name, [label]]) => [name, `by ${label}`])));
    this.strip = el("div", { class: "strip", "aria-hidden": "true" });
    this.ruler = el("div", { class: "ruler", "aria-hidden": "true" });
    this.rows = el("tbody");
    this.text = el("span");
    this.chain = el("span", { class: "map-chain" });
    this.summary = el("p", { class: "map-summary muted" }, this.text, this.chain);
    this.head = el("th", { scope: "col", class: "map-cell" }, el("span", { class: "visually-hidden" }, "Blocks"), this.ruler, this.strip);
    this.table = el("table", { class: "map" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "map-name" }, el("span", { "aria-hidden": "true" }, "block"), el("span", { "aria-hidden": "true" }, "held by"), el("b", { class: "visually-hidden" }, "Server")), this.head, el("th", { scope: "col", class: "map-side" }, "State"))),
      this.rows);
    this.scroll = el("div", { class: "map-scroll", tabindex: "0", role: "region", "aria-label": "Blocks of each server" }, this.table);
    this.empty = el("p", { class: "empty", hidden: true });
    this.toolbar = el("div", { class: "toolbar" }, this.search, this.filter, this.order);
    this.element = el("div", {}, this.summary, this.scroll, this.empty);
    new ResizeObserver(() => this.drawStrip()).observe(this.head);
  }

  select(label, options) {
    return el("select", { class: "input", "aria-label": label, onchange: () => this.draw() }, Object.entries(options).map(([value, text]) => el("option", { value }, text)));
  }

  /** Show a `model` of /api/v1/models with its servers. */
  show(model, servers) {
    this.model = model;
    this.servers = servers;
    this.draw();
  }

  draw() {
    if (!this.model) return;
    const { num_blocks: numBlocks, chain } = this.model;
    const shown = this.shown();
    this.table.style.setProperty("--blocks", numBlocks);
    this.table.classList.toggle("dense", shown.length >= MANY_ROWS);
    this.drawStrip();
    const hops = new Map(chain.map((hop) => [hop.peer_id, hop]));
    keep(this.rows, shown, (server) => server.peer_id, (server) => this.row(server), (row, server) => this.update(row, server, hops.get(server.peer_id)));
    const what = this.servers.length ? "No server matches." : "There are no servers.";
    setText(this.empty, what);
    this.empty.hidden = shown.length > 0;
    setText(this.text, this.sentence(shown.length));
    setText(this.chain, this.chainText());
  }

  shown() {
    const words = this.search.value.trim().toLowerCase();
    const texts = (server) => [server.peer_id, server.address, server.version, server.quant, server.device, ...server.adapters].join(" ").toLowerCase();
    const found = this.servers.filter((server) => (!words || texts(server).includes(words)) && (!this.filter.value || stateOf(server)[1] === this.filter.value));
    const [, compare] = ORDERS[this.order.value];
    return found.sort((a, b) => compare(a, b) || ORDERS.blocks[1](a, b) || a.peer_id.localeCompare(b.peer_id));
  }

  sentence(numShown) {
    const { missing, replicas, num_blocks: numBlocks } = this.model;
    const parts = [plural(numBlocks, "block"), numShown < this.servers.length ? `${numShown} of ${plural(this.servers.length, "server")}` : plural(this.servers.length, "server")];
    if (missing.length) parts.push(`no server holds ${missing.join(", ")}`);
    else {
      const [fewest, most] = [Math.min(...replicas), Math.max(...replicas)];
      parts.push(`each block held by ${fewest === most ? fewest : `${fewest} to ${most}`}`);
    }
    return parts.join(" · ");
  }

  chainText() {
    const { chain, chain_tokens_per_s: speed, no_chain: noChain } = this.model;
    if (chain.length) return `this gateway's chain: ${plural(chain.length, "hop")}, about ${rate(speed)} tokens/s`;
    return noChain ? `no chain: ${noChain}` : "";
  }

  // ---------------------------------------------------------------- replicas of each block

  drawStrip() {
    if (!this.model) return;
    const { replicas } = this.model;
    const width = this.strip.clientWidth;
    const numColumns = Math.max(1, Math.min(replicas.length, MOST_COLUMNS));
    const columns = Array.from({ length: numColumns }, (_, column) => {
      const from = Math.floor((column * replicas.length) / numColumns);
      const to = Math.max(from + 1, Math.floor(((column + 1) * replicas.length) / numColumns));
      return { column, from, to, fewest: Math.min(...replicas.slice(from, to)) };
    });
    const hasNumbers = width / numColumns >= CELL_PX + DIGIT_PX * String(Math.max(...replicas)).length;
    this.strip.classList.toggle("bars", !hasNumbers);
    const most = Math.max(1, ...replicas);
    keep(this.strip, columns, (each) => String(each.column), () => el("span"), (cell, { from, to, fewest }) => {
      cell.className = fewest ? `held-${Math.min(fewest, 4)}` : "lost";
      cell.style.setProperty("--level", fewest ? fewest / most : 1);
      setText(cell, hasNumbers ? String(fewest) : "");
      cell.title = `${to - from > 1 ? `blocks ${from}:${to}: at least` : `block ${from}:`} ${plural(fewest, "server")}`;
    });
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((each) => (width / replicas.length) * each >= 36) ?? 1000;
    this.table.style.setProperty("--step", step);
    const marks = Array.from({ length: Math.ceil(replicas.length / step) }, (_, number) => number * step);
    keep(this.ruler, marks, String, () => el("span"), (mark, block) => {
      setText(mark, String(block));
      mark.style.setProperty("--start", block / replicas.length);
    });
  }

  // ---------------------------------------------------------------- rows

  row(server) {
    const name = el("button", { type: "button", class: "server-name", onclick: () => this.details(server.peer_id) }, server.short_id);
    const track = el("div", { class: "track" }, el("div", { class: "bar" }, el("span")), el("div", { class: "hop" }), el("div", { class: "bar next" }));
    return el("tr", {}, el("th", { scope: "row", class: "map-name" }, name), el("td", { class: "map-cell" }, track), el("td", { class: "map-side" }, el("span", { class: "state" })));
  }

  update(row, server, hop) {
    const [text, kind] = stateOf(server);
    const [bar, hopBar, next] = row.querySelector(".track").children;
    place(bar, server.start, server.end, server.num_blocks);
    bar.className = `bar ${kind}`;
    setText(bar.firstElementChild, `${server.start}:${server.end}`);
    hopBar.hidden = !hop;
    if (hop) place(hopBar, hop.start, hop.end, server.num_blocks);
    next.hidden = server.next_start === null;
    if (!next.hidden) place(next, server.next_start, server.next_end, server.num_blocks);
    const chain = hop ? `; this gateway's chain uses ${hop.start}:${hop.end}` : "";
    row.querySelector(".track").title = `blocks ${server.start}:${server.end}, ${text}; ${rate(server.decode_tokens_per_s)} tokens/s, load ${milliseconds(server.queue_delay_s)}, room for ${count(server.kv_tokens_free)} tokens${chain}`;
    const state = row.querySelector(".state");
    state.className = `state ${kind}`;
    setText(state, text);
  }
}

function place(element, start, end, numBlocks) {
  element.style.setProperty("--start", start / numBlocks);
  element.style.setProperty("--length", (end - start) / numBlocks);
}
