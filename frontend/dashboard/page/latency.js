// Distributions from the engine's histograms: those of the last minutes are today's counts less those of then.

const KEPT_S = 300;
const EVERY_S = 5;

export class LatencyHistory {
  #engineId = null;
  #snapshots = []; // {time, latencies}, oldest first

  add(snapshot) {
    if (snapshot.engine_id !== this.#engineId) this.#snapshots = [];
    this.#engineId = snapshot.engine_id;
    const last = this.#snapshots.at(-1);
    if (!last || snapshot.time - last.time >= EVERY_S) {
      this.#snapshots.push({ time: snapshot.time, latencies: snapshot.latencies });
    }
    while (this.#snapshots.length > 1 && this.#snapshots[1].time <= snapshot.time - KEPT_S) this.#snapshots.shift();
  }

  // The distribution of what this page has seen in the last minutes, or of all there is when that is nothing.
  distribution(name, latest) {
    const { bounds, counts } = latest[name];
    const then = this.#snapshots[0].latencies[name];
    const recent = counts.map((value, index) => value - then.counts[index]);
    const any = recent.some((value) => value > 0);
    return { bounds, counts: any ? recent : counts, recent: any };
  }
}

export function total(counts) {
  return counts.reduce((sum, value) => sum + value, 0);
}

// Where a share of the values lies at most, interpolated within its bucket; above the last bound: Infinity.
export function quantile(share, bounds, counts) {
  const rank = share * total(counts);
  let below = 0;
  for (let index = 0; index < bounds.length; index += 1) {
    if (below + counts[index] >= rank && counts[index] > 0) {
      const lower = index ? bounds[index - 1] : 0;
      return lower + ((bounds[index] - lower) * Math.max(0, rank - below)) / counts[index];
    }
    below += counts[index];
  }
  return Infinity;
}
