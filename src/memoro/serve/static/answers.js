/* The answers of the tasks to an image, what they cost, and where each task looked. */

import { explain } from "./api.js";
import { count, el, fail, meter, milliseconds, number, percent, svg } from "./parts.js";

/* From no attention to the most: the colours of `memoro explain`. */
const RAMP = [[20, 30, 80], [90, 45, 135], [195, 65, 105], [248, 150, 60], [255, 240, 140]];
const PARENTS = 3;

/** A card for each answer, those of tasks that know such images first. */
export function answerCards(answers, shown) {
  const order = Object.entries(answers).sort(([, a], [, b]) => Boolean(a.unfamiliar) - Boolean(b.unfamiliar));
  return order.map(([name, answer], at) => card(name, answer, `answer-${at}`, shown));
}

/** One sentence about all answers, for the status line. */
export function summary(answers) {
  const all = Object.entries(answers);
  const strange = all.filter(([, answer]) => answer.unfamiliar).map(([name]) => name);
  if (all.length && strange.length === all.length) return "This image is unfamiliar to all of these tasks.";
  return strange.length ? `Unfamiliar to ${strange.length} of ${all.length}.` : "";
}

/** What the pass cost, and what a model for each task would have cost. */
export function costPart(found, asked, elapsed) {
  const { backbone, tasks } = found.seconds;
  const together = backbone + tasks;
  const apart = (backbone / found.passes) * asked;
  const rows = [[`${found.passes === 1 ? "1 pass" : `${found.passes} passes`}, ${count(asked, "task")}`, together, milliseconds(together), "bar"]];
  if (asked > 1) rows.push([`${asked} separate models`, apart, `about ${milliseconds(apart)}`, "other"]);
  const most = Math.max(together, apart);
  const why = asked > 1 ? ` Separate models are estimated: one pass of ${milliseconds(backbone / found.passes)} each.` : "";
  return el("div", { class: "card cost" },
    el("p", null, el("b", null, milliseconds(elapsed / 1000)), ` from the image to ${asked === 1 ? "the answer" : `all ${asked} answers`}.`),
    el("ul", { class: "bars" }, ...rows.map(([name, value, text, look]) => bar(name, value / most, text, look))),
    el("p", { class: "soft" }, `The rest is decoding, waiting for other images, and the network.${why}`));
}

function card(name, answer, id, shown) {
  const look = el("div", { class: "looked", id: `${id}-looked`, hidden: true });
  const button = el("button", { type: "button", "aria-expanded": "false", "aria-controls": look.id, "aria-label": `Where ${name} looked` }, "Where it looked");
  const box = el("article", { class: `card answer${answer.unfamiliar ? " unfamiliar" : ""}`, "aria-labelledby": id, "data-task": name },
    el("h3", { id }, name, answer.unfamiliar ? el("span", { class: "tag" }, "unfamiliar") : null),
    ...content(answer, answer.unfamiliar ? "other" : "bar"),
    familiarity(name, answer),
    button, shown.correction(name, shown), look);
  button.addEventListener("click", () => toggle(button, box, look, name, shown));
  return box;
}

function content(answer, look) {
  if (answer.values) {
    return [el("ul", { class: "values" }, ...Object.entries(answer.values).map(([label, value]) => {
      const range = answer.intervals?.[label];
      return el("li", null, `${label} `, el("b", null, number(value)),
        range ? el("span", { class: "soft" }, ` 90 %: ${number(range[0])} to ${number(range[1])}`) : null);
    }))];
  }
  const best = answer.label === undefined ? answer.labels.join(", ") || "none of its labels" : answer.label;
  const chosen = new Set(answer.labels ?? [answer.label]);
  const sorted = Object.entries(answer.probabilities).sort(([, a], [, b]) => b - a); // labels such as "7" come in their own order
  const bars = sorted.map(([label, share]) => bar(label, share, percent(share), chosen.has(label) ? look : "other"));
  return [el("p", { class: "best" }, best), el("ul", { class: "bars" }, ...bars)];
}

function bar(name, share, text, look) {
  return el("li", null, el("span", { class: "name" }, name), el("span", { class: "share" }, text), meter(share, look));
}

/** How familiar the image is to a task, in words. */
function familiarity(name, answer) {
  if (answer.familiarity === undefined) return el("p", { class: "soft" }, "This task's file has no familiarity.");
  const share = answer.familiarity === 0 ? "none" : percent(answer.familiarity);
  const strange = `${share} of its own images look at least as unusual`;
  if (answer.unfamiliar) return el("p", { class: "why" }, `This image is unlike those that ${name} was trained on: ${strange}. Do not rely on the answer.`);
  if (answer.coarse) return el("p", { class: "soft" }, `${name} has too few or too diverse images to tell what is unfamiliar.`);
  return el("p", { class: "soft" }, `Familiar: ${strange}.`);
}

async function toggle(button, box, look, name, shown) {
  const open = look.hidden;
  look.hidden = !open;
  button.setAttribute("aria-expanded", String(open));
  box.classList.toggle("open", open);
  if (!open || look.dataset.done) return;
  look.replaceChildren(el("p", { role: "status" }, "Computing the attention …"));
  try {
    const answer = await explain(shown.file, name);
    look.replaceChildren(overlay(answer.attention, name, shown), shares(answer.attention, name));
    look.dataset.done = "true";
  } catch (problem) {
    const place = el("div", { class: "problem", role: "alert" });
    look.replaceChildren(place);
    fail(place, problem, () => {
      look.hidden = true;
      toggle(button, box, look, name, shown);
    });
  }
}

/** The image in grey under its heat map, which lies over the part that the task saw. */
function overlay(attention, name, shown) {
  const map = heatMap(attention.heatmap);
  const frame = el("div", { class: "seen", role: "img", "aria-label": `Heat map: where in the image ${name} looked` });
  const notes = ["Yellow is the most attention, dark blue none."];
  if (shown.size) {
    const [left, top, width, height] = seenPart(shown.preprocessing(name), ...shown.size);
    const parts = { left: left / shown.size[0], top: top / shown.size[1], width: width / shown.size[0], height: height / shown.size[1] };
    for (const [side, share] of Object.entries(parts)) map.style[side] = `${share * 100}%`;
    frame.append(el("img", { src: shown.url, alt: "" }), map);
    if (Math.min(parts.width, parts.height) < 0.99) notes.push("The part without colours was cropped away: the task did not see it.");
  } else {
    frame.classList.add("blank");
    frame.append(map);
    notes.push("This browser cannot show the image itself.");
  }
  if (attention.note) notes.push(attention.note);
  return el("figure", null, frame, el("figcaption", null, notes.join(" ")));
}

/** [left, top, width, height] of the part that a task sees, in pixels of the image; it may reach beyond it. */
export function seenPart(steps, width, height) {
  let wide = width, high = height;
  if (Array.isArray(steps.resize)) [high, wide] = steps.resize;
  else if (steps.resize !== null) [wide, high] = [wide, high].map((edge) => (edge * steps.resize) / Math.min(width, height));
  const [rows, columns] = steps.crop ?? [high, wide];
  const across = width / wide, down = height / high;
  return [((wide - columns) / 2) * across, ((high - rows) / 2) * down, columns * across, rows * down];
}

/** One pixel for each patch; the browser scales it up smoothly. */
function heatMap(rows) {
  const values = rows.flat(), low = Math.min(...values), range = Math.max(...values) - low || 1;
  const canvas = el("canvas", { width: rows[0].length, height: rows.length, "aria-hidden": "true" });
  const context = canvas.getContext("2d"), pixels = context.createImageData(canvas.width, canvas.height);
  values.forEach((value, at) => {
    const place = ((value - low) / range) * (RAMP.length - 1), step = Math.min(Math.floor(place), RAMP.length - 2);
    const color = RAMP[step].map((start, channel) => start + (RAMP[step + 1][channel] - start) * (place - step));
    pixels.data.set([...color, 255], 4 * at);
  });
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** A row for each layer: how much of the attention went to what. */
function shares(attention, name) {
  const parents = Object.entries(attention.parents);
  const parts = [["image", attention.patches], ["base tokens", attention.prefix], ["itself", attention.itself], ["memory", attention.memory], ...parents];
  const shown = parts.slice(3, 4 + PARENTS);
  const legend = parts.map(([part], at) => el("li", null,
    svg("svg", { width: 10, height: 10, "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, rx: 2, class: `part-${Math.min(at, 6)}` })), ` ${part}`));
  const rows = attention.layers.map((layer, row) => {
    let start = 0;
    const rects = parts.map(([part, values], at) => {
      const rect = svg("rect", { x: `${start * 100}%`, width: `${values[row] * 100}%`, height: 12, class: `part-${Math.min(at, 6)}` }, svg("title", null, `${part} ${percent(values[row])}`));
      start += values[row];
      return rect;
    });
    const label = parts.map(([part, values]) => `${part} ${percent(values[row])}`).join(", ");
    return el("tr", null, el("th", { scope: "row" }, String(layer)),
      el("td", { class: "stack" }, svg("svg", { width: "100%", height: 12, role: "img", "aria-label": label }, ...rects)),
      ...shown.map(([, values]) => el("td", null, percent(values[row]))));
  });
  return el("div", null,
    el("ul", { class: "legend" }, ...legend),
    el("div", { class: "scroll" }, el("table", { class: "layers" },
      el("caption", null, `What the attention of ${name} went to, by layer`),
      el("thead", null, el("tr", null, el("th", { scope: "col" }, "layer"), el("th", { scope: "col", class: "left" }, "attention"),
        ...shown.map(([part]) => el("th", { scope: "col" }, part)))),
      el("tbody", null, ...rows))));
}
