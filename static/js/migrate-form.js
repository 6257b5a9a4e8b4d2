// Keeps the pre-flight list of the form in step with the chosen target.

import { postJson } from "./api.js";
import { count, seconds, size } from "./format.js";
import { badge, icon } from "./page.js";

const VERDICTS = { ok: ["Ready", "ok"], warning: ["Ready, with warnings", "warning"], error: ["Not possible", "error"] };

function text(tag, className, content) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = content;
  return element;
}

function checkRow(check) {
  const row = document.createElement("li");
  row.className = `check ${check.level}`;
  const mark = icon(check.level);
  mark.removeAttribute("aria-hidden");
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", check.level);
  const body = document.createElement("div");
  const values = text("span", "check-values", "");
  values.append(text("span", "source-value", check.source_value));
  if (check.target_value !== check.source_value) {
    values.append(check.source_value && check.target_value ? " → " : "", text("span", "target-value", check.target_value));
  }
  body.append(text("span", "check-name", check.name.replaceAll("_", " ")), values);
  if (check.remedy) body.append(text("span", "remedy", check.remedy));
  row.append(mark, body);
  return row;
}

function estimateSentence(estimate) {
  if (!estimate) return "";
  if (!estimate.requests) return "No request can move right now: only the route for new requests would change.";
  const what = estimate.requests === 1 ? "1 request" : `${estimate.requests} requests`;
  return `About ${what}, ${count(estimate.blocks)} blocks, ${size(estimate.bytes)}, ${seconds(estimate.seconds)} in ${estimate.rounds} rounds.`;
}

/** How a target without an engine shall be brought up; what is empty is left to it. */
function wishes(form) {
  const names = ["target_tp", "target_pp", "target_gpu_memory_utilization"];
  const given = names.filter((name) => form.elements[name]?.value);
  return Object.fromEntries(given.map((name) => [name, Number(form.elements[name].value)]));
}

/** The conditions that are filled in, as the API wants them; null where they do not count. */
function selectionOf(form) {
  if (form.elements.migration_type.value !== "keep_source_active") return null;
  const selection = {};
  for (const input of form.querySelectorAll("#selection input")) {
    const value = input.value.trim();
    if (!value) continue;
    if (input.name === "request_ids") selection.request_ids = value.split(/[\s,]+/);
    else selection[input.name] = input.type === "number" ? Number(value) : value;
  }
  return Object.keys(selection).length ? selection : null;
}

/** @param {HTMLFormElement} form the server's form, on its own page or in a dialog */
export function enhanceMigrateForm(form) {
  const { target, mode, drain_deadline_s: deadline } = form.elements;
  const start = form.querySelector("button[value=start]");
  const part = (name) => form.querySelector(`[data-part=${name}]`);
  const startBlocked = start.disabled && !target.value;
  let latest = 0;

  form.querySelectorAll("[data-only-without-script]").forEach((element) => (element.hidden = true));
  if (!target.value) start.disabled = true;

  async function check() {
    latest += 1;
    const mine = latest;
    start.disabled = true;
    part("verdict").replaceChildren();
    part("estimate").hidden = true;
    if (!target.value) {
      part("checks").replaceChildren(text("p", "empty", "Choose a target to compare the two instances."));
      return;
    }
    part("checks").replaceChildren(text("p", "empty", "Asking both instances…"));
    let list;
    let level;
    let estimate = null;
    try {
      const preflight = await postJson("/api/v1/migrations/preflight", {
        source: form.dataset.source,
        target: target.value,
        mode: mode.value,
        ...wishes(form),
        selection: selectionOf(form),
        drain_deadline_s: deadline.value === "" ? null : Number(deadline.value),
      });
      ({ level, estimate } = preflight);
      list = preflight.checks;
    } catch (error) {
      level = "error";
      list = [{ name: "pre-flight", source_value: "", target_value: "", level, remedy: error.message }];
    }
    if (mine !== latest) return;
    const rows = document.createElement("ul");
    rows.className = "checks";
    const worstFirst = ["error", "warning", "ok"].flatMap((wanted) => list.filter((check) => check.level === wanted));
    rows.append(...worstFirst.map(checkRow));
    part("checks").replaceChildren(rows);
    part("verdict").replaceChildren(badge(...VERDICTS[level]));
    part("estimate").textContent = estimateSentence(estimate);
    part("estimate").hidden = !estimate;
    start.disabled = level === "error" || startBlocked;
  }

  target.addEventListener("change", check);
  mode.addEventListener("change", check);
  form.querySelector("#target-size")?.addEventListener("change", check);
  const conditions = form.querySelector("#selection");
  const showConditions = () => {
    conditions.hidden = form.elements.migration_type.value !== "keep_source_active";
    // What nobody sees is not sent.
    conditions.disabled = conditions.hidden;
  };
  showConditions();
  for (const choice of form.elements.migration_type) {
    choice.addEventListener("change", () => {
      showConditions();
      // Only what is selected counts, for the capacity of the target too.
      if (target.value) check();
    });
  }
  conditions.addEventListener("change", check);
  deadline.addEventListener("change", check);
  form.addEventListener("submit", () => {
    part("note").textContent = "Starting…";
    // After the browser has read the form: a disabled button would not send its value.
    window.setTimeout(() => (start.disabled = true), 0);
  });
}
