"use strict";
(() => {
  const { data, h, swatch, block, percent, number, shares, keep, lines, dots, forest, heat, skew, bars, change, sorting } = drawing;

  // -- what is on the page ------------------------------------------------------------------------------------------------
  const METRICS = data.metrics;
  const LEADING = METRICS[0].name;
  const about = (key) => METRICS.find((metric) => metric.name === key);
  const isShare = (key) => about(key).share;

  data.forests.forEach((one, f) => keep(document.querySelector(`[data-forest="${f}"]`), (width) => forest(width, { ...one, metric: METRICS[0] })));

  data.grids.forEach((grid, g) => keep(document.querySelector(`[data-grid="${g}"]`), (width) => {
    const show = isShare(LEADING) ? (v) => (100 * v).toFixed(1) : number;
    return heat(width, { rows: grid.rows, columns: grid.columns, rowName: "", columnName: "", beyond: 200, value: (r, c) => grid.values[r][c], text: show,
      said: (r, c) => ({ title: `${grid.rows[r]}, ${grid.columns[c]}`, rows: [{ label: LEADING, value: grid.values[r][c] === null ? "none" : show(grid.values[r][c]) }] }) });
  }));
  document.querySelectorAll("[data-skew]").forEach((place) => place.replaceChildren(skew(data.splits[place.dataset.skew])));

  // The curves of all panels are of one metric, chosen by one row of buttons.
  let metric = LEADING;
  const curves = [];
  function choose(key) {
    metric = key;
    document.getElementById("said").textContent = `${key}: ${about(key).help}.`;
    for (const button of document.getElementById("choices").children) button.setAttribute("aria-pressed", String(button.textContent === key));
    curves.forEach((paint) => paint());
  }
  document.getElementById("choices").replaceChildren(...METRICS
    .filter(({ name }) => data.panels.some((panel) => panel.groups.some((group) => group.curves[name])))
    .map(({ name }) => {
      const button = h("button", { type: "button" }, name);
      button.addEventListener("click", () => choose(name));
      return button;
    }));
  choose(LEADING);

  data.panels.forEach((panel, p) => {
    const hidden = new Set();
    const paints = [];
    const place = (name) => document.querySelector(`[data-chart="${name}"][data-panel="${p}"]`);
    const visible = () => panel.groups.filter((_, i) => !hidden.has(i));
    const leak = panel.leaks.length > 0;
    const curve = (group, key, at) => ({ label: group.label, mark: group.mark, points: group.curves[key].mean.map((y, i) => ({
      x: at(group, i), round: group.rounds[i], y, low: group.curves[key].low[i], high: group.curves[key].high[i] })) });

    const references = (key) => panel.references.flatMap((one) => (one[key] === undefined ? [] : [{ name: one.name, value: one[key] }]));
    const classRange = shares(panel.groups.flatMap((group) => group.classes).filter((v) => v !== null), panel.least.classes, 0);

    function legend(target) {
      const buttons = panel.groups.map((group, i) => {
        const button = h("button", { type: "button", "aria-pressed": "true", title: "show or hide" }, swatch(group.mark), h("span", {}, group.label),
          leak ? h("span", { class: "tag leak" }, "leak") : null);
        button.addEventListener("click", () => {
          if (!hidden.delete(i)) hidden.add(i);
          paints.forEach((paint) => paint());
        });
        paints.push(() => button.setAttribute("aria-pressed", String(!hidden.has(i))));
        return button;
      });
      target.replaceChildren(...buttons);
    }
    document.querySelectorAll(`[data-legend="${p}"]`).forEach(legend);

    const how = (key) => ({ yName: key, y: isShare(key) ? percent : number, bounded: isShare(key), least: isShare(key) ? panel.least.shares : 0,
      references: references(key) });

    curves.push(keep(place("rounds"), (width) => lines(width, { series: visible().filter((group) => group.curves[metric]).map((group) => curve(group, metric, (g, i) => g.rounds[i])),
        xName: "round", x: String, shared: true, leak, ...how(metric) })));
    paints.push(curves.at(-1));
    for (const [name, key, xName] of [["mib", "mib", "MiB sent, both directions"], ["seconds", "seconds", "seconds of training"]]) {
      paints.push(keep(place(name), (width) => lines(width, { series: visible().filter((group) => group.curves[LEADING]).map((group) =>
        curve(group, LEADING, (g, i) => g[key][i])), xName, x: number, shared: false, leak, ...how(LEADING), references: [] })));
    }
    const scored = panel.groups.filter((group) => group.final.length);
    if (scored.length) keep(place("seeds"), (width) => dots(width, { leak, ...how(LEADING), rows: scored.map((group) => ({ label: group.label, mark: group.mark,
      values: group.final, seeds: group.seeds, mean: group.final.reduce((a, b) => a + b, 0) / group.final.length })) }));
    keep(place("classes"), (width) => heat(width, { rows: panel.groups.map((group) => group.label), columns: panel.classes, rowName: "", columnName: "class",
      leak, range: classRange, value: (r, c) => panel.groups[r].classes[c], text: (v) => (100 * v).toFixed(0), beyond: 90,
      said: (r, c) => ({ title: panel.groups[r].label, rows: [{ label: `class ${panel.classes[c]}`, value: percent(panel.groups[r].classes[c]) }] }) }));
    const confused = panel.groups.filter((group) => group.confusion);
    if (confused.length) {
      const chooser = document.getElementById(`confusion-${p}`);
      confused.forEach((group, i) => chooser.append(h("option", { value: i }, group.label)));
      const counts = () => confused[chooser.value].confusion;
      const share = (r, c) => { const all = counts()[r].reduce((a, b) => a + b, 0); return all ? counts()[r][c] / all : null; };
      chooser.addEventListener("change", keep(place("confusion"), (width) => heat(width, { rows: panel.classes, columns: panel.classes, rowName: "true class",
        columnName: "answer", leak, range: [0, 1], value: share, text: (v) => (100 * v).toFixed(0),
        said: (r, c) => ({ title: `class ${panel.classes[r]}, answer ${panel.classes[c]}`, rows: [{ label: "examples", value: String(counts()[r][c]) },
          { label: "of this class", value: percent(share(r, c)) }] }) })));
    }
    for (const [name, unit, show] of [["bytes", "MiB", (v) => `${number(v)} MiB`], ["time", "seconds", (v) => `${number(v)} s`]]) {
      const phases = panel.phases[name];
      keep(place(name), (width) => bars(width, { phases, unit, show, leak, rows: panel.groups.map((group) => ({ label: group.label, bars: group[name] })) }));
      document.querySelector(`[data-phases="${name}-${p}"]`).replaceChildren(...phases.map((phase) => h("span", {}, block(phase.tone), phase.label)));
    }
  });
  document.querySelectorAll("table:not(.still):not(#learned-clients)").forEach(sorting);

  // -- inside one run -----------------------------------------------------------------------------------------------------
  const picker = document.getElementById("inside-picker");
  const slider = document.getElementById("inside-round");
  const part = (name) => document.querySelector(`[data-inside="${name}"]`);
  const plot = (name) => document.querySelector(`[data-inside-plot="${name}"]`);
  const run = () => data.inside[picker.value];
  const split = () => data.splits[run().split];
  const clientNames = () => run().clients.map((client) => client.name);
  const classNames = () => data.panels[run().panel].classes;
  const leak = () => run().leaks.length > 0;
  data.inside.forEach((one, i) => picker.append(h("option", { value: i }, `${one.label}, seed ${one.seed}${one.leaks.length ? " (leak)" : ""}`)));
  picker.value = data.first;
  const paints = [
    keep(plot("split"), (width) => {
      const [counts, { clients }] = [split(), run()];
      return heat(width, { rows: clientNames(), columns: classNames(), rowName: "", columnName: "class", range: [0, Math.max(...counts.flat())], leak: leak(),
        value: (r, c) => counts[r][c], text: String, beside: clients.map((client) => client.examples),
        said: (r, c) => ({ title: `${clients[r].name}, class ${classNames()[c]}`, rows: [{ label: "examples", value: String(counts[r][c]) },
          { label: "of all that it holds", value: percent(counts[r][c] / clients[r].examples) }] }) });
    }),
    keep(plot("refined"), (width) => {
      const { refined } = run();
      if (!refined) return "";
      const words = ["not active in this round", "active", "refined"];
      return heat(width, { rows: clientNames(), columns: refined.rounds.map(String), rowName: "", columnName: "round", range: [0, 2], leak: leak(),
        value: (r, c) => [null, 0.3, 2][refined.grid[r][c]], text: () => "",
        said: (r, c) => ({ title: `${clientNames()[r]}, round ${refined.rounds[c]}`, rows: [{ label: words[refined.grid[r][c]], value: "" },
          ...(refined.ranking[r][c] === null ? [] : [{ label: "ranking accuracy", value: percent(refined.ranking[r][c]) }])] }) });
    }),
    keep(plot("change"), (width) => (run().change ? change(width, { names: classNames(), leak: leak(), ...run().change }) : "")),
    keep(plot("norms"), (width) => {
      const { norms } = run();
      if (!norms) return "";
      const here = norms.values[slider.value];
      document.getElementById("inside-round-name").textContent = `round ${norms.rounds[slider.value]}`;
      return heat(width, { rows: norms.cohorts[slider.value], columns: classNames(), rowName: "", columnName: "class",
        range: norms.range, leak: leak(), value: (r, c) => here[r][c], text: (v) => v.toFixed(v < 10 ? 1 : 0),
        said: (r, c) => ({ title: `${norms.cohorts[slider.value][r]}, class ${classNames()[c]}`, rows: [
          { label: `mean feature norm, round ${norms.rounds[slider.value]}`, value: number(here[r][c]) }] }) });
    }),
    keep(plot("gap"), (width) => {
      const { gap } = run();
      return gap ? lines(width, { series: gap.map((one, mark) => ({ ...one, mark })), xName: "round", yName: "feature norm", x: String, y: number,
        shared: true, leak: leak() }) : "";
    }),
  ];
  const learned = document.getElementById("learned-clients");
  const KNOWN = [["client", "client", String], ["examples", "examples", number], ["active", "rounds active", String], ["ranking", "ranking accuracy", percent],
    ["norm", "mean class norm", number], ["norm_low", "lowest", number], ["norm_high", "highest", number], ["refined", "times refined", String]];
  function inside() {
    const { refined, change: changed, norms, gap, clients, all } = run();
    const few = document.getElementById("inside-few");
    few.hidden = clients.length === all;
    few.textContent = `The first ${clients.length} of ${number(all)} clients.`;
    for (const [name, there] of Object.entries({ refined, change: changed, norms, gap })) part(name).hidden = !there;
    part("bare").hidden = Boolean(refined || norms);
    if (norms) slider.max = norms.rounds.length - 1;
    if (norms) slider.value = slider.max;
    paints.forEach((paint) => paint());
    const known = KNOWN.filter(([key]) => clients.some((client) => client[key] !== null));
    learned.tHead.rows[0].replaceChildren(...known.map(([, name]) => h("th", { scope: "col", class: "number" }, h("button", { type: "button" }, name))));
    learned.tBodies[0].replaceChildren(...clients.map((client) => h("tr", {}, ...known.map(([key, name, text], i) =>
      h("td", { class: i ? "number" : "number head", "data-label": name, "data-value": client[key] === null ? "" : client[key] },
        client[key] === null ? "" : i ? text(client[key]) : h("span", {}, client.name))))));
    if (leak()) learned.dataset.leak = "leak";
    else delete learned.dataset.leak;
    sorting(learned);
    document.getElementById("learned-of").textContent = picker.selectedOptions[0].textContent;
  }
  picker.addEventListener("change", inside);
  slider.addEventListener("input", () => paints[3]());
  inside();
})();
