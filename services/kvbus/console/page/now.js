// The server's clock, as of the last frame; it stands still while the page is paused.

let unix = Date.now() / 1000;
let at = performance.now();
let held = false;

export function setNow(seconds) {
  unix = seconds;
  at = performance.now();
}

export function hold(paused) {
  unix = now();
  at = performance.now();
  held = paused;
}

export const now = () => (held ? unix : unix + (performance.now() - at) / 1000);
