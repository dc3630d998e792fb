// Making and changing elements. Everything that comes from outside becomes text, never markup.

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A name that somebody made up: kept in its own direction, cut by the style sheet, whole on hover.
export function madeUp(name) {
  return make("bdi", { class: "made-up", title: name }, name || "–");
}

// The line of a few hundred values, newest right, as an SVG that stretches.
export function sparkline(points, from, to, most) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "sparkline");
  svg.setAttribute("viewBox", "0 0 100 20");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const x = (time) => ((100 * (time - from)) / (to - from)).toFixed(2);
  const y = (value) => (19 - (18 * value) / (most || 1)).toFixed(2);
  line.setAttribute("points", points.map(([time, value]) => `${x(time)},${y(value)}`).join(" "));
  svg.append(line);
  return svg;
}
