"use strict";
// Draws the page from the JSON in it. Texts may come from strangers: they only ever become text nodes or data of a chart.
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const page = document.getElementById("page");
  const storeKey = "holdfast:" + location.pathname;
  const kept = recall();
  const FIRST_ROWS = 200;
  let zoom = kept.zoom || null;
  const views = [], redraws = [];

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

  function bytes(count) {
    if (count === null || count === undefined) return "";
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let at = 0;
    while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
    return (at && count < 100 ? count.toFixed(1) : Math.round(count)) + " " + units[at];
  }

  function number(value) {
    if (typeof value !== "number") return value === null || value === undefined ? "" : String(value);
    return Number.isInteger(value) ? value.toLocaleString("en-US") : String(Number(value.toPrecision(5)));
  }

  function moment(seconds) {
    return seconds ? new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") : "";
  }

  function span(seconds) {
    if (!(seconds >= 0)) return "";
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
      if (seconds >= size) return (seconds / size).toFixed(seconds < 10 * size ? 1 : 0) + " " + unit;
    }
    return (seconds < 10 ? Number(seconds.toPrecision(2)) : Math.round(seconds)) + " s";
  }

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
      make("div", {class: "soft"}, facts.uri),
      state && state.text ? make("div", {class: "soft"}, state.text) : null));
  }

  function cards(list) {
    const box = make("dl", {class: "cards"});
    for (const [label, value, more] of list) {
      if (value === "" || value === null) continue;
      box.append(make("div", {class: "card"}, make("dt", {}, label), make("dd", {}, value, more ? make("small", {}, more) : null)));
    }
    page.append(box);
  }

  function warnings() {
    if (!facts.warnings.length) return;
    const shown = facts.warnings.slice(0, 20).map((text) => make("li", {}, text));
    if (facts.warnings.length > 20) shown.push(make("li", {}, `and ${facts.warnings.length - 20} more`));
    page.append(make("ul", {class: "warnings", "aria-label": "Warnings"}, ...shown));
  }

  // ---- charts

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue("--" + name).trim();
    return {front: get("front"), soft: get("soft"), line: get("line"), accent: get("accent"), bad: get("bad"), good: get("good"), warn: get("warn")};
  }

  function config(colour) {
    const axis = {labelColor: colour.soft, titleColor: colour.soft, gridColor: colour.line, domainColor: colour.line,
      tickColor: colour.line, labelFontSize: 11, titleFontSize: 11};
    return {background: null, view: {stroke: null}, axis, font: "system-ui, sans-serif",
      legend: {labelColor: colour.front, titleColor: colour.soft, orient: "bottom", columns: 3, labelLimit: 160, title: null}};
  }

  function scaleY(values) {
    const log = kept.log && values.length && values.every((value) => value > 0);
    return log ? {type: "log", nice: false} : {zero: false, nice: true};
  }

  // The value of a curve at a step: that of the last point at or before it.
  function at(points, step) {
    let low = 0, high = points.length;
    while (low < high) { const middle = (low + high) >> 1; if (points[middle][0] <= step) low = middle + 1; else high = middle; }
    return points.length ? points[Math.max(low - 1, 0)][1] : null;
  }

  const GRID = {name: "grid", select: {type: "interval", encodings: ["x"]}, bind: "scales"};

  function runSpec(curve) {
    const colour = colours();
    const line = curve.points.map(([step, value]) => ({step, value}));
    const marks = facts.checkpoints.filter((row) => row.step !== null && row.state !== "incomplete").map((row) => ({
      step: row.step, value: at(curve.points, row.step), name: row.name, size: bytes(row.size_bytes),
      state: row.marks.length ? row.marks.join(", ") : row.deleted ? "deleted " + moment(row.deleted) : row.state,
      why: row.why, saved: moment(row.created),
      area: row.state === "deleted" ? 30 : 45,
      kind: row.state === "ok" ? (row.marks.includes("best") ? "best" : "kept") : row.state === "deleted" ? "deleted" : "bad"}));
    const starts = facts.attempts.filter((one) => one.from_name !== null).map((one) => ({
      step: one.first_step, name: "attempt " + one.attempt, why: "resumed from " + one.from_name}));
    const x = {field: "step", type: "quantitative", title: "step", axis: {format: "~s", tickCount: 6, labelOverlap: true}};
    const y = {field: "value", type: "quantitative", title: null, scale: scaleY(curve.points.map((point) => point[1])),
      axis: {tickCount: 5, labelOverlap: true}};
    const tip = (field, title) => ({field, type: "nominal", title});
    const layer = [
      {data: {values: line}, params: [GRID], mark: {type: "line", clip: true, color: colour.accent, strokeWidth: 1.5, interpolate: "linear"},
        encoding: {x, y}},
      {data: {values: marks}, mark: {type: "point", filled: true, clip: true, opacity: 0.9},
        encoding: {x, y, color: {field: "kind", type: "nominal", legend: null, scale: {domain: ["kept", "best", "deleted", "bad"],
          range: [colour.accent, colour.good, colour.soft, colour.bad]}},
        shape: {field: "kind", type: "nominal", legend: null, scale: {domain: ["kept", "best", "deleted", "bad"],
          range: ["circle", "diamond", "triangle-down", "cross"]}},
        size: {field: "area", type: "quantitative", legend: null, scale: null},
        tooltip: [tip("name", "checkpoint"), {field: "step", type: "quantitative", title: "step"},
          {field: "value", type: "quantitative", title: "value", format: ".5g"}, tip("saved", "saved"), tip("size", "size"),
          tip("state", "state"), tip("why", "why")]}},
    ];
    if (starts.length) {
      layer.unshift({data: {values: starts}, mark: {type: "rule", clip: true, color: colour.warn, strokeDash: [3, 3]},
        encoding: {x, tooltip: [tip("name", "start"), tip("why", "how")]}});
    }
    return {layer};
  }

  // What each save took: one line for each series that anybody has told of.
  function savingSpec(series, format) {
    const colour = colours();
    const values = series.flatMap(([title, points]) => points.map(([step, value]) => ({step, value, series: title})));
    const titles = series.filter(([, points]) => points.length).map(([title]) => title);
    return {data: {values}, params: [GRID], mark: {type: "line", clip: true, strokeWidth: 1.2, point: {size: 18}},
      encoding: {
        x: {field: "step", type: "quantitative", title: "step", axis: {format: "~s", tickCount: 6, labelOverlap: true}},
        y: {field: "value", type: "quantitative", title: null, scale: {zero: true, nice: true}, axis: {tickCount: 5, labelOverlap: true, format}},
        color: {field: "series", type: "nominal", scale: {domain: titles, range: [colour.accent, colour.warn, colour.bad].slice(0, titles.length)}},
        tooltip: [{field: "series", type: "nominal", title: "what"}, {field: "step", type: "quantitative"}, {field: "value", type: "quantitative", format}]}};
  }

  function folderSpec(metric) {
    const values = metric.curves.flatMap((curve) => curve.points.map(([step, value]) => ({step, value, run: curve.run})));
    return {data: {values}, params: [GRID], mark: {type: "line", clip: true, strokeWidth: 1.5},
      encoding: {
        x: {field: "step", type: "quantitative", title: "step", axis: {format: "~s", tickCount: 6, labelOverlap: true}},
        y: {field: "value", type: "quantitative", title: null, scale: scaleY(values.map((one) => one.value)), axis: {tickCount: 5, labelOverlap: true}},
        color: {field: "run", type: "nominal", title: null},
        tooltip: [{field: "run", type: "nominal"}, {field: "step", type: "quantitative"}, {field: "value", type: "quantitative", format: ".5g"}]}};
  }

  async function draw(box, spec) {
    // Vega puts its description in the place of the label.
    const full = {$schema: "https://vega.github.io/schema/vega-lite/v6.json", description: box.getAttribute("aria-label"), width: "container", height: 190,
      autosize: {type: "fit", contains: "padding"}, config: config(colours()), ...spec};
    const {view} = await vegaEmbed(box, full, {actions: false, renderer: "canvas", mode: "vega-lite", loader: {load: refuse}});
    views.push(view);
    if (zoom) show(view, zoom);
    let own = false;
    view.addSignalListener("grid_step", (_, domain) => {
      if (own || !domain) return;
      zoom = [...domain];
      remember({zoom});
      own = true;
      for (const other of views) if (other !== view) show(other, zoom);
      own = false;
    });
  }

  function show(view, domain) {
    try { view.signal("grid_step", domain).runAsync(); } catch { /* a chart without that signal */ }
  }

  function refuse() { return Promise.reject(new Error("a page asks for nothing")); }

  function charts() {
    if (!facts.metrics.length) return;
    const grid = make("div", {class: "charts"});
    const log = make("input", {type: "checkbox", id: "log", onchange: () => { remember({log: log.checked}); redraw(); }});
    log.checked = Boolean(kept.log);
    const reset = make("button", {type: "button", onclick: () => { zoom = null; remember({zoom}); redraw(); }}, "Show all steps");
    section("Metrics", make("div", {class: "bar"}, make("label", {}, log, " logarithmic"), reset,
      make("span", {class: "soft"}, "Drag to move, wheel to zoom. Marks are checkpoints, dashed lines are resumes.")), grid);
    const boxes = [];
    for (const metric of facts.metrics) {
      const count = metric.count ?? metric.curves.reduce((sum, curve) => sum + curve.count, 0);
      const drawn = metric.points ? metric.points.length : metric.curves.reduce((sum, curve) => sum + curve.points.length, 0);
      const last = metric.points && metric.points.length ? metric.points[metric.points.length - 1] : null;
      const text = last ? `${metric.name}: ${count} values, ${number(last[1])} at step ${number(last[0])}` : `${metric.name}: ${count} values`;
      const box = make("div", {class: "draw", role: "img", "aria-label": text});
      const thinned = drawn < count ? `${number(count)} values, drawn with ${number(drawn)}: the lowest and highest of each range` : `${number(count)} values`;
      grid.append(make("div", {class: "chart"}, make("h3", {}, metric.name, last ? make("span", {class: "soft"}, "  " + number(last[1])) : null),
        box, make("div", {class: "soft"}, thinned)));
      boxes.push([box, metric]);
    }
    drawLazily(boxes.map(([box, metric]) => [box, () => facts.kind === "run" ? runSpec(metric) : folderSpec(metric)]));
  }

  // Only what is near the screen is drawn: the rest comes when it is scrolled to, or printed.
  function drawLazily(boxes) {
    const drawOne = (box, spec) => draw(box, spec());
    const wanted = new Map(boxes);
    const watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting && wanted.has(entry.target)) {
          drawOne(entry.target, wanted.get(entry.target));
          wanted.delete(entry.target);
        }
      }
    }, {rootMargin: "300px"});
    boxes.forEach(([box]) => watcher.observe(box));
    redraws.push(() => { for (const [box, spec] of boxes) if (!wanted.has(box)) drawOne(box, spec); });
    addEventListener("beforeprint", () => { for (const [box, spec] of wanted) drawOne(box, spec); wanted.clear(); });
  }

  function redraw() {
    views.splice(0).forEach((view) => view.finalize());
    for (const again of redraws) again();
  }

  // ---- what saving took

  function saving() {
    const told = facts.saving, curves = told.curves;
    if (!told.saves) return;
    const grid = make("div", {class: "charts"});
    const boxes = [];
    const chart = (title, text, series, format) => {
      if (!series.some(([, points]) => points.length)) return;
      const box = make("div", {class: "draw", role: "img", "aria-label": `${title}: ${text}`});
      grid.append(make("div", {class: "chart"}, make("h3", {}, title), box, make("div", {class: "soft"}, text)));
      boxes.push([box, () => savingSpec(series, format)]);
    };
    const seconds = (name, title) => told[name].count ? `${title} ${number(told[name].p50)} s in the middle, ${number(told[name].max)} s at most` : "";
    chart("Seconds per save", [seconds("durable_s", "durable after"), seconds("held_s", "training held"), seconds("lost_s", "training lost")].filter(Boolean).join("; "),
      [["until durable", curves.durable_s], ["training held", curves.held_s], ["training lost", curves.lost_s]], "~s");
    chart("Bytes per save", `${bytes(told.bytes_written)} written, ${bytes(told.bytes_reused)} shared with the checkpoint before`,
      [["written", curves.written_bytes], ["shared", curves.reused_bytes]], "~s");
    const said = [...Object.entries(told.lost_why).map(([why, times]) => `${number(times)} lost: ${why}`),
      ...(told.skipped_saves ? [`${number(told.skipped_saves)} left out while the one before was being written`] : []),
      ...Object.entries(told.deleted_by).map(([why, times]) => `${number(times)} deleted: ${why}`)];
    const made = section("Saving", grid, said.length ? make("ul", {class: "said"}, ...said.slice(0, 20).map((text) => make("li", {}, text))) : null);
    made.id = "saving";
    drawLazily(boxes);
  }

  // ---- attempts

  function lives() {
    const all = facts.attempts;
    if (!all.length) return;
    const most = Math.max(1, ...all.map((one) => one.last_step ?? one.first_step));
    const left = 90, width = 900, row = 20, shown = all.slice(-40);
    const x = (step) => left + (width - left - 10) * step / most;
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const put = (tag, attributes, text) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
      if (text) node.textContent = text;
      svg.append(node);
      return node;
    };
    const lost = all.reduce((sum, one) => sum + one.lost_steps, 0);
    svg.setAttribute("class", "lives");
    svg.setAttribute("viewBox", `0 0 ${width} ${shown.length * row + 22}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${all.length} starts of the run; ${number(lost)} steps had to be done again`);
    const places = new Map(shown.map((one, number_) => [one.attempt, number_ * row]));
    shown.forEach((one, number_) => {
      const top = number_ * row;
      const end = one.last_step ?? one.first_step;
      const parent = places.get(one.from_attempt);
      if (parent !== undefined) put("line", {class: "branch", x1: x(one.first_step), x2: x(one.first_step), y1: parent + 3, y2: top + 3});
      put("text", {x: 0, y: top + 13}, "attempt " + one.attempt);
      put("rect", {class: one.is_live ? "kept" : "kept left", x: x(one.first_step), y: top + 3, width: Math.max(2, x(end - one.lost_steps) - x(one.first_step)), height: row - 7});
      if (one.lost_steps) put("rect", {class: "lost", x: x(end - one.lost_steps), y: top + 3, width: Math.max(2, x(end) - x(end - one.lost_steps)), height: row - 7});
    });
    put("line", {class: "axis", x1: left, x2: width - 10, y1: shown.length * row + 2, y2: shown.length * row + 2});
    put("text", {x: left, y: shown.length * row + 17}, "step 0");
    put("text", {x: width - 10, y: shown.length * row + 17, "text-anchor": "end"}, "step " + number(most));
    const rows = all.slice().reverse().map((one) => make("tr", {},
      make("td", {class: "number"}, one.attempt), make("td", {}, moment(one.started)),
      make("td", {}, one.started && one.ended ? span(one.ended - one.started) : ""),
      make("td", {class: "why"}, [one.reason ?? (one.ended ? "" : "no word of its end"), one.stop].filter(Boolean).join(", "),
        one.is_live ? null : make("div", {class: "soft"}, "a branch that was left")),
      make("td", {class: "why"}, one.from_name === null ? "a fresh start" : one.from_name,
        one.line === "another run" ? make("div", {class: "soft"}, "a checkpoint of another run") : null),
      make("td", {class: "number"}, number(one.first_step)), make("td", {class: "number"}, number(one.last_step)),
      make("td", {class: "number"}, one.lost_steps ? number(one.lost_steps) : ""),
      make("td", {class: "number"}, one.lost_s ? span(one.lost_s) : ""), make("td", {class: "number"}, one.down_s === null ? "" : span(one.down_s)), make("td", {class: "name"}, `${one.host} ${one.pid || ""}`)));
    const titles = [["attempt", 1], ["started (UTC)"], ["lasted"], ["how it ended"], ["went on from"], ["first step", 1], ["last step", 1], ["steps done again", 1], ["time done again", 1], ["until the next", 1], ["where"]];
    section(lost ? `Attempts: ${number(lost)} steps had to be done again` : "Attempts", svg, make("div", {class: "wide"}, make("table", {},
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
    const count = make("span", {class: "soft", role: "status"});
    const gone = rows.filter((row) => row.state === "deleted").length;
    const deleted = make("input", {type: "checkbox", id: id + "-deleted", onchange: () => { remember({[id + ".deleted"]: deleted.checked}); fill(); }});
    deleted.checked = Boolean(kept[id + ".deleted"]);
    const more = make("button", {type: "button", class: "more", onclick: () => { most *= 5; remember({[id + ".most"]: most}); fill(); }});
    const heads = columns.map((column, at) => make("th", {scope: "col", class: column.number ? "number" : null},
      make("button", {type: "button", onclick: () => order(at)}, column.title)));
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
      count.textContent = found.length === here ? `${number(here)} in all` : `${number(found.length)} of ${number(here)}`;
      more.hidden = shown.length >= found.length;
      more.textContent = `Show more (${number(found.length - shown.length)} left)`;
    }

    const made = section(title, make("div", {class: "bar"}, filter, count,
      gone ? make("label", {}, deleted, ` with ${number(gone)} deleted since`) : null), make("div", {class: "wide"},
      make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body)), more);
    made.id = id;
    fill();
  }

  function copier(text) {
    const button = make("button", {type: "button", class: "copy", "aria-label": "Copy the path of " + text, onclick: async () => {
      try { await navigator.clipboard.writeText(text); } catch { fallback(text); }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1200);
    }}, "copy");
    return button;
  }

  function fallback(text) {
    const area = make("textarea", {});
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }

  function path(name) { return facts.uri.replace(/\/$/, "") + "/" + name; }

  function metricNames(rows, first) {
    const count = new Map();
    for (const row of rows) for (const name of Object.keys(row.metrics)) count.set(name, (count.get(name) || 0) + 1);
    return [...count.keys()].sort((a, b) => (b === first) - (a === first) || count.get(b) - count.get(a) || a.localeCompare(b)).slice(0, 5);
  }

  function checkpointTable() {
    const rows = facts.checkpoints;
    const full = rows.filter((row) => row.state === "ok");
    const gone = rows.some((row) => row.state === "deleted");
    const state = (row) => row.marks.length ? row.marks.join(", ") : row.deleted ? "deleted " + moment(row.deleted) : row.state;
    const columns = [
      {title: "checkpoint", class: "name", text: (row) => row.name},
      {title: "", text: () => "", cell: (row) => row.state === "deleted" ? "" : copier(path(row.name))},
      {title: "step", number: true, value: (row) => row.step, text: (row) => number(row.step)}];
    if (full.some((row) => row.epoch !== null)) columns.push({title: "epoch", number: true, value: (row) => row.epoch, text: (row) => number(row.epoch)});
    if (new Set(full.map((row) => row.attempt)).size > 1) columns.push({title: "attempt", number: true, value: (row) => row.attempt, text: (row) => number(row.attempt)});
    columns.push({title: "state", text: state, cell: (row) => make("span", {class: "state " + row.state}, state(row))},
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
    const columns = [
      {title: "run", class: "name", text: (row) => row.name},
      {title: "", text: () => "", cell: (row) => copier(row.uri)},
      {title: "state", text: (row) => row.state.word, cell: (row) => make("span", {class: "badge " + row.state.word, title: row.state.text}, row.state.word)},
      {title: "step", number: true, value: (row) => row.step, text: (row) => number(row.step)},
      {title: "newest (UTC)", value: (row) => row.created, text: (row) => moment(row.created)},
      {title: "checkpoints", number: true, value: (row) => row.count, text: (row) => number(row.count)},
      {title: "size", number: true, value: (row) => row.size_bytes, text: (row) => bytes(row.size_bytes)},
      {title: "attempts", number: true, value: (row) => row.attempts, text: (row) => number(row.attempts)}];
    if (rows.some((row) => row.lost_steps)) columns.push({title: "steps done again", number: true, value: (row) => row.lost_steps, text: (row) => number(row.lost_steps)});
    if (rows.some((row) => row.lost_s !== null)) columns.push({title: "lost to saving, s", number: true, value: (row) => row.lost_s, text: (row) => number(row.lost_s)});
    if (rows.some((row) => row.from !== null)) columns.push({title: "began from", class: "name", text: (row) => row.from ?? ""});
    for (const name of metricNames(rows)) columns.push({title: "last " + name, number: true, value: (row) => row.metrics[name], text: (row) => number(row.metrics[name])});
    table("checkpoints", "Runs", columns, rows);
  }

  // ---- the whole

  head();
  if (facts.kind === "run") {
    const good = facts.checkpoints.filter((row) => row.state === "ok");
    const best = good.find((row) => row.marks.includes("best"));
    const newest = good.find((row) => row.marks.includes("newest"));
    const sum = facts.newest, told = facts.saving;
    const source = facts.attempts.length ? facts.attempts[0].from_name : null;
    cards([
      ["Newest checkpoint", newest ? "step " + number(newest.step) : "none", newest ? `${newest.name}, ${span(facts.written - newest.created)} old` : ""],
      ["Best by " + (facts.ranking.metric || ""), best ? number(best.metrics[facts.ranking.metric]) : "", best ? best.name : ""],
      ["Checkpoints", number(good.length), "kept: " + facts.keep],
      ["Size", bytes(facts.size_bytes), facts.new_bytes !== facts.size_bytes ? bytes(facts.new_bytes) + " on disk, the rest is shared" : ""],
      ["Starts", number(facts.attempts.length), told.lost_steps ? `${number(told.lost_steps)} steps done again` + (told.failure_s ? ", " + span(told.failure_s) : "") : ""],
      ["Began from", source === null ? "" : source.split("/").slice(-1)[0], source],
      ["Saves", number(told.saves), [told.lost_saves ? number(told.lost_saves) + " lost" : "", told.deleted ? number(told.deleted) + " deleted since" : ""].filter(Boolean).join(", ")],
      ["Lost to saving", told.lost_s.count ? span(told.lost_s.sum) : "", `training held ${span(told.held_s.sum)}`],
      ["Written", bytes(told.bytes_written), told.bytes_reused ? bytes(told.bytes_reused) + " shared instead" : ""],
      ["Reported rows", number(facts.reports), ""],
      ["Ranks", sum ? number(sum.world_size) : "", sum ? Object.entries(sum.versions).map(([name, version]) => `${name} ${version}`).join(", ") : ""],
    ]);
  }
  warnings();
  charts();
  if (facts.kind === "run") { saving(); lives(); checkpointTable(); } else runTable();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  page.append(make("footer", {}, `Written by holdfast page at ${moment(facts.written)} UTC from ${facts.uri}. ` +
    (facts.reload_s && facts.live ? `It loads itself again every ${facts.reload_s} s.` : "")));

  if (kept.scroll) scrollTo(0, kept.scroll);
  addEventListener("scroll", () => remember({scroll: scrollY}), {passive: true});
  if (facts.reload_s && facts.live) {
    const again = () => {
      // Not under somebody who types, selects or looks elsewhere.
      const busy = document.hidden || String(getSelection()) || (document.activeElement && document.activeElement.tagName === "INPUT" && document.activeElement.type === "search");
      if (busy) setTimeout(again, 1000);
      else location.reload();
    };
    setTimeout(again, facts.reload_s * 1000);
  }
})();
