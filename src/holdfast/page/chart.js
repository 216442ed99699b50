"use strict";
// Charts on canvas. A chart draws from the view that all charts of the page share: what x means, the range of x that is
// shown, smoothing, the scale of y, and where the crosshair stands. A change of the view marks charts as stale, and each
// frame draws the stale ones that can be seen. Nothing that is drawn changes the view, so no chart can wake another.

// ---- numbers as text

function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "" : String(value);
  return Number.isInteger(value) && Math.abs(value) < 1e15 ? value.toLocaleString("en-US") : String(Number(value.toPrecision(5)));
}

function bytes(count) {
  if (count === null || count === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return (at && count < 100 ? Number(count.toFixed(1)) : Math.round(count)) + " " + units[at];
}

function span(seconds) {
  if (!(seconds >= 0)) return "";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= size) return Number((seconds / size).toFixed(seconds < 10 * size ? 1 : 0)) + " " + unit;
  }
  return Number(seconds.toPrecision(seconds < 10 ? 2 : 3)) + " s";
}

function moment(seconds) {
  return seconds ? new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") : "";
}

// A label of an axis, short: 12k and 1.5M, but no letters for what is small.
function tick(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) { const by = letter === "k" ? 1e3 : unit; return Number((value / by).toPrecision(6)) + letter; }
  }
  if (size !== 0 && size < 1e-4) return value.toExponential().replace(/\.?0*e/, "e");
  return String(Number(value.toPrecision(10)));
}

// ---- ticks

const ROUND = [1, 2, 2.5, 5, 10];
const SPANS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

function pace(from, to, most, kind) {
  const raw = (to - from) / Math.max(1, most);
  if (kind === "time" && raw > 1) {
    const found = SPANS.find((one) => one >= raw);
    return found ?? pace(from / 604800, to / 604800, most) * 604800;
  }
  const unit = kind === "bytes" ? 1024 ** Math.max(0, Math.floor(Math.log(Math.max(to, 1)) / Math.log(1024))) : 1;
  const power = 10 ** Math.floor(Math.log10(raw / unit));
  const found = ROUND.find((one) => one * power * unit >= raw * 0.999) * power * unit;
  return kind === "whole" ? Math.max(1, Math.ceil(found)) : found;
}

function ticks(from, to, most, kind) {
  if (!(to > from)) return [from];
  const by = pace(from, to, most, kind), found = [];
  for (let at = Math.ceil(from / by - 1e-9); at * by <= to + by * 1e-9 && found.length < 50; at += 1) found.push(Number((at * by).toPrecision(12)));
  return found;
}

function logTicks(from, to, most) {
  const low = Math.floor(Math.log10(from)), high = Math.ceil(Math.log10(to)), every = Math.max(1, Math.ceil((high - low) / most));
  const found = [];
  for (let power = low; power <= high; power += every) {
    for (const one of high - low <= 2 ? [1, 2, 5] : [1]) found.push(one * 10 ** power);
  }
  const inside = found.filter((one) => one >= from * 0.999 && one <= to * 1.001);
  return inside.length >= 2 ? inside : ticks(from, to, most);
}

// ---- points

// The first place in an ascending list whose value is at least x.
function search(list, x) {
  let low = 0, high = list.length;
  while (low < high) { const middle = (low + high) >> 1; if (list[middle] < x) low = middle + 1; else high = middle; }
  return low;
}

function nearest(list, x) {
  const at = search(list, x);
  if (at === 0) return 0;
  if (at === list.length) return list.length - 1;
  return x - list[at - 1] <= list[at] - x ? at - 1 : at;
}

// The value of a row [step, seconds, epoch] of a clock at a step, between rows on the line between them.
function clockAt(clock, step, column) {
  if (!clock.length) return null;
  const steps = clock.steps || (clock.steps = clock.map((row) => row[0]));
  const at = search(steps, step);
  if (at === clock.length) return clock[at - 1][column];
  if (at === 0 || steps[at] === step) return clock[at][column];
  const one = clock[at - 1], other = clock[at];
  if (one[column] === null || other[column] === null) return null;
  return one[column] + (other[column] - one[column]) * (step - one[0]) / (other[0] - one[0]);
}

// An exponential mean in which the first points do not pull towards zero.
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, mass = 0;
  return values.map((value) => { sum = sum * weight + value * (1 - weight); mass = mass * weight + (1 - weight); return sum / mass; });
}

// ---- what all charts share

class View {
  constructor(kept, remember) {
    this.axis = kept.axis || "step";
    this.domain = kept.domain || null;
    this.smooth = kept.smooth || 0;
    this.log = Boolean(kept.log);
    this.hidden = new Set(kept.hidden || []);
    this.cursor = null;  // in the unit of x
    this.owner = null;  // the chart under the pointer
    this.charts = new Set();
    this.listeners = [];
    this.remember = remember;
    this.frame = 0;
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) { entry.target.chart.isSeen = entry.isIntersecting; if (entry.isIntersecting) this.schedule(); }
    }, {rootMargin: "200px"});
    this.sized = new ResizeObserver((entries) => { for (const entry of entries) entry.target.chart.isStale = true; this.schedule(); });
    addEventListener("beforeprint", () => { for (const chart of this.charts) chart.draw(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.change({}));
  }

  change(what) {
    if (what.axis && what.axis !== this.axis) what.domain = null;  // a range of steps means nothing in hours
    Object.assign(this, what);
    this.remember({axis: this.axis, domain: this.domain, smooth: this.smooth, log: this.log, hidden: [...this.hidden]});
    for (const chart of this.charts) chart.isStale = true;
    for (const listener of this.listeners) listener();
    this.schedule();
  }

  point(owner, cursor) {
    this.owner = owner;
    this.cursor = cursor;
    this.schedule();
  }

  schedule() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      for (const chart of this.charts) {
        if (!chart.isSeen) continue;
        if (chart.isStale) chart.draw();
        chart.drawCursor();
      }
      if (!performance.getEntriesByName("holdfast-drawn").length && [...this.charts].some((chart) => chart.drawn)) performance.mark("holdfast-drawn");
    });
  }

  x(step, clock) {
    return this.axis === "step" ? step : clockAt(clock, step, this.axis === "time" ? 1 : 2);
  }

  xText(x) {
    return this.axis === "time" ? span(x) + " in" : (this.axis === "epoch" ? "epoch " : "step ") + number(this.axis === "step" ? Math.round(x) : Number(x.toFixed(2)));
  }
}

// ---- a chart

class Chart {
  // box: the element that it fills. spec: {series: [{name, colour, dash, points, clock, run}], marks: [{step, kind, row}],
  // rules: [{step, text}], kind: "" | "seconds" | "bytes", zero, clock, tip(chart, hit, x), readout: an element, open(row)}.
  constructor(box, spec, view) {
    Object.assign(this, {box, spec, view, isStale: true, isSeen: false, hits: []});
    box.chart = this;
    this.base = document.createElement("canvas");
    this.top = document.createElement("canvas");
    box.append(this.base, this.top);
    this.listen();
    view.charts.add(this);
    view.seen.observe(box);
    view.sized.observe(box);
  }

  // The lines that are shown, with x and y of each point in the unit of the axes.
  lines() {
    const {view, spec} = this;
    const key = view.axis + view.smooth;
    return spec.series.filter((one) => one.points.length && !(one.run !== undefined && view.hidden.has(one.run))).map((one) => {
      if (one.key !== key) {
        const usable = one.points.map(([step, value]) => [view.x(step, one.clock), value, step]).filter(([x]) => x !== null);
        Object.assign(one, {key, xs: usable.map((point) => point[0]), steps: usable.map((point) => point[2])});
        one.raw = usable.map((point) => point[1]);
        one.ys = smoothed(one.raw, spec.plain ? 0 : view.smooth);
      }
      return one;
    });
  }

  domain(lines) {
    if (this.view.domain) return this.view.domain;
    let low = Infinity, high = -Infinity;
    for (const one of this.spec.extent ? this.spec.extent() : lines) if (one.xs.length) { low = Math.min(low, one.xs[0]); high = Math.max(high, one.xs[one.xs.length - 1]); }
    for (const mark of this.placedMarks()) { low = Math.min(low, mark.x); high = Math.max(high, mark.x); }
    if (!(low <= high)) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  placedMarks() {
    const {view, spec} = this;
    return (spec.marks || []).map((mark) => ({...mark, x: view.x(mark.step, spec.clock)})).filter((mark) => mark.x !== null);
  }

  range(lines, from, to) {
    let low = Infinity, high = -Infinity, least = Infinity;
    for (const one of lines) {
      const begin = Math.max(0, search(one.xs, from) - 1), end = Math.min(one.xs.length, search(one.xs, to) + 1);
      for (let at = begin; at < end; at += 1) {
        const value = one.ys[at];
        low = Math.min(low, value);
        high = Math.max(high, value);
        if (value > 0) least = Math.min(least, value);
      }
    }
    if (!(low <= high)) return {low: 0, high: 1, isLog: false};
    if (this.view.log && !this.spec.plain && low > 0) return {low: low === high ? low / 2 : low, high: low === high ? high * 2 : high, isLog: true};
    if (this.spec.zero) low = Math.min(0, low);
    if (low === high) { const by = Math.abs(low) * 0.1 || 0.5; return {low: this.spec.zero ? low : low - by, high: high + by, isLog: false}; }
    const room = (high - low) * 0.05;
    return {low: this.spec.zero && low === 0 ? 0 : low - room, high: high + room, isLog: false};
  }

  colours() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue("--" + name).trim();
  }

  prepare(canvas) {
    const scale = Math.min(3, devicePixelRatio || 1), width = this.box.clientWidth, height = this.box.clientHeight;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px " + getComputedStyle(document.body).fontFamily;
    return {pen, width, height};
  }

  draw() {
    const {view, spec} = this, colour = this.colours();
    const {pen, width, height} = this.prepare(this.base);
    if (width < 40) return;
    this.isStale = false;
    const lines = this.drawn = this.lines();
    const [from, to] = this.domain(lines);
    const {low, high, isLog} = this.range(lines, from, to);
    const text = (value) => spec.kind === "bytes" ? bytes(value) : spec.kind === "seconds" ? tick(value) + " s" : tick(value);
    const rows = isLog ? logTicks(low, high, 5) : ticks(low, high, 4, spec.kind);
    const left = Math.max(28, ...rows.map((value) => pen.measureText(text(value)).width)) + 8, pad = 8;  // so that no mark is cut
    const area = {left: left + pad, right: width - 4 - pad, top: 4 + pad, bottom: height - 22 - pad};
    const toY = isLog ? (value) => area.bottom - (Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low)) * (area.bottom - area.top)
      : (value) => area.bottom - (value - low) / (high - low) * (area.bottom - area.top);
    const toX = (x) => area.left + (x - from) / (to - from) * (area.right - area.left);
    Object.assign(this, {area, toX, toY, from, to});

    pen.textBaseline = "middle";
    pen.lineWidth = 1;
    for (const value of rows) {
      const y = Math.round(toY(value)) + 0.5;
      pen.strokeStyle = colour("grid");
      pen.beginPath(); pen.moveTo(left, y); pen.lineTo(width - 4, y); pen.stroke();
      pen.fillStyle = colour("soft");
      pen.textAlign = "right";
      pen.fillText(text(value), left - 6, y);
    }
    const kind = view.axis === "time" ? "time" : view.axis === "step" ? "whole" : "";
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    const columns = ticks(from, to, Math.max(2, Math.floor((area.right - area.left) / 72)), kind);
    for (const value of columns) {
      const x = Math.round(toX(value)) + 0.5, label = kind === "time" ? span(value) : tick(value), half = pen.measureText(label).width / 2;
      pen.strokeStyle = colour("grid");
      pen.beginPath(); pen.moveTo(x, height - 22); pen.lineTo(x, height - 18); pen.stroke();
      pen.fillText(label, Math.min(Math.max(x, half), width - half), height - 6);
    }
    pen.strokeStyle = colour("line");
    pen.beginPath(); pen.moveTo(left, height - 21.5); pen.lineTo(width - 4, height - 21.5); pen.stroke();

    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width - left, height - 21);
    pen.clip();
    pen.setLineDash([3, 3]);
    pen.strokeStyle = colour("warn");
    for (const rule of spec.rules || []) {
      const x = view.x(rule.step, spec.clock);
      if (x === null || x < from || x > to) continue;
      pen.beginPath(); pen.moveTo(Math.round(toX(x)) + 0.5, 2); pen.lineTo(Math.round(toX(x)) + 0.5, height - 22); pen.stroke();
    }
    pen.setLineDash([]);
    for (const one of lines) {
      const begin = Math.max(0, search(one.xs, from) - 1), end = Math.min(one.xs.length, search(one.xs, to) + 1);
      const stroke = (values, alpha, thick) => {
        pen.globalAlpha = alpha;
        pen.lineWidth = thick;
        pen.lineJoin = "round";
        pen.strokeStyle = pen.fillStyle = colour(one.colour);
        pen.setLineDash(one.dash || []);
        pen.beginPath();
        for (let at = begin; at < end; at += 1) pen.lineTo(toX(one.xs[at]), toY(values[at]));
        pen.stroke();
        pen.setLineDash([]);
        if (end - begin <= (spec.plain ? 60 : 1)) for (let at = begin; at < end; at += 1) { pen.beginPath(); pen.arc(toX(one.xs[at]), toY(values[at]), 2, 0, 7); pen.fill(); }
        pen.globalAlpha = 1;
      };
      if (one.ys !== one.raw) stroke(one.raw, 0.25, 1);
      stroke(one.ys, 1, 1.6);
    }
    this.hits = [];
    const marks = this.placedMarks().filter((mark) => mark.x >= from && mark.x <= to);
    const main = lines[0];
    const crowded = marks.length > (area.right - area.left) / 12;
    for (const mark of main && main.xs.length ? [...marks].sort((a, b) => ORDER[a.kind] - ORDER[b.kind]) : []) {
      // Where the curve was at that step: on the line between its points.
      const after = Math.min(search(main.xs, mark.x), main.xs.length - 1), before = Math.max(0, after - 1);
      const share = main.xs[after] > main.xs[before] ? Math.min(1, Math.max(0, (mark.x - main.xs[before]) / (main.xs[after] - main.xs[before]))) : 1;
      const value = main.ys[before] + (main.ys[after] - main.ys[before]) * share;
      const x = toX(mark.x), y = toY(value);
      if (!Number.isFinite(y)) continue;
      symbol(pen, mark.kind, x, y, colour, crowded && mark.kind !== "best");
      this.hits.push({x, y, mark});
    }
    pen.restore();
  }

  drawCursor() {
    const {view, spec} = this;
    const {pen, height} = this.prepare(this.top);
    const lines = this.drawn || [], x = view.cursor;
    if (spec.readout) {
      const last = lines.length === 1 && lines[0].ys.length ? lines[0].ys[lines[0].ys.length - 1] : null;
      const there = x !== null && lines.length === 1 && lines[0].ys.length ? lines[0].ys[nearest(lines[0].xs, x)] : last;
      spec.readout.textContent = there === null ? "" : this.valueText(there);
    }
    const colour = this.colours();
    if (this.dragged) {
      pen.fillStyle = colour("accent");
      pen.globalAlpha = 0.15;
      pen.fillRect(Math.min(...this.dragged), 0, Math.abs(this.dragged[1] - this.dragged[0]), height - 22);
      pen.globalAlpha = 1;
    }
    if (x === null || !this.area || x < this.from || x > this.to) return;
    const at = Math.round(this.toX(x)) + 0.5;
    pen.strokeStyle = colour("soft");
    pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(at, 2); pen.lineTo(at, height - 22); pen.stroke();
    for (const one of lines) {
      if (!one.xs.length || one.xs[0] > x + (this.to - this.from) * 0.02 || one.xs[one.xs.length - 1] < x - (this.to - this.from) * 0.02) continue;
      const place = nearest(one.xs, x), px = this.toX(one.xs[place]), py = this.toY(one.ys[place]);
      pen.fillStyle = colour(one.colour);
      pen.strokeStyle = colour("panel");
      pen.lineWidth = 1.5;
      pen.beginPath(); pen.arc(px, py, 3.5, 0, 7); pen.fill(); pen.stroke();
    }
    if (this.hit) {
      pen.strokeStyle = colour("front");
      pen.lineWidth = 1.5;
      pen.beginPath(); pen.arc(this.hit.x, this.hit.y, 8, 0, 7); pen.stroke();
    }
  }

  valueText(value) {
    return this.spec.kind === "bytes" ? bytes(value) : this.spec.kind === "seconds" ? span(value) : number(value);
  }

  // -- the pointer, the wheel and the keys

  listen() {
    const {top, view, spec, box} = this;
    const inside = (event) => { const place = top.getBoundingClientRect(); return [event.clientX - place.left, event.clientY - place.top]; };
    const toValue = (px) => this.from + (Math.min(Math.max(px, this.area.left), this.area.right) - this.area.left) / (this.area.right - this.area.left) * (this.to - this.from);
    const look = (event) => {
      if (this.isStale) this.draw();  // so that the tip says what the view has become, between two frames as well
      if (!this.area) return;
      const [px, py] = inside(event);
      let hit = null, best = 100;
      for (const one of this.hits) { const far = (one.x - px) ** 2 + (one.y - py) ** 2; if (far <= best) { best = far; hit = one; } }
      this.hit = hit;
      top.style.cursor = hit && spec.open ? "pointer" : "crosshair";
      const value = hit ? hit.mark.x : toValue(px);
      view.point(this, value);
      spec.tip(this, hit && hit.mark, value, event.clientX, event.clientY);
    };
    const leave = () => { this.hit = null; view.point(null, null); spec.tip(null); };
    top.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch" || !this.area) return;
      top.setPointerCapture(event.pointerId);
      const [px] = inside(event);
      this.dragged = [px, px];
    });
    top.addEventListener("pointermove", (event) => {
      if (this.dragged) this.dragged[1] = Math.min(Math.max(inside(event)[0], this.area.left), this.area.right);
      look(event);
    });
    const end = (event) => {
      const dragged = this.dragged;
      this.dragged = null;
      if (!dragged) return;
      const [one, other] = [Math.min(...dragged), Math.max(...dragged)].map(toValue);
      if (event.type === "pointerup" && Math.abs(dragged[1] - dragged[0]) > 4 && other > one) view.change({domain: [one, other]});
      else view.schedule();
    };
    top.addEventListener("pointerup", end);
    top.addEventListener("pointercancel", end);
    top.addEventListener("pointerleave", leave);
    top.addEventListener("click", () => { if (this.hit && spec.open) spec.open(this.hit.mark.row); });
    top.addEventListener("dblclick", () => view.change({domain: null}));
    top.addEventListener("wheel", (event) => {
      if (!(event.ctrlKey || event.metaKey) || !this.area) return;  // the page scrolls
      event.preventDefault();
      const whole = view.domain, anchor = toValue(inside(event)[0]), by = Math.exp(Math.min(60, Math.max(-60, event.deltaY)) * 0.005);
      const next = [anchor - (anchor - this.from) * by, anchor + (this.to - anchor) * by];
      if (by > 1 && !whole) return;
      const all = this.whole();
      next[0] = Math.max(next[0], all[0]);
      next[1] = Math.min(next[1], all[1]);
      if (!(next[1] - next[0] > (all[1] - all[0]) * 1e-6)) return;
      view.change({domain: next[0] <= all[0] && next[1] >= all[1] ? null : next});
    }, {passive: false});
    box.addEventListener("keydown", (event) => {
      if (this.isStale) this.draw();
      const by = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
      const line = (this.drawn || [])[0];
      if (event.key === "Escape" && view.domain) { view.change({domain: null}); return; }
      if (event.key === "Enter" && this.hit && spec.open) { event.preventDefault(); spec.open(this.hit.mark.row); return; }
      if (by === undefined || !line || !line.xs.length) return;
      event.preventDefault();
      const jump = Math.max(1, Math.round(line.xs.length / 100)), now = view.cursor === null ? (by < 0 ? line.xs.length : -1) : nearest(line.xs, view.cursor);
      const place = Math.min(line.xs.length - 1, Math.max(0, Number.isFinite(by) ? now + by * (event.shiftKey ? 10 * jump : jump) : by < 0 ? 0 : line.xs.length - 1));
      const value = line.xs[place], rect = top.getBoundingClientRect();
      this.hit = this.hits.find((one) => Math.abs(one.x - this.toX(value)) < 4) || null;
      view.point(this, value);
      spec.tip(this, this.hit && this.hit.mark, value, rect.left + this.toX(value), rect.top + 40);
    });
    box.addEventListener("blur", leave);
  }

  whole() {
    const kept = this.view.domain;
    this.view.domain = null;
    const found = this.domain(this.lines());
    this.view.domain = kept;
    return found;
  }
}

// ---- marks

const ORDER = {deleted: 0, kept: 1, bad: 2, best: 3};

function symbol(pen, kind, x, y, colour, small) {
  pen.fillStyle = colour({kept: "accent", best: "good", deleted: "panel", bad: "bad"}[kind]);
  pen.strokeStyle = colour({kept: "panel", best: "panel", deleted: "soft", bad: "bad"}[kind]);
  pen.lineWidth = kind === "bad" ? 2 : 1.25;
  pen.beginPath();
  const r = {kept: 4, best: 6, deleted: 3, bad: 4}[kind] * (small ? 0.65 : 1);
  if (kind === "best") { pen.moveTo(x, y - r); pen.lineTo(x + r, y); pen.lineTo(x, y + r); pen.lineTo(x - r, y); pen.closePath(); }
  else if (kind === "bad") { pen.moveTo(x - r, y - r); pen.lineTo(x + r, y + r); pen.moveTo(x + r, y - r); pen.lineTo(x - r, y + r); }
  else pen.arc(x, y, r, 0, 7);
  if (kind !== "bad") pen.fill();
  pen.stroke();
}
