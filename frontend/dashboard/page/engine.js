// One engine's panel: its numbers, tiers, link, requests, latencies and moves.
// Owns: what is drawn. Knows nothing of connections; the histories behind the drawing are `timeline` and `latency`.

import { madeUp, make, setText, sparkline } from "./dom.js";
import { bytes, clock, count, rate, seconds } from "./format.js";
import { LatencyHistory, quantile, total } from "./latency.js";
import { KEPT_S, Timelines } from "./timeline.js";

const MAX_SHOWN = 40;
const MAX_LOG = 300;
const MIN_STALL_S = 0.0005;

const TIER_STATES = [
  ["used", "used"],
  ["shared", "shared"],
  ["cached", "cached"],
  ["in-flight", "in flight"],
  ["free", "free"],
];
const PHASES = [
  ["queue", "queue"],
  ["prefill", "prefill"],
  ["decode", "decode"],
  ["copying", "copying"],
  ["swapped", "swapped"],
];
const MARKS = { out: ["▼", "swapped out"], in: ["▲", "swapped in"], rejected: ["✕", "swap not possible"] };
// Without a prototype: a word that is not listed is shown as it is, "constructor" too.
const STATES = {
  __proto__: null,
  waiting: "… queue",
  loading: "⇄ loading prefix",
  prefill: "▹ prefill",
  decode: "▸ decode",
  swapping_out: "⇄ swapping out",
  swapped: "▽ swapped",
  swapping_in: "⇄ swapping in",
};
const MOVES = {
  __proto__: null,
  swapping_out: "▽ swapping out",
  swapped: "▼ swapped out",
  swapping_in: "△ swapping in",
  resumed: "▲ swapped in",
  copied_out: "↓ copied to CPU",
  copied_in: "↑ copied to GPU",
  rejected: "✕ not swapped",
};
const REASONS = {
  __proto__: null,
  admission: "room for a new request",
  growth: "room for a running one",
  resume: "its turn again",
  write_behind: "ahead of need",
  prefetch: "next to come back",
  prefix_hit: "prompt begins like it",
  oversize: "larger than the pool",
};
const LATENCIES = [
  ["ttft", "Time to first token (TTFT)"],
  ["tpot", "Time per output token (TPOT)"],
  ["stall", "Stall of swapped requests"],
];

export class EnginePanel {
  #parts = {};
  #rows = new Map(); // track -> its table row
  #timelines = new Timelines();
  #latencies = new LatencyHistory();
  #snapshot = null;
  #problem = "connecting…";
  #endpoint = "";
  #history = []; // [time, snapshot's numbers], for the lines
  #log = []; // moves and what happened to the engine, newest first

  constructor() {
    this.root = document.getElementById("engine").content.cloneNode(true).firstElementChild;
    for (const node of this.root.querySelectorAll("[data-part]")) this.#parts[node.dataset.part] = node;
    for (const [phase, text] of PHASES) {
      this.#parts.phases.append(make("li", {}, make("span", { class: `swatch segment ${phase}` }), text));
    }
    for (const [mark, text] of Object.values(MARKS)) this.#parts.phases.append(make("li", {}, `${mark} ${text}`));
  }

  state({ endpoint, snapshot, problem }) {
    this.#endpoint = endpoint;
    if (problem !== null && this.#problem === null) this.#note("engine gone", problem);
    this.#problem = problem;
    if (snapshot === null) return;
    if (this.#snapshot && this.#snapshot.engine_id !== snapshot.engine_id) {
      this.#note("engine restarted", "what was open on the one before is lost");
      this.#history = [];
    }
    this.#snapshot = snapshot;
    this.#timelines.snapshot(snapshot);
    this.#latencies.add(snapshot);
    const { link } = snapshot;
    const values = [snapshot.tokens_per_s, snapshot.step_ms, link.out_bytes_per_s, link.in_bytes_per_s];
    this.#history.push([snapshot.time, ...values]);
    while (this.#history[0][0] < snapshot.time - KEPT_S) this.#history.shift();
  }

  moves({ moves, missed }) {
    if (missed) this.#note("moves missed", `${missed} came faster than this page reads`);
    for (const move of moves) {
      this.#timelines.move(move);
      this.#log.unshift(move);
    }
    this.#log.length = Math.min(this.#log.length, 4 * MAX_LOG);
  }

  draw(windowS) {
    this.#drawHead();
    if (!this.#snapshot) return;
    const to = this.#snapshot.time;
    this.#drawNumbers(to - windowS, to);
    this.#drawTiers();
    this.#drawLink(to - windowS, to);
    this.#drawRequests(to - windowS, to);
    this.#drawLatencies();
    this.#drawMoves();
  }

  #note(what, why) {
    this.#log.unshift({ time: Date.now() / 1000, what, why });
  }

  #drawHead() {
    const { model, status, about } = this.#parts;
    const live = this.#problem === null;
    this.root.classList.toggle("stale", !live);
    const since = !live && this.#snapshot ? ` What is shown is of ${clock(this.#snapshot.time)}.` : "";
    setText(status, live ? "● live" : `■ not live: ${this.#problem}${since}`);
    const snapshot = this.#snapshot;
    setText(model, snapshot?.model ?? "Engine");
    if (!snapshot) {
      setText(about, this.#endpoint);
      return;
    }
    const block = `${snapshot.block_size} tokens and ${bytes(snapshot.kv_block_bytes)} a block`;
    const up = `up ${seconds(Math.floor(snapshot.uptime_s))}`;
    setText(about, `${snapshot.device} · KV ${snapshot.kv_cache_dtype}, ${block} · ${up} · ${this.#endpoint}`);
  }

  #drawNumbers(from, to) {
    const snapshot = this.#snapshot;
    const tile = (name, text, line = null) =>
      make("div", { class: "tile" }, make("span", { class: "name" }, name), make("b", {}, text), line);
    this.#parts.numbers.replaceChildren(
      tile("running", String(snapshot.running)),
      tile("waiting", String(snapshot.waiting)),
      tile("swapped", String(snapshot.swapped)),
      tile("tokens/s", snapshot.tokens_per_s.toFixed(snapshot.tokens_per_s < 100 ? 1 : 0), this.#line(1, from, to)),
      tile("step", snapshot.step_ms ? seconds(snapshot.step_ms / 1000) : "–", this.#line(2, from, to)),
    );
  }

  #line(column, from, to) {
    const points = this.#history.filter(([time]) => time >= from).map((values) => [values[0], values[column]]);
    return sparkline(points, from, to, Math.max(...points.map(([, value]) => value)));
  }

  #drawTiers() {
    const { gpu, cpu, kv_block_bytes: size } = this.#snapshot;
    const off = make("p", { class: "note" }, "There is no CPU tier: when the pool is full, requests wait or are recomputed.");
    this.#parts.tiers.replaceChildren(tier("GPU pool", gpu, size), cpu ? tier("CPU tier", cpu, size) : off);
  }

  #drawLink(from, to) {
    const { link } = this.#snapshot;
    this.#parts.link.replaceChildren(
      direction("▼ out, to CPU", link.out_bytes_per_s, link.peak_out_bytes_per_s, link.out_bytes, this.#line(3, from, to)),
      direction("▲ in, to GPU", link.in_bytes_per_s, link.peak_in_bytes_per_s, link.in_bytes, this.#line(4, from, to)),
    );
  }

  #drawRequests(from, to) {
    const { axis, requests } = this.#parts;
    drawAxis(axis, from, to);
    const tracks = this.#timelines.shown(MAX_SHOWN, from);
    for (const [track, row] of this.#rows) {
      if (!tracks.includes(track)) {
        row.root.remove();
        this.#rows.delete(track);
      }
    }
    tracks.forEach((track, index) => {
      if (!this.#rows.has(track)) this.#rows.set(track, new RequestRow(track));
      const row = this.#rows.get(track);
      if (requests.children[index] !== row.root) requests.insertBefore(row.root, requests.children[index] ?? null);
      row.draw(from, to);
    });
    const live = this.#snapshot.requests.length + this.#snapshot.unlisted;
    const unlisted = live - tracks.filter((track) => track.ended === null).length;
    const none = "No requests in this time. They appear here as soon as somebody sends one.";
    setText(this.#parts["requests-note"], tracks.length ? (unlisted ? `and ${count(unlisted, "more live request")}` : "") : none);
  }

  #drawLatencies() {
    const latest = this.#snapshot.latencies;
    this.#parts.latencies.replaceChildren(
      ...LATENCIES.filter(([name]) => latest[name]).map(([name, title]) =>
        distribution(title, this.#latencies.distribution(name, latest)),
      ),
    );
  }

  #drawMoves() {
    const all = this.#parts.background.checked;
    const shown = this.#log.filter((move) => all || !["copied_out", "copied_in"].includes(move.phase));
    this.#parts.moves.replaceChildren(...shown.slice(0, MAX_LOG).map(logLine));
    setText(this.#parts["moves-note"], shown.length ? "" : "Nothing had to move yet: what runs fits into the GPU pool.");
  }
}

function tier(name, use, blockBytes) {
  const numbers = { used: use.used - use.shared, shared: use.shared, cached: use.cached, "in-flight": use.in_flight, free: use.free };
  const bar = make("div", { class: "bar", "aria-hidden": "true" });
  const legend = make("ul", { class: "legend" });
  for (const [state, text] of TIER_STATES) {
    const part = make("span", { class: `part ${state}` });
    part.style.flexGrow = numbers[state];
    part.hidden = !numbers[state];
    bar.append(part);
    legend.append(make("li", {}, make("span", { class: `swatch part ${state}` }), make("b", {}, String(numbers[state])), ` ${text}`));
  }
  const taken = use.total - use.free;
  const size = `${taken} of ${count(use.total, "block")} taken, ${bytes(taken * blockBytes)} of ${bytes(use.total * blockBytes)}`;
  return make("div", { class: "tier" }, make("h4", {}, name, make("span", { class: "note" }, ` ${size}`)), bar, legend);
}

function direction(name, now, peak, sum, line) {
  const percent = peak ? (100 * now) / peak : 0;
  const shown = percent > 0 && percent < 0.1 ? "< 0.1" : percent.toFixed(percent > 0 && percent < 10 ? 1 : 0);
  const share = peak ? `${shown}% of the link's ${rate(peak)}` : "the link was not measured";
  const meter = make("div", { class: "meter", "aria-hidden": "true" }, make("span", {}));
  meter.firstChild.style.width = `${Math.min(100, percent)}%`;
  const head = make("h4", {}, name, make("b", {}, ` ${rate(now)}`), make("span", { class: "note" }, ` ${share}`));
  return make("div", { class: "direction" }, head, meter, line, make("p", { class: "note" }, `${bytes(sum)} since the start`));
}

function drawAxis(axis, from, to) {
  const step = (to - from) / 6;
  const ticks = [1, 2, 3, 4, 5].map((index) => {
    const tick = make("span", { class: "tick" }, `−${Math.round((6 - index) * step)} s`);
    tick.style.left = `${(100 * index) / 6}%`;
    return tick;
  });
  axis.replaceChildren(axis.firstElementChild, ...ticks, make("span", { class: "tick now" }, "now"));
}

// One request's line of the table. Its cells stay, their contents change: focus and selection survive.
class RequestRow {
  constructor(track) {
    this.track = track;
    const cell = (kind) => make("td", { class: kind });
    const name = make("th", { scope: "row", class: "name" }, madeUp(track.id), make("span", { class: "note" }, madeUp(track.peer)));
    this.cells = ["state", "number", "number wide", "number", "number", "number wide", "number wide"].map(cell);
    this.lane = make("div", { class: "lane" });
    this.root = make("tr", {}, name, ...this.cells, make("td", { class: "time" }, this.lane));
  }

  draw(from, to) {
    const { row, ended } = this.track;
    this.root.classList.toggle("ended", ended !== null);
    const stall = row.stall_s;
    const texts = [
      ended === null ? (STATES[row.state] ?? row.state) : "■ ended",
      `${row.prompt_tokens} + ${row.generated_tokens}`,
      ended === null ? `${row.gpu_blocks} GPU · ${row.cpu_blocks} CPU` : "",
      String(row.swaps),
      stall >= MIN_STALL_S ? seconds(stall) : "–",
      seconds(row.ttft_s),
      seconds(row.tpot_s),
    ];
    texts.forEach((text, index) => setText(this.cells[index], text));
    const position = (time) => (100 * (Math.max(time, from) - from)) / (to - from);
    const segments = this.track.segments(to).filter(([, end]) => end > from);
    const marks = this.track.marks.filter(({ at }) => at > from);
    this.lane.replaceChildren(
      ...segments.map(([begin, end, phase]) => {
        const node = make("span", { class: `segment ${phase}`, title: `${phase} for ${seconds(end - begin)}` });
        node.style.left = `${position(begin)}%`;
        node.style.width = `${position(end) - position(begin)}%`;
        return node;
      }),
      ...marks.map(({ at, kind }) => {
        const node = make("span", { class: `mark ${kind}`, title: `${MARKS[kind][1]} at ${clock(at)}` }, MARKS[kind][0]);
        node.style.left = `${position(at)}%`;
        return node;
      }),
      make("span", { class: "sr" }, segments.map(([begin, end, phase]) => `${phase} ${seconds(end - begin)}`).join(", ")),
    );
  }
}

function distribution(title, { bounds, counts, recent }) {
  const many = total(counts);
  const figure = make("figure", { class: "latency" }, make("figcaption", {}, make("h4", {}, title)));
  if (!many) {
    figure.append(make("p", { class: "note" }, "nothing measured yet"));
    return figure;
  }
  const upTo = (share) => {
    const value = quantile(share, bounds, counts);
    return value === Infinity ? `> ${seconds(bounds.at(-1))}` : seconds(value);
  };
  const shares = [["median", 0.5], ["95%", 0.95], ["99%", 0.99]];
  const texts = shares.map(([name, share]) => make("li", {}, `${name} `, make("b", {}, upTo(share))));
  const { columns, unit } = histogram(bounds, counts);
  const of = recent ? "in the last 5 minutes" : "since the engine's start";
  figure.append(
    make("ul", { class: "legend" }, ...texts),
    make("div", { class: "columns", "aria-hidden": "true" }, ...columns),
    make("p", { class: "note" }, `${count(many, "request")} ${of}, by upper bound in ${unit}`),
  );
  return figure;
}

// One column a bucket, from the one before the first that holds something to the one after the last.
function histogram(bounds, counts) {
  const first = Math.max(0, counts.findIndex((value) => value > 0) - 1);
  const last = Math.min(counts.length - 1, counts.findLastIndex((value) => value > 0) + 1);
  const [scale, unit] = (bounds[last] ?? Infinity) < 1 ? [1000, "ms"] : [1, "s"];
  const most = Math.max(...counts);
  const columns = counts.slice(first, last + 1).map((value, index) => {
    const bound = bounds[first + index];
    const label = bound === undefined ? "∞" : String(Number((scale * bound).toPrecision(3)));
    const column = make("span", { class: "column", title: `up to ${label} ${unit}: ${value}` }, make("i", {}), make("small", {}, label));
    column.firstChild.style.height = `calc((100% - 1.6rem) * ${value / most})`;
    return column;
  });
  return { columns, unit };
}

function logLine(move) {
  const text = (value, kind = "") => make("td", { class: kind }, value);
  if (move.what) {
    return make("tr", { class: "event" }, text(clock(move.time)), text(""), text(`■ ${move.what}`), make("td", { colspan: "5" }, move.why));
  }
  const why = [REASONS[move.reason] ?? move.reason, move.detail].filter(Boolean).join(": ");
  return make(
    "tr",
    { class: move.phase },
    text(clock(move.time)),
    make("td", {}, move.request_id ? madeUp(move.request_id) : "–"),
    text(MOVES[move.phase] ?? move.phase),
    text(why),
    text(move.blocks ? String(move.blocks) : "–", "number"),
    text(move.blocks ? bytes(move.bytes) : "nothing to copy", "number"),
    text(move.seconds ? seconds(move.seconds) : "–", "number"),
    text(move.queued_s ? seconds(move.queued_s) : "–", "number"),
  );
}
