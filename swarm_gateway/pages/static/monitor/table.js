// The table of all servers and their data, which can be sorted.

import { el } from "../base.js";
import { count, duration, keep, milliseconds, NONE, rate, setText, stateOf } from "./format.js";

const text = (value) => value || NONE;
// Heading, text to show, value to sort by, explanation.
const COLUMNS = [
  ["Server", (s) => s.short_id, (s) => s.short_id, "end of the peer id"],
  ["Blocks", (s) => `${s.start}:${s.end}`, (s) => s.start, "first block, and the one after the last"],
  ["State", (s) => stateOf(s)[0], (s) => stateOf(s)[0], ""],
  ["Tokens/s", (s) => rate(s.tokens_per_s), (s) => s.tokens_per_s, "decoded now, as if it held the whole model"],
  ["Speed", (s) => rate(s.decode_tokens_per_s), (s) => s.decode_tokens_per_s, "decoding steps of one session per second, through its blocks"],
  ["Load", (s) => milliseconds(s.queue_delay_s), (s) => s.queue_delay_s, "how long a step waits for its turn"],
  ["KV free", (s) => room(s), (s) => s.kv_tokens_free, "tokens of room for keys and values, and share of all"],
  ["RTT", (s) => milliseconds(s.rtt_s), (s) => s.rtt_s, "round trip from this gateway"],
  ["Up", (s) => duration(s.uptime_s), (s) => s.uptime_s, "since it was started"],
  ["Contributed", (s) => count(s.contributed_tokens), (s) => s.contributed_tokens, "tokens, as if it held the whole model; as the server itself counts"],
  ["Quant", (s) => `${text(s.quant)} ${s.device}${s.members > 1 ? ` ×${s.members}` : ""}`, (s) => s.quant, "quantisation, what computes, and how many members of a group"],
  ["Version", (s) => text(s.version), (s) => s.version, ""],
  ["Adapters", (s) => s.adapters.join(", ") || NONE, (s) => s.adapters.length, ""],
  ["Address", (s) => text(s.address), (s) => s.address, ""],
];
const IS_TEXT = new Set(["Server", "Blocks", "State", "Quant", "Version", "Adapters", "Address"]);

function room(server) {
  const share = server.kv_tokens ? ` (${Math.round((Math.min(server.kv_tokens_free, server.kv_tokens) / server.kv_tokens) * 100)} %)` : "";
  return `${count(server.kv_tokens_free)}${share}`;
}

export class ServerTable {
  constructor({ details }) {
    this.details = details;
    this.sorted = { column: 1, sign: 1 };
    this.servers = [];
    this.heads = COLUMNS.map(([name, , , why], column) =>
      el("th", { scope: "col", class: IS_TEXT.has(name) ? "" : "number" }, el("button", { type: "button", title: why || null, onclick: () => this.sortBy(column) }, name)),
    );
    this.rows = el("tbody");
    this.element = el("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "Table of servers" }, el("table", { class: "servers" }, el("thead", {}, el("tr", {}, this.heads)), this.rows));
  }

  sortBy(column) {
    const again = this.sorted.column === column;
    this.sorted = { column, sign: again ? -this.sorted.sign : IS_TEXT.has(COLUMNS[column][0]) ? 1 : -1 };
    this.show(this.servers);
  }

  show(servers) {
    this.servers = servers;
    const { column, sign } = this.sorted;
    const [, , value] = COLUMNS[column];
    const compare = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : sign * (typeof a === "string" ? a.localeCompare(b) : a - b));
    const sorted = [...servers].sort((a, b) => compare(value(a), value(b)) || a.start - b.start || a.peer_id.localeCompare(b.peer_id));
    this.heads.forEach((head, number) => head.setAttribute("aria-sort", number !== column ? "none" : sign > 0 ? "ascending" : "descending"));
    keep(this.rows, sorted, (server) => server.peer_id, (server) => this.row(server), update);
  }

  row(server) {
    const name = el("button", { type: "button", class: "server-name", onclick: () => this.details(server.peer_id) });
    const cells = COLUMNS.slice(1).map(([heading]) => el("td", { class: IS_TEXT.has(heading) ? "" : "number" }));
    return el("tr", {}, el("th", { scope: "row" }, name), cells);
  }
}

function update(row, server) {
  COLUMNS.forEach(([heading, show], column) => {
    const cell = row.children[column];
    setText(column ? cell : cell.firstElementChild, show(server));
    if (heading === "State") cell.className = `state-text ${stateOf(server)[1]}`;
  });
}
