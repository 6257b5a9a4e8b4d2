// A websocket that comes back. Messages are hints: whoever uses it refetches after each (re)connection.

const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 8000;

/**
 * @param {string} path e.g. "/ws/dashboard/"
 * @param {{onOpen: () => void, onMessage: (message: object) => void, onState: (state: "live"|"reconnecting"|"closed") => void}} handlers
 * @returns {{close: () => void}}
 */
export function openSocket(path, { onOpen, onMessage, onState }) {
  let delay = FIRST_DELAY_MS;
  let socket = null;
  let timer = null;
  let wanted = true;

  function connect() {
    const scheme = window.location.protocol === "https:" ? "wss" : "ws";
    socket = new WebSocket(`${scheme}://${window.location.host}${path}`);
    socket.onopen = () => {
      delay = FIRST_DELAY_MS;
      onState("live");
      onOpen();
    };
    socket.onmessage = (event) => onMessage(JSON.parse(event.data));
    socket.onclose = () => {
      if (!wanted) return;
      onState("reconnecting");
      timer = window.setTimeout(connect, delay);
      delay = Math.min(delay * 2, LONGEST_DELAY_MS);
    };
  }

  connect();
  return {
    close() {
      wanted = false;
      window.clearTimeout(timer);
      socket.close();
      onState("closed");
    },
  };
}

const WORDS = { live: "Live", reconnecting: "Reconnecting…", closed: "Not live" };

/** Shows the state of a connection in a `.pill`; announced politely because the element is a status. */
export function showConnection(pill, state) {
  if (!pill) return;
  pill.dataset.state = state;
  pill.textContent = WORDS[state];
}
