/* A page of pictures to choose from: by click, shift-click, a rectangle, or with the keyboard alone. */

import { byId, el, number, percent } from "./parts.js";

const DRAGGED = 6; // pixels from which a press is a rectangle

export class Grid {
  /** `actions`: decide(images, choose), undo(), more(), picture(key, large), describe(key), types(key), stays(). */
  constructor(place, actions) {
    Object.assign(this, { place, actions, cards: new Map(), at: null, from: null });
    for (const one of [place, byId("teach-large")]) one.addEventListener("keydown", (event) => this.pressed(event));
    place.addEventListener("click", (event) => this.clicked(event));
    place.addEventListener("dblclick", (event) => this.enlarge(event.target.closest("[data-key]")?.dataset.key));
    place.addEventListener("focusin", (event) => this.reach(event.target.closest("[data-key]")?.dataset.key));
    place.addEventListener("pointerdown", (event) => this.drag(event));
    byId("teach-large").addEventListener("close", ({ target }) => { // the browser has gone back to the first image
      this.reach(target.dataset.shown);
      this.focus();
    });
  }

  get keys() {
    return [...this.cards.keys()];
  }

  images() {
    return [...this.cards.values()].map((card) => card.image);
  }

  /** The chosen images; without any, the one that has the focus. */
  chosen() {
    const chosen = [...this.cards.values()].filter((card) => card.chosen);
    const [focused] = chosen.length || !this.cards.has(this.at) ? [] : [this.cards.get(this.at)];
    return (focused ? [focused] : chosen).map((card) => card.image);
  }

  finished() {
    return this.cards.size > 0 && this.images().every((image) => image.state !== "clear" || image.error);
  }

  show(images) {
    for (const card of this.cards.values()) if (card.url) URL.revokeObjectURL(card.url);
    this.cards = new Map(images.map((image) => [image.key, this.card(image)]));
    this.place.replaceChildren(...[...this.cards.values()].map((card) => card.node));
    this.at = this.from = images[0]?.key ?? null;
    this.mark();
  }

  /** Shows what is new of some images. */
  update(images) {
    for (const image of images) {
      const card = this.cards.get(image.key);
      if (!card || image.row < card.image.row) continue; // an answer that a later decision has overtaken
      const reason = image.reason || card.image.reason;
      card.image = { ...card.image, ...image, reason };
      this.write(card);
    }
  }

  /** Decides about the chosen images, and goes on to the next one at once: keys may come faster than answers. */
  async apply(state, choose = () => ({ state })) {
    const images = this.chosen(), cards = images.map((image) => this.cards.get(image.key));
    if (!images.length) return;
    const done = this.actions.decide(images, choose);
    if (!this.actions.stays(state)) {
      const last = this.keys.indexOf(images.at(-1).key);
      for (const card of this.cards.values()) card.chosen = false;
      for (const card of cards) card.busy = true;
      const rest = [...this.keys.slice(last + 1), ...this.keys.slice(0, last)];
      this.at = rest.find((key) => this.open(this.cards.get(key))) ?? this.at;
      this.mark();
      this.follow();
    }
    await done;
    for (const card of cards) card.busy = false;
  }

  open(card) {
    return card.image.state === "clear" && !card.image.error && !card.busy;
  }

  /** Shows where the keyboard is: in the grid, or at the image in large. */
  follow() {
    if (byId("teach-large").open) this.enlarge(this.at);
    else if (this.place.contains(document.activeElement)) this.focus();
  }

  focus() {
    this.cards.get(this.at)?.node.focus();
  }

  focusFirst() {
    if (this.place.contains(document.activeElement) || document.activeElement === document.body) this.focus();
  }

  card(image) {
    const picture = el("img", { alt: "", width: 224, height: 224, draggable: "false" });
    const card = { image, chosen: false, picture, text: el("div", { class: "said" }), url: null };
    card.node = el("div", { class: "shot", role: "option", tabindex: "-1", "data-key": image.key, "aria-selected": "false" }, picture, card.text);
    this.load(card);
    this.write(card);
    return card;
  }

  async load(card) {
    if (card.image.error) return;
    try {
      card.url = await this.actions.picture(card.image.key);
      card.picture.src = card.url;
    } catch {
      card.node.classList.add("missing");
    }
  }

  write(card) {
    const { image } = card, name = (label) => (Array.isArray(label) ? label.join(", ") || "none of the labels" : typeof label === "number" ? number(label) : label);
    const decided = { label: name(image.label), keep: `${name(image.label)} ✓✓`, accept: `${name(image.label)} (accepted)`, none: "none of these", skip: "skipped", clear: "" }[image.state];
    const guess = decided || image.guess === null || image.guess === undefined ? "" : `${name(image.guess)}?${typeof image.share === "number" ? ` ${percent(image.share)}` : ""}`;
    const key = JSON.stringify([decided, guess, image.reason, image.error]);
    if (card.written === key) return;
    card.written = key;
    card.node.className = `shot ${image.error ? "broken" : image.state === "clear" ? "open-shot" : "decided"}`;
    card.text.replaceChildren(...[
      image.error ? el("span", { class: "why" }, image.error) : null,
      decided ? el("b", null, `✓ ${decided}`) : null,
      guess ? el("span", null, guess) : null,
      image.reason ? el("span", { class: "soft" }, image.reason) : null,
    ].filter(Boolean));
    card.node.setAttribute("aria-label", [image.path, decided && `labelled ${decided}`, guess && `guess ${guess}`, image.reason, image.error].filter(Boolean).join(", "));
  }

  mark() {
    for (const [key, card] of this.cards) {
      card.node.setAttribute("aria-selected", String(card.chosen));
      card.node.tabIndex = key === this.at ? 0 : -1;
    }
    const chosen = [...this.cards.values()].filter((card) => card.chosen).length;
    byId("teach-chosen").textContent = chosen ? `${chosen} chosen` : "";
  }

  reach(key) {
    if (key && key !== this.at) {
      this.at = key;
      this.mark();
    }
  }

  clicked(event) {
    const key = event.target.closest("[data-key]")?.dataset.key;
    if (!key || this.dragged) return;
    const card = this.cards.get(key), touch = event.pointerType === "touch";
    if (event.shiftKey && this.from) this.range(this.from, key);
    else if (event.ctrlKey || event.metaKey || touch || (card.chosen && this.chosen().length === 1)) card.chosen = !card.chosen;
    else for (const [other, one] of this.cards) one.chosen = other === key;
    this.at = key;
    if (!event.shiftKey) this.from = key;
    this.mark();
    card.node.focus();
  }

  range(from, to) {
    const [start, end] = [this.keys.indexOf(from), this.keys.indexOf(to)].sort((a, b) => a - b);
    this.keys.forEach((key, at) => { this.cards.get(key).chosen = at >= start && at <= end; });
  }

  pressed(event) {
    const large = byId("teach-large").open, { key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return this.undone(event);
    if (large && ["Enter", " ", "Escape", "/"].includes(key)) return; // the dialog's own
    if (!large && this.actions.types(key)) return byId("teach-label").focus(); // which the key then reaches
    const columns = this.columns(), at = this.keys.indexOf(this.at);
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -at, End: this.keys.length - 1 - at }[key];
    const meaning = this.actions.describe(key.toLowerCase());
    if (move !== undefined) this.move(at + move, event.shiftKey && !large);
    else if (key === " ") this.toggle();
    else if (key === "Enter") this.enlarge(this.at);
    else if (key === "Escape") this.choose(() => false);
    else if (key === "u") this.actions.undo();
    else if (key === "m") this.actions.more();
    else if (key === "*") this.choose((card) => this.open(card));
    else if (key === "/") byId("teach-label").focus();
    else if (meaning) this.apply(...meaning);
    else return;
    event.preventDefault();
  }

  undone(event) {
    if (event.key === "z") this.actions.undo();
    else if (event.key === "a") this.choose(() => true);
    else return;
    event.preventDefault();
  }

  choose(test) {
    for (const card of this.cards.values()) card.chosen = test(card);
    this.mark();
  }

  toggle() {
    const card = this.cards.get(this.at);
    if (card) card.chosen = !card.chosen;
    this.from = this.at;
    this.mark();
  }

  move(to, extend) {
    const key = this.keys[Math.max(0, Math.min(this.keys.length - 1, to))];
    if (key === undefined) return;
    if (extend) this.range(this.from ?? this.at, key);
    else this.from = key;
    this.at = key;
    this.mark();
    if (byId("teach-large").open) this.enlarge(key);
    else this.focus();
  }

  columns() {
    const nodes = [...this.cards.values()].map((card) => card.node), top = nodes[0]?.offsetTop;
    return Math.max(1, nodes.filter((node) => node.offsetTop === top).length);
  }

  /** Shows one image in large; what is done then is done to this one. */
  async enlarge(key) {
    const card = this.cards.get(key), dialog = byId("teach-large");
    if (!card || card.image.error) return;
    this.choose(() => false);
    this.at = dialog.dataset.shown = key;
    const image = el("img", { src: card.url ?? "", alt: card.image.path }), button = el("button", { type: "button", click: () => dialog.close() }, "Close");
    dialog.replaceChildren(image, el("p", { role: "status" }, card.node.getAttribute("aria-label")), button);
    if (!dialog.open) dialog.showModal();
    button.focus();
    const url = await this.actions.picture(key, true).catch(() => null);
    if (url) [image.src, image.onload] = [url, () => URL.revokeObjectURL(url)];
  }

  /** A rectangle over the grid chooses what it touches. */
  drag(event) {
    this.dragged = false;
    if (event.button !== 0 || event.pointerType === "touch") return;
    const start = [event.clientX, event.clientY], box = el("div", { class: "rubber", hidden: true });
    const moved = (now) => {
      const [left, right] = [start[0], now.clientX].sort((a, b) => a - b), [top, bottom] = [start[1], now.clientY].sort((a, b) => a - b);
      if (!this.dragged && Math.max(right - left, bottom - top) < DRAGGED) return;
      this.dragged = true;
      box.hidden = false;
      Object.assign(box.style, { left: `${left}px`, top: `${top}px`, width: `${right - left}px`, height: `${bottom - top}px` });
      this.choose((card) => {
        const place = card.node.getBoundingClientRect();
        return place.left < right && place.right > left && place.top < bottom && place.bottom > top;
      });
    };
    const ended = () => {
      box.remove();
      document.removeEventListener("pointermove", moved);
      if (this.dragged) this.cards.get(this.at)?.node.focus({ preventScroll: true }); // the keys are for what was chosen
      setTimeout(() => { this.dragged = false; });
    };
    document.body.append(box);
    document.addEventListener("pointermove", moved);
    document.addEventListener("pointerup", ended, { once: true });
  }
}
