// Chat box of a served model: calls the OpenAI-compatible API with streaming, stop and speed.
import { format, gettext } from "./i18n.js";
import { announce } from "./page.js";
import { duration, quantity } from "./format.js";
import { request } from "./request.js";

const RETRY_MS = 1500;
const config = JSON.parse(document.getElementById("chat-config").textContent);
const part = (id) => document.getElementById(id);
const form = part("chat-form"), text = part("chat-text"), log = part("chat-log"), numbers = part("chat-numbers");
const storageKey = `orrery-chat-${config.url}`;
let messages = [], stopping = null, partial = "";

if (form) {
  restore();
  if (config.phase === "serving") start();
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
  // leaving the page ends the answer; what arrived of it stays in the conversation
  addEventListener("pagehide", () => {
    if (!stopping) return;
    save([...messages, { role: "assistant", content: partial, stopped: true }]);
    stopping.abort();
  });
  part("chat-new").addEventListener("click", () => {
    stopping?.abort();
    messages = [];
    log.replaceChildren();
    part("chat-none").hidden = false;
    numbers.textContent = "\u00a0";
    save();
    text.focus();
  });
}

/** Polls the phase until the server is ready, then reloads the page. */
async function waitForServer() {
  for (;;) {
    await new Promise((done) => setTimeout(done, RETRY_MS));
    if (document.hidden) continue;
    const answer = await request(config.phase_url).catch(() => null);
    if (!answer?.ok) continue;
    const status = await answer.json();
    if (status.phase !== config.phase && (status.phase === "serving" || status.phase === "ended")) return location.reload();
    if (part("chat-waiting")) part("chat-waiting").textContent = status.message;
  }
}

function show(role, content) {
  part("chat-none").hidden = true;
  const item = document.createElement("div");
  item.className = role;
  item.textContent = content;
  log.append(item);
  log.scrollTop = log.scrollHeight;
  return item;
}

async function send(prompt) {
  text.value = "";
  messages.push({ role: "user", content: prompt });
  save();
  show("user", prompt);
  const item = show("assistant", config.chat ? "" : prompt), began = performance.now();
  item.classList.add("waits");
  busy(new AbortController());
  let output = "", tokens = 0, first = 0, usage = null, failed = "";
  try {
    for await (const event of answer(prompt, stopping.signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0], chunk = choice?.delta?.content ?? choice?.text ?? "";
      if (!chunk) continue;
      first ||= performance.now();
      tokens += 1;
      partial = output += chunk;
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      item.textContent = (config.chat ? "" : prompt) + output;
      if (follows) log.scrollTop = log.scrollHeight;
      numbers.textContent = speed(first - began, performance.now() - first, tokens, null);
    }
  } catch (error) {
    if (error.name === "AbortError") item.classList.add("stopped");
    else failed = error.message;
  }
  item.classList.remove("waits");
  if (first) numbers.textContent = speed(first - began, performance.now() - first, usage?.completion_tokens ?? tokens, usage);
  if (failed && !output) {
    item.className = "failed";
    item.textContent = failed;
    messages.pop();
    text.value ||= prompt;
  } else {
    if (failed) show("failed", failed);
    messages.push({ role: "assistant", content: output, stopped: Boolean(failed) || item.classList.contains("stopped") });
    announce(output ? format(gettext("Answer: %(text)s"), { text: output.slice(0, 300) }) : gettext("The answer is empty."));
  }
  partial = "";
  save();
  busy(null);
  text.focus();
}

/** Yields the parsed events of the stream; throws the server's error message. */
async function* answer(prompt, signal) {
  const number = (id) => Number(part(id).value.replace(",", "."));
  const system = part("chat-system")?.value.trim();
  const body = {
    model: config.model, stream: true, stream_options: { include_usage: true }, temperature: number("chat-temperature"),
    top_p: number("chat-top-p"), max_tokens: number("chat-most"),
    ...(config.chat ? { messages: [...(system ? [{ role: "system", content: system }] : []), ...messages.map(({ role, content }) => ({ role, content }))] } : { prompt }),
  };
  const csrf = JSON.parse(document.body.getAttribute("hx-headers"))["X-CSRFToken"];
  const reply = await request(`${config.url}/${config.chat ? "chat/completions" : "completions"}`, {
    method: "POST", slowNotice: false, signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json", "X-CSRFToken": csrf },
  }).catch((error) => { throw error.name === "AbortError" ? error : new Error(gettext("The server is unreachable. Send the message again.")); });
  if (!reply.ok) {
    const failure = await reply.json().catch(() => null);
    throw new Error(failure?.error?.message ?? format(gettext("The server returned status %(status)s."), { status: reply.status }));
  }
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = reply.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
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
  const rate = tokens > 1 && rest > 0 ? format(gettext("%(rate)s tokens/s"), { rate: quantity((tokens - 1) / (rest / 1000)) }) : "";
  const read = usage ? format(gettext("%(count)s prompt tokens"), { count: usage.prompt_tokens.toLocaleString("en-US") }) : "";
  const latency = format(gettext("time to first token %(time)s"), { time: duration(first / 1000) });
  const total = format(gettext("%(count)s output tokens"), { count: tokens.toLocaleString("en-US") });
  return [latency, rate, total, read].filter(Boolean).join(" · ");
}

function busy(controller) {
  stopping = controller;
  part("chat-send").hidden = Boolean(controller);
  part("chat-stop").hidden = !controller;
}

function save(conversation = messages) {
  try { sessionStorage.setItem(storageKey, JSON.stringify(conversation)); } catch { /* kept for this page only */ }
}

function restore() {
  try { messages = JSON.parse(sessionStorage.getItem(storageKey)) ?? []; } catch { messages = []; }
  for (const message of messages) if (show(message.role, message.content) && message.stopped) log.lastElementChild.classList.add("stopped");
}
