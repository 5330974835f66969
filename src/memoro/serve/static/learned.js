/* What was learned so far: accuracy with its interval, by class, and over the number of labels. */

import { count, el, number, percent, svg } from "./parts.js";

const [WIDE, HIGH, LEFT, BOTTOM] = [300, 150, 42, 20];
const NAMES = { softmax: "right", multilabel: "of the labels right", regression: "mean error" };

/** The main figure, and its curve. */
export function showCurve(place, now) {
  const { figure, kind } = now, shown = JSON.stringify([figure, now.curve, figure || now.classes]);
  if (place.dataset.shown === shown) return;
  place.dataset.shown = shown;
  if (!figure) {
    const several = now.classes.filter((one) => one.images).length > 1;
    const text = kind === "regression" ? "Give two images a number to see guesses." : several ? "Label a second image of a class to see how often guesses are right." : "Label images of two classes to see guesses.";
    return place.replaceChildren(el("p", { class: "soft" }, text));
  }
  const text = kind === "regression" ? number : percent;
  place.replaceChildren(
    el("p", null, el("b", null, `${text(figure.value)} ${NAMES[kind]}`), ` (95 %: ${text(figure.low)} to ${text(figure.high)})`),
    el("p", { class: "soft" }, `Of ${count(figure.images, "image")} that you labelled, each answered without itself. Images were shown because they are hard, so others are usually answered better.`),
    ...(now.curve.length > 1 ? [chart(now.curve, kind)] : []));
}

function chart(points, kind) {
  const most = Math.max(...points.map(([amount]) => amount)), top = kind === "regression" ? Math.max(...points.map(([, one]) => one.high)) || 1 : 1;
  const across = (amount) => LEFT + (amount / most) * (WIDE - LEFT - 8), down = (value) => HIGH - BOTTOM - (Math.min(value, top) / top) * (HIGH - BOTTOM - 8);
  const line = points.map(([amount, one]) => `${across(amount)},${down(one.value)}`).join(" ");
  const band = [...points.map(([amount, one]) => `${across(amount)},${down(one.high)}`), ...[...points].reverse().map(([amount, one]) => `${across(amount)},${down(one.low)}`)].join(" ");
  const text = kind === "regression" ? number : percent, [amount, last] = points.at(-1);
  return el("figure", null, svg("svg", { width: WIDE, height: HIGH, viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `By number of labels: ${points.map(([labels, one]) => `${labels}: ${text(one.value)}`).join(", ")}` },
    ...[0, top / 2, top].map((value) => svg("line", { class: "axis", x1: LEFT, x2: WIDE - 8, y1: down(value), y2: down(value) })),
    ...[0, top].map((value) => svg("text", { class: "soft", x: LEFT - 4, y: down(value) + 4, "text-anchor": "end" }, text(value))),
    svg("polygon", { class: "band", points: band }), svg("polyline", { class: "line", points: line }),
    svg("circle", { class: "dot", r: 3, cx: across(amount), cy: down(last.value) }),
    svg("text", { class: "soft", x: WIDE - 8, y: HIGH - 5, "text-anchor": "end" }, count(amount, "label"))));
}

/** A row for each class. */
export function showClasses(place, now) {
  const shown = JSON.stringify(now.classes);
  if (place.dataset.shown === shown || now.kind === "regression") return;
  place.dataset.shown = shown;
  place.hidden = !now.classes.length;
  const head = ["class", "labelled", "right", "taken for"].map((name, at) => el("th", { scope: "col", class: at % 3 ? null : "left" }, name));
  const rows = now.classes.map((one) => el("tr", null, el("th", { scope: "row", class: "left" }, one.label), el("td", null, String(one.images)),
    el("td", null, one.judged ? percent(one.right / one.judged) : "–"), el("td", { class: "left" }, one.confused ?? "")));
  place.replaceChildren(el("table", null, el("thead", null, el("tr", null, ...head)), el("tbody", null, ...rows)));
}
