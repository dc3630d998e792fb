// What each request was doing when: built from snapshots, and from swap events between them.
// Owns: the tracks. Knows nothing of the page.

export const KEPT_S = 300;
const SAME_ARRIVAL_S = 1; // an id that comes back with another arrival is another request
const MAX_ENDED = 200;

const PHASE_OF_STATE = {
  __proto__: null,
  waiting: "queue",
  loading: "copying",
  prefill: "prefill",
  decode: "decode",
  swapping_out: "copying",
  swapped: "swapped",
  swapping_in: "copying",
};

// Of a row or a move: two peers may use the same id.
function keyOf({ peer, request_id }) {
  return JSON.stringify([peer, request_id]);
}

export class Track {
  constructor(row, now) {
    this.id = row.request_id;
    this.peer = row.peer_name || row.peer;
    this.arrived = now - row.age_s;
    this.row = row;
    this.ended = null;
    this.points = [{ at: this.arrived, phase: "queue" }];
    this.marks = [];
    this.#admitted = false;
    this.#answered = false;
    if (row.swaps || row.recomputes) this.#unseenUntil(row, now);
    this.seen(row, now);
  }

  #admitted;
  #answered;

  // It moved before we looked: when, nobody can say any more, but for a swap that still lasts.
  #unseenUntil(row, now) {
    const begun = this.arrived + row.queue_s;
    this.points.push({ at: begun, phase: "unseen" });
    if (row.stalled_s) this.#change(Math.max(begun, now - row.stalled_s), "swapped");
    this.#admitted = true;
    this.#answered = row.ttft_s !== null;
  }

  // A snapshot had it like this.
  seen(row, now) {
    this.row = row;
    if (!this.#admitted && row.state !== "waiting" && row.state !== "loading") {
      this.#admitted = true;
      this.#change(this.arrived + row.queue_s, "prefill");
    }
    if (!this.#answered && row.ttft_s !== null) {
      this.#answered = true;
      this.#change(this.arrived + row.ttft_s, "decode");
    }
    const phase = PHASE_OF_STATE[row.state] ?? "unseen";
    const last = this.points.at(-1); // later than `now` perhaps: events get their time as they are sent, in this order
    if (last.phase !== phase) this.#change(Math.max(now, last.at), phase);
    while (this.points.length > 1 && this.points[1].at < now - KEPT_S) this.points.shift();
    while (this.marks.length && this.marks[0].at < now - KEPT_S) this.marks.shift();
  }

  moved(move) {
    if (move.phase === "swapping_out" || move.phase === "swapping_in") {
      this.#change(move.time, "copying");
    } else if (move.phase === "swapped") {
      this.#change(move.time, "swapped");
      this.marks.push({ at: move.time, kind: "out" });
    } else if (move.phase === "resumed") {
      this.#change(move.time, this.#ranAs(move.time));
      this.marks.push({ at: move.time, kind: "in" });
    } else if (move.phase === "rejected") {
      this.marks.push({ at: move.time, kind: "rejected" });
    }
  }

  // Segments [from, to, phase] up to `now`, without those of no length.
  segments(now) {
    const end = this.ended ?? now;
    const cuts = [...this.points.slice(1).map((point) => point.at), end];
    const all = this.points.map((point, index) => [point.at, Math.min(cuts[index], end), point.phase]);
    return all.filter(([from, to]) => to > from);
  }

  #ranAs(time) {
    const before = this.points.findLast((point) => point.at <= time && ["prefill", "decode"].includes(point.phase));
    return before?.phase ?? "decode";
  }

  #change(at, phase) {
    let index = this.points.length;
    while (index > 0 && this.points[index - 1].at > at) index -= 1;
    this.points.splice(index, 0, { at, phase });
  }
}

export class Timelines {
  #engineId = null;
  #live = new Map();
  #ended = [];
  #early = []; // moves of requests that no snapshot has had yet

  // Everything about an engine that is gone has ended with its last snapshot.
  #restart(engineId) {
    for (const track of this.#live.values()) this.#end(track, track.seenAt);
    this.#live.clear();
    this.#engineId = engineId;
  }

  #end(track, at) {
    track.ended = at;
    this.#ended.push(track);
    if (this.#ended.length > MAX_ENDED) this.#ended.shift();
  }

  snapshot(snapshot) {
    const now = snapshot.time;
    if (snapshot.engine_id !== this.#engineId) this.#restart(snapshot.engine_id);
    const before = this.#live;
    this.#live = new Map();
    for (const row of snapshot.requests) {
      const key = keyOf(row);
      let track = before.get(key);
      if (track && Math.abs(now - row.age_s - track.arrived) < SAME_ARRIVAL_S) {
        before.delete(key);
        track.seen(row, now);
      } else {
        track = new Track(row, now);
      }
      track.seenAt = now;
      this.#live.set(key, track);
    }
    for (const track of before.values()) this.#end(track, now);
    for (const move of this.#early.splice(0)) this.#live.get(keyOf(move))?.moved(move);
    this.#ended = this.#ended.filter((track) => track.ended > now - KEPT_S);
  }

  move(move) {
    const track = this.#live.get(keyOf(move));
    if (track) track.moved(move);
    else this.#early.push(move);
  }

  // Live tracks and those that ended last, at most so many, in order of arrival.
  shown(most, since) {
    const live = [...this.#live.values()].slice(0, most);
    const room = most - live.length;
    const ended = room ? this.#ended.filter((track) => track.ended > since).slice(-room) : [];
    return [...ended, ...live].sort((a, b) => a.arrived - b.arrived);
  }
}
