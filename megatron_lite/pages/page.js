"use strict";
// One cursor for the line charts that stand together: pointer or arrow keys move it, and the legend
// of each chart shows the values there. Without this script charts and tables still show everything.
(() => {
  const source = document.getElementById("charts");
  if (!source) return;
  const { charts, marks } = JSON.parse(source.textContent);
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
    const low = chart.span[0], high = Math.max(chart.span[1], low + 1);
    const last = values.map((value) => value.textContent);
    return { plot, chart, cursor, dots, values, last, low, high, group: chart.group,
      where: document.querySelector('[data-where="' + chart.group + '"]') };
  });

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

  function told(chart, value) {
    return value === null ? "none" : (shown(value) + " " + chart.unit).trim();
  }

  // The last evaluation before an iteration that has none.
  function before(chart, column, index) {
    while (index > 0 && column[index] === null) index -= 1;
    return told(chart, column[index]) + (column[index] === null ? "" : " (at " + chart.x[index] + ")");
  }

  function place(chart, value) {
    const line = chart.log ? Math.log : (number) => number;
    return (line(value) - line(chart.low)) / (line(chart.high) - line(chart.low));
  }

  function move(of, x) {
    const { group, low, high, where } = of;
    for (const { chart, cursor, dots, values } of plots.filter((one) => one.group === group)) {
      const index = nearest(chart.x, x);
      const left = (100 * (chart.x[index] - low)) / (high - low) + "%";
      cursor.style.left = left;
      cursor.hidden = false;
      chart.y.forEach((column, k) => {
        const value = column[index];
        values[k].textContent = value === null && chart.dots[k]
          ? before(chart, column, index)
          : told(chart, value);
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
      const near = (marks[group] || []).filter(([at]) => Math.abs(at - x) <= reach).slice(0, 3);
      where.textContent = [of.chart.axis + " " + x.toLocaleString("en-US"), ...near.map((mark) => mark[1])]
        .join("; ");
    }
  }

  function leave() {
    for (const { cursor, dots, values, last, where } of plots) {
      cursor.hidden = true;
      dots.forEach((dot) => { dot.hidden = true; });
      values.forEach((value, k) => { value.textContent = last[k]; });
      if (where) where.hidden = true;
    }
  }

  for (const one of plots) {
    const { plot, chart, low, high } = one;
    let at = high;
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      at = chart.x[nearest(chart.x, low + share * (high - low))];
      move(one, at);
    });
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("focus", () => move(one, at));
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      const index = nearest(chart.x, at), end = chart.x.length - 1;
      const step = event.shiftKey ? 10 : 1;
      const next = { ArrowLeft: index - step, ArrowRight: index + step, Home: 0, End: end }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      at = chart.x[Math.min(end, Math.max(0, next))];
      move(one, at);
    });
  }
  leave();
})();
