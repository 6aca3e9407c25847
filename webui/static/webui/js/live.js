/* One live topic over a websocket: buffering, ordering, reconnects and gaps. Does not interpret frames.

   The socket handler only buffers; the buffer is read ten times per second. Duplicate frames are dropped; a gap in the
   numbers or a new epoch calls `onGap`, which fetches the missing data. */
import { gettext } from "./i18n.js";

const READ_MS = 100;
const SILENT_MS = 12000; // without frames or heartbeats (one every 5 s) the connection counts as dead
const NOTICE_MS = 800;
const MOST_WAIT_MS = 10000;
const FILL_AGAIN_MS = 2000;

export class Live {
  /** `path` like /ws/runs/12/; `after` and `epoch` are the position of the page's data. `refetch`: the page shows frames
      without a number, which the server does not repeat, so each reconnection calls `onGap`. A refetched response can be
      older than the frames that arrive while it loads, so these are applied again after it. */
  constructor({ path, after = 0, epoch = "", refetch = false, onFrame, onGap, onStatus = () => {} }) {
    Object.assign(this, { path, epoch, refetch, onFrame, onGap, onStatus });
    this.reconnected = false;
    this.lastSeq = Number(after) || 0;
    this.stats = { frames: 0, gaps: 0, filled: 0, doubles: 0, reconnects: 0 };
    this.buffer = [];
    this.filling = 0; // running calls of `onGap`
    this.duringFill = [];
    this.attempts = 0;
    this.behind = 0;
    this.status = "connecting";
    this.lastReceived = performance.now();
    this.timer = setInterval(() => this.read(), READ_MS);
    addEventListener("online", () => this.hurry());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.hurry(); });
    this.open();
  }

  open() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const query = new URLSearchParams({ after: this.lastSeq, ...(this.epoch ? { epoch: this.epoch } : {}) });
    this.lastReceived = performance.now();
    const socket = new WebSocket(`${scheme}://${location.host}${this.path}?${query}`);
    this.socket = socket;
    socket.onopen = () => {
      this.attempts = 0;
      this.reconnected = this.stats.reconnects > 0;
      this.setStatus("open");
    };
    socket.onmessage = (message) => {
      this.lastReceived = performance.now();
      this.buffer.push(message.data);
    };
    socket.onclose = (event) => {
      if (this.socket !== socket) return;
      this.socket = null;
      if (event.code >= 4400 && event.code < 4500) return this.setStatus("refused", event.reason);
      this.stats.reconnects += 1;
      this.setStatus("lost");
      const wait = Math.min(MOST_WAIT_MS, 250 * 2 ** this.attempts++);
      this.retry = setTimeout(() => this.open(), wait * (0.75 + Math.random() / 2));
    };
  }

  /** Reconnects at once: the network is back, or the page is visible again. */
  hurry() {
    if (this.status === "refused") return;
    if (this.socket === null) {
      clearTimeout(this.retry);
      this.open();
    } else if (performance.now() - this.lastReceived > SILENT_MS) this.drop();
  }

  /** Drops the connection as if the network had failed, then reconnects. */
  drop() {
    const socket = this.socket;
    if (!socket) return;
    this.socket = null;
    socket.onclose = null;
    socket.close();
    this.stats.reconnects += 1;
    this.setStatus("lost");
    this.retry = setTimeout(() => this.open(), 250 + Math.random() * 250);
    this.attempts = 1;
  }

  setStatus(status, reason = "") {
    const repeated = status === "lost" && this.status === "lost"; // another failed attempt: the notice is already scheduled
    this.status = status;
    if (repeated) return;
    clearTimeout(this.noticing);
    const notify = () => this.onStatus(status, reason);
    if (status === "lost") this.noticing = setTimeout(notify, NOTICE_MS);
    else notify();
  }

  read() {
    if (this.socket && performance.now() - this.lastReceived > SILENT_MS) this.drop();
    if (!this.buffer.length) return;
    const texts = this.buffer;
    this.buffer = [];
    for (const text of texts) this.take(JSON.parse(text));
  }

  take(frame) {
    if (this.reconnected) this.rejoined(); // the first frame: the server has joined the topic
    if (frame.type === "heartbeat") return this.beat(frame);
    if (frame.seq === undefined) return this.apply(frame); // a reading that the next one replaces
    if (this.epoch && frame.epoch && frame.epoch !== this.epoch) {
      this.epoch = frame.epoch; // new database: all known data is invalid
      this.lastSeq = 0;
      this.missed(0, frame.seq, true);
    }
    this.epoch = frame.epoch || this.epoch;
    if (frame.type === "gap") {
      this.missed(frame.from, frame.to, false);
      this.lastSeq = Math.max(this.lastSeq, frame.to ?? 0, frame.seq ?? 0);
      return;
    }
    if (frame.seq <= this.lastSeq) {
      this.stats.doubles += 1;
      return;
    }
    if (this.lastSeq && frame.seq > this.lastSeq + 1) this.missed(this.lastSeq + 1, frame.seq - 1, false);
    this.lastSeq = frame.seq;
    if (frame.type === "hidden") return; // about a run that the user may not see
    this.stats.frames += 1;
    this.behind = 0;
    this.apply(frame);
  }

  apply(frame) {
    if (this.refetch && this.filling) this.duringFill.push(frame);
    this.onFrame(frame);
  }

  /** Frames without a number may have been missed. */
  rejoined() {
    this.reconnected = false;
    if (this.refetch) this.missed(this.lastSeq + 1, null, false);
  }

  beat(frame) {
    if (frame.epoch && this.epoch && frame.epoch !== this.epoch) return this.drop();
    if (frame.seq > this.lastSeq && ++this.behind >= 2) {
      this.behind = 0;
      this.missed(this.lastSeq + 1, frame.seq, false);
      this.lastSeq = frame.seq;
    }
  }

  /** Fills a gap; retries if the connection breaks meanwhile. */
  missed(from, to, everything) {
    this.stats.gaps += 1;
    const fill = async () => {
      try {
        await this.onGap({ from, to, everything });
        this.stats.filled += 1;
      } catch {
        setTimeout(fill, FILL_AGAIN_MS);
        return;
      }
      for (const frame of this.duringFill) this.onFrame(frame);
      this.filling -= 1;
      if (!this.filling) this.duringFill = [];
    };
    this.filling += 1;
    fill();
  }
}

/** Shows the page's connection notice. */
export function showStatus(status, reason = "") {
  const notice = document.getElementById("connection");
  if (!notice || "offline" in notice.dataset) return;
  const messages = {
    lost: gettext("Reconnecting…"),
    refused: reason || gettext("Live updates stopped. Log in again, then reload the page."),
  };
  notice.textContent = messages[status] ?? "";
  notice.hidden = !(status in messages);
}
