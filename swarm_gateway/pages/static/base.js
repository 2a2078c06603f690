// The functions that all pages share: making elements, calling the API (with a key if required), header and theme.

/** Return a new element. Children are elements or text, never HTML; `on…` are listeners, `style` sets properties. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, of] of Object.entries(value)) element.style.setProperty(name, of);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  check: "M5 12.5 10 17 19 7.5",
  close: "M6 6l12 12M18 6 6 18",
  copy: "M9 9h10v11H9zM5 15V4h10",
  dark: "M20 14.5A8 8 0 0 1 9.5 4a8 8 0 1 0 10.5 10.5z",
  down: "M6 9.5 12 15.5l6-6",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  key: "M15 13a4 4 0 1 0-3.9-3L4 17v3h3v-2h2v-2h2l1.3-1.3A4 4 0 0 0 15 13zM16 8.5h.01",
  keyboard: "M3 7h18v11H3zM7 11h.01M11 11h.01M15 11h.01M8 14.5h8",
  left: "M14.5 6 8.5 12l6 6",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M2 12h2M20 12h2M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  menu: "M4 7h16M4 12h16M4 17h16",
  picture: "M4 5h16v14H4zM4 16l5-5 4.5 4.5L16 13l4 4M15.5 9h.01",
  plus: "M12 5v14M5 12h14",
  retry: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4",
  right: "M9.5 6l6 6-6 6",
  send: "M12 19V5M6 11l6-6 6 6",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M13 7a2 2 0 1 0 4 0 2 2 0 1 0-4 0M7 17a2 2 0 1 0 4 0 2 2 0 1 0-4 0",
  stop: "M7 7h10v10H7z",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
};

/** Return an icon that screen readers ignore; see ICONS for names. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  const attributes = { viewBox: "0 0 24 24", class: "icon", fill: "none", stroke: "currentColor", "stroke-width": "1.8" };
  for (const [key, value] of Object.entries({ ...attributes, "aria-hidden": "true" })) svg.setAttribute(key, value);
  path.setAttribute("d", ICONS[name]);
  path.setAttribute("stroke-linecap", "round");
  path.setAttribute("stroke-linejoin", "round");
  svg.append(path);
  return svg;
}

export function iconButton(name, label, onclick, attributes = {}) {
  return el("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}

// ------------------------------------------------------------------ storage, which may be switched off

/** Return the value in `localStorage` or `sessionStorage`; null if there is no value or no storage. */
export function stored(storage, key) {
  try {
    return window[storage].getItem(key);
  } catch {
    return null;
  }
}

/** Store `value`; null removes the stored value. */
export function store(storage, key, value) {
  try {
    if (value === null) window[storage].removeItem(key);
    else window[storage].setItem(key, value);
  } catch {
    // without storage, the value is forgotten when the page is closed
  }
}

// ------------------------------------------------------------------ the API

const KEY = "swarm.api-key";
let apiKey = stored("sessionStorage", KEY) ?? stored("localStorage", KEY);
let asking = null; // the dialog that is open, as a promise

/** An error of the API. `status` is 0 if the API cannot be reached; `retryAfterS`: seconds, or null. */
export class ApiError extends Error {
  constructor(status, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** Fetch from this server's API; ask the user for a required key. Throws ApiError, or `options.signal`'s AbortError. */
export async function api(path, options = {}) {
  for (;;) {
    const key = apiKey;
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server cannot be reached.");
    }
    if (response.ok) return response;
    const error = await refusal(response);
    if (response.status !== 401) throw error;
    if (key === apiKey && !(await (asking ??= askForKey(key ? error.message : "")))) throw error;
  }
}

export async function apiJson(path, options) {
  return (await api(path, options)).json();
}

export function postJson(path, body, options = {}) {
  return api(path, { ...options, method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

/** Yield the events of a text/event-stream response, as `{event, data}`; data is text. */
export async function* serverEvents(response) {
  let rest = "";
  for await (const text of texts(response.body)) {
    const parts = (rest + text).replaceAll("\r\n", "\n").split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const found = { event: "message", data: [] };
      for (const line of part.split("\n")) {
        const [, field, value] = /^([^:]*)(?:: ?(.*))?$/s.exec(line);
        if (field === "data") found.data.push(value ?? "");
        else if (field === "event") found.event = value ?? "";
      }
      if (found.data.length) yield { event: found.event, data: found.data.join("\n") };
    }
  }
}

async function* texts(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The connection to the server was lost.");
      }
      if (part.done) return;
      yield decoder.decode(part.value, { stream: true });
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function refusal(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // the body is no OpenAI error; a proxy may have sent it
  }
  return new ApiError(response.status, message, Number.parseInt(response.headers.get("Retry-After"), 10) || null);
}

// ------------------------------------------------------------------ the key

/** Ask the user for a key; resolves to whether there is one now. */
async function askForKey(problem) {
  const input = el("input", { class: "input", id: "api-key", type: "password", autocomplete: "off", required: true, spellcheck: "false", "aria-describedby": "api-key-hint" });
  const keep = el("input", { type: "checkbox" });
  keep.checked = stored("localStorage", KEY) !== null;
  const answer = await ask(
    "API key",
    [
      el("p", { class: "muted", id: "api-key-hint" }, "This server asks for a key. Its operator can give you one."),
      problem ? el("p", { class: "error-text", role: "alert" }, `Refused: ${problem}`) : null,
      el("div", { class: "field" }, el("label", { for: "api-key" }, "Key"), input),
      el("label", { class: "check" }, keep, "Remember it on this device"),
    ],
    [
      ["Cancel", ""],
      ["Use key", "ok", "primary"],
    ],
  );
  asking = null;
  if (answer !== "ok" || !input.value.trim()) return false;
  apiKey = input.value.trim();
  store("sessionStorage", KEY, apiKey);
  store("localStorage", KEY, keep.checked ? apiKey : null);
  showKeyButton();
  return true;
}

async function forgetKey() {
  const answer = await ask(
    "API key",
    [el("p", { class: "muted" }, "This browser sends a key with all its requests to this server.")],
    [
      ["Cancel", ""],
      ["Forget the key", "ok", "danger"],
    ],
  );
  if (answer !== "ok") return;
  apiKey = null;
  store("sessionStorage", KEY, null);
  store("localStorage", KEY, null);
  showKeyButton();
}

/** Show a modal dialog. `actions`: [label, value, class] each; resolves to the chosen value, "" if it was closed. */
export function ask(title, content, actions) {
  const buttons = actions.map(([label, value, kind]) =>
    el("button", { class: `button ${kind ?? ""}`, value, ...(value ? {} : { formnovalidate: true }) }, label),
  );
  const form = el("form", { method: "dialog" }, el("h2", { id: "dialog-title" }, title), content, el("div", { class: "dialog-actions" }, buttons));
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
    event.preventDefault(); // the browser would press the first button, which cancels
    form.requestSubmit(buttons.at(-1));
  });
  const dialog = el("dialog", { class: "dialog", "aria-labelledby": "dialog-title" }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}

// ------------------------------------------------------------------ header

const keyButton = iconButton("key", "API key", forgetKey);
const themeButton = iconButton("dark", "Dark theme", switchTheme);

function showKeyButton() {
  keyButton.hidden = !apiKey;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function showTheme() {
  const label = isDark() ? "Light theme" : "Dark theme";
  themeButton.replaceChildren(icon(isDark() ? "light" : "dark"));
  themeButton.setAttribute("aria-label", label);
  themeButton.title = label;
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  store("localStorage", "swarm.theme", theme);
  showTheme();
}

/** Fill `<header class="site-header">`; `before` and `after` are the page's own controls. */
export function showHeader({ before = [], after = [] } = {}) {
  const links = [
    ["/", "Chat"],
    ["/monitor", "Monitor"],
  ].map(([href, name]) => el("a", { href, "aria-current": location.pathname === href ? "page" : null }, name));
  document.querySelector(".site-header").replaceChildren(
    ...before,
    el("a", { class: "brand", href: "/", "aria-label": "Swarm" }, el("img", { src: "/static/icon.svg", alt: "", width: "24", height: "24" }), el("span", {}, "Swarm")),
    el("nav", { class: "site-nav", "aria-label": "Pages" }, links),
    ...after,
    keyButton,
    themeButton,
  );
  showKeyButton();
  showTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
}
