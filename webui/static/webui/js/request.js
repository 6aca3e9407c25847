/* Requests of pages: every page handles an expired login and a slow network the same way. */
import { gettext } from "./i18n.js";

const SLOW_MS = 3000;
const slow = new Set(); // requests without an answer for that long

/** What to show if a login expired: fetch follows the redirect to the login page, and REST answers 401; else "". */
export const loginExpired = (answer) => (answer?.status === 401 || (answer?.redirected && atLogin(answer.url)) ? expiredText() : "");

/** Whether this is the address of the login page. */
export const atLogin = (url) => Boolean(url) && new URL(url, location.href).pathname.startsWith("/login/");

const expiredText = () => gettext("Your login has expired. Reload the page.");

/** As `fetch`. After an expired login, the page shows a notice until a request succeeds, and the answer is an error
    with status 401 whose body has the text as `detail` (REST) and as `error.message` (OpenAI).
    `slowNotice: false` is for calls of a served model, which are slow by nature. */
export async function request(url, { slowNotice = true, ...options } = {}) {
  const sent = fetch(url, options), answer = await (slowNotice ? watched(sent) : sent);
  const text = loginExpired(answer);
  if (!text) {
    if (answer.ok) document.getElementById("login-expired")?.remove();
    return answer;
  }
  showLoginExpired();
  return new Response(JSON.stringify({ detail: text, error: { message: text } }), { status: 401, headers: { "Content-Type": "application/json" } });
}

/** The page says so while a request waits for long. */
async function watched(answer) {
  const mark = Symbol("request"), timer = setTimeout(() => { slow.add(mark); showSlow(); }, SLOW_MS);
  try {
    return await answer;
  } finally {
    clearTimeout(timer);
    if (slow.delete(mark)) showSlow();
  }
}

function showSlow() {
  const notice = document.getElementById("slow");
  if (notice) notice.hidden = !slow.size;
}

/** Shows the notice, once; reloading leads to the login page and back. */
export function showLoginExpired() {
  const toasts = document.getElementById("toasts");
  if (!toasts || document.getElementById("login-expired")) return;
  const notice = Object.assign(document.createElement("div"), { className: "note toast bad", id: "login-expired" });
  notice.setAttribute("role", "alert");
  const reload = Object.assign(document.createElement("button"), { className: "button small", textContent: gettext("Reload") });
  reload.onclick = () => location.reload();
  notice.append(expiredText(), reload);
  toasts.append(notice);
}
