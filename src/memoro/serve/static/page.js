/* The page: an image comes in, every task's answer comes out. */

import { hasToken, listTasks, predict, useToken } from "./api.js";
import { answerCards, costPart, summary } from "./answers.js";
import { attachFiles, showTasks } from "./tasks.js";
import { correction, startTeaching } from "./teach.js";
import { byId, count, el, fail, sentence, tell } from "./parts.js";

const state = { list: null, left: new Set(), shown: null, request: null };

/** Asks about a new image, and shows it meanwhile. */
function take(file) {
  if (state.shown) URL.revokeObjectURL(state.shown.url);
  const shown = { file, url: URL.createObjectURL(file), size: null, preprocessing, correction };
  state.shown = shown;
  ask();
  const image = byId("image"), note = byId("image-note");
  image.onload = () => {
    shown.size = [image.naturalWidth, image.naturalHeight];
    [image.hidden, note.hidden] = [false, true];
  };
  image.onerror = () => {
    [image.hidden, note.hidden] = [true, false];
    note.textContent = "This browser cannot show the image.";
  };
  image.src = shown.url;
  byId("invitation").hidden = true;
}

/** Asks the chosen tasks about the image, unless another question has come meanwhile. */
async function ask() {
  const { shown } = state;
  if (!shown) return;
  state.request?.abort();
  const request = state.request = new AbortController();
  const names = chosen();
  tell(byId("problem"), null);
  if (names?.length === 0) return clear(state.list.tasks.length ? "Select at least one task." : "There is no task yet: attach one below.");
  if (!shown.file.size) {
    clear("");
    return tell(byId("problem"), `${shown.file.name} is empty: choose another image.`);
  }
  byId("answers").setAttribute("aria-busy", "true");
  const start = performance.now();
  try {
    const found = await predict(shown.file, names, request.signal);
    if (request.signal.aborted) return;
    const { answers } = found.images[0], asked = Object.keys(answers).length;
    const cards = answerCards(answers, shown);
    const elapsed = performance.now() - start;
    byId("answers").replaceChildren(...cards);
    byId("cost").replaceChildren(...(asked ? [costPart(found, asked, elapsed)] : []));
    byId("status").replaceChildren(el("p", null, asked ? `${count(asked, "task")} answered. ${summary(answers)}` : "There is no task yet: attach one below."));
    if (stale(found.tasks, names)) refresh();
  } catch (problem) {
    if (request.signal.aborted) return;
    if (problem.status === 404 && names) {
      await refresh(); // others may have detached a task that was asked
      if (request.signal.aborted) return;
      if (names.some((name) => !state.list.tasks.some((task) => task.name === name))) return ask();
    }
    clear("");
    fail(byId("problem"), problem, ask);
  } finally {
    if (state.request === request) byId("answers").removeAttribute("aria-busy");
  }
}

function clear(text) {
  byId("answers").replaceChildren();
  byId("cost").replaceChildren();
  byId("status").replaceChildren(...(text ? [el("p", null, text)] : []));
}

/** The names of the tasks to ask; null for all. */
const chosen = () => (state.left.size && state.list ? state.list.tasks.map((task) => task.name).filter((name) => !state.left.has(name)) : null);

/** Whether others have attached or detached tasks since the list was loaded. */
function stale(versions, names) {
  if (!state.list) return false;
  const known = state.list.tasks.filter((task) => names === null || names.includes(task.name));
  return known.length !== Object.keys(versions).length || known.some((task) => versions[task.name]?.version !== task.content.slice(0, 12));
}

function preprocessing(name) {
  return state.list?.tasks.find((task) => task.name === name)?.preprocessing ?? state.list?.backbone.preprocessing ?? { resize: null, crop: null };
}

async function refresh() {
  try {
    state.list = await listTasks();
  } catch (problem) {
    if (!state.list) byId("tasks-about").textContent = "The list of tasks could not be loaded.";
    return fail(byId("task-problem"), problem, refresh);
  }
  tell(byId("task-problem"), null);
  showTasks(state.list, changed);
  showChoice();
  showAccess();
}

async function changed() {
  await refresh();
  ask();
}

function showChoice() {
  const { tasks } = state.list, place = byId("choice");
  const names = new Set(tasks.map((task) => task.name));
  state.left = new Set([...state.left].filter((name) => names.has(name)));
  place.hidden = tasks.length < 2;
  const boxes = tasks.map(({ name }) => el("label", null, el("input", { type: "checkbox", checked: !state.left.has(name), "data-task": name, change: (event) => {
    state.left[event.target.checked ? "delete" : "add"](name);
    ask();
  } }), name));
  const all = (text, left) => el("button", { type: "button", click: () => {
    state.left = new Set(left);
    for (const box of place.querySelectorAll("input")) box.checked = !state.left.has(box.dataset.task);
    ask();
  } }, text);
  place.replaceChildren(place.firstElementChild, el("div", { class: "boxes" }, ...boxes), el("div", { class: "buttons" }, all("All", []), all("None", names)));
  if (!tasks.length && !state.shown) clear("There is no task yet: attach one below.");
}

function showAccess() {
  const { writable, reason, token_needed: needed } = state.list;
  const text = !writable ? sentence(reason)
    : `Drop a task file anywhere, or choose one. It stays attached when the server restarts.${needed ? " Attaching and detaching need the server's token." : ""}`;
  byId("attaching").textContent = text;
  byId("task-file").disabled = !writable;
  byId("attach").classList.toggle("off", !writable);
  byId("access").hidden = !needed && !hasToken();
}

/** A dropped, pasted or chosen file: an image or a task. */
function receive(files) {
  const tasks = [...files].filter((file) => file.name.toLowerCase().endsWith(".safetensors"));
  const images = [...files].filter((file) => !tasks.includes(file));
  if (tasks.length) {
    byId("tasks-part").scrollIntoView();
    if (state.list?.writable === false) tell(byId("task-problem"), `${tasks[0].name} was not attached: ${state.list.reason}`);
    else attachFiles(tasks, changed);
  }
  if (images.length) {
    take(images[0]);
    if (matchMedia("(max-width: 48rem)").matches) byId("answers-part").scrollIntoView();
    if (images.length > 1) tell(byId("problem"), `These are ${images.length} images: only ${images[0].name} is shown. The API takes several at once.`);
  }
}

for (const id of ["pick", "camera", "task-file"]) {
  byId(id).addEventListener("change", (event) => {
    const files = [...event.target.files];
    event.target.value = "";
    receive(files);
  });
}

for (const button of document.querySelectorAll("[data-sample]")) {
  button.addEventListener("click", async () => {
    const name = `${button.dataset.sample}.png`;
    try {
      const response = await fetch(button.firstElementChild.src);
      receive([new File([await response.blob()], name, { type: "image/png" })]);
    } catch {
      clear("");
      tell(byId("problem"), "The server does not answer. Is it still running?", () => button.click());
    }
  });
}

document.addEventListener("paste", (event) => {
  if (event.target.closest?.("input")) return;
  const files = [...event.clipboardData.files];
  if (files.length) receive(files);
  else tell(byId("problem"), "There is no image in the clipboard: copy an image, not its address.");
});

document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dragging");
});
document.addEventListener("dragleave", (event) => event.relatedTarget ?? document.body.classList.remove("dragging"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  if (event.dataTransfer.files.length) receive(event.dataTransfer.files);
  else tell(byId("problem"), "What was dropped is not a file: save the image first, or copy and paste it.");
});

byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(byId("token").value);
  byId("token").value = "";
  changed();
});

await refresh();
if (state.list?.teaching) startTeaching(refresh);
