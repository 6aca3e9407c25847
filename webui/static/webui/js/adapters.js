/* Loads and unloads adapters of a serve run by the same calls as programs use, and shows the answer. */
import { gettext } from "./i18n.js";
import { request } from "./request.js";

const card = document.querySelector("#adapters");
const form = document.querySelector("#adapter-form");
const answer = document.querySelector("#adapter-answer");

async function call(path, body) {
  const csrf = JSON.parse(document.body.getAttribute("hx-headers"))["X-CSRFToken"];
  const response = await request(`${card.dataset.url}/${path}`, {
    method: "POST", slowNotice: false, body: JSON.stringify(body), headers: { "Content-Type": "application/json", "X-CSRFToken": csrf },
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
}

async function change(path, body, button, done) {
  button.disabled = true;
  try {
    await call(path, body);
    show(done, false);
  } catch (error) {
    show(error.message, true);
  }
  button.disabled = false;
  document.body.dispatchEvent(new CustomEvent("adapters-changed"));
}

function show(text, failed) {
  answer.hidden = false;
  answer.textContent = text;
  answer.classList.toggle("bad", failed);
}

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = Object.fromEntries(new FormData(form));
  await change("load_lora_adapter", body, form.querySelector("button"), `${body.lora_name}: ${gettext("loaded")}`);
});

card?.addEventListener("click", (event) => {
  const button = event.target.closest("[data-unload]");
  if (!button) return;
  const name = button.dataset.unload;
  change("unload_lora_adapter", { lora_name: name }, button, `${name}: ${gettext("unloaded")}`);
});
