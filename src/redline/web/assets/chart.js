// Charts on canvas. All charts over one axis share its range and the position under the pointer. A chart draws at most one
// column per pixel, from the least to the greatest of the values there, so ten thousand steps cost what a screen can show.

const LEFT = 62, RIGHT = 6, BOTTOM = 20, TOP = 10;

class Axis {
  // `format` names a value, `ticks` several along the axis.
  constructor(format, ticks) {
    this.format = format;
    this.ticks = ticks;
    this.x = [];
    this.marks = [];
    this.thinned = null;
    this.zoomed = null;
    this.hover = null;
    this.charts = [];
    this.onzoom = () => {};
    this.pending = false;
  }

  // How many rows the point stands for: buckets come first.
  sizeAt(index) {
    return this.thinned && index < this.thinned.points ? this.thinned.size : 1;
  }

  rowsIn(first, end) {
    const buckets = Math.max(0, Math.min(end, this.thinned?.points ?? 0) - first);
    return buckets * (this.thinned?.size ?? 1) + end - first - buckets;
  }

  nameAt(index) {
    const size = this.sizeAt(index);
    return this.format(this.x[index], size === 1 ? this.x[index] : index ? this.x[index - 1] + 1 : this.x[0] - size + 1);
  }

  // From the first value shown to the last.
  get span() {
    const last = this.x.length - 1;
    return last < 0 ? [0, 1] : this.zoomed ?? [this.x[0], this.x[last]];
  }

  indexAt(x) {
    let low = 0, high = this.x.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.x[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - this.x[low - 1] < this.x[low] - x ? low - 1 : low;
  }

  // The indices shown, the second not included.
  get visible() {
    if (!this.x.length) return [0, 0];
    const [from, to] = this.span;
    return [this.indexAt(from), this.indexAt(to) + 1];
  }

  point(index) {
    if (index === this.hover) return;
    this.hover = index;
    this.request();
  }

  zoom(range) {
    this.zoomed = range;
    this.onzoom(range);
    this.redraw();
  }

  redraw() {
    for (const chart of this.charts) chart.stale = true;
    this.request();
  }

  // Several changes in a frame are drawn once, and only what is on the screen.
  request() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      for (const chart of this.charts) chart.refresh();
    });
  }
}

const arriving = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.chart.arrive(isIntersecting);
}, { rootMargin: "150px" });
const resizing = new ResizeObserver((entries) => {
  for (const { target } of entries) target.chart.resize();
});

// On paper nothing scrolls into view, a sheet has its own width, and the ink is sharper and on white. A canvas is empty once it
// has a new size, so all charts are drawn anew.
const everyChart = [];
const PRINT_SCALE = 3;
let isPrinting = false;

function print_(begins) {
  isPrinting = begins;
  document.documentElement.classList.toggle("printing", begins);
  palette = new Map();
  for (const chart of everyChart) {
    chart.width = null;
    chart.resize();
  }
}

window.addEventListener("beforeprint", () => print_(true));
window.addEventListener("afterprint", () => print_(false));

class Chart {
  constructor(axis, title, note, { wide = false } = {}) {
    this.axis = axis;
    this.title = title;
    this.readings = h("ul", { class: "readings" });
    this.base = h("canvas", { role: "img", "aria-label": title });
    this.over = h("canvas", { class: "over", "aria-hidden": "true" });
    this.plot = h("div", { class: "plot", tabindex: "0", "aria-label": `${title}: arrow keys move, Escape leaves the zoom` }, this.base, this.over);
    this.plot.chart = this;
    this.element = h("figure", { class: wide ? "chart wide" : "chart" },
      h("figcaption", {}, h("h3", {}, title), note ? h("small", {}, note) : null, this.readings), this.plot);
    this.stale = true;
    this.isNear = false;
    this.drag = null;
    axis.charts.push(this);
    everyChart.push(this);
    this.listen();
    arriving.observe(this.plot);
    resizing.observe(this.plot);
  }

  listen() {
    const at = (event) => event.clientX - this.plot.getBoundingClientRect().left;
    this.plot.addEventListener("pointermove", (event) => {
      if (this.drag) this.drag.to = at(event);
      this.axis.point(this.axis.x.length ? this.axis.indexAt(this.valueAt(at(event))) : null);
      if (this.drag) this.axis.request();
    });
    this.plot.addEventListener("pointerleave", () => this.drag || this.axis.point(null));
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.plot.setPointerCapture(event.pointerId);
      this.drag = { from: at(event), to: at(event) };
    });
    this.plot.addEventListener("pointerup", () => this.drop());
    this.plot.addEventListener("pointercancel", () => { this.drag = null; });
    this.plot.addEventListener("dblclick", () => this.axis.zoom(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const [first, end] = this.axis.visible;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    if (event.key === "Escape") this.axis.zoom(null);
    if (!(event.key in moves) || !this.axis.x.length) return;
    event.preventDefault();
    this.axis.point(Math.max(first, Math.min(end - 1, (this.axis.hover ?? end - 1) + moves[event.key])));
  }

  // A drag of some pixels chooses a range; less is a click.
  drop() {
    const drag = this.drag;
    this.drag = null;
    if (!drag || Math.abs(drag.to - drag.from) < 6) return;
    const [from, to] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)].map((x) => this.axis.x[this.axis.indexAt(this.valueAt(x))]);
    if (to > from) this.axis.zoom([from, to]);
  }

  arrive(isNear) {
    this.isNear = isNear;
    if (isNear) this.refresh();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.plot, scale = isPrinting ? PRINT_SCALE : window.devicePixelRatio || 1;
    if (width === this.width && height === this.height && scale === this.scale) return;
    Object.assign(this, { width, height, scale, stale: true });
    for (const canvas of [this.base, this.over]) [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    this.refresh();
  }

  refresh() {
    if (!(this.isNear || isPrinting) || !this.width) return;
    if (this.stale) {
      this.stale = false;
      this.draw();
    }
    this.drawOver();
  }

  // ── geometry ──

  // Room on both sides of the first and the last value, for charts whose values have a width.
  get margin() { return 0; }

  get domain() {
    const [from, to] = this.axis.span, margin = this.margin || (from === to ? 0.5 : 0);
    return [from - margin, to + margin];
  }

  valueAt(pixel) {
    const [from, to] = this.domain;
    return from + ((pixel - LEFT) / (this.width - LEFT - RIGHT)) * (to - from);
  }

  pixelOf(x) {
    const [from, to] = this.domain;
    return LEFT + ((x - from) / (to - from)) * (this.width - LEFT - RIGHT);
  }

  heightOf(y) {
    const [low, high] = this.range;
    return TOP + (1 - (y - low) / (high - low)) * (this.height - TOP - BOTTOM);
  }

  // ── drawing ──

  clear(canvas) {
    const context = canvas.getContext("2d");
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    if (!isPrinting) context.clearRect(0, 0, this.width, this.height); // on paper, what is cleared is white and hides what lies under it
    context.font = `11px ${colour("text")}`;
    context.lineJoin = "round";
    return context;
  }

  grid(context, low, high) {
    const unit = this.format === bytes ? 1024 ** Math.floor(Math.log(high || 1) / Math.log(1024)) : 1;
    const ticks = niceTicks(low / unit, high / unit, 3).map((tick) => tick * unit);
    this.range = [Math.min(low, ticks[0]), Math.max(high, ticks.at(-1))];
    context.strokeStyle = colour("rule");
    context.fillStyle = colour("muted");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const texts = ticksOf(ticks, this.format);
    for (const [k, tick] of ticks.entries()) {
      const y = Math.round(this.heightOf(tick)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(this.width, y);
      context.stroke();
      context.fillText(texts[k], LEFT - 8, y);
    }
    this.gridX(context);
  }

  gridX(context) {
    if (!this.axis.x.length) return;
    const [from, to] = this.axis.span;
    context.textBaseline = "alphabetic";
    let free = LEFT;
    const ticks = niceTicks(from, to, this.width / 90), texts = this.axis.ticks(ticks);
    for (const [k, tick] of ticks.entries()) {
      if (tick < from || tick > to) continue;
      const text = texts[k], half = context.measureText(text).width / 2;
      const x = Math.max(LEFT + half, Math.min(this.width - half, this.pixelOf(tick)));
      if (x - half < free) continue;
      free = x + half + 12;
      context.textAlign = "center";
      context.fillText(text, x, this.height - 4);
    }
    this.marks(context);
  }

  // Where alerts were raised.
  marks(context) {
    const [from, to] = this.axis.span;
    context.fillStyle = colour("accent");
    for (const mark of this.axis.marks) {
      if (mark < from || mark > to) continue;
      const x = this.pixelOf(mark);
      context.beginPath();
      context.moveTo(x - 3.5, 0);
      context.lineTo(x + 3.5, 0);
      context.lineTo(x, 5);
      context.fill();
    }
  }

  drawOver() {
    const context = this.clear(this.over), { axis } = this;
    this.read(axis.hover ?? null);
    if (this.drag) {
      context.fillStyle = colour("muted");
      context.globalAlpha = 0.14;
      context.fillRect(Math.min(this.drag.from, this.drag.to), TOP, Math.abs(this.drag.to - this.drag.from), this.height - TOP - BOTTOM);
      context.globalAlpha = 1;
    }
    if (axis.hover === null || axis.hover >= axis.x.length || !this.range) return;
    const x = Math.round(this.pixelOf(axis.x[axis.hover])) + 0.5;
    if (x < LEFT - 1 || x > this.width + 1) return;
    context.strokeStyle = colour("faint");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, TOP);
    context.lineTo(x, this.height - BOTTOM);
    context.stroke();
    this.point(context, x, axis.hover);
    const text = axis.nameAt(axis.hover), half = context.measureText(text).width / 2 + 6;
    const middle = Math.max(LEFT + half, Math.min(this.width - half, x));
    context.fillStyle = colour("paper");
    context.fillRect(middle - half, this.height - BOTTOM + 4, 2 * half, BOTTOM - 4);
    context.fillStyle = colour("ink");
    context.textAlign = "center";
    context.fillText(text, middle, this.height - 4);
  }

  point() {}

  show(readings) {
    const text = JSON.stringify(readings);
    if (text === this.read_) return;
    this.read_ = text;
    this.readings.replaceChildren(...readings.map(({ swatch, label, value }) =>
      h("li", {}, swatch ? h("span", { class: `swatch ${swatch}` }) : null, label ? h("span", { class: "label" }, label) : null, value)));
  }
}

// ── lines ──

class LineChart extends Chart {
  // `lines`: [{label, key, colour, values: () => array, smooth}]; `dots`: () => [[x, y], …], drawn on top.
  constructor(axis, title, note, lines, { format = number, zero = false, dots = null, ...options } = {}) {
    super(axis, title, note, options);
    Object.assign(this, { lines, format, zero, dots });
  }

  draw() {
    const context = this.clear(this.base), [first, end] = this.axis.visible;
    const dots = this.visibleDots();
    let low = this.zero ? 0 : Infinity, high = this.zero ? 0 : -Infinity;
    for (const line of this.lines) {
      const values = line.values(), band = line.band?.();
      for (let i = first; i < end; i++) {
        const least = band?.low[i] ?? values[i], greatest = band?.high[i] ?? values[i];
        if (least < low) low = least;
        if (greatest > high) high = greatest;
      }
    }
    for (const [, y] of dots) [low, high] = [Math.min(low, y), Math.max(high, y)];
    if (!(low <= high)) {
      context.fillStyle = colour("faint");
      context.fillText("nothing yet", LEFT, this.height / 2);
      this.range = null;
      return;
    }
    if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    this.grid(context, low, high);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, this.width - LEFT, this.height - BOTTOM + 2);
    context.clip();
    for (const line of this.lines) this.line(context, line, first, end);
    context.restore();
    for (const [x, y] of dots) this.dot(context, Math.max(LEFT, this.pixelOf(x)), this.heightOf(y), colour("accent"));
  }

  visibleDots() {
    const [from, to] = this.axis.zoomed ?? [-Infinity, Infinity];
    return (this.dots?.() ?? []).filter(([x, y]) => x >= from && x <= to && Number.isFinite(y));
  }

  line(context, line, first, end) {
    const values = line.values(), paint = colour(line.colour ?? "generation");
    context.strokeStyle = context.fillStyle = paint;
    const crowded = end - first > 2 * (this.width - LEFT), band = line.band?.(), wide = band && first < band.low.length;
    if (crowded) this.band(context, values, band, first, end);
    else if (wide) this.area(context, values, band, first, end);
    if (line.smooth || crowded || wide) {
      if (!crowded && !wide) {
        context.globalAlpha = 0.32;
        context.lineWidth = 1;
        this.path(context, values, first, end);
        context.globalAlpha = 1;
      }
      context.lineWidth = 1.75;
      this.path(context, smoothed(values, this.axis.rowsIn(first, end), this.axis), first, end, true);
    } else {
      context.lineWidth = 1.5;
      this.path(context, values, first, end);
    }
  }

  // A value that is not there leaves a gap, or is bridged.
  path(context, values, first, end, bridged = false) {
    const stride = Math.max(1, Math.floor((end - first) / (2 * this.width)));
    context.beginPath();
    let pen = false, alone = null;
    for (let i = first; i < end; i += stride) {
      const value = values[i];
      if (!Number.isFinite(value)) {
        pen &&= bridged;
        continue;
      }
      const x = this.pixelOf(this.axis.x[i]), y = this.heightOf(value);
      if (pen) context.lineTo(x, y); else context.moveTo(x, y);
      alone = pen ? null : [x, y];
      pen = true;
    }
    context.stroke();
    if (alone && end - first === 1) this.dot(context, ...alone, context.strokeStyle);
  }

  // One stroke per pixel, from the least to the greatest value there.
  band(context, values, band, first, end) {
    context.globalAlpha = 0.38;
    let column = -1, low = Infinity, high = -Infinity;
    const flush = () => {
      if (low > high) return;
      const top = this.heightOf(high), bottom = this.heightOf(low);
      context.fillRect(column, top - 0.5, 1, bottom - top + 1);
    };
    for (let i = first; i < end; i++) {
      const x = Math.floor(this.pixelOf(this.axis.x[i]));
      if (x !== column) {
        flush();
        [column, low, high] = [x, Infinity, -Infinity];
      }
      const least = band?.low[i] ?? values[i], greatest = band?.high[i] ?? values[i];
      if (least < low) low = least;
      if (greatest > high) high = greatest;
    }
    flush();
    context.globalAlpha = 1;
  }

  // The same where there are fewer points than pixels: from each point to the next.
  area(context, values, band, first, end) {
    const shown = [];
    for (let i = first; i < end; i++) if (Number.isFinite(values[i])) shown.push([this.pixelOf(this.axis.x[i]), band.low[i] ?? values[i], band.high[i] ?? values[i]]);
    context.globalAlpha = 0.3;
    context.beginPath();
    for (const [x, , greatest] of shown) context.lineTo(x, this.heightOf(greatest) - 0.5);
    for (const [x, least] of shown.reverse()) context.lineTo(x, this.heightOf(least) + 0.5);
    context.fill();
    context.globalAlpha = 1;
  }

  dot(context, x, y, paint) {
    context.fillStyle = colour("paper");
    context.beginPath();
    context.arc(x, y, 5, 0, 7);
    context.fill();
    context.fillStyle = paint;
    context.beginPath();
    context.arc(x, y, 3.2, 0, 7);
    context.fill();
  }

  point(context, x, index) {
    for (const line of this.lines) {
      const value = line.values()[index];
      if (Number.isFinite(value)) this.dot(context, x, this.heightOf(value), colour(line.colour ?? "generation"));
    }
  }

  read(index) {
    const several = this.lines.length > 1 || this.dots;
    const readings = this.lines.map((line) => {
      const values = line.values(), at = index ?? lastFinite(values);
      return { swatch: several ? line.swatch ?? "p-generation" : null, label: several ? line.label : null, value: this.format(values[at]) };
    });
    const near = index === null ? this.dots?.().at(-1) : this.dots?.().find(([x]) => x === this.axis.x[index]);
    if (near) readings.push({ swatch: "p-accent", label: "held out", value: this.format(near[1]) });
    this.show(readings);
  }
}

// ── stacks ──

class StackChart extends Chart {
  // `layers`: () => [{label, swatch, colour, hatched, values}], from the bottom up; `bars`: a value has the width of a step.
  constructor(axis, title, note, layers, { format = number, bars = false, ...options } = {}) {
    super(axis, title, note, { wide: true, ...options });
    Object.assign(this, { layers, format, bars });
  }

  get margin() { return this.bars ? 0.5 : 0; }

  draw() {
    const context = this.clear(this.base), [first, end] = this.axis.visible, layers = this.layers();
    const columns = this.columns(layers, first, end);
    const high = columns.reduce((most, column) => Math.max(most, column.total), 0);
    this.range = null;
    if (!high) return;
    this.grid(context, 0, high);
    const base = this.heightOf(0);
    for (const [k, layer] of layers.entries()) {
      context.fillStyle = layer.hatched ? hatch(context, layer.colour, this.scale) : colour(layer.colour);
      for (const column of columns) {
        const top = this.heightOf(column.upTo[k]), bottom = k ? this.heightOf(column.upTo[k - 1]) : base;
        if (bottom - top > 0.05) context.fillRect(column.x, top, column.width, bottom - top);
      }
    }
  }

  // As many as there are values, or one for each pixel with the mean of those that fall on it.
  columns(layers, first, end) {
    const found = [], x = this.axis.x;
    for (let i = first; i < end;) {
      const left = this.bars ? this.pixelOf((i && this.axis.sizeAt(i) > 1 ? x[i - 1] + 1 : x[i]) - 0.5) : this.pixelOf(x[i]);
      let next = i + 1;
      while (next < end && (this.bars ? this.pixelOf(x[next] + 0.5) : this.pixelOf(x[next])) - left < 1) next += 1;
      const right = this.bars ? this.pixelOf(x[next - 1] + 0.5) : next < end ? this.pixelOf(x[next]) : left + 1;
      const upTo = [];
      let total = 0;
      for (const layer of layers) {
        let sum = 0;
        for (let j = i; j < next; j++) sum += layer.values[j] || 0;
        total += sum / (next - i);
        upTo.push(total);
      }
      // Whole pixels: between two halves the paper would shine through.
      const snap = (edge) => Math.round(edge * this.scale) / this.scale, gap = this.bars && right - left > 4 ? 1 : 0;
      found.push({ x: snap(left), width: Math.max(snap(right) - snap(left) - gap, 1 / this.scale), total, upTo });
      i = next;
    }
    return found;
  }

  read(index) {
    const layers = this.layers(), [first, end] = this.axis.visible;
    const readings = layers.map((layer) => ({ swatch: layer.swatch, label: layer.label, value: this.format(index === null ? mean(layer.values, first, end, (i) => this.axis.sizeAt(i)) : layer.values[index] || 0) }));
    this.show(readings.filter((reading, k) => index === null || layers[k].values[index] > 0));
  }
}

// ── helpers of drawing ──

function niceTicks(low, high, count) {
  const span = high - low || 1, rough = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough) ?? 10 * power;
  const ticks = [];
  for (let k = Math.floor(low / step + 1e-9); k * step <= high + step * 1e-9 || ticks.length < 2; k++) ticks.push(+(k * step).toPrecision(12));
  if (ticks.at(-1) < high - step * 0.15) ticks.push(+(ticks.at(-1) + step).toPrecision(12));
  return ticks;
}

// An exponential mean forward and back, so that the line does not lag behind what it smooths.
const smoothing = new WeakMap();

function smoothed(values, shown, axis) {
  const known = smoothing.get(values);
  if (known?.length === values.length && known.shown === shown) return known.line;
  const weight = (i) => 1 - Math.exp(-axis.sizeAt(i) / Math.max(1, shown / 40)), line = new Float64Array(values.length).fill(NaN);
  let level = NaN;
  for (let i = 0; i < values.length; i++) if (Number.isFinite(values[i])) line[i] = level = Number.isNaN(level) ? values[i] : level + weight(i) * (values[i] - level);
  level = NaN;
  for (let i = values.length - 1; i >= 0; i--) if (Number.isFinite(line[i])) line[i] = level = Number.isNaN(level) ? line[i] : level + weight(i) * (line[i] - level);
  smoothing.set(values, { length: values.length, shown, line });
  return line;
}

function lastFinite(values) {
  for (let i = values.length - 1; i >= 0; i--) if (Number.isFinite(values[i])) return i;
  return -1;
}

function mean(values, first, end, weight = () => 1) {
  let sum = 0, total = 0;
  for (let i = first; i < end; i++) {
    sum += weight(i) * (values[i] || 0);
    total += weight(i);
  }
  return total ? sum / total : NaN;
}

let palette = new Map();

function colour(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return palette.get(name);
}

function hatch(context, name, scale) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(6 * scale);
  const drawing = tile.getContext("2d");
  drawing.scale(scale, scale);
  drawing.globalAlpha = 0.45;
  drawing.fillStyle = colour(name);
  drawing.fillRect(0, 0, 6, 6);
  drawing.globalAlpha = 1;
  drawing.strokeStyle = colour(name);
  drawing.lineWidth = 2;
  for (const shift of [-6, 0, 6]) {
    drawing.beginPath();
    drawing.moveTo(shift, 6);
    drawing.lineTo(shift + 6, 0);
    drawing.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

function spark(canvas, values, name = "generation") {
  const scale = window.devicePixelRatio || 1, width = 160, height = 24;
  [canvas.width, canvas.height] = [width * scale, height * scale];
  const finite = values.filter(Number.isFinite), low = Math.min(...finite), high = Math.max(...finite);
  if (finite.length < 2) return;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.strokeStyle = colour(name);
  context.lineWidth = 1.4;
  context.lineJoin = "round";
  context.beginPath();
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) return;
    const x = 1 + (i / (values.length - 1)) * (width - 2), y = high > low ? 2 + (1 - (value - low) / (high - low)) * (height - 4) : height / 2;
    context.lineTo(x, y);
  });
  context.stroke();
}
