// Bars of the time between two tokens, newest at the right. A migration is a line across them.

const SHOWN = 160;
const BAR = 3;
const SPACE = 1;

/** Keeps the gaps of one stream and draws the last ones on a canvas. */
export class GapChart {
  #canvas;
  #gaps = [];
  #moves = [];
  #dirty = false;

  constructor(canvas) {
    this.#canvas = canvas;
  }

  get gaps() {
    return this.#gaps;
  }

  get length() {
    return this.#gaps.length;
  }

  add(gapMs) {
    this.#gaps.push(gapMs);
    this.#request();
  }

  /** Marks and returns the largest gap since index `from`: the page learns of a move only after it happened. */
  markMove(from) {
    let at = Math.max(0, Math.min(from, this.#gaps.length - 1));
    for (let index = at; index < this.#gaps.length; index += 1) if (this.#gaps[index] > this.#gaps[at]) at = index;
    this.#moves.push(at);
    this.#request();
    return { index: at, gapMs: this.#gaps[at] ?? null };
  }

  #request() {
    if (this.#dirty) return;
    this.#dirty = true;
    window.requestAnimationFrame(() => {
      this.#dirty = false;
      this.#draw();
    });
  }

  #draw() {
    const canvas = this.#canvas;
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const style = window.getComputedStyle(canvas);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);

    const fits = Math.min(SHOWN, Math.floor(width / (BAR + SPACE)));
    const first = Math.max(0, this.#gaps.length - fits);
    const shown = this.#gaps.slice(first);
    const top = Math.max(...shown, 1);
    context.fillStyle = style.getPropertyValue("--bar");
    shown.forEach((gap, index) => {
      const tall = Math.max(1, (gap / top) * (height - 2));
      context.fillRect(index * (BAR + SPACE), height - tall, BAR, tall);
    });
    context.fillStyle = style.getPropertyValue("--mark");
    for (const move of this.#moves) {
      if (move >= first) context.fillRect((move - first) * (BAR + SPACE), 0, BAR, height);
    }
  }
}
