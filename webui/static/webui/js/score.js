// Scores of a served reward model: one row per scored answer, the highest first.
import { format, gettext } from "./i18n.js";
import { announce } from "./page.js";
import { request } from "./request.js";

const config = JSON.parse(document.getElementById("chat-config").textContent);
const part = (id) => document.getElementById(id);
const form = part("score-form"), state = part("score-state"), rows = part("score-rows");

async function score(prompt, answer, formatted) {
  const csrf = JSON.parse(document.body.getAttribute("hx-headers"))["X-CSRFToken"];
  const messages = [{ role: "user", content: prompt }, { role: "assistant", content: answer }];
  const body = formatted ? { model: config.model, messages } : { model: config.model, text_1: prompt, text_2: answer };
  const reply = await request(`${config.url}/${formatted ? "pooling" : "score"}`, {
    method: "POST", slowNotice: false, body: JSON.stringify(body), headers: { "Content-Type": "application/json", "X-CSRFToken": csrf },
  }).catch(() => { throw new Error(gettext("The server is unreachable. Send the message again.")); });
  const document_ = await reply.json().catch(() => null);
  if (!reply.ok) throw new Error(document_?.error?.message ?? format(gettext("The server returned status %(status)s."), { status: reply.status }));
  return formatted ? document_.data[0].data[0] : document_.data[0].score;
}

function show(value, prompt, answer) {
  const row = document.createElement("tr");
  row.dataset.score = value;
  const number = Object.assign(document.createElement("td"), { className: "num", textContent: value.toFixed(4) });
  row.append(number, ...[prompt, answer].map((text) => Object.assign(document.createElement("td"), { textContent: text.slice(0, 300) })));
  const lower = [...rows.children].find((other) => Number(other.dataset.score) < value);
  rows.insertBefore(row, lower ?? null);
  part("score-results").hidden = false;
}

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const prompt = part("score-prompt").value, answer = part("score-answer").value;
  part("score-send").disabled = true;
  state.textContent = "\u00a0";
  try {
    const value = await score(prompt, answer, part("score-chat").checked);
    show(value, prompt, answer);
    announce(format(gettext("Score: %(score)s"), { score: value.toFixed(4) }));
  } catch (error) {
    state.textContent = error.message;
  }
  part("score-send").disabled = false;
});
