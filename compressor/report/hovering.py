"""The one script of a page: it tells about the mark under a pointer, finger or keyboard focus, and lights up its block.

It writes text only as text, and takes the titles off the marks, so that nothing is told twice. In an area with focus,
left and right go along a series, up and down to another; Escape ends it.
"""

from __future__ import annotations

SCRIPT = """
(() => {
  "use strict";
  const all = (root, what) => Array.from(root.querySelectorAll(what));
  const notes = new WeakMap();
  const tip = document.createElement("div");
  let now = null;
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);

  const area = (mark) => mark.closest(".area > svg");
  const spot = (mark, box) => {
    const [x, y] = mark.dataset.at.split(" ").map(Number);
    return [box.left + (box.width * x) / 100, box.top + (box.height * y) / 100];
  };
  const visible = (svg) => all(svg, ".mark[data-at]").filter((mark) => !mark.closest(".off"));
  const clear = () => {
    all(document, ".lit, .at, .busy").forEach((one) => one.classList.remove("lit", "at", "busy"));
    tip.hidden = true;
    now = null;
  };
  const light = (block) => {
    for (const one of block === undefined ? [] : all(document, "[data-block]")) {
      if (one.dataset.block !== block) continue;
      one.classList.add("lit");
      if (one.closest(".plot")) one.closest(".plot").classList.add("busy");
    }
  };
  const show = (mark) => {
    if (mark === now) return;
    clear();
    if (!mark) return;
    now = mark;
    mark.classList.add("at");
    light(mark.dataset.block);
    tip.textContent = notes.get(mark);
    tip.hidden = false;
    const [x, y] = spot(mark, area(mark).getBoundingClientRect());
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const above = y - tip.offsetHeight - 14;
    tip.style.left = `${Math.max(8, Math.min(x - tip.offsetWidth / 2, room)) + scrollX}px`;
    tip.style.top = `${(above < 4 ? y + 16 : above) + scrollY}px`;
  };
  const nearest = (svg, x, y) => {
    const box = svg.getBoundingClientRect();
    let best = null, least = Infinity;
    for (const mark of visible(svg)) {
      const [a, b] = spot(mark, box);
      const far = Math.hypot(a - x, b - y), dots = mark.dataset.kind === "dots";
      const score = dots ? (far > 40 ? Infinity : far - 8) : Math.abs(a - x) + Math.abs(b - y) / 100;
      if (score < least) [best, least] = [mark, score];
    }
    return best;
  };
  const step = (svg, key) => {
    const marks = visible(svg), home = { Home: 0, End: -1 }[key];
    if (!now || area(now) !== svg) return marks[0];
    const group = (mark) => mark.parentNode, at = (mark) => parseFloat(mark.dataset.at);
    const own = marks.filter((mark) => group(mark) === group(now)).sort((a, b) => at(a) - at(b));
    if (home !== undefined) return own.at(home);
    if (key === "ArrowLeft" || key === "ArrowRight") {
      return own[own.indexOf(now) + (key === "ArrowLeft" ? -1 : 1)] || now;
    }
    const groups = [...new Set(marks.map(group))];
    const next = groups[groups.indexOf(group(now)) + (key === "ArrowUp" ? -1 : 1)];
    const far = (mark) => Math.abs(at(mark) - at(now));
    return marks.filter((mark) => group(mark) === next).sort((a, b) => far(a) - far(b))[0] || now;
  };

  for (const svg of all(document, ".area > svg")) {
    for (const mark of all(svg, ".mark[data-at]")) {
      const title = mark.querySelector("title");
      notes.set(mark, title.textContent);
      title.remove();
    }
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("pointermove", (event) => show(nearest(svg, event.clientX, event.clientY)));
    svg.addEventListener("click", (event) => show(nearest(svg, event.clientX, event.clientY)));
    svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && clear());
    svg.addEventListener("focus", () => svg.matches(":focus-visible") && show(step(svg, "")));
    svg.addEventListener("blur", clear);
    svg.addEventListener("keydown", (event) => {
      if (!/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key)) return;
      event.preventDefault();
      show(step(svg, event.key));
    });
  }
  for (const row of all(document, "tr[data-block]")) {
    row.addEventListener("pointerenter", () => { clear(); light(row.dataset.block); });
    row.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && clear());
  }
  for (const button of all(document, ".keys button")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      clear();
      for (const one of all(button.closest(".plot"), "svg [data-series]")) {
        if (one.dataset.series === button.dataset.series) one.classList.toggle("off", !on);
      }
    });
  }
  document.addEventListener("keydown", (event) => event.key === "Escape" && clear());
  document.addEventListener("click", (event) => event.target.closest(".area, tr[data-block]") || clear());
})();
"""
