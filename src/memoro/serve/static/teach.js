/* Labelling: what is known so far beside the grid, and training at the end. */

import { download, teach } from "./api.js";
import { showCurve, showClasses } from "./learned.js";
import { Grid } from "./grid.js";
import { byId, count, el, fail, number, percent, tell } from "./parts.js";

const POLL = 700;
const VIEWS = { next: "What to look at next", sure: "Certain guesses", suspects: "Look again", labelled: "Labelled", unlabelled: "Unlabelled", all: "All", unreadable: "Unreadable" };
const KEPT = 500; // decisions that can be undone

const state = { now: null, view: "next", by: "auto", offset: 0, undo: [], failed: [], queue: Promise.resolve(), gone: false, asked: 0, loading: false, solved: null, trained: null, heard: null, changed: () => {} };
let grid = null;

/** Shows the part of the page that labels; `changed` is called after a task was attached. */
export async function startTeaching(changed) {
  state.changed = changed;
  grid = new Grid(byId("teach-grid"), {
    decide, undo, more: next, picture, describe,
    types: (key) => state.now?.kind === "regression" && /^[-.,0-9]$/.test(key),
    stays: (done) => done === "label" && state.now.kind === "multilabel", // there may be further labels
  });
  byId("teach-part").hidden = byId("teach-link").hidden = false;
  document.body.classList.add("teaching");
  byId("teach-views").replaceChildren(...Object.entries(VIEWS).map(([view, name]) => el("button", { type: "button", "data-view": view, "aria-pressed": String(view === state.view), click: () => show(view) }, name)));
  byId("teach-by").addEventListener("change", (event) => { state.by = event.target.value; show("next"); });
  byId("teach-name").addEventListener("submit", (event) => { event.preventDefault(); nameLabel(); });
  for (const [id, action] of Object.entries({ "teach-more": next, "teach-back": back, "teach-undo": undo, "teach-accept": acceptShown, "teach-guess": () => grid.apply(...describe("a")), "teach-none": () => grid.apply("none"), "teach-skip": () => grid.apply("skip"), "teach-keep": () => grid.apply(...describe("k")), "teach-file": saveFile, "teach-report": saveReport, "teach-train": train, "teach-stop": stop, "teach-table": saveTable })) byId(id).addEventListener("click", action);
  state.loading = true; // images come below, once
  await poll();
  const ways = Object.entries(state.now?.ways ?? {}).map(([way, text]) => el("option", { value: way }, text));
  byId("teach-by").replaceChildren(...ways);
  await show("next");
}

/** The button on a card of the answers that puts the image and its right label into the table. */
export function correction(name, shown) {
  if (!state.now?.can_add || name !== state.now.name) return null;
  const input = el("input", { list: "teach-labels", "aria-label": "The right label", autocomplete: "off" });
  const said = el("p", { class: "soft", role: "status" });
  const form = el("form", { class: "wrong", hidden: true, submit: async (event) => {
    event.preventDefault();
    try {
      const found = await teach("POST", `/images?${new URLSearchParams({ label: input.value })}`, shown.file);
      said.textContent = `Kept as ${found.path} with the label ${input.value}.`;
      form.hidden = true;
    } catch (problem) {
      said.textContent = problem.message;
    }
  } }, input, el("button", { type: "submit" }, "Keep this label"));
  return el("div", null, el("button", { type: "button", click: () => { form.hidden = !form.hidden; input.focus(); } }, "This is wrong"), form, said);
}

async function poll() {
  clearTimeout(state.timer);
  try {
    state.now = await teach("GET", "");
    if (state.gone || state.now.failure) tell(byId("teach-gone"), state.now.failure ? `Learning stopped: ${state.now.failure}` : null);
    state.gone = false;
    describeAll();
    const seen = `${state.now.version} ${state.now.solved} ${state.now.ready}`;
    if (seen !== state.solved) {
      state.solved = seen;
      if (grid.keys.length) grid.update((await teach("GET", `/images?${new URLSearchParams(grid.keys.map((key) => ["keys", key]))}`)).images);
      else if (state.view === "next" && !state.loading) await load();
    }
  } catch (problem) {
    if (!state.gone) fail(byId("teach-gone"), problem, null);
    state.gone = true;
  }
  clearTimeout(state.timer);
  state.timer = setTimeout(poll, POLL);
}

async function show(view) {
  Object.assign(state, { view, offset: 0 });
  for (const button of byId("teach-views").children) button.setAttribute("aria-pressed", String(button.dataset.view === view));
  byId("teach-way").hidden = view !== "next";
  say("");
  await load();
}

async function load() {
  const mine = ++state.asked; // later questions overtake earlier ones
  state.loading = true;
  try {
    const asked = new URLSearchParams({ view: state.view, by: state.by, offset: String(state.offset), limit: state.view === "next" ? "24" : "60" });
    const found = await teach("GET", `/images?${asked}`);
    if (mine !== state.asked) return;
    grid.show(found.images);
    const end = found.offset + found.images.length;
    const where = state.view === "next" ? `${count(found.images.length, "image")} to look at.` : `${found.images.length ? `${found.offset + 1} to ${end} of ` : ""}${count(found.total, "image")}.`;
    const empty = state.now && state.now.ready + state.now.unreadable < state.now.images ? "Images are being read." : "There is nothing here.";
    byId("teach-where").textContent = found.images.length ? where : empty;
    byId("teach-back").hidden = state.view === "next" || state.offset === 0;
    byId("teach-more").disabled = state.view !== "next" && end >= found.total;
    byId("teach-accept").hidden = state.view !== "sure" || !found.images.length;
    byId("teach-accept").textContent = `Accept these ${found.images.length}`;
    byId("teach-keep").hidden = state.view !== "suspects";
  } catch (problem) {
    fail(byId("teach-problem"), problem, load);
  } finally {
    if (mine === state.asked) state.loading = false;
  }
}

async function next() {
  if (state.view !== "next") state.offset += grid.keys.length;
  await load();
  grid.focusFirst();
}

async function back() {
  state.offset = Math.max(0, state.offset - 60);
  await load();
  grid.focusFirst();
}

/** Writes decisions one after the other, and says so once they are on disk. `choose` gives the state and label of an
 * image. Where another window has decided meanwhile, its decision stays. */
function decide(images, choose) {
  return state.queue = state.queue.then(() => write(images, choose));
}

async function write(images, choose) {
  const shown = new Map(grid.images().map((image) => [image.key, image]));
  const entries = images.map((image) => shown.get(image.key) ?? image).map((image) => ({ key: image.key, row: image.row, ...choose(image) })).filter((entry) => entry.state);
  if (!entries.length) return say("There is no guess to accept here.");
  try {
    const found = await teach("POST", "/labels", JSON.stringify({ entries }));
    if (found.changed.length) state.undo.push(found.changed);
    state.undo = state.undo.slice(-KEPT);
    grid.update(found.changed.map((one) => ({ key: one.key, ...one.now })));
    tell(byId("teach-problem"), null);
    const done = new Set(entries.map(words)), [first] = done; // without the label where there are several
    say(`${count(found.changed.length, "image")}: ${done.size === 1 ? first : first.split(" ")[0]}.${elsewhere(found)}`);
    if (found.refused) state.solved = null; // what the other window has decided is shown soon
    if (state.view === "next" && state.now.kind !== "multilabel" && grid.finished()) await next();
  } catch (problem) {
    if (!problem.gone) return fail(byId("teach-problem"), problem, null, "This was not kept: ");
    state.failed.push([images, choose]);
    tell(byId("teach-problem"), `The server does not answer: ${count(state.failed.length, "decision")} not kept yet.`, again);
  }
}

/** Writes what could not be written. */
function again() {
  for (const one of state.failed.splice(0)) decide(...one);
}

const elsewhere = ({ refused }) => (refused ? ` ${count(refused, "image")} changed in another window since, and stay${refused === 1 ? "s" : ""} as ${refused === 1 ? "it is" : "they are"}.` : "");

async function undo() {
  const last = state.undo.pop();
  if (!last) return say("There is nothing to undo.");
  try {
    const entries = last.map((one) => ({ key: one.key, state: one.before.state, label: one.before.label, row: one.now.row }));
    const found = await teach("POST", "/labels", JSON.stringify({ entries }));
    grid.update(found.changed.map((one) => ({ key: one.key, ...one.now })));
    say(`Undone: ${count(found.changed.length, "image")}.${elsewhere(found)}`);
  } catch (problem) {
    state.undo.push(last);
    fail(byId("teach-problem"), problem, undo);
  }
}

function acceptShown() {
  return decide(grid.images().filter((image) => image.state === "clear" && typeof image.guess === "string"), (image) => ({ state: "accept", label: image.guess })).then(load);
}

/** What a key or a button stands for: a label of the chosen images, which differs by the kind of task. */
function choose(label) {
  if (state.now.kind !== "multilabel") return () => ({ state: "label", label });
  return (image) => {
    const has = new Set(image.state === "clear" ? [] : image.label ?? []);
    has[has.has(label) ? "delete" : "add"](label);
    return { state: "label", label: [...has] };
  };
}

function nameLabel() {
  const input = byId("teach-label"), text = input.value.trim();
  input.value = "";
  if (!text) return;
  grid.focus();
  grid.apply("label", choose(state.now.kind === "regression" ? Number(text.replace(",", ".")) : text)).then(poll); // a new class has a key
}

/** What a key means in the grid; null where it means nothing. */
function describe(key) {
  const at = key === "0" ? 9 : Number(key) - 1, label = /^[0-9]$/.test(key) ? state.now?.classes[at]?.label : undefined;
  if (label !== undefined) return ["label", choose(label)];
  if (key === "a") return ["label", (image) => (image.guess === null ? {} : { state: state.view === "suspects" ? "label" : "accept", label: image.guess })];
  if (key === "k") return ["keep", (image) => (image.label === null ? {} : { state: "keep", label: image.label })];
  return { n: ["none"], s: ["skip"], x: ["clear"] }[key] ?? null;
}

const words = ({ state: done, label }) => ({ label: `labelled ${Array.isArray(label) ? label.join(", ") || "none of the labels" : label}`, keep: "checked", accept: `accepted ${label}`, none: "none of these", skip: "skipped", clear: "label taken back" })[done];
const say = (text) => { byId("teach-status").textContent = text; };

async function picture(key, large = false) {
  return URL.createObjectURL(await teach("GET", `/images/${key}${large ? "?large=true" : ""}`, undefined, "blob"));
}

function describeAll() {
  const { now } = state, busy = now.images - now.ready - now.unreadable;
  byId("teach-title").textContent = `Teach ${now.name}`;
  byId("teach-about").textContent = `${count(now.images, "image")}, ${now.labelled.toLocaleString("en")} labelled${now.unreadable ? `, ${now.unreadable.toLocaleString("en")} unreadable` : ""}${busy ? `. Reading: ${now.ready.toLocaleString("en")} done, those on the screen first` : ""}. Labels are kept in ${now.table.split(/[\\/]/).slice(-2).join("/")}.`;
  byId("teach-about").title = now.table;
  const bar = byId("teach-progress");
  [bar.hidden, bar.max, bar.value] = [!busy, now.images, now.ready + now.unreadable];
  const totals = { sure: now.sure, suspects: now.suspects, labelled: now.labelled + now.none + now.skip, unreadable: now.unreadable };
  for (const button of byId("teach-views").children) {
    const total = totals[button.dataset.view];
    button.textContent = VIEWS[button.dataset.view] + (total === undefined ? "" : ` (${total.toLocaleString("en")})`);
  }
  showLabels();
  showClasses(byId("teach-classes"), now);
  showCurve(byId("teach-figure"), now);
  const advice = now.advice ? `Most helpful: ${now.advice.more} more of ${now.advice.label} (${now.advice.why}).` : "";
  if (byId("teach-advice").textContent !== advice) byId("teach-advice").textContent = advice;
  if (now.figure && now.solved !== state.heard) byId("teach-heard").textContent = `New guesses from ${count(now.figure.images, "label")}${now.kind === "softmax" ? `: ${percent(now.figure.value)} right, ${now.sure} certain` : ""}.`;
  state.heard = now.solved;
  byId("teach-overlaps").textContent = now.overlaps.map(([one, other, pairs]) => `${one} and ${other} overlap: ${count(pairs, "image")} confused.`).join(" ");
  showTraining();
}

/** A button for each class, with the key that stands for it. */
function showLabels() {
  const place = byId("teach-keys"), names = state.now.classes.map((one) => one.label).join("\n");
  byId("teach-label").type = state.now.kind === "regression" ? "number" : "text";
  byId("teach-label").step = "any";
  if (place.dataset.names === names) return;
  place.dataset.names = names;
  const numbers = state.now.kind === "regression";
  byId("teach-labels").replaceChildren(...state.now.classes.map((one) => el("option", { value: one.label })));
  place.replaceChildren(...(numbers ? [] : state.now.classes).map(({ label }, at) => el("button", { type: "button", click: () => grid.apply("label", choose(label)) },
    at < 10 ? el("kbd", null, String((at + 1) % 10)) : null, ` ${label}`)));
}

async function train() {
  try {
    await teach("POST", "/train");
    await poll();
  } catch (problem) {
    fail(byId("teach-problem"), problem, null);
  }
}

async function stop() {
  await teach("DELETE", "/train").catch((problem) => fail(byId("teach-problem"), problem, null));
  await poll();
}

const saveTable = () => save(teach("GET", "/table", undefined, "blob"), `${state.now.name}-labels.csv`);
const saveReport = () => save(teach("GET", "/report", undefined, "blob"), `${state.now.name}-report.html`);
const saveFile = () => save(download(state.now.name), `${state.now.name}.safetensors`);

async function save(found, name) {
  try {
    const url = URL.createObjectURL(await found);
    el("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  } catch (problem) {
    fail(byId("teach-problem"), problem, null);
  }
}

function showTraining() {
  const { training, commands, kind } = state.now, done = training.state === "done";
  const [name, text] = { softmax: ["accuracy", percent], multilabel: ["mean average precision", number], regression: ["R²", number] }[kind];
  const value = training.score === undefined ? null : text(training.score), before = kind === "softmax" && training.before ? ` Answers while labelling: ${percent(training.before.value)}.` : "";
  const told = {
    none: "Trains the whole task on all labels so far, in the background, and attaches it to this page.",
    training: `Training on ${count(training.labels, "image")}: ${training.epochs ? `epoch ${training.epochs}` : "starting"} …`,
    done: `Done: ${value === null ? `${name} was not measured` : `${name} ${value} on images that were left out (${training.split})`}.${before} It answers below, and is in ${training.file}.`,
    failed: `The training failed: ${training.message}`,
    stopped: "The training was stopped.",
  }[training.state];
  if (byId("teach-training").textContent !== told) byId("teach-training").textContent = told;
  byId("teach-train").disabled = training.state === "training";
  byId("teach-stop").hidden = training.state !== "training";
  byId("teach-file").hidden = !done;
  byId("teach-report").hidden = !training.report;
  byId("teach-commands").textContent = commands.join("\n");
  const trained = done ? training.labels + training.file + training.ended : null;
  if (trained === state.trained) return;
  state.trained = trained;
  if (done) state.changed();
}
