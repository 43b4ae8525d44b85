"use strict";
// What every page needs: elements, numbers, charts, tables that sort, light and dark.
const drawing = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;
  const DASHES = data.dashes;

  // -- elements: text goes in as text, never as markup ----------------------------------------------------------------
  function put(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }
  const h = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) => put(document.createElementNS(SVG, tag), attributes, children);
  const colour = (index) => `var(--c${index % 8})`;
  const swatch = (index) =>
    s("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" },
      s("line", { x1: 1, x2: 25, y1: 5, y2: 5, stroke: colour(index), "stroke-dasharray": DASHES[index % DASHES.length] }));
  function block(tone) {
    const square = h("span", { class: "block" });
    square.style.background = `var(--${tone})`;
    return square;
  }

  // -- numbers --------------------------------------------------------------------------------------------------------
  const percent = (v, digits = 1) => (v === null ? "none" : `${(100 * v).toFixed(digits)} %`);
  function number(v) {
    if (v === null) return "none";
    const size = Math.abs(v);
    if (size !== 0 && (size >= 1e7 || size < 1e-3)) return v.toExponential(2);
    return v.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 1 ? 2 : 3 });
  }
  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(1, count) || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 2.5, 5, 10].find((nice) => nice * power >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
    return found;
  }
  // Percentages on an axis have decimals only where they differ in them.
  const whole = (values, text) => (text === percent && values.every((v) => Math.abs(100 * v - Math.round(100 * v)) < 1e-6) ? (v) => percent(v, 0) : text);
  // An axis of shares: as wide as the values, and no narrower than `least`, since few test examples say no more than that.
  function shares(values, least = 0, margin = 0.06) {
    if (!values.length) return [0, 1];
    let [low, high] = [Math.min(...values), Math.max(...values)];
    const pad = (high - low || 0.05) * margin;
    [low, high] = [Math.max(0, low - pad), Math.min(1, high + pad)];
    const missing = Math.max(0, Math.min(1, least) - (high - low)) / 2;
    [low, high] = [low - missing, high + missing];
    if (low < 0) [low, high] = [0, Math.min(1, high - low)];
    if (high > 1) [low, high] = [Math.max(0, low - (high - 1)), 1];
    return [low, high];
  }
  // An axis of other numbers: one below 0 only if a value is.
  function around(values) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [low < 0 ? low - pad : Math.max(0, low - pad), high + pad];
  }
  const scale = (from, to, start, end) => (v) => start + ((v - from) / (to - from || 1)) * (end - start);

  // -- the value under a pointer, a finger or the arrow keys -------------------------------------------------------------
  // A target has a box that it is nearest to, a point to stand beside, and what is to be said.
  const tip = document.getElementById("tip");
  function say(x, y, target) {
    tip.replaceChildren(h("b", {}, target.title), ...target.rows.map((row) =>
      h("div", {}, row.tone ? block(row.tone) : row.mark === undefined ? null : swatch(row.mark),
        h("span", { class: "label" }, row.label), h("em", {}, row.value), row.more ? h("small", {}, row.more) : null)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width > root.clientWidth - 8 ? x - 14 - box.width : x + 14;
    tip.style.left = `${Math.max(8, Math.min(left, root.clientWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y - box.height - 10, innerHeight - box.height - 8))}px`;
  }
  // `legend` and `leak` go with a figure that is saved: its lines' names, and whether they have a leak.
  function listen(svg, targets, { columns = 0, legend = [], leak = false } = {}) {
    Object.assign(svg, { legend, leak });
    if (!targets.length) return svg;
    const over = s("g", { "pointer-events": "none" });
    svg.append(over);
    let current = -1;
    function show(index) {
      current = index;
      const target = targets[index];
      const [x0, y0, x1, y1] = target.box;
      const frame = svg.getBoundingClientRect();
      over.replaceChildren(
        target.guide ? s("line", { class: "guide", x1: target.at[0], x2: target.at[0], y1: y0, y2: y1 }) : "",
        ...(target.outline ? [s("rect", { class: "outline", x: x0, y: y0, width: x1 - x0, height: y1 - y0, rx: 2 })] : []),
        ...(target.marks || []).map(([x, y, index]) =>
          s("circle", { cx: x, cy: y, r: 4.5, fill: colour(index), stroke: "var(--paper)", "stroke-width": 1.5 })));
      say(frame.left + target.at[0], frame.top + target.at[1], target);
    }
    function hide() {
      current = -1;
      over.replaceChildren();
      tip.hidden = true;
    }
    function nearest(event) {
      const frame = svg.getBoundingClientRect();
      const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
      let [best, least] = [0, Infinity];
      targets.forEach(({ box: [x0, y0, x1, y1] }, index) => {
        const distance = Math.hypot(Math.max(x0 - x, 0, x - x1), Math.max(y0 - y, 0, y - y1));
        if (distance < least) [best, least] = [index, distance];
      });
      show(best);
    }
    svg.addEventListener("pointermove", nearest);
    svg.addEventListener("pointerdown", nearest);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -(columns || 1), ArrowDown: columns || 1 };
      const last = targets.length - 1;
      if (event.key === "Escape") hide();
      else if (event.key === "Home") show(0);
      else if (event.key === "End") show(last);
      else if (event.key in steps) show(current < 0 ? 0 : Math.max(0, Math.min(last, current + steps[event.key])));
      else return;
      event.preventDefault();
    });
    return svg;
  }

  // -- drawing, again whenever the width changes ------------------------------------------------------------------------
  function keep(place, draw) {
    let width = 0;
    const paint = () => {
      tip.hidden = true;
      if (place.clientWidth) place.replaceChildren(draw((width = place.clientWidth)));
    };
    new ResizeObserver(() => place.clientWidth !== width && paint()).observe(place);
    paint();
    return paint;
  }
  function canvas(width, height, label) {
    return s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  }
  function clip(text, width) {
    // 6.6 px is a wide character of the label's size; the whole text is one hover away.
    const room = Math.floor(width / 6.6);
    return text.length > room ? `${text.slice(0, Math.max(1, room - 1))}\u2026` : text;
  }

  // Lines with bands. `shared`: all lines have values at the same x, so one guide tells all of them.
  function lines(width, { series, xName, yName, x: xText, y: yText, shared, leak, bounded, range, least, references = [] }) {
    const height = Math.round(Math.max(230, Math.min(400, width * 0.52)));
    const svg = canvas(width, height, `${yName} by ${xName}`);
    const there = (one) => one.points.filter((p) => p.y !== null);
    const points = series.flatMap(there);
    if (!points.length) return svg;
    const xs = points.map((p) => p.x);
    // An axis that has all of the first rounds would make a strip of the last ones: then lines enter from outside.
    const values = (found) => found.flatMap((p) => [p.y, p.low, p.high]);
    const span = (found) => Math.max(...found) - Math.min(...found);
    const late = values(series.flatMap((one) => there(one).slice(Math.floor(one.points.length / 2))));
    const all = series.length > 1 && late.length && span(late) < 0.4 * span(values(points)) ? late : values(points);
    const [low, high] = range || (bounded ? shares(all, least) : around(all));
    const yTicks = ticks(low, high, height / 55);
    const tickText = whole(yTicks, yText);
    const left = 14 + 6.8 * Math.max(...yTicks.map((v) => tickText(v).length));
    const [right, top, bottom] = [width - 12, references.length ? 28 : 14, height - 42];
    const x0 = shared ? Math.min(...xs) : 0;
    const xTicks = ticks(x0, Math.max(...xs), Math.min(8, width / 90)).filter((v) => !shared || Number.isInteger(v));
    if (shared && xTicks[0] !== x0 && (xTicks.length < 2 || xTicks[0] - x0 > (xTicks[1] - xTicks[0]) / 2)) xTicks.unshift(x0);
    const px = scale(x0, Math.max(...xs), left + 4, right - 6);
    const py = scale(low, high, bottom, top);
    for (const v of yTicks) {
      svg.append(s("line", { class: "grid", x1: left, x2: right, y1: py(v), y2: py(v) }),
        s("text", { x: left - 8, y: py(v) + 4, "text-anchor": "end" }, tickText(v)));
    }
    for (const v of xTicks) svg.append(s("text", { x: px(v), y: bottom + 18, "text-anchor": "middle" }, xText(v)));
    svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, xName));
    if (leak) {
      svg.append(s("text", { class: "watermark", x: (left + right) / 2, y: (top + bottom) / 2 + 14, "text-anchor": "middle" }, "leak"));
    }
    // What a guess reaches: a line where the axis has it, else an arrow to where it lies; in words above the axis, in one text.
    for (const { value } of references.filter((one) => low <= one.value && one.value <= high)) {
      svg.append(s("line", { class: "rule", x1: left, x2: right, y1: py(value), y2: py(value) }));
    }
    const words = references.map(({ name, value }) => `${value < low ? "\u2193 " : value > high ? "\u2191 " : ""}${name} ${yText(value)}`);
    svg.append(s("text", { class: "rule-name", x: right, y: 12, "text-anchor": "end" }, words.join(", ")));
    const inner = { x: left, y: top - 3, width: right - left, height: bottom - top + 6 };  // it cuts off what is outside
    const plot = s("svg", { ...inner, viewBox: Object.values(inner).join(" ") });
    svg.append(plot);
    for (const one of series) {
      const mine = there(one);
      const edge = (key) => mine.map((p) => `${px(p.x).toFixed(1)} ${py(p[key]).toFixed(1)}`);
      if (series.length <= 8 && mine.some((p) => p.low !== p.high)) {
        plot.append(s("path", { d: `M${[...edge("low"), ...edge("high").reverse()].join("L")}Z`, fill: colour(one.mark), opacity: 0.13 }));
      }
      plot.append(s("path", { class: "line", d: `M${edge("y").join("L")}`, stroke: colour(one.mark),
        "stroke-dasharray": DASHES[one.mark % DASHES.length] }));
      if (mine.length === 1) plot.append(s("circle", { cx: px(mine[0].x), cy: py(mine[0].y), r: 4, fill: colour(one.mark) }));
    }
    const told = (p) => ({ value: yText(p.y, 2), more: p.low === p.high ? "" : `${yText(p.low, 2)} to ${yText(p.high, 2)}` });
    let targets;
    if (shared) {
      targets = [...new Set(xs)].sort((a, b) => a - b).map((x) => {
        const here = series.flatMap((one) => one.points.filter((p) => p.x === x && p.y !== null).map((p) => ({ one, p })));
        here.sort((a, b) => b.p.y - a.p.y);
        return { box: [px(x), top, px(x), bottom], at: [px(x), Math.min(bottom, Math.max(top, py(here[0].p.y)))], guide: true, title: `${xName} ${xText(x)}`,
          rows: here.map(({ one, p }) => ({ mark: one.mark, label: one.label, ...told(p) })),
          marks: here.filter(({ p }) => low <= p.y && p.y <= high).map(({ one, p }) => [px(x), py(p.y), one.mark]) };
      });
    } else {
      targets = series.flatMap((one) => one.points.filter((p) => p.y !== null).map((p) => ({
        box: [px(p.x), py(p.y), px(p.x), py(p.y)], at: [px(p.x), py(p.y)], title: `${one.label}, round ${p.round}`,
        rows: [{ label: yName, ...told(p) }, { label: xName, value: xText(p.x) }], marks: [[px(p.x), py(p.y), one.mark]] })));
    }
    return listen(svg, targets, { leak, legend: series.map(({ label, mark }) => ({ label, mark })) });
  }

  // Who has what, as a small picture: a row is a client, a column a class.
  function skew(counts) {
    const [w, h] = [130 / counts[0].length, Math.max(1, Math.min(9, 120 / counts.length))];
    const svg = canvas(130, h * counts.length, "examples of each class that each client has");
    const most = Math.max(...counts.flat());
    counts.forEach((row, r) => row.forEach((count, c) => svg.append(
      s("rect", { class: "cell", x: c * w, y: r * h, width: w, height: h, "fill-opacity": (count / most).toFixed(3) }))));
    return svg;
  }

  // Paired differences: the mean a dot, full if it holds after correction; the interval a bar; zero a line.
  function forest(width, { blocks, least, leak, metric }) {
    const wide = width >= 640;
    const [step, head, top] = [wide ? 26 : 44, 34, 2];
    const rows = blocks.flatMap((block) => block.rows);
    const height = top + blocks.length * head + rows.length * step + 40;
    const svg = canvas(width, height, `paired differences of ${metric.name}`);
    const unit = metric.share ? 100 : 1;
    function points(v) {
      const size = Math.abs(unit * v).toFixed(metric.share ? 1 : 4);
      return `${Number(size) === 0 ? "" : v < 0 ? "\u2212" : "+"}${size}`;
    }
    const told = (row) => `${points(row.mean)}${row.low === null ? "" : ` [${points(row.low)}, ${points(row.high)}]`}, ${
      row.seeds === 1 ? "one seed" : `${row.seeds} seeds`}`;
    const [left, right] = wide ? [Math.min(width * 0.36, 16 + 7 * Math.max(...rows.map((row) => row.label.length))), width - 14 - 6.7 * Math.max(...rows.map((row) => told(row).length))] : [10, width - 10];
    // Intervals far wider than the others are cut off, with an arrow, so that one line does not hide the rest.
    const half = rows.filter((row) => row.low !== null).map((row) => (row.high - row.low) / 2).sort((a, b) => a - b);
    const reach = Math.max(...rows.map((row) => Math.max(Math.abs(row.low), Math.abs(row.high), Math.abs(row.mean))));
    const pad = (least || reach) / 20;
    const widest = reach + pad;
    const usual = Math.min(metric.share ? 1 : Infinity, Math.max(least / 2, 1.3 * Math.max(...rows.map((row) => Math.abs(row.mean))), 3 * (half[Math.floor(half.length / 2)] || 0)));
    const most = widest <= 2 * usual ? Math.max(widest, least / 2) : usual;
    const low = Math.max(-most, Math.min(-least / 2, ...rows.map((row) => (row.low === null ? row.mean : row.low) - pad)));
    const high = Math.min(most, Math.max(least / 2, ...rows.map((row) => (row.high === null ? row.mean : row.high) + pad)));
    const px = scale(low, high, left, right);
    const bottom = height - 34;
    const shown = ticks(unit * low, unit * high, Math.min(8, (right - left) / 70));
    for (const v of shown) {
      svg.append(s("line", { class: v === 0 ? "zero" : "grid", x1: px(v / unit), x2: px(v / unit), y1: top, y2: bottom }),
        s("text", { x: px(v / unit), y: bottom + 16, "text-anchor": "middle" }, v === 0 ? "0" : `${v < 0 ? "\u2212" : "+"}${+Math.abs(v).toPrecision(6)}`));
    }
    svg.append(s("text", { x: right, y: height - 2, "text-anchor": "end" }, `${metric.share ? "points of " : ""}${metric.name}: to the ${metric.higher ? "right" : "left"} is better`));
    if (leak) svg.append(s("text", { class: "watermark", x: (left + right) / 2, y: height / 2, "text-anchor": "middle" }, "leak"));
    const targets = [];
    let y = top;
    for (const block of blocks) {
      svg.append(s("text", { class: "heading", x: 0, y: y + 22 }, clip(block.title, width - 8)));
      y += head;
      for (const row of block.rows) {
        const at = wide ? y + step / 2 : y + 31;
        const tone = colour(row.mark);
        svg.append(s("text", { class: "name", x: 0, y: wide ? at + 4 : at - 13 }, clip(row.label, wide ? left - 8 : width - 6.4 * told(row).length - 10)),
          s("text", { x: width, y: wide ? at + 4 : at - 13, "text-anchor": "end", class: row.holds ? "amount" : "" }, told(row)));
        if (row.low !== null) {
          const [from, to] = [Math.max(low, row.low), Math.min(high, row.high)];
          svg.append(s("line", { x1: px(from), x2: px(to), y1: at, y2: at, stroke: tone, "stroke-width": row.holds ? 3.5 : 2 }));
          for (const [cut, x, way] of [[row.low < low, left, 1], [row.high > high, right, -1]]) {
            if (cut) svg.append(s("path", { d: `M${x + 7 * way} ${at - 5}L${x} ${at}L${x + 7 * way} ${at + 5}`, fill: "none", stroke: tone, "stroke-width": 2 }));
          }
        }
        svg.append(s("circle", { cx: px(row.mean), cy: at, r: 5, fill: row.holds ? tone : "var(--paper)", stroke: tone, "stroke-width": 2 }));
        targets.push({ box: [0, at - step / 2, width, at + step / 2], at: [px(row.mean), at - 8], title: `${row.label} minus ${row.other}`, rows: [
          { label: metric.share ? "points" : "difference", value: points(row.mean) },
          ...(row.low === null ? [] : [{ label: "95 % interval", value: `${points(row.low)} to ${points(row.high)}` }]),
          { label: "seeds with the same split", value: String(row.seeds) }, { label: "more than luck?", value: row.verdict }] });
        y += step;
      }
    }
    return listen(svg, targets, { leak });
  }

  // A row for each line: every seed a dot, the mean a bar.
  function dots(width, { rows, yName, y: yText, bounded, leak, least, references = [] }) {
    const [step, top] = [46, 4];
    const height = top + rows.length * step + 52;
    const svg = canvas(width, height, `${yName}, every seed`);
    const all = rows.flatMap((row) => row.values);
    const [low, high] = bounded ? shares(all, least) : around(all);
    const px = scale(low, high, 24, width - 24);
    const bottom = height - 48;
    const shown = ticks(low, high, Math.min(8, width / 90));
    const tickText = whole(shown, yText);
    for (const v of shown) {
      svg.append(s("line", { class: "grid", x1: px(v), x2: px(v), y1: top, y2: bottom }),
        s("text", { x: px(v), y: bottom + 18, "text-anchor": "middle" }, tickText(v)));
    }
    if (leak) svg.append(s("text", { class: "watermark", x: width / 2, y: top + rows.length * step / 2 + 14, "text-anchor": "middle" }, "leak"));
    // What a guess reaches: a line where the axis has it, else its value with an arrow to where it lies.
    for (const { value } of references.filter((one) => low <= one.value && one.value <= high)) {
      svg.append(s("line", { class: "rule", x1: px(value), x2: px(value), y1: top, y2: bottom }));
    }
    const words = references.map(({ name, value }) => `${value < low ? "\u2190 " : ""}${name} ${yText(value)}${value > high ? " \u2192" : ""}`);
    svg.append(s("text", { class: "rule-name", x: 0, y: height }, words.join(", ")));
    const targets = [];
    rows.forEach((row, index) => {
      const y = top + index * step + 31;
      const label = s("text", { class: "name", x: 0, y: y - 13 }, clip(row.label, width - 8));
      svg.append(label, s("line", { x1: px(Math.min(...row.values)), x2: px(Math.max(...row.values)), y1: y, y2: y, stroke: colour(row.mark),
        "stroke-width": 2, opacity: 0.35 }));
      for (const value of row.values) {
        svg.append(s("circle", { cx: px(value), cy: y, r: 5, fill: colour(row.mark), opacity: 0.6 }));
      }
      svg.append(s("line", { x1: px(row.mean), x2: px(row.mean), y1: y - 8, y2: y + 8, stroke: "var(--ink)", "stroke-width": 2.5 }));
      targets.push({ box: [0, y - step / 2, width, y + step / 2], at: [px(row.mean), y - 8], title: row.label, rows: [
        { label: "mean", value: yText(row.mean, 2) },
        ...row.seeds.map((seed, i) => ({ label: `seed ${seed}`, value: yText(row.values[i], 2) }))] });
    });
    return listen(svg, targets, { leak });
  }

  // Cells from pale to full. `beside`: a number for each row, as a bar at the right.
  function heat(width, { rows, columns, value, text, said, rowName, columnName, range, beside, beyond, leak }) {
    const labelWidth = Math.min(width * 0.42, 18 + 6.8 * Math.max(rowName.length, ...rows.map((row) => row.length)));
    const barWidth = beside ? Math.min(120, width * 0.2) : 0;
    const room = width - labelWidth - barWidth - (beside ? 12 : 0) - (beyond > 90 && width < 640 ? 56 : 0);
    const w = Math.min(room / columns.length, beyond || 64);
    const h0 = Math.max(9, Math.min(28, 900 / rows.length));
    // Names of columns that are wider than a column lean over.
    const wordy = Math.max(...columns.map((name) => name.length));
    const lean = wordy > 3 && 6.8 * wordy + 4 > w && w >= 12;
    const top = lean ? 34 + 4.7 * Math.min(wordy, 18) : 38;
    const height = top + rows.length * h0 + 30;
    const svg = canvas(width, height, `${columnName} by ${rowName || "line"}`);
    const everyRow = Math.ceil(13 / h0);
    const everyColumn = lean ? 1 : Math.ceil((7.5 * wordy + 4) / w);
    svg.append(s("text", { x: 0, y: top - 10 }, rowName), s("text", { x: lean ? 0 : labelWidth, y: 12 }, columnName));
    columns.forEach((name, c) => {
      if (c % everyColumn) return;
      const [x, y] = [labelWidth + (c + 0.5) * w, top - 8];
      svg.append(s("text", lean ? { x, y, transform: `rotate(-40 ${x} ${y})` } : { x, y, "text-anchor": "middle" }, clip(name, 18 * 6.6)));
    });
    const values = rows.flatMap((_, r) => columns.map((_, c) => value(r, c))).filter((v) => v !== null);
    const [least, most] = range || (values.length ? [Math.min(...values), Math.max(...values)] : [0, 1]);
    const targets = [];
    // All cells have their number or none has, and a small one rather than none.
    const longest = Math.max(0, ...rows.flatMap((_, r) => columns.map((_, c) => (value(r, c) === null ? 0 : text(value(r, c)).length))));
    const size = [12, 10.5, 9].find((points) => h0 >= 16 && w >= 0.6 * points * longest + 3);
    const longestBar = beside ? Math.max(...beside) : 0;
    rows.forEach((name, r) => {
      const y = top + r * h0;
      if (r % everyRow === 0) svg.append(s("text", { class: rowName === "" ? "name" : "", x: 0, y: y + h0 / 2 + 4 }, clip(name, labelWidth - 6)));
      columns.forEach((_, c) => {
        const v = value(r, c);
        const gap = w > 8 && h0 > 8 ? 1 : 0;
        const box = [labelWidth + c * w + gap, y + gap, labelWidth + (c + 1) * w - gap, y + h0 - gap];
        const share = v === null ? 0 : Math.max(0, Math.min(1, (v - least) / (most - least || 1)));
        const place = { x: box[0], y: box[1], width: box[2] - box[0], height: box[3] - box[1], rx: gap ? 2 : 0 };
        svg.append(s("rect", { class: "empty", ...place }));
        const opacity = v === null || (v === 0 && least === 0) ? 0 : 0.06 + 0.94 * share;
        if (opacity) svg.append(s("rect", { class: "cell", ...place, "fill-opacity": opacity.toFixed(3) }));
        if (size && v !== null) {
          const cell = s("text", { class: `in-cell ${opacity > 0.83 ? "dark" : opacity > 0.63 ? "middle" : "light"}`, x: (box[0] + box[2]) / 2, y: y + h0 / 2 + 4, "text-anchor": "middle" }, text(v));
          cell.style.fontSize = `${size}px`;
          svg.append(cell);
        }
        targets.push({ box, at: [(box[0] + box[2]) / 2, box[1]], outline: true, ...said(r, c) });
      });
      if (beside) {
        const x = labelWidth + columns.length * w + 12;
        svg.append(s("rect", { x, y: y + h0 * 0.22, width: Math.max(1, (beside[r] / longestBar) * (barWidth - 44)), height: h0 * 0.56, rx: 2,
          fill: "var(--soft)", opacity: 0.5 }));
        if (r % everyRow === 0) {
          svg.append(s("text", { x: x + (beside[r] / longestBar) * (barWidth - 44) + 6, y: y + h0 / 2 + 4 }, number(beside[r])));
        }
      }
    });
    if (beside) svg.append(s("text", { x: labelWidth + columns.length * w + 12, y: top - 8 }, "examples"));
    if (leak) svg.append(s("text", { class: "watermark", x: labelWidth + (columns.length * w) / 2, y: top + (rows.length * h0) / 2 + 14,
      "text-anchor": "middle" }, "leak"));
    colours(svg, labelWidth, height - 8, least, most, text);
    return listen(svg, targets, { leak, columns: columns.length });
  }

  // What the colours of a heat-map mean: from its lowest to its highest value.
  function colours(svg, x, y, least, most, text) {
    if (!text(most) || least === most) return;
    const name = text(least);
    const start = x + 7 * name.length + 6;
    for (let i = 0; i < 10; i++) {
      svg.append(s("rect", { class: "empty", x: start + 9 * i, y: y - 9, width: 9, height: 10 }),
        s("rect", { class: "cell", x: start + 9 * i, y: y - 9, width: 9, height: 10, "fill-opacity": (0.06 + (0.94 * i) / 9).toFixed(3) }));
    }
    svg.append(s("text", { x, y }, name), s("text", { x: start + 96, y }, text(most)));
  }

  // Bars made of phases; a row may have several bars (down, up).
  function bars(width, { rows, phases, unit, show, leak }) {
    const [thick, top] = [15, 4];
    const side = Math.max(0, ...rows.flatMap((row) => row.bars.map((bar) => bar.name.length))) * 7 + 8;
    const heights = rows.map((row) => 22 + row.bars.length * (thick + 4) + 10);
    const height = top + heights.reduce((a, b) => a + b, 0) + 34;
    const svg = canvas(width, height, `${unit} by phase`);
    const total = (bar) => bar.parts.reduce((sum, part) => sum + part, 0);
    const most = Math.max(...rows.flatMap((row) => row.bars.map(total)));
    const px = scale(0, most, side, width - 16);
    const bottom = height - 30;
    for (const v of ticks(0, most, Math.min(8, width / 90))) {
      svg.append(s("line", { class: "grid", x1: px(v), x2: px(v), y1: top, y2: bottom }),
        s("text", { x: px(v), y: bottom + 18, "text-anchor": "middle" }, number(v)));
    }
    if (leak) svg.append(s("text", { class: "watermark", x: width / 2, y: height / 2, "text-anchor": "middle" }, "leak"));
    const targets = [];
    let y = top;
    rows.forEach((row, index) => {
      svg.append(s("text", { class: "name", x: 0, y: y + 15 }, clip(row.label, width - 8)));
      row.bars.forEach((bar, b) => {
        const yb = y + 22 + b * (thick + 4);
        if (bar.name) svg.append(s("text", { x: 0, y: yb + 11 }, bar.name));
        let x = side;
        bar.parts.forEach((part, p) => {
          const next = x + px(part) - px(0);
          if (part) svg.append(s("rect", { x, y: yb, width: Math.max(0.5, next - x), height: thick, fill: `var(--${phases[p].tone})` }));
          x = next;
        });
        targets.push({ box: [0, yb - 2, width, yb + thick + 2], at: [(side + x) / 2, yb], title: `${row.label}${bar.name ? `, ${bar.name}` : ""}`,
          rows: [...phases.flatMap((phase, p) => bar.parts[p] ? [{ tone: phase.tone, label: phase.label, value: show(bar.parts[p]) }] : []),
            { label: "together", value: show(total(bar)) }] });
      });
      y += heights[index];
    });
    return listen(svg, targets, { leak, legend: phases });
  }

  // Before and after, class by class: a hollow dot, a line, a full dot.
  function change(width, { names, before, after, leak }) {
    const height = 250;
    const svg = canvas(width, height, "accuracy of refined clients before and after refinement, by class");
    const [left, right, top, bottom] = [52, width - 8, 12, height - 42];
    const py = scale(0, 1, bottom, top);
    for (const v of [0, 0.25, 0.5, 0.75, 1]) {
      svg.append(s("line", { class: "grid", x1: left, x2: right, y1: py(v), y2: py(v) }),
        s("text", { x: left - 8, y: py(v) + 4, "text-anchor": "end" }, percent(v, 0)));
    }
    svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "class"));
    if (leak) svg.append(s("text", { class: "watermark", x: (left + right) / 2, y: (top + bottom) / 2 + 14, "text-anchor": "middle" }, "leak"));
    const step = (right - left) / names.length;
    const every = Math.ceil(26 / step);
    const letters = Math.max(3, Math.floor((every * step) / 6.6));
    const targets = [];
    names.forEach((name, c) => {
      const x = left + (c + 0.5) * step;
      if (c % every === 0) svg.append(s("text", { x, y: bottom + 18, "text-anchor": "middle" }, clip(name, letters * 6.6)));
      if (before[c] === null || after[c] === null) return;
      const tone = after[c] >= before[c] ? "var(--c0)" : "var(--c1)";
      svg.append(s("line", { x1: x, x2: x, y1: py(before[c]), y2: py(after[c]), stroke: tone, "stroke-width": 3, opacity: 0.45 }),
        s("circle", { cx: x, cy: py(before[c]), r: 5, fill: "var(--paper)", stroke: tone, "stroke-width": 2 }),
        s("circle", { cx: x, cy: py(after[c]), r: 5.5, fill: tone }));
      targets.push({ box: [x, top, x, bottom], at: [x, py(Math.max(before[c], after[c])) - 6], guide: false, title: `class ${name}`, rows: [
        { label: "before refinement", value: percent(before[c]) }, { label: "after", value: percent(after[c]) }] });
    });
    return listen(svg, targets, { leak });
  }

  // -- tables that sort -----------------------------------------------------------------------------------------------------
  function sorting(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, index) => head.querySelector("button").addEventListener("click", () => {
      const numbers = head.classList.contains("number");
      // Numbers from the largest, words from the first letter; what has no value stays at the end.
      const way = head.getAttribute("aria-sort") === (numbers ? "descending" : "ascending") ? (numbers ? 1 : -1) : numbers ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      const value = (row) => row.cells[index].dataset.value;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [u, v] = [value(a), value(b)];
        if (u === "" || v === "") return (u === "") - (v === "");
        return way * (numbers ? u - v : u.localeCompare(v));
      });
      table.tBodies[0].append(...rows);
    }));
  }

  // -- light and dark -------------------------------------------------------------------------------------------------------
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => (button.textContent = dark() ? "Light" : "Dark");
  try {
    if (localStorage.getItem("fnrfl-theme")) root.dataset.theme = localStorage.getItem("fnrfl-theme");
  } catch { /* a browser may forbid it for files */ }
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("fnrfl-theme", root.dataset.theme);
    } catch { /* then it holds for this page only */ }
    name();
  });
  system.addEventListener("change", name);
  name();

  // -- parts that fold: on a narrow screen all but the results are folded at first, and a link opens the part it leads to ---
  const folds = [...document.querySelectorAll("details.fold")];
  if (matchMedia("(max-width: 720px)").matches) folds.forEach((fold) => (fold.open = "first" in fold.dataset));
  function unfold(address) {
    const fold = address.length > 1 ? document.querySelector(`section[id="${CSS.escape(address.slice(1))}"] > details.fold`) : null;
    if (fold) fold.open = true;
  }
  document.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", () => unfold(link.hash)));
  addEventListener("hashchange", () => unfold(location.hash));
  unfold(location.hash);
  addEventListener("beforeprint", () => folds.forEach((fold) => (fold.open = true)));

  return { data, h, s, colour, swatch, block, percent, number, shares, ticks, whole, scale, listen, keep, canvas, clip, lines, dots, forest, heat, skew, bars, change, sorting };
})();
