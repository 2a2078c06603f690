// Text areas: one that stands in the place of what it edits, and their height.

import { el } from "../base.js";

/**
 * Puts a form in the place of `element`, until it is submitted or given up.
 *
 * `submit` gets the text, if it `isValid` (by default: not empty); `close` is called before that, and on giving up.
 * `sendsOnEnter`: Enter submits, Shift+Enter begins a line.
 */
export function editInPlace(
  element,
  text,
  { label, hint, button, submit, close, className = "", sendsOnEnter = false, isValid = (value) => value !== "" },
) {
  const area = el("textarea", { class: `input ${className}`.trim(), "aria-label": label, rows: "3" });
  area.value = text;
  const leave = () => {
    form.replaceWith(element);
    close();
  };
  const buttons = [
    el("span", { class: "muted" }, hint),
    el("button", { type: "button", class: "button", onclick: leave }, "Cancel"),
    el("button", { class: "button primary" }, button),
  ];
  const form = el("form", { class: "edit" }, area, el("div", { class: "edit-actions" }, ...buttons));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const value = area.value;
    if (!isValid(value)) return;
    leave();
    submit(value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      leave();
    } else if (sendsOnEnter && event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  element.replaceWith(form);
  fit(area);
  area.addEventListener("input", () => fit(area));
  area.focus();
}

/** As high as its text, which its style may limit. */
export function fit(area) {
  area.style.setProperty("height", "auto");
  area.style.setProperty("height", `${area.scrollHeight + 2}px`);
}
