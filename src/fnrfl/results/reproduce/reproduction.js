"use strict";
(() => {
  const { data, h, s, percent, scale, ticks, whole, listen, keep, canvas, clip, lines, heat, sorting } = drawing;
  const share = (v) => v.toFixed(4);

  // A row for each bar: totals reach from zero, a step from one total to the next.
  function waterfall(width, { title, bars, leak }) {
    const [step, top] = [46, 4];
    const height = top + bars.length * step + 34;
    const bottom = height - 30;
    const svg = canvas(width, height, `${title}: what each leak adds`);
    const px = scale(0, 1, 8, width - 24);
    const shown = ticks(0, 1, Math.min(5, width / 90));
    for (const v of shown) {
      svg.append(s("line", { class: "grid", x1: px(v), x2: px(v), y1: top, y2: bottom }),
        s("text", { x: px(v), y: bottom + 18, "text-anchor": "middle" }, whole(shown, percent)(v)));
    }
    if (leak) svg.append(s("text", { class: "watermark", x: width / 2, y: top + (bars.length * step) / 2 + 14, "text-anchor": "middle" }, "leak"));
    const targets = [];
    bars.forEach((bar, index) => {
      const y = top + index * step;
      const known = bar.end !== null;
      const amount = !known ? "not run" : bar.total ? share(bar.end) : `${bar.end < bar.start ? "\u2212" : "+"}${share(Math.abs(bar.end - bar.start))}`;
      const label = s("text", { class: "name", x: 8, y: y + 15 }, `${clip(bar.label, width - 130)}  `, s("tspan", { class: "amount" }, amount));
      if (known && bar.leak) label.append(s("tspan", { class: "alarm" }, "  leak"));
      svg.append(label);
      targets.push({ box: [0, y, width, y + step], at: [known ? px(Math.max(bar.start, bar.end)) : 8, y + 22], title: bar.label,
        rows: [{ label: bar.total ? "accuracy" : "from", value: bar.words, more: bar.leak ? "leak" : "" }] });
      if (!known) return;
      const [from, to] = [Math.min(bar.start, bar.end), Math.max(bar.start, bar.end)];
      svg.append(s("rect", { class: bar.leak ? "fall leak" : "fall", x: px(from), y: y + 22, width: Math.max(2, px(to) - px(from)), height: 14, rx: 2 }));
      if (index + 1 < bars.length && bars[index + 1].end !== null) {
        svg.append(s("line", { class: "guide", x1: px(bar.end), x2: px(bar.end), y1: y + 36, y2: y + step + 22 }));
      }
    });
    return listen(svg, targets);
  }

  // Images from bytes: a row for each image, a column for each client. No address is loaded for them.
  function samples(width, { levels, shape: [clients, images, height, columns, channels], pixels }) {
    const bytes = Uint8Array.from(atob(pixels), (letter) => letter.charCodeAt(0));
    const grid = h("div", { class: "pictures", role: "img", "aria-label": `test images with noise from ${levels[0]} to ${levels.at(-1)}` });
    grid.style.gridTemplateColumns = `repeat(${clients}, minmax(0, ${Math.min(96, width / clients)}px))`;
    grid.append(...levels.map((level) => h("span", {}, level)));
    for (let image = 0; image < images; image++) {
      for (let client = 0; client < clients; client++) {
        const picture = h("canvas", { width: columns, height });
        const drawn = new ImageData(columns, height);
        const start = (client * images + image) * height * columns * channels;
        for (let i = 0; i < height * columns; i++) {
          for (let c = 0; c < 3; c++) drawn.data[4 * i + c] = bytes[start + i * channels + (channels === 1 ? 0 : c)];
          drawn.data[4 * i + 3] = 255;
        }
        picture.getContext("2d").putImageData(drawn, 0, 0);
        grid.append(picture);
      }
    }
    return grid;
  }

  for (const place of document.querySelectorAll("[data-curves]")) {
    const { series, leak } = data.curves[place.dataset.curves];
    keep(place, (width) => lines(width, { series, leak, xName: "round", yName: "accuracy", x: String, y: percent, shared: true, range: [0, 1] }));
  }
  for (const place of document.querySelectorAll("[data-waterfall]")) {
    keep(place, (width) => waterfall(width, data.waterfalls[place.dataset.waterfall]));
  }
  for (const place of document.querySelectorAll("[data-split]")) {
    const { title, classes, counts } = data.splits[place.dataset.split];
    const examples = counts.map((row) => row.reduce((a, b) => a + b, 0));
    keep(place, (width) => heat(width, { rows: counts.map((_, i) => `client ${i + 1}`), columns: classes, rowName: "", columnName: "class",
      range: [0, Math.max(...counts.flat())], value: (r, c) => counts[r][c], text: String, beside: examples,
      said: (r, c) => ({ title: `${title}: client ${r + 1}, ${classes[c]}`, rows: [{ label: "examples", value: String(counts[r][c]) },
        { label: "of all that it holds", value: percent(counts[r][c] / (examples[r] || 1)) }] }) }));
  }
  keep(document.querySelector("[data-noisy]"), (width) => samples(width, data.noisy));
  document.querySelectorAll("table").forEach(sorting);

  // On paper nothing can be opened; the lists of cells stay closed, since they are long.
  const closed = [...document.querySelectorAll("section:not(#cells) details:not([open])")];
  addEventListener("beforeprint", () => closed.forEach((part) => (part.open = true)));
  addEventListener("afterprint", () => closed.forEach((part) => (part.open = false)));
})();
