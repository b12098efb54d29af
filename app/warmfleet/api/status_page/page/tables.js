// The tables of the page: they sort by their columns, and on a phone each row becomes a card.

import { clock, count, el, keyed, percent, prose, seconds, svg } from "./dom.js";

const compared = new Intl.Collator("en", { numeric: true }).compare;
const LIMITED = new Set(["load-only", "unheard", "suspected"]);
const ON_THE_WAY = new Set(["pending", "warming", "joining", "draining", "paused", "left"]); // nothing is wrong with these

/** A table that is sorted by the column whose head was pressed last. columns: {name, cell(row), and perhaps by(row), number, words}. */
export class Table {
  constructor(table, { caption, columns, keyOf, rowClass = () => null, sortedBy = null, empty }) {
    Object.assign(this, { table, columns, keyOf, rowClass, sortedBy, empty, down: false, rows: [] });
    table.classList.add("cards");
    table.setAttribute("role", "table"); // cards are blocks, and a browser takes no block for a part of a table
    this.body = el("tbody", { role: "rowgroup" });
    this.heads = columns.map((column) => this.head(column));
    const thead = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...this.heads));
    if (!columns.some((column) => column.by)) thead.classList.add("plain");
    table.replaceChildren(el("caption", { class: "unseen" }, caption), thead, this.body);
    this.mark();
  }

  head(column) {
    const attributes = { scope: "col", role: "columnheader", class: kind(column) };
    if (!column.by) return el("th", attributes, column.name);
    const button = el("button", { type: "button" }, column.name, el("span", { "aria-hidden": "true" }));
    button.addEventListener("click", () => {
      this.down = this.sortedBy === column.name && !this.down;
      this.sortedBy = column.name;
      this.mark();
      this.show(this.rows);
    });
    return el("th", attributes, button);
  }

  mark() {
    this.columns.forEach((column, place) => {
      if (!column.by) return;
      const sorts = column.name === this.sortedBy;
      const head = this.heads[place];
      if (sorts) head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
      head.querySelector("span").textContent = sorts ? (this.down ? " ▼" : " ▲") : "";
    });
  }

  show(rows) {
    this.rows = rows;
    const column = this.columns.find((one) => one.name === this.sortedBy);
    const order = (a, b) => compared(this.keyOf(a), this.keyOf(b));
    const sorted = column
      ? [...rows].sort((a, b) => (this.down ? -1 : 1) * compare(column.by(a), column.by(b)) || order(a, b))
      : rows;
    if (rows.length) keyed(this.body, sorted, this.keyOf, (row) => this.row(row));
    else {
      const cell = el("td", { role: "cell", colspan: this.columns.length, "data-column": "" }, ...prose(this.empty));
      this.body.replaceChildren(el("tr", { role: "row" }, cell));
    }
  }

  row(row) {
    const cells = this.columns.map((column, place) => {
      const attributes = { "data-column": column.name, class: kind(column) };
      const content = [column.cell(row)].flat();
      if (place) return el("td", { ...attributes, role: "cell" }, ...content);
      return el("th", { ...attributes, role: "rowheader", scope: "row" }, ...content);
    });
    return el("tr", { role: "row", class: this.rowClass(row) }, ...cells);
  }
}

/** number: to the right, in one line. words: as wide as there is room; on a phone as wide as the card. */
function kind(column) {
  return column.number ? "number" : column.words ? "words" : null;
}

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : compared(String(a), String(b));
}

const small = (text) => el("small", {}, ...prose(text));

/** A share in percent behind a bar of it. */
function shown(share) {
  return [bar(share), el("span", { class: "share" }, percent(share))];
}

function bar(share) {
  const picture = svg("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.append(svg("rect", { class: "empty", width: 100, height: 8 }));
  picture.append(svg("rect", { class: "full", width: 100 * Math.max(0, Math.min(share, 1)), height: 8 }));
  return picture;
}

/** How good a worker's state is: it takes no requests, 0 by a fault or 1 on purpose; it does, 2 within limits or 3 well. */
export function grade(worker) {
  if (worker.routable) return LIMITED.has(worker.state) ? 2 : 3;
  return ON_THE_WAY.has(worker.state) ? 1 : 0;
}

const ROLES = { prefill: "prefill engine", decode: "decode engine", both: "prefill and decode engine" };
const SIGNS = ["✕", "○", "◐", "●"];
const COLOURS = ["bad-text", "warn-text", "warn-text", "good-text"];
const fill = (worker) => (worker.capacity_blocks ? worker.blocks / worker.capacity_blocks : null);

function state(worker) {
  const good = grade(worker);
  const sign = el("span", { "aria-hidden": "true" }, `${SIGNS[good]} `);
  const told = worker.remedy ? [small(worker.reason), small(`→ ${worker.remedy}`)] : [small(worker.reason)];
  return [el("span", { class: COLOURS[good] }, sign, worker.state), ...told, ...role(worker.pairs)];
}

/** Whether the worker prefills or decodes for others, with how many of them it pairs, and why not with all. */
function role(pairs) {
  if (!pairs) return [];
  const told = pairs.role ? [small(`${ROLES[pairs.role]}: pairs with ${count(pairs.partners)} of ${count(pairs.of)} engines`)] : [];
  return [...told, ...pairs.apart.flatMap(({ from, why, remedy }) =>
    [small(from.length ? `not with ${from.slice(0, 3).join(", ")}${from.length > 3 ? ` and ${from.length - 3} more` : ""}: ${why}` : why), small(`→ ${remedy}`)])];
}

function cache(worker) {
  const share = fill(worker);
  if (share === null) return ["unknown"];
  const held = [...shown(share), small(`${count(worker.blocks)} of ${count(worker.capacity_blocks)} blocks`)];
  const { places } = worker;
  if (!places) return held;
  const taken = `${count(places.taken_tokens)} of ${count(places.capacity_tokens)} tokens`;
  return [...held, small(`${count(places.sessions)} sessions, ${taken}`)];
}

function lag(worker) {
  if (worker.lag_s === null) return [worker.state === "approximate" ? "no stream" : "unknown"];
  const told = worker.lag_batches ? seconds(worker.lag_s) : "none";
  const more = worker.diverged ? "differs: a snapshot is due" : worker.lag_batches ? `${count(worker.lag_batches)} entries` : null;
  return more ? [told, small(more)] : [told];
}

export const NO_WORKER =
  "No worker has joined, so requests get 503. Start vLLM with the plugin and WARMFLEET_REDIS_URL, or name engines in " +
  "WARMFLEET_STATIC_WORKERS; `warmfleet doctor` says what is missing.";
export const NO_WORKER_READY = "No worker takes requests, so they get 503. The table of workers says why.";

export function workersTable(table) {
  return new Table(table, {
    caption: "Workers with their state, cache, load, speed and the lag of their index",
    keyOf: (worker) => worker.worker_id,
    rowClass: (worker) => (grade(worker) ? null : "out"),
    sortedBy: "State",
    empty: "No worker has joined.",
    columns: [
      { name: "Worker", by: (worker) => worker.worker_id, cell: (worker) => [worker.worker_id, small(worker.url || "no address")] },
      { name: "State", words: true, by: grade, cell: state },
      { name: "Cache", number: true, by: (worker) => fill(worker) ?? -1, cell: cache },
      {
        name: "Requests", number: true, by: (worker) => worker.in_flight,
        cell: (worker) => [count(worker.in_flight), small(`${count(worker.decode_tokens)} tokens of context`)],
      },
      { name: "Tokens to prefill", number: true, by: (worker) => worker.prefill_tokens, cell: (worker) => count(worker.prefill_tokens) },
      {
        name: "Speed", number: true, by: (worker) => worker.speed_tps,
        cell: (worker) => (worker.speed_tps ? [count(worker.speed_tps), small("tokens/s")] : "not known"),
      },
      { name: "Index lag", number: true, by: (worker) => worker.lag_s ?? -1, cell: lag },
    ],
  });
}

function candidates(decision) {
  if (!decision.candidates) return null;
  const heads = ["Worker", "Cost", "Held", "Ahead", "Requests", "Speed"];
  const rows = decision.candidates.map((one) =>
    el("tr", { class: one.worker_id === decision.worker_id ? "shown" : null },
      el("th", { scope: "row", class: "name" }, one.worker_id),
      ...[seconds(one.cost_s), count(one.matched_tokens), count(one.wait_tokens), count(one.in_flight), count(one.speed_tps)]
        .map((text) => el("td", { class: "number" }, text))));
  const head = el("tr", {}, ...heads.map((name, place) => el("th", { scope: "col", class: place ? "number" : null }, name)));
  const table = el("table", {}, el("caption", { class: "unseen" }, "Candidates of this decision"), el("thead", {}, head), el("tbody", {}, ...rows));
  const title = `The cheapest ${rows.length} of ${decision.of} workers`;
  return el("details", {}, el("summary", {}, title), el("div", { class: "scroll", role: "region", "aria-label": title, tabindex: "0" }, table));
}

function held(decision) {
  const share = decision.prompt_tokens ? decision.matched_tokens / decision.prompt_tokens : 0;
  return [...shown(share), small(`${count(decision.matched_tokens)} of ${count(decision.prompt_tokens)} tokens`)];
}

export function decisionsTable(table) {
  return new Table(table, {
    caption: "The last decisions, the newest first, each with its reason",
    keyOf: (decision) => decision.number,
    empty: "No request has been decided here yet.",
    columns: [
      { name: "Time", cell: (decision) => [clock(decision.at), small(`${decision.endpoint}, ${decision.request_id}`)] },
      { name: "Worker", cell: (decision) => el("span", { class: "name" }, decision.worker_id) },
      { name: "Why", words: true, cell: (decision) => [el("span", { class: decision.fallback ? "warn-text" : null }, decision.reason), candidates(decision)] },
      { name: "Prompt held there", number: true, cell: held },
      { name: "Predicted cost", number: true, cell: (decision) => (decision.fallback ? "–" : [seconds(decision.cost_s), small(`${count(decision.wait_tokens)} tokens ahead`)]) },
    ],
  });
}

const REPLICA_COLOURS = { serving: "good-text", draining: "warn-text", silent: "bad-text" };

function replicaState(replica) {
  const heard = replica.state === "silent"
    ? `not heard for ${seconds(replica.heard_s)}: killed, hung or cut off from Redis`
    : `heard ${seconds(replica.heard_s)} ago`;
  return [el("span", { class: REPLICA_COLOURS[replica.state] }, replica.state), small(heard)];
}

export function replicasTable(table) {
  return new Table(table, {
    caption: "The replicas that serve this model, with what each did in the last minute",
    keyOf: (replica) => replica.replica,
    rowClass: (replica) => (replica.state === "silent" ? "out" : null),
    sortedBy: "Replica",
    empty: "Redis does not answer, so other replicas are not known.",
    columns: [
      { name: "Replica", by: (one) => one.replica, cell: (one) => [one.replica, small(one.url || "no address")] },
      { name: "State", words: true, by: (one) => one.state, cell: replicaState },
      { name: "Version", by: (one) => one.version, cell: (one) => [one.version, small(`policy ${one.policy}`)] },
      { name: "Up", number: true, by: (one) => one.up_s, cell: (one) => span(one.up_s) },
      { name: "Requests", number: true, by: (one) => one.in_flight, cell: (one) => [count(one.in_flight), small(`${count(one.waiting)} wait`)] },
      { name: "Decisions", number: true, by: (one) => one.decisions, cell: (one) => count(one.decisions) },
      { name: "Hit ratio", number: true, by: (one) => one.hit_ratio ?? -1, cell: (one) => percent(one.hit_ratio) },
    ],
  });
}

export function sessionsTable(table) {
  return new Table(table, {
    caption: "The held sessions, first those that came first",
    keyOf: (session) => session.session,
    empty: "No session is held, or this host may not see sessions.",
    columns: [
      { name: "Session", cell: (session) => el("span", { class: "name" }, session.session) },
      { name: "State", cell: (session) => session.state },
      { name: "Held for", number: true, cell: (session) => [seconds(session.held_s), small(`${count(session.tokens)} tokens`)] },
      { name: "Why", words: true, cell: (session) => session.because },
    ],
  });
}

export function slowTable(table) {
  return new Table(table, {
    caption: "The slowest requests of the last hour, each with what took its time",
    keyOf: (request) => `${request.at} ${request.request_id}`,
    empty: "No request was served here yet.",
    columns: [
      { name: "Time", cell: (request) => [clock(request.at), small(request.request_id)] },
      { name: "Waited", number: true, cell: waited },
      { name: "Why", words: true, cell: (request) => [...prose(request.because), request.remedy ? small(`→ ${request.remedy}`) : null].filter(Boolean) },
      { name: "Worker", cell: (request) => el("span", { class: "name" }, request.worker ?? "none") },
    ],
  });
}

/** How long something has run, in the largest unit that tells it well. */
export function span(up) {
  if (up < 120) return `${up} s`;
  return up < 7200 ? `${Math.floor(up / 60)} min` : `${Math.floor(up / 3600)} h`;
}

/** How long the client waited for the first byte, or has waited so far, or did in vain. */
function waited(request) {
  const until = request.first_ms ?? request.ms;
  return [seconds(until / 1000), small(request.running ? "under way" : `status ${request.status ?? "none"}`)];
}

export function modelsTable(table, choose) {
  return new Table(table, {
    caption: "The models of this replica",
    keyOf: (model) => model.model,
    rowClass: (model) => (model.chosen ? "shown" : null),
    empty: "none",
    columns: [
      {
        name: "Model",
        cell: (model) => {
          const button = el("button", { type: "button", "aria-pressed": String(model.chosen) }, model.model);
          button.addEventListener("click", () => choose(model.model));
          return button;
        },
      },
      { name: "Workers", number: true, cell: (model) => `${model.routable} of ${model.workers}` },
      { name: "Decisions/s", number: true, cell: (model) => model.decisions },
      { name: "Hit ratio", number: true, cell: (model) => percent(model.hit_ratio) },
      { name: "First token P90", number: true, cell: (model) => seconds(model.p90_s) },
      { name: "Queue", number: true, cell: (model) => count(model.waiting) },
      { name: "Decides", cell: (model) => model.rung },
    ],
  });
}
