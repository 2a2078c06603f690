// The messages of a conversation, each with its actions.

import { el, iconButton } from "../base.js";
import { isWriting, shownNodes } from "./conversation.js";
import { editInPlace } from "./editing.js";
import { copyButton, showMarkdown } from "./markdown.js";
import { Thumbnails, pictureButtons } from "./pictures.js";
import { ServerLine } from "./servers.js";

const CUT = "The page was closed while this was written.";

/**
 * The thread. `act`: the page's actions edit(node, text, pictures), retry(node) and turn(node, by), unless it
 * `isRunning`.
 */
export class Thread {
  element = el("div", { class: "thread" });
  #act;
  #views = new Map(); // keys: ids of messages

  constructor(act) {
    this.#act = act;
  }

  show(conversation) {
    const nodes = shownNodes(conversation);
    const views = nodes.map((node) => this.#viewOf(node));
    views.forEach((view, index) => view.show(nodes[index], conversation));
    const elements = views.map((view) => view.element);
    if (elements.length !== this.element.children.length || elements.some((each, index) => each !== this.element.children[index]))
      this.element.replaceChildren(...elements);
  }

  /** Open the editor of the user's last message. */
  editLast(conversation) {
    const node = shownNodes(conversation).findLast((each) => each.role === "user");
    if (node) this.#viewOf(node).edit();
  }

  #viewOf(node) {
    const Kind = node.role === "user" ? UserMessage : Answer;
    if (!this.#views.has(node.id)) this.#views.set(node.id, new Kind(node, this.#act));
    return this.#views.get(node.id);
  }
}

/** The controls to switch between versions of a message; hidden if there is only one. */
export class Versions {
  #back;
  #on;
  #number = el("span", {});
  #node = null;

  constructor(act) {
    this.#back = iconButton("left", "Previous version", () => act.turn(this.#node, -1));
    this.#on = iconButton("right", "Next version", () => act.turn(this.#node, 1));
    this.element = el("span", { class: "versions", role: "group", "aria-label": "Versions" }, this.#back, this.#number, this.#on);
  }

  show(node, conversation) {
    this.#node = node;
    const all = conversation.nodes[node.parent].children;
    const at = all.indexOf(node.id);
    this.element.hidden = all.length < 2;
    this.#number.textContent = `${at + 1}/${all.length}`;
    this.#back.disabled = at === 0 || isWriting(conversation);
    this.#on.disabled = at === all.length - 1 || isWriting(conversation);
  }
}

class UserMessage {
  #node;
  #act;
  #text = el("div", { class: "bubble" });
  #pictures;
  #versions;
  #editButton = iconButton("edit", "Edit", () => this.edit());
  #actions;

  constructor(node, act) {
    this.#node = node;
    this.#act = act;
    this.#versions = new Versions(act);
    const copying = node.text ? copyButton("Copy message", () => this.#node.text) : null;
    this.#text.hidden = !node.text;
    this.#pictures = el("div", { class: "pictures", hidden: !node.pictures }, pictureButtons(node.pictures ?? []));
    this.#actions = el("div", { class: "actions" }, this.#versions.element, copying, this.#editButton);
    this.element = el("article", { class: "message user", "aria-label": "You" }, this.#pictures, this.#text, this.#actions);
  }

  show(node, conversation) {
    if (this.#text.textContent !== node.text) this.#text.textContent = node.text;
    this.#editButton.disabled = isWriting(conversation);
    this.#versions.show(node, conversation);
  }

  edit() {
    const kept = new Thumbnails(this.#node.pictures ?? []);
    this.#actions.hidden = true;
    this.#pictures.hidden = true;
    editInPlace(this.#text, this.#node.text, {
      above: kept.element,
      label: "Edit your message",
      hint: "What came after stays in the version before.",
      button: "Send",
      sendsOnEnter: true,
      isValid: (text) => (text.trim() !== "" || kept.pictures.length > 0) && !this.#act.isRunning,
      submit: (text) => this.#act.edit(this.#node, text.trim() && text, kept.pictures),
      close: () => {
        this.#actions.hidden = false;
        this.#pictures.hidden = !this.#node.pictures;
        this.#editButton.focus();
      },
    });
  }
}

/** What the model thinks before it answers: open while it thinks, and closed once it answers. */
class Reasoning {
  #text = el("div", { class: "reasoning-text" });
  #label = el("summary", {}, "Reasoning");
  element = el("details", { class: "reasoning", hidden: true }, this.#label, this.#text);
  #isThinking = null;

  show(node) {
    const text = node.reasoning ?? "";
    this.element.hidden = !text;
    if (this.#text.textContent !== text) this.#text.textContent = text;
    const isThinking = node.status === "writing" && !node.text;
    if (isThinking === this.#isThinking) return; // the reader may have opened or closed it since
    this.#isThinking = isThinking;
    this.element.open = isThinking;
    this.#label.textContent = isThinking ? "Thinking…" : "Reasoning";
  }
}

class Answer {
  #reasoning = new Reasoning();
  #body = el("div", { class: "markdown" });
  #shown = null; // the text that the body shows
  #end = new Ending();
  #servers;
  #versions;
  #retryButton;
  #node;

  constructor(node, act) {
    this.#node = node;
    this.#servers = new ServerLine(node.id);
    this.#versions = new Versions(act);
    this.#end.onRetry = () => act.retry(this.#node);
    this.#retryButton = iconButton("retry", "Retry", () => act.retry(this.#node));
    this.actions = el(
      "div",
      { class: "actions" },
      this.#versions.element,
      copyButton("Copy answer", () => this.#node.text),
      this.#retryButton,
    );
    this.element = el("article", { class: "message answer", "aria-label": "Answer" }, this.#reasoning.element, this.#body, this.#end.element, this.#servers.element, this.actions);
  }

  show(node, conversation) {
    this.#reasoning.show(node);
    if (this.#shown !== node.text) {
      this.#shown = node.text;
      showMarkdown(this.#body, node.text);
    }
    const isUnfinished = node.status === "writing";
    this.element.classList.toggle("writing", isUnfinished);
    this.element.setAttribute("aria-busy", String(isUnfinished));
    this.#retryButton.disabled = isWriting(conversation);
    this.#end.show(node, isWriting(conversation));
    this.#servers.show(node);
    this.#versions.show(node, conversation);
    this.actions.hidden = isUnfinished;
  }
}

/** The notice under an answer that did not end normally, with a button to retry. */
export class Ending {
  element = el("div", { class: "ending", hidden: true });
  onRetry = () => {};
  #shown = null;
  #retry = el("button", { type: "button", class: "button", onclick: () => this.onRetry() }, "Retry");

  show(node, isWriting) {
    const [kind, text] = this.#of(node);
    this.#retry.disabled = isWriting;
    if (this.#shown === text) return;
    this.#shown = text;
    this.element.hidden = !text;
    this.element.className = `ending ${kind}`;
    if (kind === "failed") this.element.setAttribute("role", "alert");
    else this.element.removeAttribute("role");
    this.element.replaceChildren(...(text ? [el("span", {}, text), ...(kind === "length" ? [] : [this.#retry])] : []));
  }

  #of(node) {
    if (node.status === "failed") return ["failed", errorText(node.error)];
    if (node.status === "cut") return ["cut", CUT];
    if (node.status === "stopped") return ["cut", "Stopped."];
    if (node.status === "done" && !node.text) return ["cut", "The model has ended its answer without a text."];
    return ["", null];
  }
}

function errorText({ message, status, retryAfterS }) {
  const what = { 0: "No connection", 401: "A key is needed", 429: "Too much at once", 503: "The swarm cannot answer" }[status];
  const when = retryAfterS ? ` Try again in ${retryAfterS} s.` : "";
  return `${what ?? "The request was refused"}: ${message}${/[.!?]$/.test(message) ? "" : "."}${when}`;
}
