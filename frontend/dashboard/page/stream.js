// Server-sent events over fetch: an EventSource cannot send the header that a key travels in.
// Knows how events are framed and when a connection counts as dead; not what the events say.

const SILENCE_MS = 5000; // the server says something twice a second

export class KeyNeeded extends Error {}

// A header holds bytes, one a character: those of the key's UTF-8, as every other client sends them.
function bearer(key) {
  return `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
}

// Calls onOpen() once, then onEvent(name, data) for each event; returns or throws when the stream is over.
export async function follow(url, key, onOpen, onEvent) {
  const dead = new AbortController();
  let timer = setTimeout(() => dead.abort(), SILENCE_MS);
  const headers = key ? { authorization: bearer(key) } : {};
  try {
    const reply = await fetch(url, { headers, cache: "no-store", signal: dead.signal });
    if (reply.status === 401) throw new KeyNeeded();
    if (!reply.ok) throw new Error(`the frontend answered ${reply.status}`);
    onOpen();
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => dead.abort(), SILENCE_MS);
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const [name, data] = event.split("\n");
        onEvent(name.slice("event: ".length), JSON.parse(data.slice("data: ".length)));
      }
    }
  } finally {
    clearTimeout(timer);
    dead.abort();
  }
}
