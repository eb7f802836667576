// Elements and numbers. What is data becomes text nodes: nothing here parses markup.

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "width") element.style.width = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function section(title, note, ...children) {
  return h("section", { "aria-label": title }, h("header", {}, h("h2", {}, title), note ? h("p", {}, note) : null), ...children);
}

// ── numbers ──

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function number(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return grouped.format(value);
  if (size < 0.001) return value.toExponential(1).replace("e-", "e−").replace(/^-/, "−");
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return (Number.isInteger(value) ? String(value) : value.toFixed(digits)).replace(/^-/, "−");
}

function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${value.toFixed(unit === 0 || Math.abs(value) >= 100 ? 0 : 1)} ${units[unit]}`;
}

function percent(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size > 0 && size < 0.0005) return "< 0.1%";
  return `${(value * 100).toFixed(size >= 0.1 || size === 0 ? 0 : 1)}%`;
}

// The numbers along an axis, all in the unit of the greatest and with the same digits.
function ticksOf(ticks, format) {
  const most = Math.max(...ticks.map(Math.abs)), step = ticks[1] - ticks[0];
  const scales = new Map([
    [seconds, [[60, " min", 120], [1, " s", 1], [1e-3, " ms", 1e-3], [1e-6, " µs", 0]]],
    [bytes, ["TiB", "GiB", "MiB", "KiB"].map((unit, i) => [1024 ** (4 - i), ` ${unit}`, 1024 ** (4 - i)]).concat([[1, " B", 0]])],
    [percent, [[0.01, "%", 0]]],
  ]);
  const [size, unit] = (scales.get(format) ?? [[1, "", 0]]).find(([, , least]) => most >= least);
  if (!unit && most > 0 && most < 0.001) return ticks.map((tick) => (tick ? number(tick) : "0"));
  const digits = Math.min(6, Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9) + (/^[1-9]0*$|^0\.0*[1-9]$|^[1-9]e/.test(String(+(step / size).toPrecision(3))) ? 0 : 1)));
  const text = (value) => (Math.abs(value) >= 1000 ? grouped.format(value) : value.toFixed(digits).replace(/^-/, "−"));
  return ticks.map((tick) => (tick === 0 ? `0${unit === "%" ? unit : ""}` : text(tick / size) + unit));
}

// The unit of a metric is the end of its name.
function formatOf(key) {
  if (/_per_s$/.test(key)) return number;
  if (/(_s|\/seconds|_seconds)$/.test(key)) return seconds;
  if (/(_bytes|\/bytes)$/.test(key) || /bytes_moved$/.test(key)) return bytes;
  if (/(_fraction|_rate|_share|\/mfu|kv_use_peak|kv_use|_utilization|_use)$/.test(key)) return percent;
  return number;
}

function ago(time, now) {
  const passed = now - time;
  if (passed < 5) return "just now";
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  return passed < 172800 ? `${Math.round(passed / 3600)} h ago` : `${Math.round(passed / 86400)} days ago`;
}

function quantile(sorted, q) {
  if (!sorted.length) return NaN;
  const at = (sorted.length - 1) * q, low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}

// ── phases of time ──

const PHASES = ["generation", "training", "weight_sync", "data", "environment", "reward"];

function phaseOrder(names) {
  const rank = (name) => (name === "unaccounted" ? 99 : name === "other" ? 98 : name.startsWith("wait") ? 50 : PHASES.indexOf(name));
  return [...names].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
}

// A stage that waits for another is time lost; a helper that waits for something to do is not.
const phaseClass = (phase, isHelper = false) => `p-${phase.startsWith("wait") ? (isHelper ? "idle" : "wait") : [...PHASES, "unaccounted"].includes(phase) ? phase : "other"}`;
const phaseWords = (phase) => (phase.startsWith("wait") ? "waiting" + phase.slice(4) : phase).replaceAll("_", " ");

function phaseBar(parts, total, format, isHelper) {
  const shown = parts.filter((part) => part.value > 0);
  const label = shown.map((part) => `${phaseWords(part.phase)} ${percent(part.value / total)}`).join(", ");
  return h("div", { class: "bar", role: "img", "aria-label": label }, shown.map((part) =>
    h("span", { class: phaseClass(part.phase, isHelper), width: `${(100 * part.value) / total}%`, title: `${part.name ?? phaseWords(part.phase)}  ${format(part.value)}  ${percent(part.value / total)}` })));
}

function phaseLegend(parts, total, format) {
  return h("ul", { class: "legend" }, parts.filter((part) => part.value > 0).map((part) =>
    h("li", {}, h("span", { class: `swatch ${phaseClass(part.phase)}` }), phaseWords(part.phase), h("b", {}, percent(part.value / total)), h("span", { class: "muted" }, format(part.value)))));
}
