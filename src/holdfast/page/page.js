"use strict";
// Draws the page from the JSON in it. Texts may come from strangers: they only ever become text nodes or texts on canvas.
(() => {
  performance.mark("holdfast-begun");
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const page = document.getElementById("page");
  const storeKey = "holdfast:" + location.pathname;
  const kept = recall();
  const view = new View(kept.view || {}, (changes) => remember({view: changes}));
  const FIRST_ROWS = 50, COLOURS = 8;

  // ---- small helpers

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined).map((child) =>
      child instanceof Node ? child : String(child)));
    return node;
  }

  function count(number_, noun) { return `${number(number_)} ${noun}${number_ === 1 ? "" : "s"}`; }

  function section(title, ...children) {
    const made = make("section", {"aria-label": title}, make("h2", {}, title), ...children);
    page.append(made);
    return made;
  }

  // ---- what a reload must not lose

  function recall() {
    try { return JSON.parse(sessionStorage.getItem(storeKey)) || {}; } catch { return {}; }
  }

  function remember(changes) {
    Object.assign(kept, changes);
    try { sessionStorage.setItem(storeKey, JSON.stringify(kept)); } catch { /* a browser that keeps nothing */ }
  }

  // ---- head

  function head() {
    const state = facts.state;
    page.append(make("header", {},
      make("h1", {}, facts.title, state ? make("span", {class: "badge " + state.word}, state.word) : null),
      make("div", {class: "soft path"}, facts.uri),
      state && state.text ? make("div", {class: "soft"}, state.text) : null));
  }

  function cards(list, more) {
    const box = make("dl", {class: "cards"});
    for (const [label, value, small, tone] of list) {
      if (value === "" || value === null) continue;
      box.append(make("div", {class: "card" + (tone ? " " + tone : "")}, make("dt", {}, label), make("dd", {}, value, small ? make("small", {}, small) : null)));
    }
    const line = make("p", {class: "soft more-facts"}, more.filter(Boolean).join(" \u00b7 "));
    page.append(make("div", {class: "summary"}, box, line));
  }

  function warnings() {
    if (!facts.warnings.length) return;
    const shown = facts.warnings.slice(0, 20).map((text) => make("li", {}, text));
    if (facts.warnings.length > 20) shown.push(make("li", {}, `and ${facts.warnings.length - 20} more`));
    page.append(make("ul", {class: "warnings", "aria-label": "Warnings"}, ...shown));
  }

  // ---- what stands beside the pointer

  const tipBox = make("div", {class: "tip", role: "presentation"});
  tipBox.hidden = true;

  function tip(chart, mark, x, clientX, clientY) {
    tipBox.hidden = !chart;
    if (!chart) return;
    const clock = chart.spec.clock, lines = (chart.drawn || []).filter((one) => one.xs.length);
    const rows = lines.map((one) => {
      const place = nearest(one.xs, x), raw = one.raw[place];
      const text = chart.valueText(raw) + (one.ys !== one.raw ? ` (smoothed ${chart.valueText(one.ys[place])})` : "");
      const swatch = lines.length > 1 ? make("i", {class: "swatch"}) : null;
      if (swatch) swatch.style.background = `var(--${one.colour})`;
      return [swatch, lines.length > 1 ? one.name : "value", text, one.steps[place]];
    }).slice(0, 16);
    const step = mark ? mark.step : lines.length ? lines[0].steps[nearest(lines[0].xs, x)] : x;
    const seconds = clock ? clockAt(clock, step, 1) : null;
    const list = make("dl", {}, ...[["", "step", number(step)], ...rows].flatMap(([swatch, name, text]) => [make("dt", {}, swatch || null, name), make("dd", {}, text)]));
    if (seconds !== null && facts.began) list.append(make("dt", {}, "time"), make("dd", {}, `${moment(facts.began + seconds)} UTC, ${span(seconds)} in`));
    if (mark) {
      const row = mark.row;
      list.append(...[["checkpoint", row.name], ["state", stateOf(row)], ["size", bytes(row.size_bytes)], ["saved", moment(row.created)], ["why", row.why]]
        .filter(([, text]) => text).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
      list.append(make("dt", {}), make("dd", {class: "soft"}, "click for more"));
    }
    tipBox.replaceChildren(list);
    const place = tipBox.getBoundingClientRect();
    const left = clientX + 16 + place.width < innerWidth ? clientX + 16 : Math.max(4, clientX - 16 - place.width);
    tipBox.style.left = left + scrollX + "px";
    tipBox.style.top = Math.max(4, Math.min(clientY + 16, innerHeight - place.height - 4)) + scrollY + "px";
  }

  function stateOf(row) { return row.marks.length ? row.marks.join(", ") : row.deleted ? "deleted " + moment(row.deleted) : row.state; }

  function kindOf(row) { return row.state === "ok" ? (row.marks.includes("best") ? "best" : "kept") : row.state === "deleted" ? "deleted" : "bad"; }

  // ---- charts

  function chartBox(title, label, small) {
    const readout = make("span", {class: "readout"});
    const box = make("div", {class: "draw", role: "img", tabindex: "0", "aria-label": label});
    const made = make("div", {class: "chart"}, make("div", {class: "title"}, make("h3", {}, title), readout), box, small ? make("div", {class: "soft small"}, small) : null);
    return {made, box, readout};
  }

  const marks = facts.kind === "run" ? facts.checkpoints.filter((row) => row.step !== null && row.state !== "incomplete").map((row) => ({step: row.step, kind: kindOf(row), row})) : [];
  const rules = facts.kind === "run" ? facts.attempts.filter((one) => one.from_name !== null).map((one) => ({step: one.first_step})) : [];

  function runChart(metric) {
    const last = metric.points.length ? metric.points[metric.points.length - 1] : null;
    const label = `${metric.name}: ${count(metric.count, "value")}` + (last ? `, ${number(last[1])} at step ${number(last[0])}` : "");
    const small = metric.points.length < metric.count ? `${number(metric.count)} values, drawn with ${number(metric.points.length)}: the lowest and highest of each range` : "";
    const {made, box, readout} = chartBox(metric.name, label, small);
    new Chart(box, {series: [{name: metric.name, colour: "accent", points: metric.points, clock: facts.clock}], marks, rules, clock: facts.clock, tip, readout, open: showCheckpoint}, view);
    return made;
  }

  function runsChart(metric) {
    const {made, box} = chartBox(metric.name, `${metric.name} of ${count(metric.curves.length, "run")}`, "");
    const series = metric.curves.map((curve) => ({name: curve.run, run: curve.run, points: curve.points, clock: facts.clocks[curve.run] || [], ...look(curve.run)}));
    new Chart(box, {series, tip}, view);
    return made;
  }

  function look(name) {
    const at = facts.runs.findIndex((run) => run.name === name);
    const dashes = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
    return {colour: "c" + (at % COLOURS + 1), dash: dashes[Math.floor(at / COLOURS) % dashes.length]};
  }

  function toolbar() {
    const clocks = facts.kind === "run" ? [facts.clock] : Object.values(facts.clocks);
    const axes = [["step", "step"], ...(clocks.some((clock) => clock.some((row) => row[2] !== null && row[2] > 0)) ? [["epoch", "epoch"]] : []), ...(clocks.some((clock) => clock.length > 1) ? [["time", "time"]] : [])];
    if (!axes.some(([name]) => name === view.axis)) view.axis = "step";
    const axis = make("select", {id: "axis", onchange: () => view.change({axis: axis.value})}, ...axes.map(([name, text]) => make("option", {value: name}, text)));
    axis.value = view.axis;
    const smooth = make("input", {type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, oninput: () => view.change({smooth: Number(smooth.value)})});
    smooth.value = view.smooth;
    const weight = make("output", {for: "smooth"});
    const log = make("input", {type: "checkbox", id: "log", onchange: () => view.change({log: log.checked})});
    log.checked = view.log;
    const reset = make("button", {type: "button", id: "reset", onclick: () => view.change({domain: null})}, "Show all");
    const filter = facts.metrics.length > 8 ? make("input", {type: "search", id: "metric-filter", placeholder: `Find among ${facts.metrics.length} metrics`, "aria-label": "Find a metric", oninput: () => { remember({metrics: filter.value}); sift(filter.value); }}) : null;
    if (filter) filter.value = kept.metrics || "";
    const follow = () => { weight.textContent = Number(smooth.value).toFixed(2); reset.disabled = !view.domain; };
    view.listeners.push(follow);
    follow();
    return make("div", {class: "bar tools"}, make("label", {}, "x ", axis), make("label", {class: "slide"}, "smoothing ", smooth, weight), make("label", {}, log, " log y"), reset, filter);
  }

  function legend() {
    const kinds = new Set(marks.map((mark) => mark.kind));
    const shown = [["kept", "kept"], ["best", "best"], ["deleted", "deleted since"], ["bad", "damaged"]].filter(([kind]) => kinds.has(kind));
    const list = make("ul", {class: "legend", "aria-label": "Marks on the curves"}, ...shown.map(([kind, text]) => {
      const canvas = make("canvas", {width: 28, height: 28, "aria-hidden": "true"});
      const paint = () => {
        const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
        pen.setTransform(2, 0, 0, 2, 0, 0);
        pen.clearRect(0, 0, 14, 14);
        symbol(pen, kind, 7, 7, (name) => style.getPropertyValue("--" + name).trim(), false);
      };
      paint();
      view.listeners.push(paint);
      return make("li", {}, canvas, text);
    }));
    if (rules.length) list.append(make("li", {}, make("i", {class: "dash", "aria-hidden": "true"}), "resume"));
    list.append(make("li", {class: "hint"}, "drag to zoom, Ctrl and wheel too, double click for all"));
    return list;
  }

  function sift(words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    for (const box of document.querySelectorAll("#metrics .chart")) box.hidden = !wanted.every((word) => box.dataset.name.includes(word));
    for (const group of document.querySelectorAll("#metrics details")) {
      const found = group.querySelectorAll(".chart:not([hidden])").length;
      group.hidden = !found;
      if (wanted.length) group.open = found > 0;
      else group.open = Boolean((kept.open || {})[group.dataset.group]);
    }
  }

  function charts() {
    if (!facts.metrics.length) return;
    const groups = new Map();
    for (const metric of facts.metrics) groups.set(metric.group, [...(groups.get(metric.group) || []), metric]);
    const made = section("Metrics", toolbar(), facts.kind === "run" ? legend() : null);
    made.id = "metrics";
    for (const [name, metrics] of groups) {
      const grid = make("div", {class: "charts"});
      const fill = () => {
        if (grid.childElementCount) return;
        for (const metric of metrics) {
          const box = facts.kind === "run" ? runChart(metric) : runsChart(metric);
          box.dataset.name = metric.name.toLowerCase();
          grid.append(box);
        }
      };
      fill();
      if (name === "") { made.append(grid); continue; }
      const group = make("details", {ontoggle: () => { if (!kept.metrics) remember({open: {...kept.open, [name]: group.open}}); view.schedule(); }},
        make("summary", {}, make("h3", {}, name), make("span", {class: "soft"}, " " + count(metrics.length, "metric"))), grid);
      group.dataset.group = name;
      group.open = Boolean((kept.open || {})[name]);
      made.append(group);
    }
    if (kept.metrics) sift(kept.metrics);
  }

  // ---- what saving took

  function saving() {
    const told = facts.saving, curves = told.curves;
    if (!told.saves) return;
    const grid = make("div", {class: "charts"});
    const chart = (title, text, kind, series) => {
      const shown = series.filter(([, points]) => points.length);
      if (!shown.length) return;
      const {made, box} = chartBox(title, `${title}: ${text}`, text);
      made.firstChild.append(make("ul", {class: "legend"}, ...shown.map(([name, , colour]) => {
        const swatch = make("i", {class: "swatch"});
        swatch.style.background = `var(--${colour})`;
        return make("li", {}, swatch, name);
      })));
      grid.append(made);
      new Chart(box, {series: shown.map(([name, points, colour]) => ({name, colour, points, clock: facts.clock})), kind, zero: true, plain: true, clock: facts.clock, tip}, view);
    };
    const seconds = (name, title) => told[name].count ? `${title} ${span(told[name].p50)} in the middle, ${span(told[name].max)} at most` : "";
    chart("Seconds per save", [seconds("durable_s", "durable after"), seconds("held_s", "training held"), seconds("lost_s", "training lost")].filter(Boolean).join("; "), "seconds",
      [["until durable", curves.durable_s, "c1"], ["training held", curves.held_s, "c2"], ["training lost", curves.lost_s, "c6"]]);
    chart("Bytes per save", `${bytes(told.bytes_written)} written, ${bytes(told.bytes_reused)} shared with the checkpoint before`, "bytes",
      [["written", curves.written_bytes, "c1"], ["shared", curves.reused_bytes, "c3"]]);
    const said = [...Object.entries(told.lost_why).map(([why, times]) => `${number(times)} lost: ${why}`),
      ...(told.skipped_saves ? [`${number(told.skipped_saves)} left out while the one before was being written`] : []),
      ...Object.entries(told.deleted_by).map(([why, times]) => `${number(times)} deleted: ${why}`)];
    const made = section("Saving", grid, said.length ? make("ul", {class: "said"}, ...said.slice(0, 20).map((text) => make("li", {}, text))) : null);
    made.id = "saving";
  }

  // ---- attempts

  function lives() {
    const all = facts.attempts;
    if (!all.length) return;
    const most = Math.max(1, ...all.map((one) => one.last_step ?? one.first_step));
    const lost = all.reduce((sum, one) => sum + one.lost_steps, 0);
    const shown = all.slice(-40);
    const part = (step) => 100 * step / most + "%";
    const place = (node, from, to) => { node.style.left = part(from); node.style.width = `max(3px, ${part(to - from)})`; return node; };
    const bars = make("div", {class: "lives", role: "img", "aria-label": `${count(all.length, "start")} of the run; ${count(lost, "step")} had to be done again`});
    const places = new Map(shown.map((one, at) => [one.attempt, at]));
    shown.forEach((one, at) => {
      const end = one.last_step ?? one.first_step;
      const track = make("div", {class: "track"});
      const parent = places.get(one.from_attempt);
      if (parent !== undefined) {
        const branch = make("i", {class: "branch"});
        branch.style.left = part(one.first_step);
        branch.style.height = `${(at - parent) * 1.6}rem`;
        track.append(branch);
      }
      track.append(place(make("i", {class: one.is_live ? "kept" : "kept left"}), one.first_step, Math.max(one.first_step, end - one.lost_steps)));
      if (one.lost_steps) track.append(place(make("i", {class: "lost"}), end - one.lost_steps, end));
      bars.append(make("span", {class: "label"}, "attempt " + one.attempt), track);
    });
    bars.append(make("span", {class: "label"}), make("div", {class: "ends soft"}, make("span", {}, "step 0"), make("span", {}, "step " + number(most))));
    const rows = all.slice().reverse().map((one) => make("tr", {},
      make("td", {class: "number"}, one.attempt), make("td", {}, moment(one.started)),
      make("td", {}, one.started && one.ended ? span(one.ended - one.started) : ""),
      make("td", {class: "why"}, [one.died ?? one.reason ?? (one.ended ? "" : "no word of its end"), one.stop].filter(Boolean).join(", "),
        one.is_live ? null : make("div", {class: "soft"}, "a branch that was left")),
      make("td", {class: "why"}, one.from_name === null ? "a fresh start" : one.from_name,
        one.line === "another run" ? make("div", {class: "soft"}, "a checkpoint of another run") : null),
      make("td", {class: "number"}, number(one.first_step)), make("td", {class: "number"}, number(one.last_step)),
      make("td", {class: "number"}, one.lost_steps ? number(one.lost_steps) : ""),
      make("td", {class: "number"}, one.lost_s ? span(one.lost_s) : ""), make("td", {class: "number"}, one.down_s === null ? "" : span(one.down_s)), make("td", {class: "name"}, `${one.host} ${one.pid || ""}`)));
    const titles = [["attempt", 1], ["started (UTC)"], ["lasted"], ["how it ended"], ["went on from"], ["first step", 1], ["last step", 1], ["steps done again", 1], ["time done again", 1], ["until the next", 1], ["where"]];
    section(lost ? `Attempts: ${count(lost, "step")} had to be done again` : "Attempts", bars, make("div", {class: "wide", tabindex: "0", role: "group", "aria-label": "Table of attempts"}, make("table", {},
      make("thead", {}, make("tr", {}, ...titles.map(([title, isNumber]) => make("th", {scope: "col", class: isNumber ? "number" : null}, title)))),
      make("tbody", {}, ...rows))));
  }

  // ---- tables that sort and filter

  function table(id, title, columns, rows) {
    let sort = kept[id + ".sort"] || null;
    let most = kept[id + ".most"] || FIRST_ROWS;
    const body = make("tbody");
    const filter = make("input", {type: "search", placeholder: "Filter: name, state, reason ...", "aria-label": "Filter " + title,
      oninput: () => { remember({[id + ".filter"]: filter.value}); most = FIRST_ROWS; fill(); }});
    filter.value = kept[id + ".filter"] || "";
    const total = make("span", {class: "soft", role: "status"});
    const gone = rows.filter((row) => row.state === "deleted").length;
    const deleted = make("input", {type: "checkbox", id: id + "-deleted", onchange: () => { remember({[id + ".deleted"]: deleted.checked}); fill(); }});
    deleted.checked = Boolean(kept[id + ".deleted"]);
    const more = make("button", {type: "button", class: "more", onclick: () => { most *= 5; remember({[id + ".most"]: most}); fill(); }});
    const heads = columns.map((column, at) => make("th", {scope: "col", class: column.number ? "number" : null},
      column.title ? make("button", {type: "button", onclick: () => order(at)}, column.title) : make("span", {class: "unseen"}, column.unseen || "actions")));
    const texts = rows.map((row) => columns.map((column) => column.text(row)).join("\n").toLowerCase());

    function order(at) {
      const descending = sort && sort.at === at ? !sort.descending : Boolean(columns[at].number);
      sort = {at, descending};
      remember({[id + ".sort"]: sort});
      fill();
    }

    function fill() {
      heads.forEach((head_, at) => {
        if (sort && sort.at === at) head_.setAttribute("aria-sort", sort.descending ? "descending" : "ascending");
        else head_.removeAttribute("aria-sort");
      });
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const here = deleted.checked ? rows.length : rows.length - gone;
      let found = rows.map((_, number_) => number_).filter((number_) => (deleted.checked || rows[number_].state !== "deleted") &&
        words.every((word) => texts[number_].includes(word)));
      if (sort && columns[sort.at]) {
        const value = columns[sort.at].value || columns[sort.at].text;
        const sign = sort.descending ? -1 : 1;
        const keys = new Map(found.map((number_) => [number_, value(rows[number_])]));
        const missing = (key) => key === null || key === undefined || key === "" || Number.isNaN(key);
        found.sort((a, b) => {
          const one = keys.get(a), other = keys.get(b);
          if (missing(one) || missing(other)) return missing(one) - missing(other) || a - b;  // the empty ones last, always
          if (typeof one === "number" && typeof other === "number") return sign * (one - other) || a - b;
          return sign * String(one).localeCompare(String(other), "en", {numeric: true}) || a - b;
        });
      }
      const shown = found.slice(0, most);
      body.replaceChildren(...shown.map((number_) => {
        const row = rows[number_];
        return make("tr", {class: row.state && row.state.word === undefined ? row.state : null}, ...columns.map((column) => make("td",
          {class: [column.class, column.number ? "number" : ""].filter(Boolean).join(" ") || null,
            title: column.class === "name" ? column.text(row) : null}, column.cell ? column.cell(row) : column.text(row))));
      }));
      total.textContent = found.length === here ? `${number(here)} in all` : `${number(found.length)} of ${number(here)}`;
      more.hidden = shown.length >= found.length;
      more.textContent = `Show more (${number(found.length - shown.length)} left)`;
    }

    const made = section(title, make("div", {class: "bar"}, filter, total,
      gone ? make("label", {}, deleted, ` with ${number(gone)} deleted since`) : null), make("div", {class: "wide", tabindex: "0", role: "group", "aria-label": "Table: " + title},
      make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body)), more);
    made.id = id;
    fill();
  }


  // ---- one checkpoint

  function copier(text, what) {
    const button = make("button", {type: "button", class: "copy", "aria-label": "Copy " + what, onclick: async () => {
      try { await navigator.clipboard.writeText(text); } catch { fallback(text, button); }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1200);
    }}, "copy");
    return button;
  }

  function fallback(text, button) {
    const area = make("textarea", {});
    area.value = text;
    button.after(area);  // inside of the dialog, where one is open
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }

  function path(name) { return facts.uri.replace(/\/$/, "") + "/" + name; }

  const dialog = make("dialog", {"aria-labelledby": "about", onclick: (event) => { if (event.target === dialog) dialog.close(); }});

  function showCheckpoint(row) {
    const quoted = JSON.stringify(path(row.name));
    const more = row.details || {};
    const parent = more.parent && facts.checkpoints.find((one) => one.name === more.parent);
    const lines = [["size", bytes(row.size_bytes)], ["new on disk", row.new_bytes !== row.size_bytes ? bytes(row.new_bytes) : ""],
      ["saved", row.created ? moment(row.created) + " UTC" : ""], ["epoch", row.epoch === null ? "" : number(row.epoch)], ["attempt", number(row.attempt)],
      ["deleted", row.deleted ? moment(row.deleted) + " UTC" : ""], [row.state === "ok" ? "kept because" : "why", row.why], ["checked", more.checked], ["verified", more.verified]];
    const list = make("dl", {class: "facts"}, ...lines.filter(([, text]) => text).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
    if (more.parent) list.append(make("dt", {}, "parent"), make("dd", {}, parent ? make("button", {type: "button", class: "link", onclick: () => showCheckpoint(parent)}, more.parent) : more.parent));
    const metrics = Object.entries(row.metrics);
    const codes = row.state === "ok" ? [`state = holdfast.load(${quoted})`, `holdfast.Checkpointer("runs/new", state, resume=${quoted})`, `holdfast verify ${shell(path(row.name))}`] : [];
    dialog.replaceChildren(
      make("div", {class: "title"}, make("h2", {id: "about"}, row.name), make("span", {class: "state " + row.state}, stateOf(row)),
        make("button", {type: "button", class: "close", "aria-label": "Close", onclick: () => dialog.close()}, "\u00d7")),
      make("p", {class: "big"}, "step " + number(row.step)), list,
      codes.length ? make("div", {class: "codes"}, ...codes.map((code) => make("div", {class: "code"}, make("code", {}, code), copier(code, code)))) : null,
      more.items && more.items.length ? make("table", {}, make("thead", {}, make("tr", {}, ...[["item"], ["tensors", 1], ["elements", 1], ["size", 1], ["dtype"]].map(([title, isNumber]) => make("th", {scope: "col", class: isNumber ? "number" : null}, title)))),
        make("tbody", {}, ...more.items.map((item) => make("tr", {}, make("td", {class: "name"}, item.name), make("td", {class: "number"}, number(item.tensors)), make("td", {class: "number"}, number(item.numel)), make("td", {class: "number"}, bytes(item.bytes)), make("td", {}, item.dtypes.join(", ")))))) : null,
      metrics.length ? make("details", {open: metrics.length <= 12 ? "" : null}, make("summary", {}, count(metrics.length, "metric")), make("dl", {class: "facts"},
        ...metrics.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, number(value))]))) : null);
    tip(null);
    if (!dialog.open) dialog.showModal();
  }

  function shell(text) { return /^[\w@%+=:,./-]+$/.test(text) ? text : "'" + text.replace(/'/g, "'\\''") + "'"; }

  function metricNames(rows, first) {
    const found = new Map();
    for (const row of rows) for (const name of Object.keys(row.metrics)) found.set(name, (found.get(name) || 0) + 1);
    const order = new Map(facts.metrics.map((metric, at) => [metric.name, at]));
    const place = (name) => order.has(name) ? order.get(name) : Infinity;
    return [...found.keys()].sort((a, b) => (b === first) - (a === first) || place(a) - place(b) || a.localeCompare(b)).slice(0, 5);
  }

  function checkpointTable() {
    const rows = facts.checkpoints;
    const full = rows.filter((row) => row.state === "ok");
    const gone = rows.some((row) => row.state === "deleted");
    const columns = [
      {title: "checkpoint", class: "name", text: (row) => row.name, cell: (row) => make("button", {type: "button", class: "link", onclick: () => showCheckpoint(row)}, row.name)},
      {title: "", unseen: "copy the path", text: () => "", cell: (row) => row.state === "deleted" ? "" : copier(path(row.name), "the path of " + row.name)},
      {title: "step", number: true, value: (row) => row.step, text: (row) => number(row.step)}];
    if (full.some((row) => row.epoch)) columns.push({title: "epoch", number: true, value: (row) => row.epoch, text: (row) => number(row.epoch)});
    if (new Set(full.map((row) => row.attempt)).size > 1) columns.push({title: "attempt", number: true, value: (row) => row.attempt, text: (row) => number(row.attempt)});
    columns.push({title: "state", text: stateOf, cell: (row) => make("span", {class: "state " + row.state}, stateOf(row))},
      {title: gone ? "why kept, deleted, or what is wrong" : "why kept, or what is wrong", class: "why", text: (row) => row.why});
    columns.push({title: "saved (UTC)", value: (row) => row.created, text: (row) => moment(row.created)},
      {title: "size", number: true, value: (row) => row.size_bytes, text: (row) => bytes(row.size_bytes)});
    if (full.some((row) => row.new_bytes !== row.size_bytes)) columns.push({title: "new on disk", number: true, value: (row) => row.new_bytes, text: (row) => bytes(row.new_bytes)});
    for (const name of metricNames(rows, facts.ranking.metric)) {
      columns.push({title: name, number: true, value: (row) => row.metrics[name], text: (row) => number(row.metrics[name])});
    }
    table("checkpoints", "Checkpoints", columns, rows);
  }

  function runTable() {
    const rows = facts.runs;
    if (!kept.view) rows.slice(12).forEach((row) => view.hidden.add(row.name));
    const tick = (row) => {
      const box = make("input", {type: "checkbox", "aria-label": "Draw " + row.name, onchange: () => { if (box.checked) view.hidden.delete(row.name); else view.hidden.add(row.name); view.change({}); }});
      box.checked = !view.hidden.has(row.name);
      const swatch = make("i", {class: "swatch"});
      swatch.style.background = `var(--${look(row.name).colour})`;
      view.listeners.push(() => { box.checked = !view.hidden.has(row.name); });
      return make("label", {class: "tick"}, box, swatch);
    };
    const columns = [
      {title: "", unseen: "drawn", text: () => "", cell: tick},
      {title: "run", class: "name", text: (row) => row.name},
      {title: "", unseen: "copy the path", text: () => "", cell: (row) => copier(row.uri, "the path of " + row.name)},
      {title: "state", text: (row) => row.state.word, cell: (row) => make("span", {class: "badge " + row.state.word, title: row.state.text}, row.state.word)},
      {title: "step", number: true, value: (row) => row.step, text: (row) => number(row.step)},
      {title: "newest (UTC)", value: (row) => row.created, text: (row) => moment(row.created)},
      {title: "checkpoints", number: true, value: (row) => row.count, text: (row) => number(row.count)},
      {title: "size", number: true, value: (row) => row.size_bytes, text: (row) => bytes(row.size_bytes)},
      {title: "attempts", number: true, value: (row) => row.attempts, text: (row) => number(row.attempts)}];
    if (rows.some((row) => row.lost_steps)) columns.push({title: "steps done again", number: true, value: (row) => row.lost_steps, text: (row) => number(row.lost_steps)});
    if (rows.some((row) => row.lost_s !== null)) columns.push({title: "lost to saving", number: true, value: (row) => row.lost_s, text: (row) => span(row.lost_s)});
    if (rows.some((row) => row.from !== null)) columns.push({title: "began from", class: "name", text: (row) => row.from ?? ""});
    for (const name of metricNames(rows)) columns.push({title: "last " + name, number: true, value: (row) => row.metrics[name], text: (row) => number(row.metrics[name])});
    table("checkpoints", "Runs", columns, rows);
    const all = (on) => make("button", {type: "button", onclick: () => { view.hidden = new Set(on ? [] : rows.map((row) => row.name)); view.change({}); }}, on ? "Draw all" : "Draw none");
    document.querySelector("#checkpoints .bar").append(all(true), all(false));
  }

  // ---- what the time went for, and how often is saved

  function goodput(parts) {
    if (!parts || !parts.wall_s) return [];
    const names = [["again_s", "done again"], ["held_s", "held by saves"], ["slowed_s", "slowed by saves"], ["starting_s", "starting"], ["down_s", "down"]];
    const lost = names.filter(([name]) => parts[name] >= 0.0005 * parts.wall_s).sort((a, b) => parts[b[0]] - parts[a[0]]).slice(0, 3);
    const share = (value) => (100 * value / parts.wall_s).toFixed(1) + "%";
    return [["Useful steps", share(parts.useful_s), `of ${span(parts.wall_s)}` + (lost.length ? "; " + lost.map(([name, text]) => `${share(parts[name])} ${text}`).join(", ") : "")]];
  }

  // Of every="auto": what it is now, and from what it has moved there.
  function interval(good) {
    const chosen = good.filter((row) => row.details && row.details.every_s).map((row) => [row.step, row.details.every_s]);
    if (!chosen.length) return "";
    const [now] = chosen, before = chosen.find(([, seconds]) => Math.abs(seconds - now[1]) > 0.05 * now[1]);
    return `saved every ${span(now[1])} by every="auto"` + (before ? `, every ${span(before[1])} at step ${number(before[0])}` : "");
  }

  // ---- the whole

  head();
  document.body.append(tipBox, dialog);
  warnings();
  if (facts.kind === "run") {
    const good = facts.checkpoints.filter((row) => row.state === "ok");
    const best = good.find((row) => row.marks.includes("best"));
    const newest = good.find((row) => row.marks.includes("newest"));
    const sum = facts.newest, told = facts.saving;
    const source = facts.attempts.length ? facts.attempts[0].from_name : null;
    cards([
      ["Newest checkpoint", newest ? "step " + number(newest.step) : "none", newest ? `${span(facts.written - newest.created)} old when this was written` : ""],
      ["Best by " + (facts.ranking.metric || ""), best ? number(best.metrics[facts.ranking.metric]) : "", best ? "step " + number(best.step) : "", "good"],
      ["Starts", number(facts.attempts.length), told.lost_steps ? `${count(told.lost_steps, "step")} done again` + (told.failure_s ? ", " + span(told.failure_s) : "") : "nothing done again", told.lost_steps ? "bad" : ""],
      ["Lost to saving", told.lost_s.count ? span(told.lost_s.sum) : "", `over ${count(told.saves, "save")}; training held ${span(told.held_s.sum)}`],
      ...goodput(facts.goodput),
      ["On disk", bytes(facts.new_bytes), `${count(good.length, "checkpoint")}, kept: ${facts.keep}`],
    ], [
      source === null ? "" : "began from " + source, interval(good),
      told.deleted ? `${number(told.deleted)} deleted since` : "", told.lost_saves ? `${count(told.lost_saves, "save")} lost` : "",
      `${bytes(told.bytes_written)} written` + (told.bytes_reused ? `, ${bytes(told.bytes_reused)} shared instead` : ""),
      count(facts.reports, "reported row"), sum ? count(sum.world_size, "rank") : "",
      sum ? Object.entries(sum.versions).map(([name, version]) => `${name} ${version}`).join(", ") : "",
    ]);
  }
  if (facts.kind === "run") { charts(); saving(); lives(); checkpointTable(); } else { runTable(); charts(); }
  page.append(make("footer", {}, `Written by holdfast page at ${moment(facts.written)} UTC from ${facts.uri}. ` +
    (facts.reload_s && facts.live ? `It loads itself again every ${facts.reload_s} s.` : "")));

  history.scrollRestoration = "manual";
  if (kept.scroll) scrollTo(0, kept.scroll);
  addEventListener("scroll", () => remember({scroll: scrollY}), {passive: true});
  if (facts.reload_s && facts.live) {
    const again = () => {
      // Not under somebody who types, points at a chart, reads about a checkpoint or looks elsewhere.
      const typing = document.activeElement && document.activeElement.tagName === "INPUT" && document.activeElement.type === "search";
      if (document.hidden || String(getSelection()) || typing || dialog.open || view.owner) setTimeout(again, 1000);
      else location.reload();
    };
    setTimeout(again, facts.reload_s * 1000);
  }
})();
