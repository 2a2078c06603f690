// The lists of events and of contributions.

import { el } from "../base.js";
import { clock, count, keep, percent, setText } from "./format.js";

const MOST_SHOWN = 12; // the most contributors to show

// The sentence for each kind of event, and its tone.
const SENTENCES = {
  joined: ["good", (e) => `joined with blocks ${e.blocks}`],
  left: ["quiet", (e) => `left; it held blocks ${e.blocks}`],
  moved: ["busy", (e) => `moves from blocks ${e.before} to ${e.blocks}`],
  restarted: ["busy", (e) => `was started again, with blocks ${e.blocks}`],
  unreachable: ["bad", (e) => `does not answer; it held blocks ${e.blocks}`],
  back: ["good", (e) => `answers again, with blocks ${e.blocks}`],
  state: ["quiet", (e) => `is ${e.state.replaceAll("_", " ")}, was ${e.before.replaceAll("_", " ")}`],
  blocks_lost: ["bad", (e) => `No server holds blocks ${e.blocks}`],
  blocks_back: ["good", (e) => `Blocks ${e.blocks} are held again`],
};

export class Events {
  constructor() {
    this.list = el("ol");
    this.log = el("div", { class: "events", role: "log", "aria-label": "Events, newest first", tabindex: "0" }, this.list);
    this.empty = el("p", { class: "empty" }, "Nothing has happened since this gateway was started.");
    this.element = el("div", {}, this.log, this.empty);
  }

  /** Show events, given newest last; models are named if there are several. */
  show(events, numModels) {
    this.empty.hidden = events.length > 0;
    this.log.hidden = !events.length;
    // Another history of the server may use the same ids for other events.
    keep(this.list, events.toReversed(), (event) => `${event.id} ${event.time}`, (event) => line(event), (item) => item.classList.toggle("with-model", numModels > 1));
  }
}

function line(event) {
  const [kind, sentence] = SENTENCES[event.kind] ?? ["quiet", () => event.kind];
  const time = el("time", { datetime: new Date(event.time * 1000).toISOString() }, clock(event.time));
  const name = event.short_id ? [el("b", { title: event.peer_id }, event.short_id), " "] : [];
  return el("li", { class: kind }, time, el("span", { class: "event-text" }, ...name, sentence(event), el("span", { class: "event-model muted" }, ` · ${event.model}`)));
}

export class Contributions {
  constructor() {
    this.list = el("ol", { class: "contributions" });
    this.rest = el("p", { class: "muted small" });
    this.empty = el("p", { class: "empty" }, "No server has computed anything yet.");
    this.element = el("div", {}, this.list, this.rest, this.empty);
  }

  show(contributions) {
    const found = contributions.filter((each) => each.contributed_tokens > 0);
    const total = found.reduce((sum, each) => sum + each.contributed_tokens, 0);
    const most = found[0]?.contributed_tokens ?? 1;
    this.empty.hidden = found.length > 0;
    keep(this.list, found.slice(0, MOST_SHOWN), (each) => `${each.peer_id} ${each.model}`, bar, (item, each) => {
      item.style.setProperty("--share", each.contributed_tokens / most);
      item.classList.toggle("gone", !each.here);
      item.title = `${each.peer_id}: ${count(each.decoded_tokens)} decoded, ${count(each.prompt_tokens)} of prompts, ${count(each.training_tokens)} in training${each.here ? "" : "; not here now"}`;
      setText(item.children[1], `${count(each.contributed_tokens)} · ${percent(each.contributed_tokens / total)}`);
    });
    const left = found.length - MOST_SHOWN;
    setText(this.rest, left > 0 ? `and ${left} more, of ${count(total)} tokens in all` : found.length ? `${count(total)} tokens in all, as the servers count themselves` : "");
  }
}

function bar(each) {
  return el("li", {}, el("b", {}, each.short_id), el("span", { class: "amount" }));
}
