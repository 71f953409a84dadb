"use strict";
// The sliders of the planning page, and the hints of its dots. plan_page.py draws everything else.
(() => {
  const source = document.getElementById("grids");
  if (!source) return;
  const grids = JSON.parse(source.textContent);
  const names = ["t", "p", "states", "b", "policy"];

  const gib = (mebibytes) => (mebibytes / 1024).toFixed(2) + " GiB";
  const seconds = (value) => (value < 1 ? (1000 * value).toPrecision(4) + " ms" : value.toPrecision(4) + " s");
  const peak = (cell) => Math.max(...cell[3].map((rank) => sum(rank)));
  const sum = (rank) => rank.slice(1).reduce((total, part) => total + part, 0);
  const told = (grid, cell) => names.map((name, k) => {
    const value = grid.axes[name][cell[0][k]];
    return typeof value === "number" ? name + " " + value : value;
  }).join(", ");

  function add(parent, name, className, text) {
    const child = parent.appendChild(document.createElement(name));
    if (className) child.className = className;
    if (text !== undefined) child.textContent = text;
    return child;
  }

  function drawBars(box, grid, cell, most) {
    box.replaceChildren();
    for (const rank of cell[3]) {
      const row = add(box, "div", "bar");
      add(row, "span", "name", "rank " + rank[0]);
      const track = add(row, "div", "track");
      const reserve = add(track, "span", "reserve");
      reserve.style.left = 100 * (grid.capacity - grid.reserve) / most + "%";
      reserve.style.width = 100 * grid.reserve / most + "%";
      add(track, "span", "capacity").style.left = 100 * grid.capacity / most + "%";
      rank.slice(1).forEach((part, k) => {
        if (!part) return;
        const piece = add(track, "i", "part c" + grid.colors[k]);
        piece.style.width = 100 * part / most + "%";
        piece.title = grid.terms[k][0] + ": " + gib(part) + ". " + grid.hints[k];
      });
      const total = sum(rank);
      add(row, "b", total > grid.capacity ? "bad" : "", gib(total));
      row.setAttribute("role", "img");
      row.setAttribute("aria-label", "rank " + rank[0] + ": " + gib(total) + ": "
        + rank.slice(1).map((part, k) => grid.terms[k][0] + " " + gib(part)).join(", "));
    }
  }

  for (const box of document.querySelectorAll(".explorer")) {
    const grid = grids[box.dataset.grid];
    const cells = new Map(grid.cells.map((cell) => [cell[0].join(), cell]));
    const inputs = [...box.querySelectorAll("input")];
    const result = box.querySelector(".result"), bars = box.querySelector(".bars");
    const legend = box.querySelector(".legend");
    grid.terms.forEach(([name], k) => {
      const entry = add(legend, "li");
      add(entry, "i", "swatch box c" + grid.colors[k]);
      entry.append(name);
      entry.title = grid.hints[k];
    });

    const show = () => {
      const at = inputs.map((input) => Number(input.value));
      inputs.forEach((input, k) => {
        const value = String(grid.axes[names[k]][at[k]]);
        input.nextElementSibling.textContent = value;
        input.setAttribute("aria-valuetext", value);
      });
      const cell = cells.get(at.join());
      result.className = "result";
      if (!cell) {
        bars.replaceChildren();
        result.textContent = grid.axes.policy[at[4]] === "fastest that fits"
          && grid.cells.some((other) => other[0].slice(0, 4).join() === at.slice(0, 4).join())
          ? "No recompute policy makes this layout fit."
          : "This layout is not in the grid: its sizes do not divide the GPUs, the layers or the "
            + "batch, or it is far from the plan.";
        return;
      }
      const most = peak(cell), free = grid.capacity - most;
      const fits = most <= grid.capacity - grid.reserve;
      const word = fits ? "fits" : free >= 0 ? "fits only into the reserve" : "does not fit";
      result.classList.add(fits ? "good" : free >= 0 ? "warn" : "bad");
      result.textContent = word + ": " + gib(most) + ", "
        + (free >= 0 ? gib(free) + " free" : gib(-free) + " too much")
        + "; " + seconds(cell[1]) + " a step; policy " + grid.policies[cell[2]];
      drawBars(bars, grid, cell, 1.04 * Math.max(most, grid.capacity));
    };
    inputs.forEach((input) => input.addEventListener("input", show));
    show();
    box.showCell = (cell) => {
      inputs.forEach((input, k) => { input.value = cell[0][k]; });
      show();
    };
  }

  for (const plot of document.querySelectorAll("[data-scatter]")) {
    const name = plot.dataset.scatter, grid = grids[name];
    const text = document.querySelector('[data-point="' + name + '"]'), idle = text.textContent;
    const [left, right] = grid.x, [low, high] = grid.y;
    const points = grid.cells.map((cell) => ({
      cell,
      x: Math.log(cell[1] / left) / Math.log(right / left),
      y: 1 - (peak(cell) - low) / (high - low),
    })).filter((point) => point.y >= 0).sort((one, other) => one.x - other.x);
    const ring = add(plot, "div", "ring");
    ring.hidden = true;
    let at = -1;

    const choose = (index) => {
      at = index;
      const { cell, x, y } = points[index];
      ring.hidden = false;
      ring.style.left = 100 * x + "%";
      ring.style.top = 100 * y + "%";
      text.textContent = told(grid, cell) + ": " + gib(peak(cell)) + ", " + seconds(cell[1])
        + " a step. A click, or Enter, moves the sliders there.";
    };
    const leave = () => { ring.hidden = true; text.textContent = idle; };
    const open = () => {
      if (at >= 0) document.querySelector('.explorer[data-grid="' + name + '"]').showCell(points[at].cell);
    };
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      const distance = (point) => (point.x * box.width - x) ** 2 + (point.y * box.height - y) ** 2;
      choose(points.reduce((best, point, k) => (distance(point) < distance(points[best]) ? k : best), 0));
    });
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("click", open);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Enter") open();
      if (step === undefined) return;
      event.preventDefault();
      choose(Math.min(points.length - 1, Math.max(0, at + step)));
    });
  }
})();
