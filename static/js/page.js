// Small things that several pages do: relative times, icons, and taking fresh parts of a page from the server.

import { ago } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `${document.body.dataset.icons}#${name}`);
  svg.append(use);
  return svg;
}

/** Colour, icon and word. `tone`: ok, info, busy, warning, error or muted, which are also names of icons. */
export function badge(word, tone) {
  const element = document.createElement("span");
  element.className = `badge tone-${tone}`;
  element.append(icon(tone), word);
  return element;
}

/** Turns every <time data-ago> into "12 s ago"; the exact time stays in the title. */
export function tickTimes(root = document) {
  for (const element of root.querySelectorAll("time[data-ago]")) {
    if (!element.title) element.title = element.textContent;
    const text = ago(new Date(element.dateTime));
    if (element.textContent !== text) element.textContent = text;
  }
}

export function keepTimesFresh() {
  tickTimes();
  window.setInterval(() => document.hidden || tickTimes(), 1000);
}

/**
 * Fetches this page again and replaces each element marked data-live by its fresh version. The server's templates stay the
 * only place that knows the markup, and what the server escaped stays escaped.
 */
export async function refreshLiveParts(url = window.location.href) {
  const response = await fetch(url, { headers: { Accept: "text/html" } });
  if (!response.ok || response.redirected) return false;
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const replacement = fresh.getElementById(part.id);
    if (!replacement || part.contains(document.activeElement) || part.querySelector("dialog[open]")) continue;
    const imported = document.importNode(replacement, true);
    tickTimes(imported);
    if (!part.isEqualNode(imported)) part.replaceWith(imported);
  }
  return true;
}

/** Runs `work` at most once per `pause` milliseconds, and once more if it was asked for meanwhile. */
export function throttled(work, pause) {
  let running = false;
  let again = false;
  return async function request() {
    if (running) {
      again = true;
      return;
    }
    running = true;
    do {
      again = false;
      try {
        await work();
      } catch {
        // The network is away; the next hint or tick tries again.
      }
      await new Promise((resolve) => window.setTimeout(resolve, pause));
    } while (again);
    running = false;
  };
}
