// Where the live page's data comes from. Websocket messages are hints that may be lost, doubled or late; the database is the
// truth. So: open the socket, buffer, fetch what is missing by REST, then apply the buffer. After a hole in the event
// numbers, and after each reconnection, fetch again.

import { getJson, getRows } from "./api.js";
import { openSocket } from "./socket.js";

const EVENTS_PER_PAGE = 500;

export class MigrationFeed {
  #url;
  #id;
  #handlers;
  #lastSeq;
  #buffer = null;
  #again = false;
  #socket = null;

  /**
   * @param {string} id of the job
   * @param {number} lastSeq number of the last event that the page shows already
   * @param {{onJob, onRounds, onRequests, onEvents, onState}} handlers; lists come in the shape of the REST API
   */
  constructor(id, lastSeq, handlers) {
    this.#id = id;
    this.#url = `/api/v1/migrations/${id}`;
    this.#lastSeq = lastSeq;
    this.#handlers = handlers;
  }

  start() {
    this.#socket = openSocket(`/ws/migrations/${this.#id}/`, {
      onOpen: () => this.refetch(),
      onMessage: (message) => this.#receive(message),
      onState: this.#handlers.onState,
    });
  }

  stop() {
    this.#socket?.close();
  }

  async refetch() {
    if (this.#buffer) {
      this.#again = true;
      return;
    }
    this.#buffer = [];
    let failed = false;
    try {
      do {
        this.#again = false;
        await this.#fetchEvents();
        const [job, rounds, requests] = await Promise.all([
          getJson(this.#url),
          getRows(`${this.#url}/rounds`),
          getRows(`${this.#url}/requests`),
        ]);
        this.#handlers.onRounds(rounds);
        this.#handlers.onRequests(requests);
        this.#handlers.onJob(job);
      } while (this.#again);
    } catch {
      failed = true;
    }
    const waiting = this.#buffer;
    this.#buffer = null;
    waiting.forEach((message) => this.#receive(message));
    if (failed) window.setTimeout(() => this.refetch(), 1500);
  }

  async #fetchEvents() {
    for (;;) {
      const page = await getRows(`${this.#url}/events?after=${this.#lastSeq}`);
      const fresh = page.filter((event) => event.seq > this.#lastSeq);
      if (!fresh.length) return;
      this.#lastSeq = fresh[fresh.length - 1].seq;
      this.#handlers.onEvents(fresh);
      if (page.length < EVENTS_PER_PAGE) return;
    }
  }

  #receive(message) {
    if (this.#buffer) {
      this.#buffer.push(message);
      return;
    }
    switch (message.type) {
      case "job":
        this.#handlers.onJob(message.job);
        break;
      case "round":
        this.#handlers.onRounds([message.round]);
        break;
      case "request":
        this.#handlers.onRequests([message.request]);
        break;
      case "event":
        if (message.event.seq <= this.#lastSeq) break;
        if (message.event.seq > this.#lastSeq + 1) {
          this.refetch();
          break;
        }
        this.#lastSeq = message.event.seq;
        this.#handlers.onEvents([message.event]);
        break;
    }
  }
}
