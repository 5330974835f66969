/* Elements that the parts of the page are made of. Text is always text, never markup. */

import { Problem, hasToken } from "./api.js";

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes that are functions are listeners, true is an empty attribute, null and false are left out. */
export const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** A share as a bar as wide as its place. The number stands beside it, so screen readers skip the bar. */
export function meter(share, look = "bar") {
  const width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return svg("svg", { class: "meter", width: "100%", height: 8, "aria-hidden": "true" },
    svg("rect", { class: "track", width: "100%", height: 8, rx: 4 }),
    svg("rect", { class: look, width, height: 8, rx: 4 }));
}

export function percent(share) {
  if (share >= 0.9995 || share === 0) return `${Math.round(share * 100)} %`;
  return share < 0.001 ? "<0.1 %" : `${(share * 100).toFixed(share < 0.0995 || share > 0.99 ? 1 : 0)} %`;
}

export const milliseconds = (seconds) => `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
export const number = (value) => String(Number(value.toPrecision(4)));
/** The same as the command line's `format_bytes`. */
export function size(bytes) {
  const [unit, name] = bytes >= 1e9 ? [1e9, "GB"] : bytes >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
  const digits = { minimumFractionDigits: 1, maximumFractionDigits: 1 };
  return `${(Math.floor(bytes / (unit / 10) + 0.5) / 10).toLocaleString("en", digits)}\u00a0${name}`;
}
export const count = (amount, noun) => `${amount.toLocaleString("en")} ${noun}${amount === 1 ? "" : "s"}`;

export function shorten(text, most) {
  const letters = [...text];
  return letters.length <= most ? text : `${letters.slice(0, most - 1).join("")}…`;
}

export const sentence = (text) => text[0].toUpperCase() + text.slice(1);

/** Shows a text, and a button to try again, where screen readers announce it; null takes it away. */
export function tell(place, text, again) {
  place.hidden = text === null;
  place.replaceChildren(...(text === null ? [] : [el("p", null, text)]), ...(again ? [el("button", { type: "button", click: again }, "Try again")] : []));
}

/** Says why a request failed. Where a token is missing, asks for it. `before` says what was attempted. */
export function fail(place, problem, again, before = "") {
  if (!(problem instanceof Problem)) {
    tell(place, `Something went wrong on this page: ${problem.message} Reload it.`);
    throw problem;
  }
  if (problem.status === 401) {
    byId("access").hidden = false;
    return tell(place, hasToken() ? "The server does not accept this token here. Enter another one below." : "This server needs a token. Enter it below.");
  }
  tell(place, problem.gone || !before ? sentence(problem.message) : before + problem.message, problem.gone ? again : null);
}
