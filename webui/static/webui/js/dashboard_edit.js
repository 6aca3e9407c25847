/* Edit mode of a dashboard: order by drag, buttons and arrow keys, pins, copies, removal, name and JSON. Each change is
   saved at once by REST; the version guards against edits in another window. */
import { format, gettext } from "./i18n.js";
import { announce, toast } from "./page.js";
import { PanelForm } from "./panel_form.js";
import { send, startPanels } from "./panels.js";
import { request } from "./request.js";

export class Editor {
  constructor({ root, subject, views, state }) {
    Object.assign(this, { root, subject, views, id: state.id, version: state.version, document: state.document, saving: Promise.resolve() });
    this.saved = document.getElementById("saved");
    this.form = new PanelForm(subject, (panel) => this.put(panel));
    root.addEventListener("click", (event) => this.click(event));
    root.addEventListener("keydown", (event) => this.key(event));
    this.drag();
    document.getElementById("add-panel").addEventListener("click", () => this.form.open(null, this.freeId()));
    document.getElementById("name-form").addEventListener("submit", (event) => this.rename(event));
    document.getElementById("json-form").addEventListener("submit", (event) => this.replace(event));
    this.sort();
    this.showEnds();
  }

  slots() { return [...this.root.querySelectorAll("[data-slot]")]; }
  panel(id) { return this.document.panels.find((panel) => panel.id === id); }
  title(slot) { return slot.querySelector("[data-panel-title]")?.textContent.trim() || gettext("Text"); }

  freeId() {
    const used = new Set(this.document.panels.map((panel) => panel.id));
    let number = used.size + 1;
    while (used.has(`p${number}`)) number += 1;
    return `p${number}`;
  }

  /* The document has the panels in the order of the page: pinned ones first. */
  sort() {
    this.document = { ...this.document, panels: this.document.panels.toSorted((a, b) => Boolean(b.pinned) - Boolean(a.pinned)) };
  }

  /** Saves a document or a name after what is being saved; throws the refusal. */
  save(change) {
    const work = this.saving.then(async () => {
      this.saved.textContent = gettext("Saving…");
      const result = await send(`/api/v1/dashboards/${this.id}`, change, "PATCH", { "If-Match": `"${this.version}"` });
      this.version = result.version;
      if (change.document) this.document = result.document;
      this.saved.textContent = gettext("All changes are saved");
      return result;
    });
    this.saving = work.catch(() => { this.saved.textContent = gettext("Not saved"); });
    return work;
  }

  /** Saves the order or another change of panels that the page shows already. */
  async keep(panels) {
    this.document = { ...this.document, panels };
    document.getElementById("no-panels").hidden = panels.length > 0;
    this.showEnds();
    try {
      await this.save({ document: this.document });
    } catch (error) {
      const text = error.status === 412 ? gettext("Someone changed this dashboard meanwhile. Reload the page, then repeat your change.") : error.status ? error.message : gettext("The server did not respond. The last change is not saved.");
      toast(text, "bad");
    }
  }

  click(event) {
    const button = event.target.closest("[data-do]"), slot = button?.closest("[data-slot]");
    if (!slot) return;
    const act = { up: () => this.move(slot, -1), down: () => this.move(slot, 1), pin: () => this.pin(slot), edit: () => this.form.open(this.panel(slot.dataset.slot)), copy: () => this.copy(slot), remove: () => this.remove(slot) }[button.dataset.do];
    act?.();
  }

  key(event) {
    const handle = event.target.closest('[data-do="drag"]'), steps = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[event.key];
    if (!handle || !steps) return;
    event.preventDefault();
    event.stopPropagation();
    this.move(handle.closest("[data-slot]"), steps);
  }

  /** Moves a panel by a place; the focus stays on the button that moved it. */
  move(slot, steps) {
    const slots = this.slots(), from = slots.indexOf(slot), to = from + steps, focused = document.activeElement;
    if (to < 0 || to >= slots.length) return announce(format(gettext("%(title)s is already at the end."), { title: this.title(slot) }));
    if (Boolean(this.panel(slot.dataset.slot).pinned) !== Boolean(this.panel(slots[to].dataset.slot).pinned)) return announce(gettext("Pinned panels come first. Pin or unpin the panel to move it further."));
    steps < 0 ? slots[to].before(slot) : slots[to].after(slot);
    if (slot.contains(focused)) (focused.disabled ? slot.querySelector('[data-do="drag"]') : focused).focus();
    this.ordered(slot);
  }

  ordered(slot) {
    const slots = this.slots(), panels = slots.map((each) => this.panel(each.dataset.slot));
    announce(format(gettext("%(title)s moved to place %(place)s of %(count)s."), { title: this.title(slot), place: slots.indexOf(slot) + 1, count: slots.length }));
    slot.scrollIntoView({ block: "nearest" });
    return this.keep(panels);
  }

  showEnds() {
    const slots = this.slots();
    slots.forEach((slot, place) => {
      slot.querySelector('[data-do="up"]').disabled = place === 0;
      slot.querySelector('[data-do="down"]').disabled = place === slots.length - 1;
    });
  }

  pin(slot) {
    const id = slot.dataset.slot, pinned = !this.panel(id).pinned;
    const panels = this.document.panels.map((panel) => (panel.id === id ? { ...panel, pinned } : panel));
    const firsts = panels.filter((panel) => panel.pinned && panel.id !== id).length;
    slot.querySelector('[data-do="pin"]').setAttribute("aria-pressed", String(pinned));
    const others = this.slots().filter((each) => each !== slot);
    others[firsts] ? others[firsts].before(slot) : this.root.append(slot);
    slot.querySelector('[data-do="pin"]').focus();
    const byId = new Map(panels.map((panel) => [panel.id, panel]));
    announce(format(pinned ? gettext("%(title)s is pinned.") : gettext("%(title)s is no longer pinned."), { title: this.title(slot) }));
    return this.keep(this.slots().map((each) => byId.get(each.dataset.slot)));
  }

  async copy(slot) {
    const panel = { ...this.panel(slot.dataset.slot), id: this.freeId() }, place = this.slots().indexOf(slot) + 1;
    await this.keep(this.document.panels.toSpliced(place, 0, panel));
    await this.show(panel.id, slot);
    announce(gettext("The panel is copied."));
  }

  remove(slot) {
    const id = slot.dataset.slot, panel = this.panel(id), place = this.slots().indexOf(slot), title = this.title(slot);
    this.views.get(id)?.remove();
    this.views.delete(id);
    const next = slot.nextElementSibling ?? slot.previousElementSibling;
    slot.remove();
    (next?.querySelector('[data-do="remove"]') ?? document.getElementById("add-panel")).focus();
    this.keep(this.document.panels.filter((each) => each.id !== id));
    toast(format(gettext("%(title)s is removed."), { title }));
    const undo = Object.assign(document.createElement("button"), { type: "button", className: "button small", textContent: gettext("Undo") });
    const box = document.getElementById("toasts").lastElementChild;
    box.firstChild.after(" ", undo);
    undo.onclick = async () => {
      box.remove();
      await this.keep(this.document.panels.toSpliced(Math.min(place, this.document.panels.length), 0, panel));
      await this.show(id, this.slots()[place - 1] ?? null);
    };
  }

  /** Saves a panel of the form: a changed one in its place, a new one at the end. Throws the refusal. */
  async put(panel) {
    const known = this.panel(panel.id), moved = known && Boolean(known.pinned) !== Boolean(panel.pinned);
    const panels = known ? this.document.panels.map((each) => (each.id === panel.id ? panel : each)) : [...this.document.panels, panel];
    const place = panels.findIndex((each) => each.id === panel.id);
    try {
      await this.save({ document: { ...this.document, panels } });
    } catch (error) {
      const own = `document.panels.${place}.`;
      throw Object.assign(error, { fields: (error.problem?.errors ?? []).map((item) => ({ ...item, field: item.field.startsWith(own) ? item.field.slice(own.length) : "" })) });
    }
    document.getElementById("no-panels").hidden = true;
    if (moved || (!known && panel.pinned)) { location.reload(); return; }
    await this.show(panel.id, null);
    announce(known ? gettext("The panel is saved.") : gettext("The panel is added at the end of the page."));
  }

  /** Reads the element of a panel and puts it in the place of its old one, after another one, or at an end. */
  async show(id, after) {
    const answer = await request(`/dashboards/${this.id}/panels/${id}/`);
    if (!answer.ok) { location.reload(); return; }
    const holder = document.createElement("template");
    holder.innerHTML = await answer.text();
    const slot = holder.content.firstElementChild, old = this.root.querySelector(`[data-slot="${CSS.escape(id)}"]`);
    this.views.get(id)?.remove();
    if (old) old.replaceWith(slot);
    else if (after) after.after(slot);
    else if (this.document.panels[0]?.id === id) this.root.prepend(slot);
    else this.root.append(slot);
    for (const [key, view] of startPanels(slot, this.subject)) this.views.set(key, view);
    this.showEnds();
    slot.querySelector('[data-do="edit"]').focus();
    slot.scrollIntoView({ block: "nearest" });
  }

  drag() {
    let held = null, begin = -1;
    this.root.addEventListener("dragstart", (event) => {
      const handle = event.target.closest?.('[data-do="drag"]');
      if (!handle) return;
      held = handle.closest("[data-slot]");
      begin = this.slots().indexOf(held);
      held.classList.add("dragged");
      event.dataTransfer.effectAllowed = "move";
      event.dataTransfer.setData("text/plain", held.dataset.slot);
      event.dataTransfer.setDragImage(held, 24, 16);
    });
    this.root.addEventListener("dragover", (event) => {
      const over = event.target.closest?.("[data-slot]");
      if (!held) return;
      event.preventDefault();
      if (!over || over === held || Boolean(this.panel(over.dataset.slot).pinned) !== Boolean(this.panel(held.dataset.slot).pinned)) return;
      const slots = this.slots();
      slots.indexOf(over) > slots.indexOf(held) ? over.after(held) : over.before(held);
    });
    this.root.addEventListener("dragend", () => {
      if (!held) return;
      const slot = held;
      slot.classList.remove("dragged");
      held = null;
      if (this.slots().indexOf(slot) !== begin) this.ordered(slot);
    });
    this.root.addEventListener("drop", (event) => event.preventDefault());
  }

  async rename(event) {
    event.preventDefault();
    const dialog = event.target.closest("dialog"), name = new FormData(event.target).get("name");
    try {
      const result = await this.save({ name });
      document.getElementById("dashboard-name").textContent = result.name;
      dialog.close();
    } catch (error) { toast(error.message, "bad"); }
    delete event.target.dataset.sent;
  }

  async replace(event) {
    event.preventDefault();
    const field = event.target.elements.document, error = event.target.querySelector(".error");
    const say = (text) => { error.textContent = text; error.hidden = !text; };
    try {
      await this.save({ document: JSON.parse(field.value) });
      location.reload();
    } catch (problem) {
      const first = problem.problem?.errors?.[0];
      say(first ? `${first.field.replace(/^document\./, "")}: ${first.message}${first.hint ? ` (${first.hint})` : ""}` : problem.message);
      field.focus();
    }
  }
}
