// The page: one connection to the frontend, one panel an engine, the controls.
// Owns: reconnecting, the key, when to draw. Knows nothing of what a panel shows.

import { setText } from "./dom.js";
import { EnginePanel } from "./engine.js";
import { follow, KeyNeeded } from "./stream.js";

const EVENTS = new URL("events", import.meta.url);
const RETRY_MS = 1000;
const KEY = "coldblock-api-key";

const element = (id) => document.getElementById(id);
const panels = new Map();
let paused = false;
let drawing = false;

function panelOf(engine) {
  if (!panels.has(engine)) {
    const panel = new EnginePanel();
    panels.set(engine, panel);
    const ordered = [...panels.keys()].sort((a, b) => a - b);
    element("engines").insertBefore(panel.root, panels.get(ordered[ordered.indexOf(engine) + 1])?.root ?? null);
  }
  return panels.get(engine);
}

function onEvent(name, data) {
  if (name === "state") panelOf(data.engine).state(data);
  else if (name === "moves") panelOf(data.engine).moves(data);
  draw();
}

// Once a frame at most, and not at all while nobody can see it.
function draw() {
  if (drawing || paused) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    for (const panel of panels.values()) panel.draw(Number(element("window").value));
  });
}

function connection(state, text) {
  document.body.dataset.connection = state;
  setText(document.querySelector(".connection .glyph"), state === "open" ? "●" : "○");
  setText(element("connection"), text);
}

function opened() {
  element("key-form").hidden = true;
  connection("open", "live");
}

function askForKey(wrong) {
  connection("closed", "needs a key");
  sessionStorage.removeItem(KEY);
  if (wrong) setText(element("key-problem"), "The frontend does not know this key. Try another.");
  element("key-form").hidden = false;
  element("key").focus();
  return new Promise((resolve) => {
    element("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, element("key").value);
      element("key").value = "";
      resolve();
    };
  });
}

async function run() {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    try {
      await follow(EVENTS, key, opened, onEvent);
      connection("closed", "the frontend ended the connection; trying again…");
    } catch (error) {
      if (error instanceof KeyNeeded) {
        await askForKey(key !== null);
        continue;
      }
      connection("closed", "no connection to the frontend; trying again…");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

element("window").addEventListener("change", draw);
element("engines").addEventListener("change", draw);
element("pause").addEventListener("click", () => {
  paused = !paused;
  element("pause").setAttribute("aria-pressed", String(paused));
  setText(element("pause"), paused ? "Resume" : "Pause");
  draw();
});
run();
