// A conversation with a model that only continues text: one document, in which the model's parts are marked.

import { el, iconButton } from "../base.js";
import { ROOT, lastNode, shownNodes } from "./conversation.js";
import { editInPlace } from "./editing.js";
import { copyButton } from "./markdown.js";
import { ServerLine } from "./servers.js";
import { Ending, Versions } from "./thread.js";

/** The document. `act`: as for Thread; editing replaces the first node with all text. */
export class Document {
  #act;
  #text = el("div", { class: "document-text" });
  #parts = new Map(); // keys: ids of messages
  #foot = el("div", { class: "document-foot" });
  #last = null; // {node, ending, line} of the newest answer
  #nodes = [];
  #editButton = iconButton("edit", "Edit the text", () => this.edit());
  #retryButton;
  #versions = el("span", { class: "all-versions" });
  #actions;

  constructor(act) {
    this.#act = act;
    this.#retryButton = iconButton("retry", "Retry", () => act.retry(this.#nodes.at(-1)));
    this.#actions = el("div", { class: "actions" }, this.#versions, copyButton("Copy the text", () => this.#whole), this.#editButton, this.#retryButton);
    this.element = el("article", { class: "document", "aria-label": "Text" }, this.#text, this.#foot, this.#actions);
  }

  get #whole() {
    return this.#nodes.map((node) => node.text).join("");
  }

  show(conversation) {
    this.#nodes = shownNodes(conversation);
    const parts = this.#nodes.map((node) => this.#partOf(node));
    if (parts.length !== this.#text.children.length || parts.some((part, index) => part !== this.#text.children[index]))
      this.#text.replaceChildren(...parts);
    const node = lastNode(conversation);
    this.element.hidden = node.id === ROOT;
    if (node.id === ROOT) return;
    const isAnswer = node.role === "assistant";
    const isWriting = node.status === "writing";
    this.element.setAttribute("aria-busy", String(isWriting));
    this.#text.classList.toggle("writing", isWriting);
    if (isAnswer) this.#showFoot(node);
    else this.#foot.replaceChildren();
    this.#showVersions(conversation);
    this.#retryButton.hidden = !isAnswer;
    this.#actions.hidden = isWriting;
  }

  #partOf(node) {
    if (!this.#parts.has(node.id)) this.#parts.set(node.id, el(node.role === "user" ? "span" : "ins", {}));
    const part = this.#parts.get(node.id);
    if (part.textContent !== node.text) part.textContent = node.text;
    return part;
  }

  /** Show the version controls of every part with several versions, edited or retried. */
  #showVersions(conversation) {
    const several = this.#nodes.filter((node) => conversation.nodes[node.parent].children.length > 1);
    while (this.#versions.children.length > several.length) this.#versions.lastChild.remove();
    several.forEach((node, index) => {
      if (!this.#versions.children[index]) {
        const made = new Versions(this.#act);
        made.element.view = made;
        this.#versions.append(made.element);
      }
      this.#versions.children[index].view.show(node, conversation);
    });
  }

  #showFoot(node) {
    if (this.#last?.node !== node || !this.#foot.hasChildNodes()) {
      this.#last = { node, ending: new Ending(), line: new ServerLine(node.id) };
      this.#last.ending.onRetry = () => this.#act.retry(node);
      this.#foot.replaceChildren(this.#last.ending.element, this.#last.line.element);
    }
    this.#last.ending.show(node, node.status === "writing");
    this.#last.line.show(node);
  }

  editLast() {
    if (this.#nodes.length) this.edit();
  }

  edit() {
    this.#actions.hidden = true;
    editInPlace(this.#text, this.#whole, {
      label: "Edit the text",
      hint: "The text as it was stays in the version before.",
      button: "Go on from here",
      className: "document-edit",
      isValid: (text) => text !== "" && !this.#act.isRunning,
      submit: (text) => this.#act.edit(this.#nodes[0], text),
      close: () => {
        this.#actions.hidden = false;
        this.#editButton.focus();
      },
    });
  }
}
