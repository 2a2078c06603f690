// The list of models, and the choice of a model at the top of the page.

import { apiJson, el } from "../base.js";

/** The models that this server offers; `refresh` reads them again. */
export class Models {
  names = [];
  error = null; // the reason why the names are unknown
  #traits = new Map(); // promises, by name

  async refresh() {
    try {
      this.names = (await apiJson("/v1/models")).data.map((model) => model.id);
      this.error = null;
    } catch (error) {
      this.error = error;
    }
  }

  /** Resolve to whether the model `hasTemplate` for chats (null: not known), and whether it `sees`. */
  traits(name) {
    if (!this.#traits.has(name)) this.#traits.set(name, this.#askForTraits(name));
    return this.#traits.get(name);
  }

  async #askForTraits(name) {
    let found = { chat_template: null };
    try {
      found = await apiJson(`/v1/models/${name.split("/").map(encodeURIComponent).join("/")}`);
    } catch {
      // as if the server did not know yet
    }
    if (found.chat_template === null) this.#traits.delete(name);
    return { hasTemplate: found.chat_template, sees: found.capabilities?.includes("vision") ?? false };
  }
}

/** Fill a `<select>`; a chosen model that is gone stays in the list, marked as not served. */
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

/** Return the name to show: for an adapter `model + adapter`. */
function shown(name) {
  const [model, adapter] = name.split(":");
  return adapter ? `${model} + ${adapter}` : model;
}
