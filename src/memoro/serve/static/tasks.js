/* The list of tasks: what each is, who extends whom, attaching and detaching. */

import { attach, detach, download } from "./api.js";
import { byId, count, el, fail, number, shorten, size, svg, tell } from "./parts.js";

const MAIN = { softmax: "accuracy", multilabel: "mean_average_precision", regression: "r2" };
const NAMES = { mean_average_precision: "mAP", r2: "R²", f1: "F1" };
const LABELS = 12;
const FACTS = 40;
const DRAWN = 60;
const SKIPPED = 20;
const detached = new Map();

/** Shows the list; `changed` is called after a task was attached or detached. */
export function showTasks(list, changed) {
  const { backbone, tasks } = list;
  const none = tasks.length ? "" : " Attach a task file, or train a task: memoro train photos/pets.";
  byId("tasks-about").textContent = `${count(tasks.length, "task")} on ${backbone.name}, fingerprint ${backbone.fingerprint.slice(0, 12)}.${none}`;
  showSkipped(list.skipped);
  byId("graph").replaceChildren(...(tasks.length ? [graph(tasks, backbone.name, byId("graph").clientWidth)] : []));
  byId("tasks").replaceChildren(...tasks.map((task) => card(task, list, changed)));
}

/** The files of the server's folder that are not served, and why. */
function showSkipped(files) {
  const rows = files.slice(0, SKIPPED).map(({ file, reason }) => el("li", null, el("b", null, shorten(file, 80)), `: ${shorten(reason, 400)}`));
  const more = files.length > SKIPPED ? [el("li", null, `… and ${count(files.length - SKIPPED, "file")} more`)] : [];
  byId("skipped").hidden = !files.length;
  byId("skipped").replaceChildren(el("p", null, `${count(files.length, "file")} in the server's folder cannot be served. Repair or remove them, then restart the server.`), el("ul", null, ...rows, ...more));
}

/** Attaches files one after the other, and says what became of each. */
export async function attachFiles(files, changed) {
  const problem = byId("task-problem");
  tell(problem, null);
  for (const file of files) {
    say(`Attaching ${file.name} …`);
    try {
      const { tasks } = await attach(file);
      const words = Object.entries(tasks).map(([name, one]) => `${name} ${one.changed ? "attached" : "was attached already"}`);
      for (const name of Object.keys(tasks)) detached.delete(name);
      say(`${words.join(", ")}.`);
      await changed();
    } catch (error) {
      say("");
      return fail(problem, error, () => attachFiles([file], changed), `${file.name} was not attached: `);
    }
  }
}

async function detachTask(task, list, changed) {
  tell(byId("task-problem"), null);
  try {
    const file = await download(task.name);
    if (file.size > list.max_body) {
      return tell(byId("task-problem"), `${task.name} was not detached, because that could not be undone: its file has ${size(file.size)}, and this server accepts ${size(list.max_body)}. Start it with a larger --max-body-mb.`);
    }
    await detach(task.name);
    detached.set(task.name, file);
    say(`${task.name} detached.`, changed);
    await changed();
    byId("task-status").querySelector("button").focus();
  } catch (error) {
    fail(byId("task-problem"), error, () => detachTask(task, list, changed));
  }
}

async function undo(name, changed) {
  await attachFiles([new File([detached.get(name)], name)], changed);
  byId("tasks-part").focus();
}

/** The status of the last change, and a button for each detached task that brings it back. */
function say(text, changed) {
  const place = byId("task-status");
  place.replaceChildren(...(text ? [el("p", null, text)] : []));
  if (changed) say.changed = changed;
  if (detached.size) {
    place.append(el("p", { class: "buttons" }, ...[...detached.keys()].reverse().map((name) =>
      el("button", { type: "button", click: () => undo(name, say.changed) }, `Undo: attach ${shorten(name, 40)} again`))));
  }
}

function card(task, list, changed) {
  const labels = task.labels.slice(0, LABELS).join(", ") + (task.labels.length > LABELS ? ", …" : "");
  return el("article", { class: "card task", "aria-label": `Task ${task.name}`, "data-task": task.name },
    el("h3", null, task.name),
    el("p", null, `${task.kind === "regression" ? count(task.labels.length, "number") : count(task.labels.length, "label")}: ${labels}`),
    el("p", null, ...measured(task), size(task.bytes), task.parents.length ? `, extends ${task.parents.join(", ")}` : ""),
    el("details", null, el("summary", null, "Where it came from"),
      el("table", { class: "facts" }, el("tbody", null, ...facts(task).map(([name, value]) =>
        el("tr", null, el("th", { scope: "row", class: "left" }, name), el("td", { class: "left" }, value)))))),
    el("div", { class: "buttons" },
      el("button", { type: "button", "aria-label": `Download ${task.name}`, click: () => save(task) }, "Download"),
      el("button", { type: "button", "aria-label": `Detach ${task.name}`, disabled: !list.writable, "aria-describedby": list.writable ? null : "attaching",
        click: () => detachTask(task, list, changed) }, "Detach")));
}

/** The main figure of a task, and what it was measured on. */
function measured(task) {
  const key = MAIN[task.kind], value = task.metrics[key];
  if (typeof value !== "number") return ["not measured, "];
  const { images, split } = task.metrics;
  const where = typeof images === "number" ? ` (${count(images, "image")}${typeof split === "string" ? `, ${shorten(split, 20)}` : ""})` : "";
  return [`${NAMES[key] ?? key} `, el("b", null, number(value)), `${where}, `];
}

/** What the file says about its origin. A stranger may have written it: only short texts and numbers are shown. */
function facts(task) {
  const plain = (record) => Object.entries(record).filter(([, value]) => ["string", "number", "boolean"].includes(typeof value) && value !== "");
  const text = (value) => (typeof value === "number" ? number(value) : shorten(String(value), 200));
  const rows = [
    ["backbone", `${task.backbone.name}, fingerprint ${task.backbone.fingerprint.slice(0, 12)}`],
    ["content hash", task.content.slice(0, 12)],
    ["cells per layer", String(task.cells)],
    ["from layer", String(task.from_layer)],
    ...(task.rank ? [["rank of its low-rank weights", String(task.rank)]] : []),
    ...plain(task.training).map(([name, value]) => [name.replaceAll("_", " "), text(value)]),
    ...plain(task.metrics).map(([name, value]) => [`measured: ${NAMES[name] ?? name.replaceAll("_", " ")}`, text(value)]),
  ];
  return rows.slice(0, FACTS).map(([name, value]) => [shorten(name, 60), value]);
}

async function save(task) {
  tell(byId("task-problem"), null);
  try {
    const url = URL.createObjectURL(await download(task.name));
    el("a", { href: url, download: `${task.name}.safetensors` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  } catch (error) {
    fail(byId("task-problem"), error, () => save(task));
  }
}

/** The backbone on the left, tasks to its right, each to the right of what it extends; `room` is how wide it may be. */
function graph(all, backbone, room) {
  const related = all.length <= DRAWN ? all : all.filter((task) => task.parents.length || all.some((other) => other.parents.includes(task.name)));
  const tasks = related.slice(0, DRAWN), parents = new Map(tasks.map((task) => [task.name, task.parents]));
  const depth = new Map(), find = (name) => {
    if (!depth.has(name)) depth.set(name, 1 + Math.max(0, ...(parents.get(name) ?? []).filter((one) => parents.has(one)).map(find)));
    return depth.get(name);
  };
  const [high, step] = [26, 34], columns = [];
  for (const { name } of tasks) (columns[find(name) - 1] ??= []).push(name);
  const gap = room < 600 ? 20 : 48, wide = Math.max(72, Math.min(132, Math.floor((room - 2 - gap * columns.length) / (columns.length + 1))));
  const place = new Map();
  columns.forEach((names, at) => {
    const height = (name) => {
      const above = parents.get(name).filter((one) => place.has(one)).map((one) => place.get(one).y);
      return above.length ? above.reduce((sum, y) => sum + y, 0) / above.length : 0;
    };
    let next = 0;
    for (const name of [...names].sort((a, b) => height(a) - height(b))) {
      const y = Math.max(next, height(name));
      place.set(name, { x: (at + 1) * (wide + gap), y });
      next = y + step;
    }
  });
  const bottom = Math.max(...[...place.values()].map(({ y }) => y)), base = { x: 0, y: columns.length ? (columns[0].length - 1) * step / 2 : 0 };
  const node = (name, { x, y }, look) => svg("g", { class: look, transform: `translate(${x} ${y})` }, svg("title", null, name),
    svg("rect", { width: wide, height: high, rx: 6 }), svg("text", { x: wide / 2, y: 17, "text-anchor": "middle" }, shorten(name, Math.floor(wide / 7))));
  const edge = (from, to) => svg("path", { class: "axis", d: `M${from.x + wide},${from.y + high / 2} C${from.x + wide + gap / 2},${from.y + high / 2} ${to.x - gap / 2},${to.y + high / 2} ${to.x},${to.y + high / 2}` });
  const edges = tasks.flatMap(({ name }) => {
    const own = parents.get(name).filter((one) => place.has(one));
    return (own.length ? own.map((one) => place.get(one)) : [base]).map((from) => edge(from, place.get(name)));
  });
  const words = tasks.map(({ name }) => (parents.get(name).length ? `${name} extends ${parents.get(name).join(", ")}` : `${name} extends nothing`));
  const [width, height] = [(columns.length + 1) * (wide + gap) - gap + 2, Math.max(bottom, base.y) + high + 2];
  return el("figure", null,
    svg("svg", { class: "graph", width, height, viewBox: `-1 -1 ${width} ${height}`, role: "img", "aria-label": `Which task extends which: ${words.join("; ")}` },
      ...edges, node(backbone, base, "node base"), ...tasks.map(({ name }) => node(name, place.get(name), "node"))),
    el("figcaption", null, all.length > tasks.length ? `${count(all.length - tasks.length, "task")} more, not drawn.` : "A task sees the backbone, itself, and the tasks to its left that it is connected to."));
}
