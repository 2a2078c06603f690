// A conversation: a tree of messages, of which one path from the root is shown. Uses neither the page nor the network.
//
// A node is {id, parent, role, text, children, shown}: `children` are ids, `shown` the index of the child on the path.
// A user's message may have `pictures` (see `pictures.js`). An answer also has `status` (writing, done, stopped, failed,
// cut) and the fields that `answering.js` sets.

export const ROOT = "root";

/** Return a new conversation. `like`: a conversation whose model, mode and sampling are copied. */
export function newConversation(like = null) {
  return {
    id: crypto.randomUUID?.() ?? randomId(),
    title: null,
    created: Date.now(),
    updated: Date.now(),
    model: like?.model ?? null,
    mode: like?.mode ?? null, // "chat" or "complete"; null: chosen by the model's abilities
    system: "",
    sampling: { ...like?.sampling },
    nodes: { [ROOT]: { id: ROOT, parent: null, children: [], shown: 0 } },
  };
}

/** Return a random id, because `crypto.randomUUID` exists only over HTTPS and on this machine. */
function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Return the nodes that are shown, first message first. */
export function shownNodes(conversation) {
  const found = [];
  for (let node = conversation.nodes[ROOT]; node.children.length; ) {
    node = conversation.nodes[node.children[node.shown]];
    found.push(node);
  }
  return found;
}

/** Return the nodes from the first message to this one. */
export function wayTo(conversation, node) {
  const found = [];
  for (let at = node; at.id !== ROOT; at = conversation.nodes[at.parent]) found.unshift(at);
  return found;
}

export function lastNode(conversation) {
  return shownNodes(conversation).at(-1) ?? conversation.nodes[ROOT];
}

/** Return whether an answer is being written: until its end, no question is sent and no other version is shown. */
export function isWriting(conversation) {
  return lastNode(conversation).status === "writing";
}

/** Add a new message after `parent`, show it, and return it. */
export function append(conversation, parent, role, text, pictures = []) {
  const node = { id: randomId(), parent: parent.id, role, text, children: [], shown: 0 };
  if (pictures.length) node.pictures = pictures;
  conversation.nodes[node.id] = node;
  parent.shown = parent.children.push(node.id) - 1;
  if (conversation.title === null && role === "user") conversation.title = titleOf(text || "Pictures");
  return node;
}

/** Remove a message and all messages after it. */
export function drop(conversation, node) {
  const parent = conversation.nodes[node.parent];
  for (const child of node.children) drop(conversation, conversation.nodes[child]);
  parent.children = parent.children.filter((id) => id !== node.id);
  parent.shown = Math.max(0, Math.min(parent.shown, parent.children.length - 1));
  delete conversation.nodes[node.id];
}

function titleOf(text) {
  const line = text.trim().split("\n")[0].trim();
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "Untitled";
}

/** Return the API's `messages` for an answer after `parent`. The turns alternate, as some templates require. */
export function messagesFor(conversation, parent) {
  const turns = [];
  for (const { role, text, pictures = [] } of wayTo(conversation, parent)) {
    if (!text && !pictures.length) continue; // an answer that failed at once
    if (turns.at(-1)?.role !== role) turns.push({ role, texts: [], pictures: [] });
    turns.at(-1).pictures.push(...pictures);
    if (text) turns.at(-1).texts.push(text);
  }
  const messages = turns.map(({ role, texts, pictures }) => {
    const text = texts.join(role === "user" ? "\n\n" : "");
    return { role, content: pictures.length ? [...pictures, ...(text ? [{ type: "text", text }] : [])] : text };
  });
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...messages] : messages;
}

/** Return the pictures of these messages. */
export function picturesOf(nodes) {
  return nodes.flatMap((node) => node.pictures ?? []);
}

/** Return the API's `prompt`: all text up to `parent`. */
export function promptFor(conversation, parent) {
  return wayTo(conversation, parent)
    .map((node) => node.text)
    .join("");
}

/** Mark answers as cut that were being written when the page was closed; return the conversation. */
export function reopened(conversation) {
  for (const node of Object.values(conversation.nodes)) if (node.status === "writing") node.status = "cut";
  return conversation;
}
