// Wheel, drag, pinch and tap on a canvas, told as zoom(factor, x), pan(dx, dy) and tap(x, y).

import { place } from "./canvas.js";

const TAP = 4;

export function gestures(canvas, on) {
  const pointers = new Map();
  let travelled = 0, spread = 0;

  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) {
      on.pan(-sideways, 0);
    } else {
      const factor = Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0022) * (event.ctrlKey ? 3 : 1));
      if (on.refuses(factor)) return;
      on.zoom(factor, place(canvas, event)[0]);
    }
    event.preventDefault();
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, place(canvas, event));
    if (pointers.size === 1) travelled = 0;
    spread = apart();
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const [x, y] = place(canvas, event);
    pointers.set(event.pointerId, [x, y]);
    if (pointers.size === 2) {
      const now = apart();
      if (spread > 0 && now > 0) on.zoom(now / spread, middle());
      spread = now;
      travelled = TAP + 1;
      return;
    }
    travelled += Math.abs(x - before[0]) + Math.abs(y - before[1]);
    if (travelled > TAP) {
      canvas.classList.add("is-dragging");
      on.pan(x - before[0], y - before[1]);
    }
  });
  const up = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    canvas.classList.remove("is-dragging");
    if (event.type === "pointerup" && travelled <= TAP) on.tap(...place(canvas, event));
    spread = apart();
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);

  const apart = () => {
    const [a, b] = [...pointers.values()];
    return b ? Math.hypot(a[0] - b[0], a[1] - b[1]) : 0;
  };
  const middle = () => [...pointers.values()].reduce((sum, [x]) => sum + x, 0) / pointers.size;
}
