// The list of conversations.

import { el, iconButton } from "../base.js";

/** The sidebar. `act`: the page's actions open(conversation), rename, remove and export. */
export class Sidebar {
  #act;
  #list;

  constructor(list, act) {
    this.#list = list;
    this.#act = act;
  }

  show(conversations, current, isRunning) {
    const kept = [...conversations].filter((each) => each.title !== null).sort((a, b) => b.updated - a.updated);
    const wanted = JSON.stringify(kept.map((each) => [each.id, each.title, each === current, isRunning(each)]));
    if (this.#list.dataset.shown === wanted) return;
    this.#list.dataset.shown = wanted;
    const focused = this.#list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    const empty = el("li", { class: "muted nothing" }, "What you write is kept here, in this browser.");
    this.#list.replaceChildren(...(kept.length ? kept.map((each) => this.#itemOf(each, each === current, isRunning(each))) : [empty]));
    if (focused) this.#list.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  }

  #itemOf(conversation, isCurrent, runs) {
    const open = el(
      "button",
      { type: "button", class: "open", "data-id": conversation.id, "aria-current": isCurrent ? "true" : null, title: conversation.title, onclick: () => this.#act.open(conversation) },
      el("span", {}, conversation.title),
      runs ? el("span", { class: "runs", role: "img", "aria-label": "An answer is under way" }) : null,
    );
    const named = (what) => `${what} “${conversation.title}”`;
    return el(
      "li",
      { class: "conversation" },
      open,
      el(
        "span",
        { class: "tools" },
        iconButton("edit", named("Rename"), () => this.#act.rename(conversation)),
        iconButton("download", named("Export"), () => this.#act.export(conversation)),
        iconButton("trash", named("Delete"), () => this.#act.remove(conversation)),
      ),
    );
  }
}

/** Save the conversation as a file. */
export function exportJson(conversation) {
  const blob = new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" });
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
  const link = el("a", { href: URL.createObjectURL(blob), download: `${name}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
