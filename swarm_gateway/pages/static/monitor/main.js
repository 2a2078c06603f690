// The monitor: the swarm live and over time.

import { apiJson, ask, el, icon, showHeader } from "../base.js";
import { Chart } from "./charts.js";
import { Contributions, Events } from "./feed.js";
import { card, clock, count, duration, keep, milliseconds, NONE, percent, plural, rate, setText, stateOf } from "./format.js";
import { Live } from "./live.js";
import { BlockMap } from "./map.js";
import { ServerTable } from "./table.js";

const RANGES = { "1 h": 3600, "24 h": 86400, "30 d": 30 * 86400 };
const seen = { swarm: null, servers: [], models: [], events: [], contributions: [] };
let chosenModel = null;
let range = "1 h";

// ------------------------------------------------------------------ parts of the page

const title = el("h1", {}, "Swarm");
const status = el("p", { class: "status-pill", role: "status" });
const freshness = el("p", { class: "freshness muted" });
const problem = el("div", { class: "problem", role: "alert", hidden: true });
const reasons = el("ul", { class: "reasons", "aria-label": "What is wrong" });
const tiles = el("dl", { class: "tiles" });
const tabs = el("div", { class: "tabs", role: "group", "aria-label": "Model" });
const map = new BlockMap({ details });
const table = new ServerTable({ details });
const events = new Events();
const contributions = new Contributions();
const charts = [
  new Chart({ title: "Tokens/s", value: (sample) => sample.tokens_per_s, text: rate }),
  new Chart({ title: "Servers online", value: (sample) => sample.servers_online, text: (value) => count(value, 1), least: 2 }),
  new Chart({ title: "Load", value: (sample) => sample.queue_delay_s * 1000, text: (value) => `${count(value, 1)} ms`, least: 1 }),
];
const ranges = el("div", { class: "segments", role: "group", "aria-label": "Time shown" }, Object.keys(RANGES).map((name) =>
  el("button", { type: "button", "aria-pressed": String(name === range), onclick: () => chooseRange(name) }, name)));
const command = el("code", { class: "join-command", tabindex: "0" });
const copyText = el("span", {}, "Copy");
const copyButton = el("button", { type: "button", class: "button", disabled: true, onclick: copyCommand }, icon("copy"), copyText);
const joinNote = el("p", { class: "muted small" });

const mapCard = card("Blocks", "blocks-title", map.element);
mapCard.querySelector(".card-head").append(tabs, map.toolbar);
const chartCard = card("Over time", "charts-title", el("div", { class: "charts" }, charts.map((chart) => chart.element)));
chartCard.querySelector(".card-head").append(ranges);

showHeader();
document.querySelector("main").append(
  el("div", { class: "top" }, title, status, freshness),
  problem,
  reasons,
  tiles,
  el("section", { class: "join", "aria-labelledby": "join-title" }, el("h2", { id: "join-title" }, "Add a machine"), el("div", { class: "join-line" }, command, copyButton), joinNote),
  mapCard,
  chartCard,
  el("div", { class: "columns" }, card("Events", "events-title", events.element), card("Contributions", "contributions-title", contributions.element)),
  card("Servers", "servers-title", table.element),
);

// ------------------------------------------------------------------ contents of the parts

function show(news) {
  Object.assign(seen, news);
  if (news.events) events.show(seen.events, seen.models.length);
  if (news.contributions) contributions.show(seen.contributions);
  if (!news.swarm) return;
  showSwarm(seen.swarm);
  showModel();
  events.show(seen.events, seen.models.length);
}

function showSwarm(swarm) {
  setText(title, swarm.swarm);
  document.title = `${swarm.swarm} – Swarm monitor`;
  const words = { ok: "all blocks are served", degraded: "degraded", down: `${swarm.own_model} cannot be used` };
  setText(status, words[swarm.status]);
  status.className = `status-pill ${swarm.status}`;
  keep(reasons, swarm.reasons, (reason) => reason, (reason) => el("li", {}, reason), () => {});
  reasons.hidden = !swarm.reasons.length;
  setText(freshness, `seen ${clock(swarm.time)} · version ${swarm.version}`);
  const lost = swarm.blocks_missing;
  const facts = [
    ["Tokens/s", rate(swarm.tokens_per_s), swarm.prompt_tokens_per_s ? `and ${rate(swarm.prompt_tokens_per_s)} of prompts` : "by all servers"],
    ["Servers", String(swarm.servers_online), swarm.servers > swarm.servers_online ? `of ${swarm.servers} online` : "online", swarm.servers_unreachable ? "busy" : ""],
    ["Blocks missing", String(lost), `of ${swarm.blocks}, ${plural(swarm.models, "model")}`, lost ? "bad" : ""],
    ["Load", milliseconds(swarm.queue_delay_s), "mean wait of a step"],
    ["KV in use", percent(swarm.kv_used), "of the servers' room"],
    ["Requests here", String(swarm.generations_active), swarm.generations_queued ? `active, ${swarm.generations_queued} queued` : "active"],
  ];
  keep(tiles, facts, ([name]) => name, ([name]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("b"), el("span"))), (tile, [, value, note, kind]) => {
    tile.className = kind ?? "";
    setText(tile.querySelector("b"), value);
    setText(tile.querySelector("span"), note);
  });
}

function showModel() {
  const model = seen.models.find((each) => each.model === chosenModel) ?? seen.models.find((each) => each.model === seen.swarm.own_model) ?? seen.models[0];
  const names = seen.models.length > 1 ? seen.models : [];
  keep(tabs, names, (each) => each.model, (each) => el("button", { type: "button", onclick: () => chooseModel(each.model) }, each.model), (tab, each) => tab.setAttribute("aria-pressed", String(each === model)));
  tabs.hidden = !names.length;
  mapCard.hidden = !model;
  setText(command, (model ?? seen.swarm).join_command);
  copyButton.disabled = false;
  const note = (model ?? seen.swarm).join_note;
  setText(joinNote, note);
  joinNote.hidden = !note;
  if (model) map.show(model, seen.servers.filter((server) => server.model === model.model));
  table.show(seen.servers.filter((server) => !model || server.model === model.model));
}

function chooseModel(name) {
  chosenModel = name;
  showModel();
}

async function copyCommand() {
  try {
    await navigator.clipboard.writeText(command.textContent);
    setText(copyText, "Copied");
  } catch {
    getSelection().selectAllChildren(command); // without TLS, browsers allow the clipboard only on loopback
    setText(copyText, "Press Ctrl+C");
  }
  setTimeout(() => setText(copyText, "Copy"), 2000);
}

function details(peerId) {
  const server = seen.servers.find((each) => each.peer_id === peerId);
  if (!server) return;
  const facts = {
    "Peer id": server.peer_id,
    Model: `${server.model} ${server.revision ? `(${server.revision})` : ""}`,
    Blocks: `${server.start}:${server.end} of ${server.num_blocks}${server.pinned ? ", pinned" : ""}`,
    State: stateOf(server)[0] + (server.denial ? `: ${server.denial}` : ""),
    Speed: `${rate(server.decode_tokens_per_s)} steps/s decoding, ${rate(server.forward_tokens_per_s)} tokens/s at once`,
    Now: `${rate(server.tokens_per_s)} tokens/s, ${rate(server.prompt_tokens_per_s)} of prompts, ${rate(server.training_tokens_per_s)} in training`,
    Load: milliseconds(server.queue_delay_s),
    "KV room": `${count(server.kv_tokens_free)} of ${count(server.kv_tokens)} tokens free`,
    "Round trip": milliseconds(server.rtt_s),
    Computes: `${server.quant}, ${server.dtype}, ${server.device}${server.members > 1 ? `, a group of ${server.members}` : ""}`,
    Version: `${server.version || NONE}, wire ${server.wire_version}`,
    Up: duration(server.uptime_s),
    Contributed: `${count(server.contributed_tokens)} tokens`,
    Adapters: server.adapters.join(", ") || NONE,
    Address: server.address || NONE,
  };
  const list = el("dl", { class: "facts", tabindex: "0", role: "group", "aria-label": "Details of the server" }, Object.entries(facts).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  ask(`Server ${server.short_id}`, [list], [["Close", "", "primary"]]);
}

// ------------------------------------------------------------------ over time

function chooseRange(name) {
  range = name;
  for (const button of ranges.children) button.setAttribute("aria-pressed", String(button.textContent === name));
  showHistory();
}

async function showHistory(options) {
  const asked = range;
  const { samples, resolution_s: resolution } = await apiJson(`/api/v1/history?since=-${RANGES[asked]}`, options).catch(() => ({ samples: null }));
  if (asked !== range || !samples || !seen.swarm) return;
  const to = seen.swarm.time;
  for (const chart of charts) chart.show(samples, resolution, to - RANGES[asked], to);
}

// ------------------------------------------------------------------ the connection

function connection(lost) {
  problem.hidden = !lost;
  document.querySelector("main").classList.toggle("stale", Boolean(lost));
  if (!lost) return;
  const again = lost.waitS === null ? "" : ` Trying again in ${lost.waitS} s.`;
  problem.replaceChildren(el("span", {}, lost.message + again), el("button", { type: "button", class: "button", onclick: lost.retry }, "Try now"));
}

new Live({ show, connection, slowly: showHistory }).run();
