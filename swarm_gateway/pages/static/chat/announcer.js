// Announces the answer to screen readers by sentences: a region that changes with every token is no help.

const SENTENCE = /^[\s\S]*[.!?:\n](?=\s|$)/;

export class Announcer {
  #region;
  #node = null;
  #numSaid = 0; // characters

  constructor(region) {
    this.#region = region;
  }

  /** Announce the new sentences of an answer that has changed. */
  hear(node) {
    if (this.#node !== node || node.text.length < this.#numSaid) {
      this.#node = node;
      this.#numSaid = 0;
      this.#region.replaceChildren();
    }
    const rest = node.text.slice(this.#numSaid);
    const isOver = node.status !== "writing";
    const whole = isOver ? rest : (SENTENCE.exec(rest)?.[0] ?? "");
    if (whole.trim()) this.#say(whole);
    this.#numSaid += whole.length;
    if (isOver) this.#say(node.status === "done" ? "The answer is complete." : "The answer has stopped.");
  }

  #say(text) {
    const paragraph = document.createElement("p");
    paragraph.textContent = text;
    this.#region.append(paragraph);
    while (this.#region.children.length > 50) this.#region.firstChild.remove();
  }
}
