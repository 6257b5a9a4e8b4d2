// Streams chats through the proxy and shows what a client feels while a migration runs.

import { getJson } from "./api.js";
import { streamChat } from "./chat-stream.js";
import { count, milliseconds, percentile, seconds, times } from "./format.js";
import { GapChart } from "./gap-chart.js";
import { badge } from "./page.js";

const LOOKUP_MS = 1000;

const form = document.querySelector("#chat");
const streamsList = document.querySelector("#streams");
const emptyState = document.querySelector("#no-streams");
const template = document.querySelector("#stream-template");
const status = document.querySelector("#playground-status");
const stopButton = form.querySelector("[data-action=stop]");
const live = new Set();

class StreamCard {
  constructor(number, model, prompt) {
    this.element = template.content.firstElementChild.cloneNode(true);
    this.text = this.part("text");
    this.chart = new GapChart(this.element.querySelector("canvas"));
    this.abort = new AbortController();
    this.tokens = 0;
    this.streamId = null;
    this.answerId = null;
    this.instance = null;
    this.seenUpTo = 0;
    this.lastAt = null;
    this.startedAt = performance.now();
    this.part("title").textContent = `Stream ${number}`;
    this.part("prompt").textContent = prompt;
    this.model = model;
    this.setState("waiting", "busy");
  }

  part(name) {
    return this.element.querySelector(`[data-part=${name}]`);
  }

  setState(word, tone) {
    this.part("state").replaceChildren(badge(word, tone));
  }

  async run(body) {
    live.add(this);
    try {
      const { finishReason, usage } = await streamChat(body, {
        signal: this.abort.signal,
        onStart: (streamId) => {
          this.streamId = streamId;
          this.setState("streaming", "busy");
        },
        onId: (id) => (this.answerId = id),
        onTokens: (text, tokens) => this.take(text, tokens),
      });
      if (usage) this.tokens = usage.completion_tokens;
      this.setState(finishReason === "length" ? "finished (length)" : "finished", "ok");
    } catch (error) {
      if (error.name === "AbortError") {
        this.setState("stopped", "muted");
      } else {
        this.setState("failed", "error");
        const message = this.part("error");
        message.textContent = error.message;
        message.hidden = false;
      }
    } finally {
      live.delete(this);
      this.showNumbers();
      update();
    }
  }

  take(text, tokens) {
    const now = performance.now();
    if (this.lastAt === null) this.firstAt = now;
    else if (tokens) this.chart.add(now - this.lastAt);
    if (tokens) this.lastAt = now;
    this.tokens += tokens;
    const atEnd = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 8;
    this.text.append(text);
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
    this.showNumbers();
  }

  showNumbers() {
    const gaps = this.chart.gaps;
    const median = percentile(gaps, 0.5);
    const longest = gaps.length ? gaps.reduce((a, b) => Math.max(a, b)) : null;
    this.part("tokens").textContent = count(this.tokens);
    this.part("first").textContent = this.lastAt === null ? "–" : seconds((this.firstAt - this.startedAt) / 1000);
    const elapsed = this.lastAt === null ? 0 : this.lastAt - this.firstAt;
    this.part("rate").textContent = elapsed > 0 ? `${((1000 * (this.tokens - 1)) / elapsed).toFixed(1)}/s` : "–";
    this.part("median").textContent = milliseconds(median);
    this.part("longest").textContent = longest === null ? "–" : `${milliseconds(longest)} (${times(longest / Math.max(median, 0.1))})`;
  }

  /** The proxy names the stream in a header; without it, the id of the answer contains the name. */
  isAnswerOf(streamId) {
    return this.streamId === streamId || (!this.streamId && Boolean(this.answerId?.includes(streamId)));
  }

  /** Takes note of where the proxy says this stream runs. */
  placed(instance) {
    if (this.instance && this.instance !== instance) {
      const { index, gapMs } = this.chart.markMove(this.seenUpTo);
      const line = document.createElement("li");
      line.append(badge("moved", "info"), ` ${this.instance} → ${instance}, at about token ${count(index + 1)}, after ${milliseconds(gapMs)}`);
      this.part("moves").append(line);
    }
    this.instance = instance;
    this.seenUpTo = Math.max(0, this.chart.length - 1);
    this.part("instance").textContent = instance;
  }
}

async function loadModels() {
  const select = form.elements.model;
  try {
    const { data } = await getJson("/v1/models");
    select.replaceChildren(...data.map((model) => new Option(model.id, model.id)));
    if (!data.length) throw new Error("No instance is active, so there is no model to talk to.");
    for (const button of form.querySelectorAll("button[name=streams]")) button.disabled = false;
    status.textContent = "";
  } catch (error) {
    select.replaceChildren(new Option("no model", ""));
    status.textContent = error.message;
    window.setTimeout(loadModels, 3000);
  }
}

async function lookUpInstances() {
  if (!live.size) return;
  const { streams } = await getJson(form.dataset.streamsUrl);
  for (const card of live) {
    const stream = streams.find((candidate) => card.isAnswerOf(candidate.stream_id));
    if (stream) card.placed(stream.instance);
  }
}

function update() {
  stopButton.disabled = live.size === 0;
  emptyState.hidden = streamsList.children.length > 0;
}

let started = 0;

function start(howMany) {
  const base = {
    model: form.elements.model.value,
    max_tokens: Number(form.elements.max_tokens.value),
    temperature: Number(form.elements.temperature.value),
  };
  const prompt = form.elements.prompt.value;
  for (let index = 0; index < howMany; index += 1) {
    started += 1;
    const card = new StreamCard(started, base.model, prompt);
    streamsList.prepend(card.element);
    card.run({ ...base, seed: started, messages: [{ role: "user", content: prompt }] });
  }
  update();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!form.reportValidity()) return;
  start(Number(event.submitter?.value || 1));
});
stopButton.addEventListener("click", () => live.forEach((card) => card.abort.abort()));
form.querySelector("[data-action=clear]").addEventListener("click", () => {
  live.forEach((card) => card.abort.abort());
  streamsList.replaceChildren();
  update();
});
window.setInterval(() => lookUpInstances().catch(() => {}), LOOKUP_MS);
loadModels();
update();
