// The chat box of a served model: OpenAI's API as any program would call it, streamed, with a stop and its speed.
// Knows the server's events and the page's parts by id; what a message means is the model's.
import { announce } from "./page.js";
import { duration, quantity } from "./format.js";

const ASK_AGAIN_MS = 1500;
const talk = JSON.parse(document.getElementById("chat-talk").textContent);
const part = (id) => document.getElementById(id);
const form = part("chat-form"), text = part("chat-text"), log = part("chat-log"), numbers = part("chat-numbers");
const kept = `orrery-chat-${talk.url}`;
let messages = [], stopping = null;

if (form) {
  restore();
  if (talk.phase === "serving") start();
  else waitForServer();
}

function start() {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!stopping && text.value.trim()) send(text.value);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  part("chat-ideas")?.addEventListener("click", (event) => { if (event.target.matches("button")) send(event.target.textContent); });
  part("chat-stop").addEventListener("click", () => stopping?.abort());
  part("chat-new").addEventListener("click", () => {
    stopping?.abort();
    messages = [];
    log.replaceChildren();
    part("chat-none").hidden = false;
    numbers.textContent = "\u00a0";
    keep();
    text.focus();
  });
}

/** Until it serves, its phase is asked for; then the page is made anew, with what is typed kept by the browser. */
async function waitForServer() {
  for (;;) {
    await new Promise((done) => setTimeout(done, ASK_AGAIN_MS));
    if (document.hidden) continue;
    const answer = await fetch(talk.phase_url).catch(() => null);
    if (!answer?.ok) continue;
    const told = await answer.json();
    if (told.phase !== talk.phase && (told.phase === "serving" || told.phase === "ended")) return location.reload();
    if (part("chat-waits")) part("chat-waits").textContent = told.says;
  }
}

function show(role, content) {
  part("chat-none").hidden = true;
  const item = document.createElement("li");
  item.className = role;
  item.textContent = content;
  log.append(item);
  log.scrollTop = log.scrollHeight;
  return item;
}

async function send(asked) {
  text.value = "";
  messages.push({ role: "user", content: asked });
  show("user", asked);
  const item = show("assistant", talk.chat ? "" : asked), began = performance.now();
  item.classList.add("waits");
  busy(new AbortController());
  let said = "", tokens = 0, first = 0, usage = null, failed = "";
  try {
    for await (const event of answer(asked, stopping.signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0], piece = choice?.delta?.content ?? choice?.text ?? "";
      if (!piece) continue;
      first ||= performance.now();
      tokens += 1;
      said += piece;
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      item.textContent = (talk.chat ? "" : asked) + said;
      if (follows) log.scrollTop = log.scrollHeight;
      numbers.textContent = speed(first - began, performance.now() - first, tokens, null);
    }
  } catch (error) {
    if (error.name === "AbortError") item.classList.add("stopped");
    else failed = error.message;
  }
  item.classList.remove("waits");
  if (first) numbers.textContent = speed(first - began, performance.now() - first, usage?.completion_tokens ?? tokens, usage);
  if (failed && !said) {
    item.className = "failed";
    item.textContent = failed;
    messages.pop();
    text.value ||= asked;
  } else {
    if (failed) show("failed", failed);
    messages.push({ role: "assistant", content: said });
    announce(said ? `It answered: ${said.slice(0, 300)}` : "It answered nothing.");
  }
  keep();
  busy(null);
  text.focus();
}

/** The events of the stream, each parsed. Throws what the server refuses in its own words. */
async function* answer(asked, signal) {
  const number = (id) => Number(part(id).value.replace(",", "."));
  const system = part("chat-system")?.value.trim();
  const body = {
    model: talk.model, stream: true, stream_options: { include_usage: true }, temperature: number("chat-temperature"),
    top_p: number("chat-top-p"), max_tokens: number("chat-most"),
    ...(talk.chat ? { messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] } : { prompt: asked }),
  };
  const csrf = JSON.parse(document.body.getAttribute("hx-headers"))["X-CSRFToken"];
  const reply = await fetch(`${talk.url}/${talk.chat ? "chat/completions" : "completions"}`, {
    method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json", "X-CSRFToken": csrf },
  }).catch((error) => { throw error.name === "AbortError" ? error : new Error("The server cannot be reached. Try again."); });
  if (!reply.ok) {
    const told = await reply.json().catch(() => null);
    throw new Error(told?.error?.message ?? `The server answered ${reply.status}.`);
  }
  const words = new TextDecoder();
  let rest = "";
  for (const reader = reply.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + words.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function speed(first, rest, tokens, usage) {
  const rate = tokens > 1 && rest > 0 ? `${quantity((tokens - 1) / (rest / 1000))} tokens/s` : "";
  const read = usage ? `${usage.prompt_tokens.toLocaleString("en-US")} tokens read` : "";
  return [`first token after ${duration(first / 1000)}`, rate, `${tokens.toLocaleString("en-US")} tokens`, read].filter(Boolean).join(" · ");
}

function busy(controller) {
  stopping = controller;
  part("chat-send").hidden = Boolean(controller);
  part("chat-stop").hidden = !controller;
}

function keep() {
  try { sessionStorage.setItem(kept, JSON.stringify(messages)); } catch { /* lasts for this page then */ }
}

function restore() {
  try { messages = JSON.parse(sessionStorage.getItem(kept)) ?? []; } catch { messages = []; }
  for (const each of messages) show(each.role, each.content);
}
