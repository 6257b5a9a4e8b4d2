// One streamed chat completion through the proxy, as a client program would see it.

/** Yields the JSON of each `data:` event of an SSE body; stops at [DONE]. */
async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += decoder.decode(value, { stream: true }).replaceAll("\r\n", "\n");
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const data = buffer
        .slice(0, end)
        .split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart())
        .join("\n");
      buffer = buffer.slice(end + 2);
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

/**
 * @param {object} body what is POSTed to /v1/chat/completions
 * @param {{signal: AbortSignal, onStart: (streamId: string|null) => void, onId: (id: string) => void, onTokens: (text: string, tokens: number) => void}} handlers
 * @returns {Promise<{finishReason: string|null, usage: object|null}>}
 * @throws {Error} with the server's sentence when the request is refused or the stream ends in an error event
 */
export async function streamChat(body, { signal, onStart, onId, onTokens }) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, return_token_ids: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? `The proxy answered ${response.status}.`);
  }
  onStart(response.headers.get("x-vllm-hi-stream"));
  let finishReason = null;
  let usage = null;
  let id = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message ?? "The stream ended with an error.");
    usage = event.usage ?? usage;
    if (id === null && event.id) {
      id = event.id;
      onId(id);
    }
    const choice = event.choices?.[0];
    if (!choice) continue;
    const text = choice.delta?.content ?? "";
    const tokens = choice.token_ids?.length ?? (text ? 1 : 0);
    if (text || tokens) onTokens(text, tokens);
    finishReason = choice.finish_reason ?? finishReason;
  }
  return { finishReason, usage };
}
