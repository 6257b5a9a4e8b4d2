// Calls to the panel's own REST API with the session cookie.

function csrfToken() {
  const field = document.querySelector("input[name=csrfmiddlewaretoken]");
  return field ? field.value : "";
}

/** What the server said, in its own words: `code` for programs, `message` for people. */
export class ApiError extends Error {
  constructor(status, code, message, param) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

async function answer(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // A proxy's error page is not JSON; the status says enough.
  }
  if (response.ok) return body;
  const error = body?.error ?? {};
  throw new ApiError(response.status, error.code ?? "http_error", error.message ?? body?.detail ?? `The server answered ${response.status}.`, error.param);
}

export async function getJson(url, options = {}) {
  return answer(await fetch(url, { headers: { Accept: "application/json" }, ...options }));
}

export async function postJson(url, body, options = {}) {
  return answer(
    await fetch(url, {
      method: "POST",
      headers: { Accept: "application/json", "Content-Type": "application/json", "X-CSRFToken": csrfToken() },
      body: JSON.stringify(body),
      ...options,
    }),
  );
}

/** All rows of a list that may or may not be paginated. */
export async function getRows(url) {
  const rows = [];
  let next = url;
  while (next) {
    const page = await getJson(next);
    if (Array.isArray(page)) return page;
    rows.push(...(page.results ?? []));
    next = page.next ? new URL(page.next, window.location.href) : null;
    if (next) next = next.pathname + next.search;
  }
  return rows;
}
