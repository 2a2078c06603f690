// The dialogs: system prompt and sampling, renaming and deletion of a conversation, and keyboard shortcuts.

import { ask, el } from "../base.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, hint: "0 takes the likeliest token." },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, hint: "Takes only the likeliest tokens, whose probabilities add up to this." },
  { name: "max_tokens", label: "Most tokens", min: 1, max: 1000000, step: 1, hint: "A longer answer is cut off." },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, hint: "The same seed gives the same answer." },
];
const KEYS = [
  [["Enter"], "Send"],
  [["Shift", "Enter"], "New line"],
  [["Esc"], "Stop the answer, or close what is open"],
  [["↑"], "In an empty field: edit the last message"],
  [["Ctrl", "Shift", "O"], "New conversation"],
  [["Ctrl", "B"], "Show or hide conversations"],
  [["Ctrl", "/"], "This list"],
];

/** Ask for options; change the conversation, and resolve to whether it was changed. */
export async function askForOptions(conversation) {
  const isChat = conversation.mode === "chat";
  const system = el("textarea", { class: "input", id: "system-prompt", rows: "5", "aria-describedby": "system-hint" });
  system.value = conversation.system;
  const inputs = NUMBERS.map((number) => numberInput(number, conversation.sampling[number.name]));
  const answer = await ask(
    "Options of this conversation",
    [
      el(
        "div",
        { class: "field" },
        el("label", { for: "system-prompt" }, "System prompt"),
        system,
        el("span", { class: "hint", id: "system-hint" }, isChat ? "What the model keeps in mind in all its answers." : "Only used in Chat."),
      ),
      el("div", { class: "numbers" }, NUMBERS.map((number, index) => numberField(number, inputs[index]))),
    ],
    [
      ["Cancel", ""],
      ["Apply", "ok", "primary"],
    ],
  );
  if (answer !== "ok") return false;
  conversation.system = system.value;
  NUMBERS.forEach(({ name }, index) => {
    conversation.sampling[name] = inputs[index].value === "" ? null : inputs[index].valueAsNumber;
  });
  return true;
}

function numberInput({ name, min, max, step }, value) {
  const input = el("input", { class: "input", type: "number", id: `option-${name}`, min, max, step: step < 1 ? "any" : step, placeholder: "default", "aria-describedby": `hint-${name}` });
  if (value !== null && value !== undefined) input.value = value;
  return input;
}

function numberField({ name, label, hint }, input) {
  return el("div", { class: "field" }, el("label", { for: input.id }, label), input, el("span", { class: "hint", id: `hint-${name}` }, hint));
}

/** Ask for a name; resolves to the new name, or null. */
export async function askForName(title) {
  const input = el("input", { class: "input", id: "conversation-name", required: true, maxlength: "120" });
  input.value = title;
  const field = el("div", { class: "field" }, el("label", { for: "conversation-name" }, "Name"), input);
  const answer = await ask(
    "Rename conversation",
    [field],
    [
      ["Cancel", ""],
      ["Rename", "ok", "primary"],
    ],
  );
  return answer === "ok" ? input.value.trim() || null : null;
}

export async function confirmDelete(title) {
  const answer = await ask(
    "Delete conversation?",
    [el("p", {}, `“${title}” is only in this browser. It cannot be brought back.`)],
    [
      ["Cancel", ""],
      ["Delete", "ok", "danger"],
    ],
  );
  return answer === "ok";
}

export async function showKeys() {
  const rows = KEYS.map(([keys, what]) => el("tr", {}, el("td", {}, what), el("td", {}, keys.map((key) => el("kbd", {}, key)))));
  await ask("Keyboard", [el("table", { class: "keys" }, el("tbody", {}, rows))], [["Close", ""]]);
}
