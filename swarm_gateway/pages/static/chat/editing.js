// Text areas: an editor in the place of an element, and the height of text areas.

import { el } from "../base.js";

/**
 * Put a form in the place of `element`, until the user submits or cancels.
 *
 * `submit` gets the text, if it `isValid` (by default: not empty); `close` is called before that, and on cancelling.
 * `sendsOnEnter`: Enter submits, Shift+Enter begins a line. `above`: an element to show above the text.
 */
export function editInPlace(
  element,
  text,
  { label, hint, button, submit, close, above = null, className = "", sendsOnEnter = false, isValid = (value) => value !== "" },
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
  const form = el("form", { class: "edit" }, above, area, el("div", { class: "edit-actions" }, ...buttons));
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

/** Make the area as high as its text; its style may limit this. */
export function fit(area) {
  area.style.setProperty("height", "auto");
  area.style.setProperty("height", `${area.scrollHeight + 2}px`);
}
