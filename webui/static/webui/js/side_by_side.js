// Side-by-side chat: sends a message, shows both answers without their models, then the vote's result.
import { gettext } from "./i18n.js";
import { toast } from "./page.js";
import { request } from "./request.js";

const part = (id) => document.getElementById(id);
const config = JSON.parse(part("side-config").textContent);
const form = part("side-form"), text = part("side-text"), log = part("side-log"), votes = part("side-votes"), state = part("side-state");
let turn = null, conversation = null, busy = false;

async function call(path, body, more = {}) {
  const csrf = JSON.parse(document.body.getAttribute("hx-headers"))["X-CSRFToken"];
  const answer = await request(`${config.url}/${path}`, {
    method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json", "X-CSRFToken": csrf }, ...more,
  });
  const document_ = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(document_.detail ?? `${answer.status}`);
  return document_;
}

function showTurn() {
  const item = document.createElement("li");
  item.className = "turn";
  const question = Object.assign(document.createElement("p"), { className: "turn-question", textContent: turn.messages.at(-1).content });
  const pair = Object.assign(document.createElement("div"), { className: "review-pair" });
  for (const name of ["a", "b"]) {
    const side = Object.assign(document.createElement("div"), { className: "turn-answer" });
    side.dataset.side = name;
    side.append(
      Object.assign(document.createElement("span"), { className: "badge", textContent: name.toUpperCase() }),
      Object.assign(document.createElement("p"), { textContent: turn[name] || gettext("(empty answer)") }),
    );
    pair.append(side);
  }
  item.append(question, pair);
  log.append(item);
  item.scrollIntoView({ block: "nearest" });
}

function reveal() {
  const item = log.lastElementChild;
  ["a", "b"].forEach((name, index) => {
    const side = item.querySelector(`[data-side="${name}"]`);
    side.querySelector(".badge").textContent = `${name.toUpperCase()}: ${turn.models[index]}`;
    if (turn.choice === name) {
      side.classList.add("better");
      side.querySelector(".badge").after(Object.assign(document.createElement("span"), { className: "badge good", textContent: gettext("better") }));
    }
  });
}

/** Replaces the votes and the button that writes them by the server's. */
async function showVotes() {
  const answer = await request(location.href).catch(() => null);
  if (!answer?.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const id of ["side-write", "side-results"]) {
    const newer = page.getElementById(id);
    if (newer) part(id)?.replaceWith(newer);
  }
}

function waits(forVote) {
  votes.hidden = !forVote;
  text.disabled = part("side-send").disabled = forVote || busy;
  part("side-new").hidden = forVote || conversation === null;
  if (!forVote && !busy) text.focus({ preventScroll: true });
}

async function send() {
  const message = text.value.trim();
  if (!message || busy) return;
  busy = true;
  state.textContent = gettext("Both models are answering…");
  waits(false);
  try {
    turn = await call("turns", { text: message, ...(conversation === null ? {} : { conversation }) }, { slowNotice: false });
    conversation = turn.conversation;
    text.value = "";
    showTurn();
    state.textContent = gettext("Which answer is better?");
    busy = false;
    waits(true);
  } catch (error) {
    toast(error.message, "bad");
    state.textContent = "\u00a0";
    busy = false;
    waits(false);
  }
}

async function vote(choice) {
  if (busy || !turn) return;
  busy = true;
  try {
    turn = await call(`turns/${turn.id}/vote`, { choice });
    reveal();
    showVotes();
    state.textContent = gettext("Voted. The conversation continues after the better answer, or start a new one.");
    turn = null;
    busy = false;
    waits(false);
  } catch (error) {
    toast(error.message, "bad");
    busy = false;
  }
}

if (form) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  votes.addEventListener("click", (event) => {
    const button = event.target.closest("[data-choice]");
    if (button) vote(button.dataset.choice);
  });
  part("side-new").addEventListener("click", () => {
    conversation = null;
    log.replaceChildren();
    state.textContent = "\u00a0";
    waits(false);
  });
}
