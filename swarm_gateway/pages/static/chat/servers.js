// The live line under an answer: the servers of its blocks, their events, and the speed.

import { el, icon } from "../base.js";

const NUM_TONES = 8;
const tones = new Map(); // keys: peer ids; values: tones in the order in which the page first saw the servers

function toneOf(server) {
  if (!tones.has(server.peer_id)) tones.set(server.peer_id, tones.size % NUM_TONES);
  return `tone-${tones.get(server.peer_id)}`;
}

export function shortId(peerId) {
  return `…${peerId.slice(-6)}`;
}

function names(peerIds) {
  return peerIds.map(shortId).join(", ");
}

function span([start, end]) {
  return `${start}:${end}`;
}

function seconds(number) {
  return `${number >= 10 ? Math.round(number) : number.toFixed(1)} s`;
}

/** Return a sentence about an event of an answer's servers. */
export function sentence(event) {
  if (event.type === "recovery") {
    const how = event.from_copy ? "a standby took over" : `replayed ${event.replayed_tokens} tokens`;
    return `Blocks ${span(event.span)} moved from ${names(event.failed)} to ${names(event.replacements)}: ${how}, ${seconds(event.stall_s)}`;
  }
  if (event.type === "move") {
    const move = `Blocks ${span(event.span)} moved from ${shortId(event.server)}, which leaves, to ${shortId(event.replacement)}`;
    return `${move}: copied ${event.copied_tokens} tokens, ${seconds(event.seconds)}`;
  }
  if (event.type === "waiting") return `Waiting for servers: ${event.reason}`;
  return event.text;
}

/** Return an answer's tokens per second; null before there are two tokens. */
export function speedOf(node) {
  return node.tokens > 1 && node.writingS > 0 ? (node.tokens - 1) / node.writingS : null;
}

/** The live line of one answer, which is made once and then updated. */
export class ServerLine {
  #bar = el("span", { class: "bar", "aria-hidden": "true" });
  #summary = el("span", { class: "summary" });
  #events = el("ul", { class: "happenings" });
  #details = el("div", { class: "server-details", hidden: true });
  #button;
  #servers = null; // the servers that the bar shows
  #numEvents = 0;

  constructor(id) {
    this.#details.id = `servers-${id}`;
    this.#button = el(
      "button",
      { type: "button", class: "server-line", "aria-expanded": "false", "aria-controls": this.#details.id, onclick: () => this.#toggle() },
      this.#bar,
      this.#summary,
      icon("down"),
    );
    this.element = el("div", { class: "servers" }, this.#button, this.#events, this.#details);
  }

  show(node) {
    this.element.hidden = !node.servers?.length && !node.happenings?.length && node.status !== "writing";
    if (this.#servers !== node.servers) this.#showServers(node.servers ?? []);
    if (this.#numEvents !== node.happenings.length) this.#showEvents(node.happenings);
    this.#summary.textContent = summaryOf(node);
  }

  #showServers(servers) {
    const isNew = new Set(this.#servers?.length ? servers.map((server) => server.peer_id) : []);
    for (const server of this.#servers ?? []) isNew.delete(server.peer_id);
    this.#servers = servers;
    this.#bar.replaceChildren(
      ...servers.map((server) => {
        const [start, end] = server.span;
        const text = `Blocks ${span(server.span)} on ${shortId(server.peer_id)}`;
        const kind = `segment ${toneOf(server)} ${isNew.has(server.peer_id) ? "new" : ""}`;
        return el("span", { class: kind, title: text, style: { "--blocks": end - start } });
      }),
    );
    this.#button.setAttribute("aria-description", servers.length ? "Shows which server holds which blocks" : "");
    this.#details.replaceChildren(
      el(
        "table",
        {},
        el("caption", { class: "visually-hidden" }, "Servers of this answer"),
        el("thead", {}, el("tr", {}, ...["Blocks", "Server", "Runs on", "Address"].map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, servers.map(rowOf)),
      ),
    );
  }

  #showEvents(events) {
    for (const event of events.slice(this.#numEvents)) {
      const kind = event.type === "recovery" || event.type === "move" ? "moved" : "trouble";
      this.#events.append(el("li", { class: kind, title: event.text }, sentence(event)));
    }
    this.#numEvents = events.length;
  }

  #toggle() {
    this.#details.hidden = !this.#details.hidden;
    this.#button.setAttribute("aria-expanded", String(!this.#details.hidden));
    this.#details.scrollIntoView({ block: "nearest" });
  }
}

function rowOf(server) {
  const runsOn = [server.device, server.quant === "none" ? null : server.quant].filter(Boolean).join(" · ");
  return el(
    "tr",
    {},
    el("td", {}, span(server.span)),
    el("td", { title: server.peer_id }, el("span", { class: `dot ${toneOf(server)}`, "aria-hidden": "true" }), el("code", {}, shortId(server.peer_id))),
    el("td", {}, runsOn),
    el("td", {}, el("code", {}, server.address ?? "")),
  );
}

function summaryOf(node) {
  const parts = [];
  const number = new Set(node.servers.map((server) => server.peer_id)).size;
  if (number) parts.push(`${number} ${number === 1 ? "server" : "servers"}`);
  const speed = speedOf(node);
  if (speed !== null) parts.push(`${speed >= 100 ? Math.round(speed) : speed.toFixed(1)} tokens/s`);
  if (node.status === "writing") {
    const quietS = (Date.now() - node.startedMs) / 1000 - (node.firstS === null ? 0 : node.firstS + node.writingS);
    if (node.firstS === null) parts.push(number ? "reading the prompt" : "looking for servers");
    else if (quietS >= 2) parts.push(`paused for ${Math.floor(quietS)} s`);
  } else if (node.firstS !== null) parts.push(`first token after ${seconds(node.firstS)}`);
  return parts.join(" · ");
}
