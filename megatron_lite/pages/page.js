"use strict";
// One cursor for all line charts of the page: pointer or arrow keys move it, and the legend of each
// chart shows the values there. Without this script the charts and the tables still show everything.
(() => {
  const source = document.getElementById("charts");
  if (!source) return;
  const { charts, marks, span } = JSON.parse(source.textContent);
  const where = document.getElementById("where");
  const plots = [...document.querySelectorAll(".plot[data-chart]")].map((plot) => {
    const chart = charts[plot.dataset.chart];
    const cursor = plot.appendChild(document.createElement("div"));
    cursor.className = "cursor";
    const dots = chart.y.map((_, k) => {
      const dot = plot.appendChild(document.createElement("div"));
      dot.className = "dot s" + k;
      return dot;
    });
    const values = [...plot.closest("figure").querySelectorAll("[data-value]")];
    return { plot, chart, cursor, dots, values, last: values.map((value) => value.textContent) };
  });
  const low = span[0], high = Math.max(span[1], low + 1);

  function nearest(xs, x) {
    let from = 0, to = xs.length - 1;
    while (to - from > 1) {
      const middle = (from + to) >> 1;
      if (xs[middle] <= x) from = middle; else to = middle;
    }
    return x - xs[from] <= xs[to] - x ? from : to;
  }

  function shown(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3);
    return value.toLocaleString("en-US", { maximumSignificantDigits: 5 });
  }

  function place(chart, value) {
    const line = chart.log ? Math.log : (number) => number;
    return (line(value) - line(chart.low)) / (line(chart.high) - line(chart.low));
  }

  function move(x) {
    for (const { chart, cursor, dots, values } of plots) {
      const index = nearest(chart.x, x);
      const left = (100 * (chart.x[index] - low)) / (high - low) + "%";
      cursor.style.left = left;
      cursor.hidden = false;
      chart.y.forEach((column, k) => {
        const value = column[index];
        values[k].textContent = value === null ? "none" : (shown(value) + " " + chart.unit).trim();
        dots[k].hidden = value === null;
        if (value !== null) {
          dots[k].style.left = left;
          dots[k].style.bottom = 100 * place(chart, value) + "%";
        }
      });
    }
    if (where) {
      where.hidden = false;
      const reach = Math.max(0.5, (high - low) / 250);
      const near = marks.filter(([at]) => Math.abs(at - x) <= reach).slice(0, 3);
      where.textContent = ["iteration " + x.toLocaleString("en-US"), ...near.map((mark) => mark[2])]
        .join(" · ");
    }
  }

  function leave() {
    for (const { cursor, dots, values, last } of plots) {
      cursor.hidden = true;
      dots.forEach((dot) => { dot.hidden = true; });
      values.forEach((value, k) => { value.textContent = last[k]; });
    }
    if (where) where.hidden = true;
  }

  let at = high;
  for (const { plot, chart } of plots) {
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      at = chart.x[nearest(chart.x, low + share * (high - low))];
      move(at);
    });
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("focus", () => move(at));
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      const index = nearest(chart.x, at), end = chart.x.length - 1;
      const next = {
        ArrowLeft: index - (event.shiftKey ? 10 : 1), ArrowRight: index + (event.shiftKey ? 10 : 1),
        Home: 0, End: end,
      }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      at = chart.x[Math.min(end, Math.max(0, next))];
      move(at);
    });
  }
  leave();
})();
