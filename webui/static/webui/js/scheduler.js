/* One scheduler for everything that draws: dirty, visible items in turn, within a share of the main thread.
   Knows when to draw, not what. A hidden tab draws nothing and catches up when it is looked at again. */

const SHARE = 0.2; // of the main thread; what else a live page does there takes a few per cent more
const MOST_CREDIT_MS = 60; // a pause may not be spent in one long burst

class Scheduler {
  constructor() {
    this.items = [];
    this.turn = 0;
    this.timer = 0;
    this.credit = MOST_CREDIT_MS;
    this.before = performance.now();
    this.waiting = false;
    this.spent = 0; // ms of drawing since the start, for measurements
    this.since = this.before;
    this.channel = new MessageChannel();
    this.channel.port1.onmessage = () => this.painted();
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.wake(); });
  }

  /** `item`: {draw(), visible() → bool, hz, light?, drawn?}; light ones (tiles) are drawn together and do not wait for
      their turn, `drawn` false means that a draw had nothing to show yet. Returns a function that marks it dirty. */
  add(item) {
    const entry = { ...item, item, dirty: false, drawn: false, last: -Infinity };
    this.items.push(entry);
    const mark = () => { entry.dirty = true; this.wake(); };
    mark.remove = () => { this.items = this.items.filter((other) => other !== entry); };
    return mark;
  }

  wake() {
    if (this.timer) { // waiting for the next turn
      clearTimeout(this.timer);
      this.timer = 0;
      this.waiting = false;
    }
    if (this.waiting || document.hidden) return;
    this.waiting = true;
    requestAnimationFrame((now) => this.frame(now));
  }

  frame(now) {
    this.waiting = false;
    if (document.hidden) return;
    this.credit = Math.min(MOST_CREDIT_MS, this.credit + (now - this.before) * SHARE);
    this.before = now;
    let next = Infinity;
    const ready = (entry) => {
      if (!entry?.dirty || !entry.item.visible()) return false;
      const due = entry.last + 1000 / entry.hz - now;
      if (due > 4) next = Math.min(next, due);
      return due <= 4;
    };
    this.drawing = { start: performance.now(), free: true };
    const drawn = this.items.filter((entry) => entry.item.light && ready(entry));
    const count = this.items.length;
    for (let i = 0; i < count && this.credit > 0; i++) { // one heavy item a frame: input and scrolling come between
      const entry = this.items[(this.turn + i) % count];
      if (entry.item.light || !ready(entry)) continue;
      drawn.push(entry);
      this.drawing.free = !entry.drawn; // the first look at a page does not wait
      this.turn = (this.turn + i + 1) % count;
      break;
    }
    for (const entry of drawn) this.draw(entry, now);
    if (drawn.length) {
      this.waiting = true;
      this.channel.port2.postMessage(0); // arrives when the frame has been laid out and painted
      return;
    }
    if (this.credit <= 0 && this.items.some((entry) => entry.dirty && entry.item.visible())) next = Math.min(next, -this.credit / SHARE);
    if (next !== Infinity) this.later(next); // else nothing is dirty in sight: sleep until marked
  }

  draw(entry, now) {
    entry.dirty = false;
    try { entry.item.draw(); } catch (error) { console.error("drawing failed", error); }
    entry.drawn = entry.item.drawn ?? true;
    if (entry.drawn) entry.last = now;
  }

  /* The whole frame counts: script, style, layout and paint. */
  painted() {
    const cost = performance.now() - this.drawing.start;
    this.spent += cost;
    if (!this.drawing.free) this.credit -= cost;
    this.later(0);
  }

  later(wait) {
    this.waiting = true;
    if (wait < 20) requestAnimationFrame((time) => this.frame(time));
    else this.timer = setTimeout(() => {
      this.timer = 0;
      requestAnimationFrame((time) => this.frame(time));
    }, wait);
  }

  /** Share of the main thread that drawing took since the last call. */
  share() {
    const now = performance.now();
    const found = this.spent / Math.max(1, now - this.since);
    this.spent = 0;
    this.since = now;
    return found;
  }
}

export const scheduler = new Scheduler();

/** Tracks whether an element is in sight; calls `changed` when it comes into it. */
export function watchVisible(element, changed) {
  const state = { visible: false };
  new IntersectionObserver((entries) => {
    state.visible = entries.at(-1).isIntersecting;
    if (state.visible) changed();
  }, { rootMargin: "64px" }).observe(element);
  return state;
}
