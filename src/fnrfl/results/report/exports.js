"use strict";
// Tables as CSV and LaTeX and figures as SVG, made in the browser from what the page shows; nothing is sent or fetched.
const exporting = (() => {
  const { h, s } = drawing;
  const root = document.documentElement;

  function save(name, text, type) {
    const address = URL.createObjectURL(new Blob([text], { type }));
    const link = h("a", { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }
  const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "figure";
  const met = {};
  // The second table or figure of a name has -2 in its file's name.
  function unique(name) {
    met[name] = (met[name] || 0) + 1;
    return met[name] === 1 ? name : `${name}-${met[name]}`;
  }
  const toolbar = (...buttons) => h("div", { class: "exports" }, ...buttons.map(([text, title, work]) => {
    const button = h("button", { type: "button", title }, text);
    button.addEventListener("click", work);
    return button;
  }));

  // -- tables -----------------------------------------------------------------------------------------------------------
  // A cell is its text, what stands smaller beside or below it, and whether it has a leak.
  function cell(td) {
    const own = td.cloneNode(true);
    const beside = [...own.querySelectorAll(".spread:not(sup):not(.below)")].map((one) => one.textContent.trim()).join(" ");
    const below = [...own.querySelectorAll(".below")].map((one) => one.textContent.trim()).join(" ");
    const leak = own.querySelector(".tag.leak") !== null;
    own.querySelectorAll(".spread, .tag, sup, svg").forEach((one) => one.remove());
    return { text: own.textContent.trim().replace(/\s+/g, " "), beside, below, leak, ends: td.dataset.ends ? td.dataset.ends.split("|") : null };
  }
  function read(table) {
    const heads = [...table.tHead.rows[0].cells];
    return {
      name: table.dataset.table,
      columns: heads.map((head) => ({ name: head.textContent.trim(), number: head.classList.contains("number") })),
      rows: [...table.tBodies[0].rows].map((row) => [...row.cells].map(cell)),
      leak: Boolean(table.dataset.leak) || table.querySelector("tbody .tag.leak") !== null,
      everywhere: Boolean(table.dataset.leak),
    };
  }
  const plain = (text) => text.replace(/\u2212/g, "-");
  const isNumber = (text) => /^[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?$/i.test(plain(text));
  // A number is written so that a program reads it; of a text that a spreadsheet would run, it sees an apostrophe first.
  function csvCell(text, number) {
    if (number && isNumber(text)) return plain(text).replace(/,/g, "").replace(/^\+/, "");
    const safe = /^\s*[=+\-@\uff1d\uff0b\uff0d\uff20]/.test(text) || /^[\t\r\n]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
  }
  function csv(table) {
    const { columns, rows, everywhere } = read(table);
    const parts = columns.flatMap(({ name, number }, c) => {
      const cells = rows.map((row) => row[c] || { text: "", beside: "", below: "", leak: false });
      const found = cells.some(({ ends }) => ends)
        ? [0, 1].map((end) => [`${name}, ${["low", "high"][end]}`, true, cells.map(({ ends }) => (ends ? ends[end] : ""))])
        : [[name, number, cells.map(({ text }) => text)]];
      // Beside a number stand its standard deviation, a remark such as (seeds 0, 2 of 3), or both.
      const besides = cells.map(({ beside }) => beside.match(/^(?:\u00b1\s*(\S+)\s*)?([^]*)$/));
      for (const [place, what] of [[1, "standard deviation"], [2, "more"]]) {
        if (besides.some((parts) => parts[place])) found.push([`${name}, ${what}`, place === 1, besides.map((parts) => parts[place] || "")]);
      }
      if (cells.some(({ below }) => below)) found.push([`${name}, more`, false, cells.map(({ below }) => below)]);
      if (cells.some(({ leak }) => leak)) found.push([c ? `${name}, leak` : "leak", false, cells.map(({ leak }) => (leak ? "leak" : ""))]);
      return found;
    });
    if (everywhere) parts.push(["leak", false, rows.map(() => "leak")]);
    const lines = [parts.map(([name]) => csvCell(name, false)), ...rows.map((_, r) => parts.map(([, number, cells]) => csvCell(cells[r], number)))];
    return `\ufeff${lines.map((line) => line.join(",")).join("\r\n")}\r\n`;
  }
  const TEX = { "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", $: "\\$", "&": "\\&", "#": "\\#", "%": "\\%", _: "\\_", "^": "\\textasciicircum{}",
    "~": "\\textasciitilde{}", "<": "$<$", ">": "$>$", "|": "$|$", "\u2212": "$-$", "\u00b1": "$\\pm$", "\u00a0": "~" };
  const tex = (text) => text.replace(/[\u0000-\u001f]+/g, " ").replace(/[\\{}$&#%_^~<>|\u2212\u00b1\u00a0]/g, (letter) => TEX[letter]);
  function latex(table) {
    const { name, columns, rows, leak, everywhere } = read(table);
    const mark = "\\textsuperscript{leak}";
    const line = (cells) => `${cells.join(" & ")} \\\\`;
    return [
      `% ${document.title.replace(/\s+/g, " ")}: ${name}. It needs \\usepackage{booktabs}, and a compiler that reads UTF-8.`,
      ...(leak ? ["% leak: rows with this mark saw what an honest run does not see; leave the mark in."] : []),
      `\\begin{tabular}{${columns.map(({ number }) => (number ? "r" : "l")).join("")}}`,
      "\\toprule", line(columns.map((column) => tex(column.name))), "\\midrule",
      ...rows.map((row) => line(row.map((one, c) =>
        `${tex(one.text)}${one.beside ? ` ${tex(/^[\u00b1(]/.test(one.beside) ? one.beside : `(${one.beside})`)}` : ""}${one.leak || (everywhere && c === 0) ? mark : ""}`))),
      "\\bottomrule", "\\end{tabular}", ""].join("\n");
  }

  // -- figures ----------------------------------------------------------------------------------------------------------
  const LOOKS = { fill: "rgb(0, 0, 0)", "fill-opacity": "1", stroke: "none", "stroke-width": "1px", "stroke-dasharray": "none", "stroke-linecap": "butt",
    "stroke-linejoin": "miter", opacity: "1", "paint-order": "normal", "font-size": "", "font-weight": "400" };
  // Every element's looks, as the style sheet of the page has them in light colours, become attributes of the copy.
  function dressed(element) {
    const copy = element.cloneNode(false);
    for (const name of ["class", "style", "tabindex"]) copy.removeAttribute(name);
    const looks = getComputedStyle(element);
    const text = element.tagName === "text" || element.tagName === "tspan";
    for (const [name, usual] of Object.entries(LOOKS)) {
      if (name.startsWith("font") && !text) continue;
      const value = looks.getPropertyValue(name);
      if (value && value !== usual) copy.setAttribute(name, value);
    }
    for (const child of element.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) copy.append(child.textContent);
      else if (!child.hasAttribute("pointer-events")) copy.append(dressed(child));
    }
    return copy;
  }
  function wrapped(text, room) {
    const lines = [""];
    for (const word of text.trim().split(/\s+/)) {
      if (lines.at(-1) && lines.at(-1).length + word.length + 1 > room) lines.push("");
      lines.push(`${lines.pop()} ${word}`.trim());
    }
    return lines;
  }
  function svg(drawn, said) {
    const theme = root.dataset.theme;
    root.dataset.theme = "light";
    const [width, height] = [drawn.viewBox.baseVal.width, drawn.viewBox.baseVal.height];
    const colours = getComputedStyle(root);
    const resolved = (name) => {
      const probe = h("span");
      probe.style.color = `var(--${name})`;
      document.body.append(probe);
      const found = getComputedStyle(probe).color;
      probe.remove();
      return found;
    };
    const [ink, alarm] = [resolved("ink"), resolved("alarm")];
    const head = [];
    let y = 6;
    for (const line of wrapped(said, Math.floor(width / 6.4))) head.push(s("text", { x: 0, y: (y += 17), "font-size": 12.5, fill: ink }, line));
    if (drawn.leak) head.push(s("text", { x: 0, y: (y += 18), "font-size": 13, "font-weight": 700, fill: alarm }, "leak: not what an honest run would reach"));
    let x = 0;
    if (drawn.legend.length) y += 20;
    for (const { label, mark, tone } of drawn.legend) {
      const wide = 40 + 7 * label.length;
      if (x && x + wide > width) [x, y] = [0, y + 18];
      const dash = mark === undefined ? "none" : drawing.data.dashes[mark % drawing.data.dashes.length];
      head.push(s("line", { x1: x, x2: x + 24, y1: y - 4, y2: y - 4, stroke: resolved(tone || `c${mark % 8}`), "stroke-width": tone ? 10 : 2.25, "stroke-dasharray": dash }),
        s("text", { x: x + 30, y, "font-size": 12, fill: ink }, label));
      x += wide;
    }
    y += 14;
    const copy = dressed(drawn);
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    const whole = s("svg", { viewBox: `-12 0 ${width + 24} ${height + y + 12}`, width: width + 24, height: height + y + 12, "font-family": "Helvetica, Arial, sans-serif" },
      s("title", {}, said.trim()), s("rect", { x: -12, y: 0, width: width + 24, height: height + y + 12, fill: "rgb(255, 255, 255)" }),
      ...head, s("g", { transform: `translate(0 ${y})` }, ...copy.childNodes));
    return new XMLSerializer().serializeToString(whole);
  }

  // -- a line of buttons below each -------------------------------------------------------------------------------------
  for (const table of document.querySelectorAll("table[data-table]")) {
    const name = unique(table.dataset.table);
    const file = (suffix) => `${name}${read(table).leak ? "-leak" : ""}.${suffix}`;
    (table.closest(".scroll") || table).after(toolbar(
      ["CSV", "save this table for a spreadsheet", () => save(file("csv"), csv(table), "text/csv")],
      ["LaTeX", "save this table for a paper", () => save(file("tex"), latex(table), "application/x-tex")]));
  }
  for (const place of document.querySelectorAll(".plot")) {
    function caption() {
      const figure = place.closest("figure");  // curves have one caption together
      const said = (figure.querySelector("figcaption") || document.getElementById("said")).cloneNode(true);
      if (figure.querySelector("h3")) said.prepend(`${figure.querySelector("h3").textContent}: `);
      said.querySelectorAll(".tag").forEach((tag) => tag.remove());
      return said.textContent.replace(/\s+/g, " ").replace(/ ([:.,])/g, "$1");
    }
    const name = unique(slug(place.dataset.chart || place.dataset.insidePlot || Object.keys(place.dataset)[0] || "figure"));
    place.after(toolbar(["SVG", "save this figure, in light colours", () => {
      const drawn = place.querySelector("svg");
      if (drawn) save(`${name}${drawn.leak ? "-leak" : ""}.svg`, svg(drawn, caption()), "image/svg+xml");
    }]));
  }
  return { csv, latex, svg };
})();
