import { keepTimesFresh, refreshLiveParts, throttled } from "./page.js";
import { openSocket, showConnection } from "./socket.js";

// Hints cover instances and migrations. Streams change with every token and have no event: a slow tick covers them.
const HINT_PAUSE_MS = 400;
const TICK_MS = 3000;

const pill = document.querySelector("#connection");
const refresh = throttled(refreshLiveParts, HINT_PAUSE_MS);

keepTimesFresh();
openSocket("/ws/dashboard/", {
  onOpen: refresh,
  onMessage: refresh,
  onState: (state) => showConnection(pill, state),
});
window.setInterval(() => document.hidden || refresh(), TICK_MS);
