/* One live topic over a websocket: buffers, numbers, reconnects, tells gaps. Knows frames, not what they mean.

   The socket's handler only buffers; the buffer is read ten times a second. A frame seen before is dropped, a hole in
   the numbers or a new epoch is reported to `onGap`, which fetches what is missing. */

const READ_MS = 100;
const SILENT_MS = 20000; // no frame and no heartbeat: the connection is dead though nobody said so
const NOTICE_MS = 800;
const MOST_WAIT_MS = 10000;
const FILL_AGAIN_MS = 2000;

export class Live {
  /** `path` like /ws/runs/12/; `after` and `epoch` are where the page's data stand. */
  constructor({ path, after = 0, epoch = "", onFrame, onGap, onStatus = () => {} }) {
    Object.assign(this, { path, epoch, onFrame, onGap, onStatus });
    this.lastSeq = Number(after) || 0;
    this.stats = { frames: 0, gaps: 0, filled: 0, doubles: 0, reconnects: 0 };
    this.buffer = [];
    this.tries = 0;
    this.behind = 0;
    this.status = "connecting";
    this.heard = performance.now();
    this.timer = setInterval(() => this.read(), READ_MS);
    addEventListener("online", () => this.hurry());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.hurry(); });
    this.open();
  }

  open() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const query = new URLSearchParams({ after: this.lastSeq, ...(this.epoch ? { epoch: this.epoch } : {}) });
    this.heard = performance.now();
    const socket = new WebSocket(`${scheme}://${location.host}${this.path}?${query}`);
    this.socket = socket;
    socket.onopen = () => {
      this.tries = 0;
      this.say("open");
    };
    socket.onmessage = (message) => {
      this.heard = performance.now();
      this.buffer.push(message.data);
    };
    socket.onclose = (event) => {
      if (this.socket !== socket) return;
      this.socket = null;
      if (event.code >= 4400 && event.code < 4500) return this.say("refused", event.reason);
      this.stats.reconnects += 1;
      this.say("lost");
      const wait = Math.min(MOST_WAIT_MS, 250 * 2 ** this.tries++);
      this.retry = setTimeout(() => this.open(), wait * (0.75 + Math.random() / 2));
    };
  }

  /** Tries at once: the network is back, or somebody looks again. */
  hurry() {
    if (this.status === "refused") return;
    if (this.socket === null) {
      clearTimeout(this.retry);
      this.open();
    } else if (performance.now() - this.heard > SILENT_MS) this.drop();
  }

  /** Ends the present connection as if the network had; a new one follows. */
  drop() {
    const socket = this.socket;
    if (!socket) return;
    this.socket = null;
    socket.onclose = null;
    socket.close();
    this.stats.reconnects += 1;
    this.say("lost");
    this.retry = setTimeout(() => this.open(), 250 + Math.random() * 250);
    this.tries = 1;
  }

  say(status, reason = "") {
    const again = status === "lost" && this.status === "lost"; // one more try that failed: the notice is on its way
    this.status = status;
    if (again) return;
    clearTimeout(this.noticing);
    const tell = () => this.onStatus(status, reason);
    if (status === "lost") this.noticing = setTimeout(tell, NOTICE_MS);
    else tell();
  }

  read() {
    if (this.socket && performance.now() - this.heard > SILENT_MS) this.drop();
    if (!this.buffer.length) return;
    const texts = this.buffer;
    this.buffer = [];
    for (const text of texts) this.take(JSON.parse(text));
  }

  take(frame) {
    if (frame.type === "heartbeat") return this.beat(frame);
    if (this.epoch && frame.epoch && frame.epoch !== this.epoch) {
      this.epoch = frame.epoch; // the database began anew: nothing known holds
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
    this.stats.frames += 1;
    this.behind = 0;
    this.onFrame(frame);
  }

  beat(frame) {
    if (frame.epoch && this.epoch && frame.epoch !== this.epoch) return this.drop();
    if (frame.seq > this.lastSeq && ++this.behind >= 2) {
      this.behind = 0;
      this.missed(this.lastSeq + 1, frame.seq, false);
      this.lastSeq = frame.seq;
    }
  }

  /** The connection may break once more while the hole is filled: then that is tried again. */
  missed(from, to, everything) {
    this.stats.gaps += 1;
    const fill = async () => {
      try {
        await this.onGap({ from, to, everything });
        this.stats.filled += 1;
      } catch {
        setTimeout(fill, FILL_AGAIN_MS);
      }
    };
    fill();
  }
}

/** The page's notice about its connection, in words. */
export function showStatus(status, reason = "") {
  const notice = document.getElementById("connection");
  if (!notice) return;
  const words = { lost: "Reconnecting…", refused: reason || "Live updates ended: log in again, then reload the page." };
  notice.textContent = words[status] ?? "";
  notice.hidden = !(status in words);
}
