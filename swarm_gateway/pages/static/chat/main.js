// The chat page: its state, and its reactions to the user.

import { el, icon, iconButton, showHeader, store, stored } from "../base.js";
import { Announcer } from "./announcer.js";
import { answer } from "./answering.js";
import { ROOT, append, drop, lastNode, newConversation, picturesOf, reopened, shownNodes } from "./conversation.js";
import { Document } from "./document.js";
import { fit } from "./editing.js";
import { examplesFor } from "./examples.js";
import { Models, showChoice } from "./models.js";
import { askForName, askForOptions, confirmDelete, showKeys } from "./options.js";
import { Attachments } from "./pictures.js";
import { Sidebar, exportJson } from "./sidebar.js";
import { openStore } from "./store.js";
import { Thread } from "./thread.js";

const SAVE_EVERY_MS = 300;
const SAVE_PICTURES_EVERY_MS = 5000; // of conversations with pictures, each save of which writes megabytes
const LOOK_EVERY_MS = 500; // between checks of how long an answer has paused
const LEAVING_MS = 3000;
const CURRENT = "swarm.conversation";
const ASIDE = "swarm.aside"; // the newest messages at closing, whose ends the database may lack
const find = (id) => document.getElementById(id);

class Chat {
  #all = new Map(); // conversations, by id
  #current = newConversation();
  #running = new Map(); // the AbortController of each conversation, by id
  #models = new Models();
  #announcer = new Announcer(find("announcer"));
  #seeing = new Set(); // names of models that see
  #attachments = new Attachments(find("composer"), () => picturesOf(shownNodes(this.#current)), () => this.draw());
  #withChosenMode = null; // the conversation whose mode the user has chosen
  #view = null; // a Thread or a Document
  #unsaved = new Set();
  #writing = new Set(); // conversations that the database has not confirmed
  #isDrawn = true;
  #isLeaving = false;
  #store;

  constructor(kept) {
    this.#store = kept;
    this.sidebar = new Sidebar(find("conversations"), {
      open: (conversation) => this.open(conversation),
      rename: (conversation) => this.rename(conversation),
      remove: (conversation) => this.remove(conversation),
      export: exportJson,
    });
  }

  async load() {
    const kept = await this.#store.all();
    this.#takeBack(kept);
    kept.forEach(reopened);
    for (const conversation of kept) this.#all.set(conversation.id, conversation);
    const last = this.#all.get(stored("sessionStorage", CURRENT));
    const newest = kept.sort((a, b) => b.updated - a.updated)[0];
    this.open(last ?? newConversation(newest));
    find("not-kept").hidden = this.#store.keeps;
    await this.refreshModels();
  }

  get isRunning() {
    return this.#running.has(this.#current.id);
  }

  get current() {
    return this.#current;
  }

  // ---------------------------------------------------------------- conversations

  open(conversation) {
    this.#current = conversation;
    store("sessionStorage", CURRENT, conversation.id);
    this.#view = null;
    closeDrawer();
    this.#chooseModel();
    this.draw();
    toEnd();
    find("message").focus();
  }

  begin() {
    this.open(newConversation(this.#current));
  }

  async rename(conversation) {
    const name = await askForName(conversation.title);
    if (name === null) return;
    conversation.title = name;
    this.#saveNow(conversation);
    this.draw();
  }

  async remove(conversation) {
    if (!(await confirmDelete(conversation.title))) return;
    this.stop(conversation);
    this.#all.delete(conversation.id);
    this.#unsaved.delete(conversation);
    await this.#store.remove(conversation.id);
    if (conversation === this.#current) this.begin();
    else this.draw();
    find("new").focus();
  }

  async setOptions() {
    if (await askForOptions(this.#current)) this.#keep();
    this.draw();
  }

  // ---------------------------------------------------------------- models

  async refreshModels() {
    await this.#models.refresh();
    find("models-problem").hidden = this.#models.error === null;
    find("models-problem-text").textContent = this.#models.error?.message ?? "";
    this.#chooseModel();
    this.draw();
  }

  setModel(name) {
    this.#current.model = name;
    this.#withChosenMode = null;
    this.#keep();
    this.#chooseModel();
    this.draw();
  }

  setMode(mode) {
    this.#withChosenMode = this.#current;
    if (this.#current.mode === mode) return;
    this.#current.mode = mode;
    this.#view = null;
    this.#keep();
    this.draw();
  }

  /** Give a new conversation the first model, and the mode that suits the model unless the user has chosen one. */
  async #chooseModel() {
    const conversation = this.#current;
    conversation.model ??= this.#models.names[0] ?? null;
    const isNew = lastNode(conversation).id === ROOT;
    if (isNew && this.#models.names.length && !this.#models.names.includes(conversation.model)) conversation.model = this.#models.names[0];
    if (conversation.model === null || !this.#models.names.includes(conversation.model)) return;
    const { model } = conversation;
    const { hasTemplate, sees } = await this.#models.traits(model);
    if (sees) this.#seeing.add(model);
    if (conversation !== this.#current || conversation.model !== model) return;
    this.hasTemplate = hasTemplate;
    const isFree = lastNode(conversation).id === ROOT && conversation !== this.#withChosenMode;
    if (isFree && hasTemplate !== null) conversation.mode = hasTemplate ? "chat" : "complete";
    this.draw();
  }

  // ---------------------------------------------------------------- messages

  /** Send the text with the attached pictures; return whether there was something to send. */
  send(text) {
    const conversation = this.#current;
    if (this.isRunning || this.#attachments.isReading || !conversation.model) return false;
    const last = lastNode(conversation);
    const goesOn = conversation.mode === "complete" && last.id !== ROOT;
    const isSaid = text.trim() || this.#attachments.pictures.length;
    if (!isSaid && !goesOn) return false;
    const parted = goesOn && !/^\s/.test(text) && !last.text.endsWith("\n") ? `\n\n${text}` : text;
    this.#ask(isSaid ? append(conversation, last, "user", text.trim() && parted, this.#attachments.take()) : last);
    toEnd();
    return true;
  }

  edit(node, text, pictures) {
    if (this.isRunning) return;
    this.#ask(append(this.#current, this.#current.nodes[node.parent], "user", text, pictures));
    find("message").focus();
  }

  retry(node) {
    if (this.isRunning) return;
    const parent = this.#current.nodes[node.parent];
    if (!node.text) drop(this.#current, node); // an empty answer is no version to return to
    this.#ask(parent);
    find("message").focus();
  }

  turn(node, by) {
    if (this.isRunning) return;
    const parent = this.#current.nodes[node.parent];
    parent.shown = Math.min(Math.max(parent.shown + by, 0), parent.children.length - 1);
    this.#keep();
    this.draw();
  }

  stop(conversation = this.#current) {
    this.#running.get(conversation.id)?.abort();
  }

  editLast() {
    this.#view?.editLast(this.#current);
  }

  async #ask(parent) {
    const conversation = this.#current;
    conversation.mode ??= "chat";
    const node = append(conversation, parent, "assistant", "");
    const stopping = new AbortController();
    this.#running.set(conversation.id, stopping);
    this.#all.set(conversation.id, conversation);
    conversation.updated = Date.now();
    this.#saveNow(conversation);
    const answered = answer(conversation, node, stopping.signal, () => {
      if (node.status === "failed" && this.#isLeaving) node.status = "cut"; // a closing page aborts its requests
      if (node.status !== "writing") this.#running.delete(conversation.id);
      this.#save(conversation);
      if (conversation !== this.#current) return;
      this.#announcer.hear(node);
      this.drawSoon();
    });
    this.draw();
    await answered;
    this.#saveNow(conversation);
    this.draw();
  }

  // ---------------------------------------------------------------- saving and showing

  #keep() {
    if (this.#all.has(this.#current.id)) this.#saveNow(this.#current);
  }

  /** Save the conversation soon, not at once, because answers change with every token. */
  #save(conversation) {
    if (this.#unsaved.has(conversation)) return;
    this.#unsaved.add(conversation);
    const hasPictures = picturesOf(Object.values(conversation.nodes)).length > 0;
    setTimeout(() => this.#write(conversation), hasPictures ? SAVE_PICTURES_EVERY_MS : SAVE_EVERY_MS);
  }

  async #write(conversation) {
    if (!this.#unsaved.delete(conversation) || !this.#all.has(conversation.id)) return;
    this.#writing.add(conversation);
    try {
      await this.#store.put(conversation);
    } catch (error) {
      find("not-kept").hidden = false;
      console.error(error);
    }
    this.#writing.delete(conversation);
  }

  #saveNow(conversation) {
    this.#unsaved.add(conversation);
    this.#write(conversation);
  }

  /** Prepare for the page's end. If the page is still open after a while, it was not closed. */
  leave() {
    this.#isLeaving = true;
    setTimeout(() => (this.#isLeaving = false), LEAVING_MS);
    this.saveAll();
  }

  /** Save all. A closing page may lose database writes, so the newest messages also go to session storage. */
  saveAll() {
    const running = [...this.#running.keys()].map((id) => this.#all.get(id));
    const changing = new Set([...this.#unsaved, ...this.#writing, ...running]);
    for (const conversation of this.#unsaved) this.#write(conversation);
    const aside = [...changing].filter(Boolean).map((conversation) => [conversation.id, lastNode(conversation)]);
    store("sessionStorage", ASIDE, aside.length ? JSON.stringify(aside) : null);
  }

  #takeBack(kept) {
    for (const [id, node] of JSON.parse(stored("sessionStorage", ASIDE) ?? "[]")) {
      const conversation = kept.find((each) => each.id === id);
      const old = conversation?.nodes[node.id];
      if (!old || old.text?.length > node.text?.length) continue;
      conversation.nodes[node.id] = node;
      this.#save(conversation);
    }
    store("sessionStorage", ASIDE, null);
  }

  drawSoon() {
    if (!this.#isDrawn) return;
    this.#isDrawn = false;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.#isDrawn = true;
    const follows = isAtEnd();
    const conversation = this.#current;
    const isComplete = conversation.mode === "complete";
    const isNew = lastNode(conversation).id === ROOT;
    document.title = `${conversation.title ?? "Chat"} – Swarm`;
    showChoice(find("model"), this.#models.names, conversation.model);
    find(isComplete ? "mode-complete" : "mode-chat").checked = true;
    const clash = this.hasTemplate === false && !isComplete && this.#models.names.includes(conversation.model);
    find("template-hint").hidden = !clash;
    find("template-model").textContent = conversation.model ?? "";
    this.sidebar.show(this.#all.values(), conversation, (each) => this.#running.has(each.id));
    this.#showMessages(conversation, isComplete);
    this.#showStart(conversation, isComplete, isNew);
    this.#showComposer(isComplete, isNew);
    if (follows) toEnd();
    find("to-end").hidden = isNew || isAtEnd();
  }

  #showMessages(conversation, isComplete) {
    const Kind = isComplete ? Document : Thread;
    if (!(this.#view instanceof Kind)) {
      this.#view = new Kind(this);
      find("messages").replaceChildren(this.#view.element);
    }
    this.#view.show(conversation);
  }

  #showStart(conversation, isComplete, isNew) {
    find("start").hidden = !isNew;
    if (!isNew) return;
    find("start-title").textContent = isComplete ? "Begin a text, the swarm goes on" : "Ask the swarm";
    find("start-text").textContent = isComplete
      ? "This is a model that goes on with text. What you write is where it begins."
      : "Several machines answer together: each holds some of the model's blocks. The line under an answer shows which.";
    const examples = examplesFor(conversation.model, isComplete);
    if (find("examples").dataset.shown === JSON.stringify(examples)) return;
    find("examples").dataset.shown = JSON.stringify(examples);
    find("examples").replaceChildren(
      ...examples.map(([title, text]) =>
        el("button", { type: "button", class: "example", onclick: () => this.#useExample(text) }, el("strong", {}, title), el("span", { class: isComplete ? "mono" : "" }, text)),
      ),
    );
  }

  #useExample(text) {
    find("message").value = text;
    fit(find("message"));
    find("message").focus();
  }

  #showComposer(isComplete, isNew) {
    const message = find("message");
    const goesOn = isComplete && !isNew;
    message.placeholder = goesOn ? "Add some text, or go on" : isComplete ? "Begin a text" : "Write a message";
    find("message-label").textContent = isComplete ? "Text" : "Message";
    find("composer").classList.toggle("mono", isComplete);
    const isRunning = this.isRunning;
    find("stop").hidden = !isRunning;
    find("send").hidden = isRunning;
    this.#attachments.show(!isComplete && this.#seeing.has(this.#current.model));
    const isSaid = message.value.trim() || this.#attachments.pictures.length;
    find("send").disabled = !this.#current.model || this.#attachments.isReading || !(isSaid || goesOn);
    const label = goesOn && !message.value.trim() ? "Go on" : "Send";
    find("send").setAttribute("aria-label", label);
    find("send").title = label;
  }
}

// -------------------------------------------------------------------- scrolling

function isAtEnd() {
  const scroller = find("scroller");
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
}

function toEnd() {
  const scroller = find("scroller");
  scroller.scrollTop = scroller.scrollHeight;
}

// -------------------------------------------------------------------- the list of conversations: a drawer on phones

const narrow = matchMedia("(max-width: 820px)");
const menuButton = iconButton("menu", "Conversations", () => toggleDrawer(), { "aria-controls": "sidebar", "aria-expanded": "false" });

function isDrawerOpen() {
  return document.body.classList.contains(narrow.matches ? "drawer-open" : "sidebar-open");
}

function toggleDrawer() {
  document.body.classList.toggle(narrow.matches ? "drawer-open" : "sidebar-open");
  showDrawer();
  if (narrow.matches && isDrawerOpen()) find("new").focus();
}

function closeDrawer() {
  if (!document.body.classList.contains("drawer-open")) return;
  document.body.classList.remove("drawer-open");
  showDrawer();
  menuButton.focus();
}

function showDrawer() {
  if (!narrow.matches) document.body.classList.remove("drawer-open");
  const isOpen = isDrawerOpen();
  menuButton.setAttribute("aria-expanded", String(isOpen));
  find("sidebar").inert = !isOpen;
  find("chat").inert = narrow.matches && isOpen;
}

// -------------------------------------------------------------------- start

function send(chat) {
  const message = find("message");
  if (!chat.send(message.value)) return;
  message.value = "";
  fit(message);
  chat.draw();
}

function listenToKeys(chat) {
  find("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(chat);
    } else if (event.key === "ArrowUp" && !find("message").value) {
      event.preventDefault();
      chat.editLast();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const control = event.ctrlKey || event.metaKey;
    if (event.key === "Escape") {
      if (document.body.classList.contains("drawer-open")) closeDrawer();
      else chat.stop();
    } else if (control && event.shiftKey && event.key.toLowerCase() === "o") chat.begin();
    else if (control && !event.shiftKey && event.key.toLowerCase() === "b") toggleDrawer();
    else if (control && event.key === "/") showKeys();
    else return;
    event.preventDefault();
  });
}

async function main() {
  showHeader({ before: [menuButton], after: [iconButton("keyboard", "Keyboard shortcuts", showKeys)] });
  for (const [id, name] of [["new", "plus"], ["options", "settings"], ["send", "send"], ["stop", "stop"], ["to-end", "down"]]) find(id).prepend(icon(name));
  document.body.classList.toggle("sidebar-open", true);
  showDrawer();
  narrow.addEventListener("change", showDrawer);
  const chat = new Chat(await openStore());
  find("new").addEventListener("click", () => chat.begin());
  find("options").addEventListener("click", () => chat.setOptions());
  find("model").addEventListener("change", (event) => chat.setModel(event.target.value));
  find("mode-chat").addEventListener("click", () => chat.setMode("chat"));
  find("mode-complete").addEventListener("click", () => chat.setMode("complete"));
  find("to-complete").addEventListener("click", () => chat.setMode("complete"));
  find("models-retry").addEventListener("click", () => chat.refreshModels());
  find("stop").addEventListener("click", () => chat.stop());
  find("to-end").addEventListener("click", toEnd);
  find("backdrop").addEventListener("click", closeDrawer);
  find("scroller").addEventListener("scroll", () => chat.drawSoon(), { passive: true });
  find("message").addEventListener("input", () => {
    fit(find("message"));
    chat.draw();
  });
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(chat);
  });
  listenToKeys(chat);
  for (const name of ["beforeunload", "pagehide"]) addEventListener(name, () => chat.leave());
  document.addEventListener("visibilitychange", () => (document.hidden ? chat.saveAll() : chat.refreshModels()));
  setInterval(() => chat.isRunning && chat.draw(), LOOK_EVERY_MS);
  await chat.load();
}

main();
