// The store of conversations: this browser's IndexedDB, or nothing where that is missing.

const NAME = "swarm-chat";
const TABLE = "conversations";

export async function openStore() {
  try {
    return new Store(await opened());
  } catch {
    return new Store(null);
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("blocked"));
  });
}

class Store {
  #database;

  constructor(database) {
    this.#database = database;
  }

  /** Return whether conversations outlive the page. */
  get keeps() {
    return this.#database !== null;
  }

  async all() {
    if (!this.#database) return [];
    return done(this.#database.transaction(TABLE).objectStore(TABLE).getAll());
  }

  /** Write the conversation; resolves once this is done. */
  async put(conversation) {
    if (this.#database) await done(this.#table().put(conversation));
  }

  async remove(id) {
    if (this.#database) await done(this.#table().delete(id));
  }

  #table() {
    return this.#database.transaction(TABLE, "readwrite").objectStore(TABLE);
  }
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
