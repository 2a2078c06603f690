// Which models there are, and the two choices at the top: the model, and whether to chat with it or let it go on.

import { apiJson, el } from "../base.js";

/** What this server serves; asks again whenever `refresh` is called. */
export class Models {
  names = [];
  error = null; // why they are not known
  #templates = new Map(); // promises of whether a model has a chat template; null: not known

  async refresh() {
    try {
      this.names = (await apiJson("/v1/models")).data.map((model) => model.id);
      this.error = null;
    } catch (error) {
      this.error = error;
    }
  }

  hasTemplate(name) {
    if (!this.#templates.has(name)) this.#templates.set(name, this.#askForTemplate(name));
    return this.#templates.get(name);
  }

  async #askForTemplate(name) {
    try {
      const found = (await apiJson(`/v1/models/${name.split("/").map(encodeURIComponent).join("/")}`)).chat_template;
      if (found === null) this.#templates.delete(name);
      return found;
    } catch {
      this.#templates.delete(name);
      return null;
    }
  }
}

/** Fills a `<select>`; a model that was chosen and is gone stays there, marked as such. */
export function showChoice(select, names, chosen) {
  const all = names.includes(chosen) || !chosen ? names : [chosen, ...names];
  const wanted = JSON.stringify([all, chosen, names.length]);
  if (select.dataset.shown === wanted) return;
  select.dataset.shown = wanted;
  const options = all.map((name) => el("option", { value: name }, names.includes(name) ? shown(name) : `${shown(name)} (not served now)`));
  select.replaceChildren(...(options.length ? options : [el("option", { value: "" }, "No models")]));
  select.value = chosen ?? "";
  select.disabled = !all.length;
}

/** An adapter as `model + adapter`. */
function shown(name) {
  const [model, adapter] = name.split(":");
  return adapter ? `${model} + ${adapter}` : model;
}
