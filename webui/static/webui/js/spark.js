/* Sparklines and small rings on a canvas of our own, sharp on every screen. Depends on numbers and a color only. */

/** Draws `values` over the whole canvas; a last point is marked, values that are not finite leave a red tick. */
export function spark(canvas, values, color = getComputedStyle(canvas).color) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !height) return;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const finite = values.filter(Number.isFinite);
  if (!finite.length) return;
  let low = Infinity, high = -Infinity;
  for (const value of finite) { low = Math.min(low, value); high = Math.max(high, value); }
  const span = high - low || Math.abs(high) || 1, pad = 3;
  const x = (i) => pad + (i / Math.max(1, values.length - 1)) * (width - 2 * pad);
  const y = (v) => (high === low ? height / 2 : height - pad - ((v - low) / span) * (height - 2 * pad));
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  pen.strokeStyle = color;
  pen.beginPath();
  let drawing = false;
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) { drawing = false; return; }
    if (drawing) pen.lineTo(x(i), y(value));
    else pen.moveTo(x(i), y(value));
    drawing = true;
  });
  pen.stroke();
  const last = values.findLastIndex(Number.isFinite);
  pen.fillStyle = color;
  pen.beginPath();
  pen.arc(x(last), y(values[last]), 2, 0, 7);
  pen.fill();
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--fail");
  values.forEach((value, i) => { if (!Number.isFinite(value)) pen.fillRect(x(i) - 1, height - 5, 2, 5); });
}

/** Draws every canvas.spark[data-values] of a part of the page. */
export function sparks(root = document) {
  for (const canvas of root.querySelectorAll("canvas.spark[data-values]")) {
    const values = canvas.dataset.values ? canvas.dataset.values.split(",").map(Number) : [];
    spark(canvas, values);
  }
}
