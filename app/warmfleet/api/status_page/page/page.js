// Asks the replica for its figures every two seconds while somebody looks, and shows them.

import { bytes, count, el, number, percent, say, seconds, write } from "./dom.js";
import { draw } from "./plots.js";
import {
  NO_WORKER, NO_WORKER_READY, decisionsTable, modelsTable, replicasTable, sessionsTable, slowTable, span, workersTable,
} from "./tables.js";

const EVERY_MS = 2000;
const SLOWEST_MS = 15000; // between two tries while the replica does not answer
const PATIENCE_MS = 10000;
const ANNOUNCED = 3; // changes that are read out at once
const KEY = "warmfleet-operator-key";
const THEME = "warmfleet-theme";
const RUNGS = {
  redis: ["Redis decides", "good"],
  asked: ["engines are asked", "warn"],
  last_known: ["last known view", "bad"],
  nothing: ["no fleet known", "bad"],
};

const [FLEET, REPLICA] = ["whole fleet", "this replica"]; // where a figure comes from, as the foot of the page tells

const $ = (id) => document.getElementById(id);
const workers = workersTable($("workers"));
const decisions = decisionsTable($("decisions"));
const replicas = replicasTable($("replicas"));
const slow = slowTable($("slow"));
const models = modelsTable($("models"), choose);
const sessions = sessionsTable($("sessions"));

let last = null; // what is shown
let before = null; // the states of the model's workers and its rung, to tell what changed
let paused = false;
let failures = 0;
let timer = 0;
let asking = false;

// ------------------------------------------------------------------ asking

async function poll() {
  clearTimeout(timer);
  if (paused || document.hidden || asking) return;
  const key = sessionStorage.getItem(KEY);
  const unwanted = () => paused || sessionStorage.getItem(KEY) !== key; // the reader changed that meanwhile
  asking = true;
  try {
    const answer = await fetch("status.json", {
      headers: key ? { authorization: `Bearer ${latin(key)}` } : {},
      cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(PATIENCE_MS),
    });
    const figures = answer.ok ? await answer.json() : null;
    if (!unwanted()) {
      if (answer.status === 401) {
        askForKey(Boolean(key));
        return;
      }
      if (!answer.ok) throw new Error(`it answered ${answer.status}`);
      last = figures;
      answered();
      show();
    }
  } catch (error) {
    if (!unwanted()) failed(error);
  } finally {
    asking = false;
  }
  timer = setTimeout(poll, unwanted() ? 0 : Math.min(EVERY_MS * 2 ** failures, SLOWEST_MS));
}

/** The bytes of a text in UTF-8, each as one character: a header takes no others. */
function latin(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

function answered() {
  failures = 0;
  if (!$("key-form").hidden) $("fleet").focus(); // what had the focus goes away
  $("key-form").hidden = true;
  $("notice").hidden = true;
  $("shown").hidden = false;
  $("forget").hidden = sessionStorage.getItem(KEY) === null;
  live(`live ${new Date(1000 * last.at).toLocaleTimeString("en-GB")}`, "good-text");
}

function failed(error) {
  failures += 1;
  const since = last ? `; these figures are from ${new Date(1000 * last.at).toLocaleTimeString("en-GB")}` : "";
  say($("notice"), `This replica gives no figures (${error.message})${since}. The page goes on trying.`);
  $("notice").hidden = false;
  live("no answer", "bad-text");
}

function live(text, colour) {
  say($("live"), text);
  $("live").className = `badge ${colour}`;
}

// ------------------------------------------------------------------ the operator's key

function askForKey(wrong) {
  sessionStorage.removeItem(KEY);
  last = before = null;
  $("shown").hidden = true;
  $("forget").hidden = true;
  $("notice").hidden = true;
  $("key-wrong").hidden = !wrong;
  $("key-form").hidden = false;
  live("needs the key", "warn-text");
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  poll();
});

$("forget").addEventListener("click", () => {
  askForKey(false);
  poll();
});

// ------------------------------------------------------------------ controls

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  say($("pause"), paused ? "Go on" : "Pause");
  if (paused) live("paused", "warn-text");
  else poll();
});

document.addEventListener("visibilitychange", poll);
$("filter").addEventListener("input", showWorkers);
$("only-out").addEventListener("change", showWorkers);
addEventListener("resize", () => last && showPlots(chosen()));

$("theme").value = localStorage.getItem(THEME) ?? "";
$("theme").addEventListener("change", () => {
  localStorage.setItem(THEME, $("theme").value);
  theme();
});

function theme() {
  document.documentElement.dataset.theme = $("theme").value;
}

function choose(name) {
  const address = new URL(location.href);
  address.searchParams.set("model", name);
  history.replaceState(null, "", address);
  show();
}

/** The model that is shown: the one in the address, else the first. */
function chosen() {
  const name = new URLSearchParams(location.search).get("model");
  return last.models.find((model) => model.model === name) ?? last.models[0];
}

// ------------------------------------------------------------------ showing

/** Show the figures that are there, old ones too: whether the replica answers is for `poll` to tell. */
function show() {
  if (!last) return;
  const model = chosen();
  const { name, up_s: up, draining } = last.replica;
  say($("replica"), `replica ${name} at ${location.host}, up ${span(up)}${draining ? ", draining: it stops soon" : ""}`);
  showModels(model);
  showHead(model);
  showPlots(model);
  showWorkers();
  $("sessions-section").hidden = !model.ledger;
  sessions.show(model.ledger?.line ?? []);
  if (last.hidden) decisions.empty = slow.empty = last.hidden;
  slow.show(last.slow);
  decisions.show(model.decisions);
  replicas.show(model.replicas);
  announce(model);
}

/** Whether the workers that are shown are those of a reading before Redis went away. */
const old = (model) => model.away;
const routable = (model) => model.workers.filter((worker) => worker.routable).length;

function showModels(model) {
  $("models-section").hidden = last.models.length < 2;
  models.show(last.models.map((one) => ({
    model: one.model, chosen: one === model, routable: routable(one), workers: one.workers.length,
    decisions: number(one.lately.decisions_per_s), hit_ratio: one.lately.hit_ratio, p90_s: one.ttft.p90_s || null,
    waiting: one.queue?.waiting, rung: RUNGS[one.rung][0],
  })));
}

function showHead(model) {
  say($("model-title"), model.model);
  document.title = `${routable(model)} of ${model.workers.length} workers, ${model.model} – Warmfleet`;
  const drains = ["draining", "moving"].includes(model.pool_state) ? `this pool is ${model.pool_state}; ` : "";
  say($("model-facts"), `${drains}policy ${model.policy} (${model.policy_by}), prompts identified: ${model.identity}`);
  const nobody = ["redis", "asked"].includes(model.rung) && !routable(model);
  const steps = last.rungs.map((rung) => {
    const now = rung === model.rung;
    const colour = nobody ? "bad" : RUNGS[rung][1];
    return el("li", { "aria-current": now ? "step" : null, class: now ? colour : null }, `${now ? "▶ " : ""}${RUNGS[rung][0]}`);
  });
  $("rungs").replaceChildren(...steps);
  $("rung-reason").className = nobody ? "notice bad" : "";
  write($("rung-reason"), nobody ? (model.workers.length ? NO_WORKER_READY : NO_WORKER) : model.rung_reason);
  showTiles(model);
}

function nextInLine(queue) {
  const first = queue.next;
  if (!first) return "";
  const state = first.has_room ? `goes to ${first.worker_id} now, after` : `waits for ${first.worker_id},`;
  return `; the first ${state} ${seconds(first.waited_s)}${first.has_room ? "" : " so far"}`;
}

function showTiles(model) {
  const { lately, ttft, queue, index, ledger, pairs } = model;
  const all = model.fleet; // of all replicas; null while Redis is away
  const [figures, scope] = all ? [all, `${FLEET}, last minute`] : [{ ...lately, ...ttft }, `${REPLICA}, last minute`];
  const here = (text) => (all && all.replicas > 1 ? `; here ${text}` : "");
  const away = "not known while Redis is away";
  const tiles = [
    ["Workers", `${routable(model)} of ${model.workers.length}`, old(model) ? "took requests when last read" : "take requests", FLEET],
    ["Hit ratio", percent(figures.hit_ratio), `of prompt tokens${here(percent(lately.hit_ratio))}`, scope],
    ["First token, P50", seconds(figures.p50_s || null),
      `of streams; P90 ${seconds(figures.p90_s || null)}${here(`${seconds(ttft.p50_s || null)}, ${seconds(ttft.p90_s || null)}`)}`, scope],
    ["Decisions", `${number(figures.decisions_per_s)}/s`,
      `${number(figures.fallbacks_per_s)}/s without Redis${here(`${number(lately.decisions_per_s)}/s`)}`, scope],
    ["In the queue", count(queue?.waiting), queue ? `${seconds(queue.work_s)} of work${nextInLine(queue)}` : away, FLEET],
    ...(ledger ? [["Sessions held", count(ledger.held), `${count(ledger.running + ledger.idle)} have a place, ` +
      `${count(ledger.taken_tokens)} of ${count(ledger.capacity_tokens)} tokens`, FLEET]] : []),
    ...(pairs ? [["Pairs", count(pairs.pairs), `${count(pairs.prefill)} prefill, ${count(pairs.decode)} decode, ` +
      `${count(pairs.both)} both; ${pairs.told}`, FLEET]] : []),
    ["Redis memory", index ? bytes(index.memory_used_bytes) : "–", index ? memoryLimit(index) : away, FLEET],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value, more, scope]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, more), el("small", { class: "of" }, scope)))));
}

function memoryLimit({ memory_limit_bytes: limit, entries }) {
  return `${limit ? `of ${bytes(limit)}` : "no limit set"}, ${count(entries)} entries`;
}

const plots = ["hits", "first", "decisions", "waiting"].map((name) => el("figure", { id: `plot-${name}` }));
$("plots").append(...plots);

function showPlots(model) {
  const { age_s: ages, hit_ratio: hits, p50_s, p90_s, p99_s, decisions_per_s, fallbacks_per_s, waiting } = model.history;
  draw(plots[0], { title: "Hit ratio", ages, top: 1, format: percent, lines: [{ name: "of prompt tokens", values: hits }] });
  draw(plots[1], {
    title: "Time to first token", ages, format: seconds,
    lines: [{ name: "P50", values: p50_s }, { name: "P90", values: p90_s }, { name: "P99", values: p99_s }],
  });
  draw(plots[2], {
    title: "Decisions per second", ages, format: number,
    lines: [{ name: "all", values: decisions_per_s }, { name: "without Redis", values: fallbacks_per_s }],
  });
  draw(plots[3], { title: "Requests that wait", ages, format: number, lines: [{ name: "in this replica's queue", values: waiting }] });
}

function showWorkers() {
  if (!last) return;
  const model = chosen();
  const { workers: all, view_age_s: age } = model;
  say($("workers-scope"), old(model) ? `as this replica read them ${age === null ? "never" : `${count(age)} s ago`}` : "whole fleet");
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = all.filter((worker) => {
    const role = worker.pairs?.role ?? "";
    const text = `${worker.worker_id} ${worker.url} ${worker.state} ${worker.reason} ${role} ${worker.names.join(" ")}`.toLowerCase();
    return words.every((word) => text.includes(word)) && !($("only-out").checked && worker.routable);
  });
  workers.empty = all.length ? "No worker matches the filter." : "No worker has joined.";
  workers.show(found);
  say($("filtered"), `${found.length} of ${all.length} shown`);
}

// ------------------------------------------------------------------ telling changes

/** Let screen readers tell what changed since the last figures: states of workers, and what decides. */
function announce(model) {
  const now = { model: model.model, rung: model.rung, states: new Map(model.workers.map((worker) => [worker.worker_id, worker.state])) };
  const told = [];
  if (before && before.model === now.model) {
    if (before.rung !== now.rung) told.push(model.rung_reason);
    for (const [name, state] of now.states) {
      if (!before.states.has(name)) told.push(`${name} joined: ${state}`);
      else if (before.states.get(name) !== state) told.push(`${name}: ${before.states.get(name)}, now ${state}`);
    }
    for (const name of before.states.keys()) if (!now.states.has(name)) told.push(`${name} is gone`);
  }
  before = now;
  if (!told.length) return;
  const more = told.length > ANNOUNCED ? `; and ${told.length - ANNOUNCED} more changes` : "";
  say($("changes"), told.slice(0, ANNOUNCED).join("; ") + more);
}

theme();
poll();
