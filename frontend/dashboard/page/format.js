// Numbers as people read them. Knows nothing of what they count.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit ? digits(count) : count} ${UNITS[unit]}`;
}

export function rate(bytesPerSecond) {
  if (!bytesPerSecond) return "0 MB/s";
  if (bytesPerSecond >= 1e9) return `${digits(bytesPerSecond / 1e9)} GB/s`;
  return `${digits(bytesPerSecond / 1e6)} MB/s`;
}

export function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${digits(1000 * value)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 120 ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function count(value, name) {
  return `${value} ${name}${value === 1 ? "" : "s"}`;
}

export function clock(unixSeconds) {
  const moment = new Date(1000 * unixSeconds);
  const two = (number) => String(number).padStart(2, "0");
  return `${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}`;
}
