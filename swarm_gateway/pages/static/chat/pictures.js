// Pictures in a user's messages. Each is a part of OpenAI's API, {type: "image_url", image_url: {url}}, with a data URL.

import { ask, el, iconButton } from "../base.js";

const MOST_PICTURES = 32; // of one request, as the API says
const MOST_CHARACTERS = 7.5e6; // of the pictures of one request: the API takes 8 MiB in all
const MOST_PIXELS = 2048; // on a side
const MOST_BYTES = 1e6; // of a file that is sent as it is
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // which the API takes

/** Return the file's picture, made smaller if it is large. Throws if the file is no picture. */
async function pictureIn(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MOST_PIXELS / Math.max(bitmap.width, bitmap.height));
  const isFine = scale === 1 && file.size <= MOST_BYTES && TYPES.includes(file.type);
  const url = isFine ? await dataUrl(file) : jpegUrl(bitmap, scale);
  bitmap.close();
  return { type: "image_url", image_url: { url } };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function jpegUrl(bitmap, scale) {
  const [width, height] = [bitmap.width, bitmap.height].map((pixels) => Math.max(1, Math.round(pixels * scale)));
  const canvas = el("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", 0.85);
}

function lengthOf(pictures) {
  return pictures.reduce((sum, picture) => sum + picture.image_url.url.length, 0);
}

function counted(number) {
  return `${number} ${number === 1 ? "picture" : "pictures"}`;
}

/** Return a button for each picture, which shows it larger. */
export function pictureButtons(pictures) {
  return pictures.map(({ image_url: { url } }, index) => {
    const name = `Picture ${index + 1}`;
    const show = () => ask(name, [el("img", { class: "large-picture", src: url, alt: name })], [["Close", ""]]);
    return el("button", { type: "button", class: "picture", "aria-label": name, title: "Show it larger", onclick: show }, el("img", { src: url, alt: "", draggable: "false" }));
  });
}

/** Thumbnails within a form, with a button each that removes one of the `pictures`; `removed` is called after that. */
export class Thumbnails {
  element = el("ul", { class: "thumbnails", "aria-label": "Attached pictures" });
  pictures;
  #removed;
  #shown = null;

  constructor(pictures, removed = () => this.show()) {
    this.pictures = pictures;
    this.#removed = removed;
    this.show();
  }

  show() {
    this.element.hidden = !this.pictures.length;
    if (this.#shown === this.pictures) return;
    this.#shown = this.pictures;
    this.element.replaceChildren(
      ...this.pictures.map((picture, index) => {
        const image = el("img", { src: picture.image_url.url, alt: `Picture ${index + 1}`, draggable: "false" });
        return el("li", {}, image, iconButton("close", `Remove picture ${index + 1}`, () => this.#remove(index)));
      }),
    );
  }

  #remove(index) {
    this.pictures = this.pictures.filter((_, at) => at !== index);
    this.#removed();
    const buttons = this.element.querySelectorAll("button");
    (buttons[index] ?? buttons[index - 1] ?? this.element.closest("form").querySelector("textarea")).focus();
  }
}

/**
 * The pictures attached to the message in `form`: chosen, pasted, or dropped on the page. `earlier` returns the pictures
 * that the request has besides; `changed` is called after changes, and should call `show`.
 */
export class Attachments {
  #form;
  #earlier;
  #changed;
  #thumbnails = new Thumbnails([], () => this.#set(this.#thumbnails.pictures));
  #problem = el("p", { class: "small error-text", role: "alert", hidden: true });
  #status = el("span", { class: "visually-hidden", role: "status" });
  #input = el("input", { type: "file", accept: TYPES.join(), multiple: true, hidden: true });
  #button = iconButton("picture", "Attach pictures", () => this.#input.click(), { id: "attach", hidden: true });
  #numReading = 0; // of `add`
  #isOffered = false;

  constructor(form, earlier, changed) {
    this.#form = form;
    this.#earlier = earlier;
    this.#changed = changed;
    form.prepend(this.#thumbnails.element, this.#problem, this.#status, this.#button, this.#input);
    this.#input.addEventListener("change", () => {
      this.add([...this.#input.files]);
      this.#input.value = ""; // so that the same file can be chosen again
    });
    document.addEventListener("paste", (event) => this.#paste(event));
    document.addEventListener("dragover", (event) => this.#drag(event));
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) form.classList.remove("dropping"); // the page was left, not an element on it
    });
    document.addEventListener("drop", (event) => this.#drop(event));
  }

  get isReading() {
    return this.#numReading > 0;
  }

  /** The attached pictures, which wait where pictures are not offered. */
  get pictures() {
    return this.#isOffered ? this.#thumbnails.pictures : [];
  }

  /** Return the pictures, and forget them. */
  take() {
    const taken = this.pictures;
    if (this.#isOffered) this.#set([]);
    return taken;
  }

  show(isOffered) {
    this.#isOffered = isOffered;
    this.#button.hidden = !isOffered;
    this.#thumbnails.show();
    if (!isOffered) this.#thumbnails.element.hidden = true;
    this.#problem.hidden = !isOffered || !this.#problem.textContent;
  }

  /** Attach the pictures in these files, as far as a request has room for them; say what is left out. */
  async add(files) {
    const unreadable = [];
    let numLeft = 0;
    this.#numReading += 1;
    this.#changed();
    for (const file of files) {
      try {
        const picture = this.#hasRoom([]) ? await pictureIn(file) : null;
        if (picture && this.#hasRoom([picture])) this.#thumbnails.pictures = [...this.#thumbnails.pictures, picture];
        else numLeft += 1;
      } catch {
        unreadable.push(`“${file.name}”`);
      }
    }
    this.#numReading -= 1;
    const problems = [];
    if (unreadable.length) problems.push(`No picture that can be read: ${unreadable.join(", ")}.`);
    if (numLeft) problems.push(`${counted(numLeft)} left out: a conversation has room for ${MOST_PICTURES}, and for 8 MB in all.`);
    this.#set(this.#thumbnails.pictures, problems.join(" "));
  }

  #set(pictures, problem = "") {
    this.#thumbnails.pictures = pictures;
    this.#problem.textContent = problem;
    this.#status.textContent = pictures.length ? `${counted(pictures.length)} attached` : "";
    this.#changed();
  }

  #hasRoom(more) {
    const all = [...this.#earlier(), ...this.#thumbnails.pictures];
    return all.length < MOST_PICTURES && lengthOf(all) + lengthOf(more) <= MOST_CHARACTERS;
  }

  #takes(event) {
    return this.#isOffered && !document.querySelector("dialog[open]") && !event.target.closest?.(".edit");
  }

  #paste(event) {
    const { files, types } = event.clipboardData;
    const isText = types.includes("text/plain") && types.includes("text/html"); // office programs add its picture
    if (!files.length || isText || !this.#takes(event)) return;
    event.preventDefault();
    this.add([...files]);
  }

  #drag(event) {
    if (!event.dataTransfer.types.includes("Files") || !this.#takes(event)) return;
    event.preventDefault(); // else the browser would open what is dropped
    event.dataTransfer.dropEffect = "copy";
    this.#form.classList.add("dropping");
  }

  #drop(event) {
    this.#form.classList.remove("dropping");
    if (!event.dataTransfer.files.length || !this.#takes(event)) return;
    event.preventDefault();
    this.add([...event.dataTransfer.files]);
  }
}
