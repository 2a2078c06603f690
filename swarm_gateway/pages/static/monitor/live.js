// Reads the swarm from the API at each tick of the server, and retries after failures.

import { api, apiJson, ApiError, serverEvents } from "../base.js";

const SLOWLY_MS = 10_000; // between two reads of slow data
const MOST_WAIT_S = 30;
const MOST_EVENTS = 200;
const JSON_ONLY = { headers: { Accept: "application/json" } };

/**
 * The live view. It calls `show` with `{swarm, servers, models}`, `{contributions}` and `{events}` (newest last), and
 * `connection` with null, or with `{message, waitS, retry}` if there is none. If `waitS` is null, only `retry` ends
 * the wait.
 */
export class Live {
  constructor({ show, connection, slowly }) {
    this.show = show;
    this.connection = connection;
    this.slowly = slowly;
    this.events = [];
    this.lastId = null;
    this.slowAt = -Infinity;
    this.wake = () => {};
    document.addEventListener("visibilitychange", () => (document.hidden ? this.abort?.abort() : this.wake()));
  }

  async run() {
    for (let failures = 0; ; ) {
      if (document.hidden) await new Promise((resolve) => (this.wake = resolve));
      try {
        await this.follow(() => {
          failures = 0;
          this.connection(null);
        });
      } catch (error) {
        if (error.name === "AbortError") continue;
        await this.pause(error, Math.min(2 ** failures++, MOST_WAIT_S));
      }
    }
  }

  /** Follow the stream until it ends; the end is an error. */
  async follow(works) {
    this.abort = new AbortController();
    const options = { signal: this.abort.signal };
    await this.readEvents(options);
    const headers = { Accept: "text/event-stream", "Last-Event-ID": String(this.lastId) };
    for await (const { event, data } of serverEvents(await api("/api/v1/events", { ...options, headers }))) {
      if (event === "tick") {
        await this.read(options);
        works();
      } else this.add([JSON.parse(data)]);
    }
    throw new ApiError(0, "The connection to the server was lost.");
  }

  async read(options) {
    const isDue = performance.now() - this.slowAt > SLOWLY_MS;
    if (isDue) this.slowAt = performance.now();
    const paths = ["swarm", "servers", "models", ...(isDue ? ["contributions"] : [])];
    const [swarm, { servers }, { models }, contributions] = await Promise.all(paths.map((path) => apiJson(`/api/v1/${path}`, options)));
    this.show({ swarm, servers, models, ...contributions });
    if (isDue) this.slowly(options);
  }

  /** Read the past events; after a break, read the missed ones. */
  async readEvents(options) {
    const after = this.lastId === null ? "" : `&after=${this.lastId}`;
    const { last_id: lastId, events } = await apiJson(`/api/v1/events?limit=${MOST_EVENTS}${after}`, { ...options, ...JSON_ONLY });
    if (this.lastId !== null && lastId < this.lastId) {
      Object.assign(this, { events: [], lastId: null }); // the server has another history now
      return this.readEvents(options);
    }
    this.lastId = lastId;
    this.add(events);
  }

  add(events) {
    if (!events.length && this.events.length) return;
    this.events = [...this.events, ...events].slice(-MOST_EVENTS);
    this.lastId = Math.max(this.lastId ?? 0, ...events.map((event) => event.id));
    this.show({ events: this.events });
  }

  async pause(error, waitS) {
    const isRefused = error instanceof ApiError && [401, 403].includes(error.status);
    if (!(error instanceof ApiError)) console.error(error);
    let timer;
    await new Promise((resolve) => {
      this.wake = resolve;
      if (!isRefused) timer = setTimeout(resolve, waitS * 1000);
      this.connection({ message: error.message, waitS: isRefused ? null : waitS, retry: resolve });
    });
    clearTimeout(timer);
  }
}
