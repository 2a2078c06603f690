// Formats numbers, times and states as text, and updates lists.

import { el } from "../base.js";

export const NONE = "–";
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function count(value, digits = 0) {
  if (value === null || value === undefined) return NONE;
  for (const [size, unit] of UNITS) if (Math.abs(value) >= size * 9.995) return `${short(value / size)} ${unit}`;
  return value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toFixed(digits)));
}

function short(value) {
  return value >= 99.5 ? String(Math.round(value)) : value.toFixed(1);
}

/** Return tokens per second as text; numbers below 10 get one decimal. */
export function rate(value) {
  return count(value, value < 10 ? 1 : 0);
}

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const ms = seconds * 1000;
  return ms < 1 ? "<1 ms" : ms < 9999.5 ? `${Math.round(ms)} ms` : `${count(seconds)} s`;
}

export function percent(share) {
  return `${share > 0 && share < 0.01 ? "<1" : Math.round(share * 100)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** Return the time as text, with the day if it is not today. `time`: seconds since 1970. */
export function clock(time, { seconds = true } = {}) {
  const date = new Date(time * 1000);
  const hours = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(seconds ? { second: "2-digit" } : {}), hour12: false });
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? hours : `${date.toLocaleDateString([], { day: "numeric", month: "short" })} ${hours}`;
}

export function plural(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

export const STATES = {
  online: ["online", "good"],
  joining: ["joining", "busy"],
  draining: ["draining", "busy"],
  unreachable: ["not answering", "bad"],
  denied: ["access denied", "bad"],
  incompatible: ["other version", "bad"],
  other_revision: ["other revision", "bad"],
};

/** Return a server's state as [text, kind]; kind is good, busy or bad. */
export function stateOf(server) {
  if (server.state !== "unreachable" && server.next_start !== null) return [`moving to ${server.next_start}:${server.next_end}`, "busy"];
  return STATES[server.state] ?? [server.state, "bad"];
}

/** Make the children of `parent` match `items`, in this order; elements of items that were there before are kept. */
export function keep(parent, items, key, make, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let child = before.get(name);
    if (child) before.delete(name);
    else {
      child = make(item);
      child.dataset.key = name;
    }
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of before.values()) child.remove();
}

/** Set the text only if it differs, so that a selection stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function card(title, id, ...children) {
  return el("section", { class: "card", "aria-labelledby": id }, el("div", { class: "card-head" }, el("h2", { id }, title)), ...children);
}
