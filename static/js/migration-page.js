// The page of one migration. The server sent it complete; while the job runs this module keeps it so.

import { postJson } from "./api.js";
import { count, milliseconds, percentile, seconds, size, times } from "./format.js";
import { MigrationFeed } from "./migration-feed.js";
import { badge, icon, keepTimesFresh, tickTimes } from "./page.js";
import { showConnection } from "./socket.js";

const page = document.querySelector("#migration");
const words = JSON.parse(document.querySelector("#vocabulary").textContent);
const createdAt = new Date(page.dataset.created);
const rounds = new Map();
const requests = new Map();
const STEPS = [...document.querySelectorAll("#stepper li")].map((step) => step.dataset.step);
const FLOWING = new Set(["copying", "handing_over", "draining"]);

const field = (row, name) => row.querySelector(`[data-field=${name}]`);
const tile = (name, text) => {
  const element = page.querySelector(`[data-tile=${name}]`);
  if (element.textContent !== String(text)) element.textContent = text;
};
const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
const rate = (bytes, ms) => (ms > 0 && bytes ? `${size(Math.round((bytes * 1000) / ms))}/s` : "");

/** The row of a key in a table body or list, made from its template when it is new. */
function rowFor(parent, key, templateId) {
  for (const row of parent.children) if (row.dataset.key === String(key)) return row;
  const row = document.querySelector(templateId).content.firstElementChild.cloneNode(true);
  row.dataset.key = key;
  parent.append(row);
  return row;
}

// --- rounds ---------------------------------------------------------------------------------------------------------

function showRounds(list) {
  for (const round of list) rounds.set(round.round_index, round);
  if (!rounds.size) return;
  const body = document.querySelector("#rounds");
  document.querySelector("#no-rounds").hidden = true;
  const all = [...rounds.values()].sort((a, b) => a.round_index - b.round_index);
  const largest = Math.max(1, ...all.map((round) => Math.max(round.blocks + round.hit_blocks, round.dirty_blocks)));
  for (const round of all) {
    const row = rowFor(body, round.round_index, "#round-template");
    field(row, "label").textContent = words.rounds[round.kind] ?? round.kind;
    field(row, "index").textContent = `#${round.round_index}`;
    field(row, "blocks").textContent = count(round.blocks);
    field(row, "bytes").textContent = size(round.bytes);
    field(row, "hit").textContent = count(round.hit_blocks);
    field(row, "dirty").textContent = count(round.dirty_blocks);
    field(row, "duration").textContent = milliseconds(round.duration_ms);
    field(row, "rate").textContent = rate(round.bytes, round.duration_ms);
    const [sent, hit, dirty] = row.querySelectorAll("rect");
    sent.setAttribute("width", `${(100 * round.blocks) / largest}%`);
    hit.setAttribute("x", `${(100 * round.blocks) / largest}%`);
    hit.setAttribute("width", `${(100 * round.hit_blocks) / largest}%`);
    dirty.setAttribute("width", `${(100 * round.dirty_blocks) / largest}%`);
  }
  showNumbers();
}

// --- requests -------------------------------------------------------------------------------------------------------

function showRequests(list) {
  for (const request of list) requests.set(request.request_id, request);
  if (!requests.size) return;
  const body = document.querySelector("#requests");
  document.querySelector("#no-requests").hidden = true;
  const multiple = (request) => (request.gap_ms != null && request.itl_ms ? request.gap_ms / request.itl_ms : null);
  const largest = Math.max(4, ...[...requests.values()].map((request) => multiple(request) ?? 0));
  for (const request of requests.values()) {
    const row = rowFor(body, request.request_id, "#request-template");
    const outcome = words.outcomes[request.outcome] ?? { label: request.outcome, tone: "muted" };
    field(row, "id").textContent = request.request_id;
    const shown = field(row, "outcome");
    if (shown.textContent.trim() !== outcome.label) shown.replaceChildren(badge(outcome.label, outcome.tone));
    field(row, "why").textContent = request.message || request.code || words.ways[request.way] || "";
    field(row, "tokens").textContent = `${count(request.prompt_tokens)} + ${count(request.output_tokens)}`;
    field(row, "blocks").textContent = count(request.kv_blocks);
    field(row, "tail").textContent = request.tail_blocks ? `${request.tail_blocks} · ${size(request.tail_bytes)}` : "–";
    field(row, "gap").textContent = milliseconds(request.gap_ms);
    field(row, "gaptimes").textContent = times(multiple(request));
    row.querySelector("rect").setAttribute("width", `${(100 * (multiple(request) ?? 0)) / largest}%`);
    field(row, "stages").textContent = Object.entries(request.stages ?? {})
      .filter(([, ms]) => typeof ms === "number")
      .map(([name, ms]) => `${name.replaceAll("_", " ")} ${Number(ms).toFixed(ms < 10 ? 1 : 0)}`)
      .join(" · ");
    showChip(request, outcome);
  }
  showNumbers();
}

/** One square per request: on the source until it has moved. */
function showChip(request, outcome) {
  const side = page.querySelector(`[data-chips=${request.outcome === "moved" ? "target" : "source"}]`);
  let chip = [...page.querySelectorAll(".chip")].find((candidate) => candidate.dataset.key === request.request_id);
  if (!chip) {
    chip = document.createElement("li");
    chip.dataset.key = request.request_id;
  }
  if (chip.parentElement !== side) side.append(chip);
  chip.className = `chip ${request.outcome}`;
  chip.title = `${request.request_id}: ${outcome.label}`;
}

// --- numbers --------------------------------------------------------------------------------------------------------

function showNumbers() {
  const copied = [...rounds.values()];
  const rows = [...requests.values()];
  tile("rounds", copied.length);
  tile("blocks", count(sum(copied, "blocks") + sum(rows, "tail_blocks")));
  tile("hits", count(sum(copied, "hit_blocks")));
  tile("bytes", size(sum(copied, "bytes") + sum(rows, "tail_bytes")));
  tile("rate", rate(sum(copied, "bytes"), sum(copied, "duration_ms")));

  const moved = rows.filter((row) => row.outcome === "moved" && row.gap_ms != null);
  const gaps = moved.map((row) => row.gap_ms);
  const multiples = moved.filter((row) => row.itl_ms).map((row) => row.gap_ms / row.itl_ms);
  for (const [name, share] of [["gap50", 0.5], ["gap99", 0.99]]) {
    tile(name, milliseconds(percentile(gaps, share)));
    tile(`${name}x`, multiples.length ? `${times(percentile(multiples, share))} inter-token time` : "");
  }
  const parts = [["attached", "attached"], ["finished", "ended by themselves"], ["stayed", "stayed"], ["refused", "not movable"], ["filtered", "kept by the filter"]]
    .map(([outcome, word]) => [rows.filter((row) => row.outcome === outcome).length, word])
    .filter(([howMany]) => howMany)
    .map(([howMany, word]) => `${howMany} ${word}`);
  tile("others", parts.join(", "));
  const known = rows.filter((row) => row.outcome === "moved").length;
  if (known > Number(page.querySelector("[data-tile=moved]").textContent)) tile("moved", known);
}

// --- job ------------------------------------------------------------------------------------------------------------

let state = page.dataset.state;
let startedAt = null;
let abortShown = false;

function showJob(job) {
  tile("moved", job.moved_requests);
  tile("total", job.total_requests);
  page.querySelector("[data-part=attempt]").textContent = job.attempt;
  startedAt = job.started_at ? new Date(job.started_at) : null;
  if (job.state !== state) {
    state = job.state;
    page.dataset.state = state;
    const word = words.states[state];
    page.querySelector("[data-part=state]").replaceChildren(badge(word.label, word.tone));
    if (!word.terminal) showStep();
    if (state === "finishing") forbidAbort();
    if (state === "attaching") swapFromServer(["preflight", "job-facts"]).catch(() => {});
  }
  if (job.abort_requested && !abortShown) {
    abortShown = true;
    const button = document.querySelector("#abort-form button");
    if (button) button.disabled = true;
    swapFromServer(["result"]).catch(() => (abortShown = false));
  }
  showFlow();
  if (words.states[state].terminal) finish();
}

function showStep() {
  const at = STEPS.indexOf(state);
  document.querySelectorAll("#stepper li").forEach((step, index) => {
    step.dataset.status = index < at ? "past" : index === at ? "current" : "future";
    if (index === at) step.setAttribute("aria-current", "step");
    else step.removeAttribute("aria-current");
  });
}

function showFlow() {
  page.querySelector("[data-part=link]").dataset.flow = FLOWING.has(state) ? "on" : "off";
}

function tickElapsed() {
  const element = page.querySelector("[data-part=elapsed]");
  if (startedAt && !words.states[state].terminal) element.textContent = seconds((Date.now() - startedAt) / 1000);
}

let finishing = false;

/** The server words the result, so the parts that change at the end come from it. */
async function finish() {
  if (finishing) return;
  finishing = true;
  try {
    await feed.refetch();
    await swapFromServer(["head-status", "result", "stepper", "job-facts", "preflight", "requests"]);
    feed.stop();
    document.querySelector("#abort-dialog")?.close();
  } catch {
    finishing = false;
    window.setTimeout(finish, 1500);
  }
}

async function swapFromServer(ids) {
  const response = await fetch(window.location.href, { headers: { Accept: "text/html" } });
  if (!response.ok) throw new Error(`the page answered ${response.status}`);
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const id of ids) {
    const replacement = fresh.getElementById(id);
    if (replacement) document.getElementById(id).replaceWith(document.importNode(replacement, true));
  }
  tickTimes(page);
}

// --- events ---------------------------------------------------------------------------------------------------------

const log = document.querySelector("#events");
const follow = document.querySelector("#follow");

function showEvents(list) {
  for (const event of list) {
    const row = rowFor(log, event.seq, "#event-template");
    row.dataset.kind = event.kind;
    field(row, "offset").textContent = `+${((new Date(event.created_at) - createdAt) / 1000).toFixed(3)} s`;
    field(row, "kind").textContent = event.kind;
    field(row, "message").textContent = event.message;
    field(row, "step").textContent = event.step;
  }
  if (follow.checked) log.scrollTop = log.scrollHeight;
}

// --- abort ----------------------------------------------------------------------------------------------------------

function confirmAbort() {
  const form = document.querySelector("#abort-form");
  const dialog = document.querySelector("#abort-dialog");
  if (!form || !dialog) return;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.showModal();
  });
  dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
  dialog.querySelector("[data-confirm]").addEventListener("click", async () => {
    dialog.close();
    const button = form.querySelector("button");
    button.disabled = true;
    try {
      await postJson(`/api/v1/migrations/${page.dataset.job}/abort`, {});
    } catch (error) {
      const note = document.createElement("div");
      note.className = "note tone-error";
      note.setAttribute("role", "alert");
      const text = document.createElement("div");
      text.textContent = error.message;
      note.append(icon("error"), text);
      document.querySelector("#result").replaceChildren(note);
      button.disabled = false;
    }
    feed.refetch();
  });
}

/** From here on all requests have moved, and stopping would undo nothing. */
function forbidAbort() {
  const button = document.querySelector("#abort-form button");
  if (!button) return;
  button.disabled = true;
  button.title = "All requests have moved; migrate back instead";
}

const feed = new MigrationFeed(page.dataset.job, Number(page.dataset.lastSeq), {
  onJob: showJob,
  onRounds: showRounds,
  onRequests: showRequests,
  onEvents: showEvents,
  onState: (connection) => showConnection(document.querySelector("#connection"), connection),
});

keepTimesFresh();
document.querySelectorAll("[data-needs-script]").forEach((element) => (element.hidden = false));
log.scrollTop = log.scrollHeight;
const since = page.querySelector("[data-part=elapsed]").dataset.since;
if (since) startedAt = new Date(since);
if (!words.states[state].terminal) {
  confirmAbort();
  showFlow();
  feed.start();
  window.setInterval(tickElapsed, 100);
}
