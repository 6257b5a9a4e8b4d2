// The page of one instance: its requests, read from the instance itself, and the dialog that starts a migration.

import { getJson } from "./api.js";
import { count, seconds } from "./format.js";
import { enhanceMigrateForm } from "./migrate-form.js";
import { badge, keepTimesFresh, refreshLiveParts, throttled } from "./page.js";
import { openSocket, showConnection } from "./socket.js";

const REQUESTS_MS = 2000;

const wrap = document.querySelector("#requests-wrap");
const body = document.querySelector("#requests");
const empty = document.querySelector("#no-requests");
const note = document.querySelector("#requests-note");
const template = document.querySelector("#request-template");

function requestRow(request) {
  const row = template.content.firstElementChild.cloneNode(true);
  const set = (name, value) => (row.querySelector(`[data-field=${name}]`).textContent = value);
  set("request_id", request.request_id);
  set("status", request.status);
  set("prompt_tokens", count(request.prompt_tokens));
  set("output_tokens", count(request.output_tokens));
  set("kv_blocks", count(request.kv_blocks));
  set("age", seconds(request.age_s));
  row.querySelector("[data-field=movable]").append(request.migratable ? badge("Yes", "ok") : badge("No", "warning"));
  set("reason", request.reason?.message ?? "");
  return row;
}

async function showRequests() {
  try {
    const { requests } = await getJson(wrap.dataset.url);
    body.replaceChildren(...requests.map(requestRow));
    wrap.hidden = requests.length === 0;
    empty.hidden = requests.length > 0;
    empty.textContent = "No request is in flight.";
    note.textContent = "asked just now";
  } catch (error) {
    wrap.hidden = true;
    empty.hidden = false;
    empty.textContent = error.message;
  }
}

async function openDialog(link, dialog) {
  const response = await fetch(link.href, { headers: { Accept: "text/html" } });
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  const form = fresh.querySelector("#migrate-form");
  if (!form) {
    window.location.assign(link.href);
    return;
  }
  const head = document.createElement("div");
  head.className = "dialog-head";
  const title = document.createElement("h2");
  title.id = "migrate-title";
  title.textContent = fresh.querySelector("#migrate-title").textContent;
  head.append(title);
  dialog.replaceChildren(head, document.importNode(form, true));
  dialog.querySelector("[data-close]").addEventListener("click", (event) => {
    event.preventDefault();
    dialog.close();
  });
  enhanceMigrateForm(dialog.querySelector("form"));
  dialog.showModal();
}

const link = document.querySelector("#migrate");
const dialog = document.querySelector("#migrate-dialog");
link?.addEventListener("click", (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  openDialog(link, dialog).catch(() => window.location.assign(link.href));
});

keepTimesFresh();
const refresh = throttled(refreshLiveParts, 400);
openSocket("/ws/dashboard/", {
  onOpen: refresh,
  onMessage: refresh,
  onState: (state) => showConnection(document.querySelector("#connection"), state),
});
const update = throttled(async () => {
  await Promise.all([showRequests(), refreshLiveParts()]);
}, 0);
update();
window.setInterval(() => document.hidden || update(), REQUESTS_MS);
