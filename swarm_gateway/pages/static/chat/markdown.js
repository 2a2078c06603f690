// Shows a model's text as elements. The text is untrusted: nothing in it may run, load, or look like the page.

import { el, iconButton, icon } from "../base.js";
import DOMPurify from "../vendor/dompurify.js";
import hljs from "../vendor/highlight.js";
import { Marked } from "../vendor/marked.js";

const MOST_HIGHLIGHTED = 30000; // most characters of a highlighted block of code
const CLEAN = {
  ALLOWED_TAGS: [
    ..."a p br hr strong em del code pre span blockquote ul ol li".split(" "),
    ..."h3 h4 h5 h6 table thead tbody tr th td".split(" "),
  ],
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)), // shown as it was written
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6); // higher levels are the page's own
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || "image")}</a>`, // nothing is loaded
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const language = hljs.getLanguage(lang?.match(/^[\w+#.-]+/)?.[0] ?? "") ? lang.match(/^[\w+#.-]+/)[0] : null;
      const isSmall = language && text.length <= MOST_HIGHLIGHTED;
      const code = isSmall ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escaped(text);
      return `<pre><code class="language-${language ?? "text"}">${code}</code></pre>`;
    },
  },
});

function escaped(text) {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}

/**
 * Show the text in the container, as Markdown. Unchanged blocks are kept, so that a stream costs little and a
 * selection stays.
 */
export function showMarkdown(container, text) {
  const tokens = marked.lexer(text);
  const blocks = tokens.filter((token) => token.type !== "space" && token.type !== "def");
  const numLinks = Object.keys(tokens.links).length;
  if (container.numLinks !== numLinks) container.replaceChildren(); // earlier blocks may use the new link definitions
  container.numLinks = numLinks;
  blocks.forEach((block, index) => {
    const old = container.children[index];
    if (old?.raw === block.raw) return;
    const made = el("div", { class: "block" }, rendered(block, tokens.links));
    made.raw = block.raw;
    if (old) old.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > blocks.length) container.lastChild.remove();
}

function rendered(block, links) {
  const fragment = DOMPurify.sanitize(marked.parser(Object.assign([block], { links })), CLEAN);
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) continue;
    link.target = "_blank";
    link.rel = "noopener noreferrer";
    link.title = link.href;
  }
  for (const table of fragment.querySelectorAll("table")) wrap(table, el("div", { class: "table", tabindex: "0" }));
  for (const pre of fragment.querySelectorAll("pre")) {
    pre.tabIndex = 0;
    const language = pre.firstChild.className.replace("language-", "");
    wrap(pre, el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", {}, language), copyButton("Copy code", () => pre.textContent))));
  }
  return fragment;
}

function wrap(element, wrapper) {
  element.replaceWith(wrapper);
  wrapper.append(element);
}

/** Return a button that copies the result of the function `text`. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const name = (await copied(text())) ? "check" : "close";
    button.replaceChildren(icon(name));
    button.setAttribute("aria-label", name === "check" ? "Copied" : "Copying is not allowed");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "visually-hidden" }); // the only way to copy without HTTPS
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}
