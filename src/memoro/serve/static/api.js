/* Requests to the server that this page came from. */

const ROOT = new URL("../v1/", import.meta.url);
const RETRIES = 3;
let token = read();

/** A request to the routes that label. */
export async function teach(method, path, body, kind = "json") {
  return (await send(method, `teach${path}`, body))[kind]();
}

/** An error in words for the user. `gone` is set if the server did not answer at all. */
export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
    this.gone = status === 0;
  }
}

/** What the tasks answer about a file; all tasks where `names` is null. */
export async function predict(file, names, signal) {
  return (await send("POST", `predict?${query(names)}`, file, signal)).json();
}

/** The answer of one task, with its attention. */
export async function explain(file, name) {
  const found = await (await send("POST", `explain?${query([name])}`, file)).json();
  return found.images[0].answers[name];
}

export const listTasks = async () => (await send("GET", "tasks")).json();
export const attach = async (file) => (await send("PUT", "tasks", file)).json();
export const detach = (name) => send("DELETE", `tasks/${encodeURIComponent(name)}`);
export const download = async (name) => (await send("GET", `tasks/${encodeURIComponent(name)}/file`)).blob();
export const hasToken = () => token !== "";

export function useToken(text) {
  token = text.trim();
  try {
    sessionStorage.setItem("token", token);
  } catch {
    // Storage may be off: the token then lasts until the page is loaded again.
  }
}

function read() {
  try {
    return sessionStorage.getItem("token") ?? "";
  } catch {
    return "";
  }
}

function query(names) {
  const asked = new URLSearchParams({ top_k: "5", unfamiliar: "mark" });
  for (const name of names ?? []) asked.append("tasks", name);
  return asked;
}

async function send(method, path, body, signal) {
  const headers = body === undefined ? {} : { "content-type": typeof body === "string" ? "application/json" : "application/octet-stream" };
  if (token) headers.authorization = `Bearer ${token}`;
  for (let tries = 1; ; tries++) {
    let response;
    try {
      response = await fetch(new URL(path, ROOT), { method, headers, body, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (token && !/^[\x21-\x7e]+$/.test(token)) throw new Problem("The token contains characters that are not allowed.", 401);
      if (body instanceof Blob && !(await readable(body))) throw new Problem("The file can no longer be read: choose it again.", 400);
      throw new Problem("The server does not answer. Is it still running?", 0);
    }
    if (response.ok) return response;
    if (response.status === 503 && tries <= RETRIES) {
      await new Promise((done) => setTimeout(done, 1000 * (Number(response.headers.get("retry-after")) || 1)));
      continue;
    }
    const told = await response.json().catch(() => ({}));
    throw new Problem(typeof told.error === "string" ? told.error : `The server answered ${response.status}.`, response.status);
  }
}

/** A file that was moved or changed since it was chosen cannot be sent. */
async function readable(file) {
  return file.slice(0, 1).arrayBuffer().then(() => true, () => false);
}
