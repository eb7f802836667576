// The page of one run: in a report its document lies in the page, in the dashboard it is asked for, and then what is new.

const POLL_MS = 1500;
const SECOND = { colour: "training", swatch: "p-training" }, THIRD = { colour: "weight-sync", swatch: "p-weight_sync" };

const CHARTS = [
  ["learned", "Reward", "mean of a step's attempts", [{ label: "sampled", key: "rollouts/reward_mean", smooth: true }], { evaluations: true, wide: true }],
  ["learning", "Loss", null, [{ key: "trainer/loss", smooth: true }]],
  ["learning", "KL", "engine to trainer; to the reference", [{ label: "mismatch", key: "trainer/mismatch_kl" }, { label: "reference", key: "trainer/kl", ...SECOND }], { zero: true }],
  ["learning", "Entropy", "nats per token", [{ key: "trainer/entropy", smooth: true }]],
  ["learning", "Gradient norm", "before clipping", [{ key: "trainer/grad_norm", smooth: true }], { zero: true }],
  ["learning", "Clipped", "share of trained tokens", [{ key: "trainer/clip_fraction" }], { zero: true, format: percent }],
  ["learning", "Answer length", "tokens", [{ key: "rollouts/completion_tokens_mean", smooth: true }], { zero: true }],
  ["learning", "Groups with signal", "of those that arrived", [{ label: "with signal", key: "rollouts/groups_with_signal" }, { label: "all", key: "rollouts/groups", ...SECOND }], { zero: true }],
  ["learning", "Failures", "attempts without a reward", [{ label: "failed", key: "rollouts/failures" }, { label: "begun again", key: "rollouts/retries", ...SECOND }], { zero: true }],
  ["learning", "Turns", "per attempt", [{ label: "mean", key: "rollouts/turns_mean", smooth: true }, { label: "most", key: "rollouts/turns_max", ...SECOND }], { zero: true }],
  ["learning", "Truncated", "share of attempts that a limit ended", [{ key: "rollouts/truncated_fraction" }], { zero: true, format: percent }],
  ["speed", "Generation", "tokens per second", [{ key: "engine/tokens_per_s", smooth: true }], { zero: true }],
  ["speed", "Training", "tokens per second", [{ key: "trainer/tokens_per_s", smooth: true, colour: "training" }], { zero: true }],
  ["speed", "MFU", "share of the device's peak", [{ key: "trainer/mfu", smooth: true, colour: "training" }], { zero: true, format: percent }],
  ["speed", "Lag", "versions between sampling and training", [{ label: "oldest", key: "buffer/policy_lag_steps" }, { label: "mean", key: "buffer/lag_mean", ...SECOND }], { zero: true }],
  ["speed", "First token", "percentiles", [{ label: "50%", key: "engine/first_token_p50_s" }, { label: "90%", key: "engine/first_token_p90_s", ...SECOND }, { label: "99%", key: "engine/first_token_p99_s", ...THIRD }], { zero: true, format: seconds }],
  ["speed", "Between tokens", "percentiles", [{ label: "50%", key: "engine/inter_token_p50_s" }, { label: "90%", key: "engine/inter_token_p90_s", ...SECOND }, { label: "99%", key: "engine/inter_token_p99_s", ...THIRD }], { zero: true, format: seconds }],
  ["speed", "Rollout", "percentiles", [{ label: "50%", key: "rollouts/latency_p50_s" }, { label: "90%", key: "rollouts/latency_p90_s", ...SECOND }, { label: "99%", key: "rollouts/latency_p99_s", ...THIRD }], { zero: true, format: seconds }],
  ["speed", "Environment", "before a turn, percentiles", [{ label: "50%", key: "rollouts/environment_p50_s" }, { label: "90%", key: "rollouts/environment_p90_s", ...SECOND }, { label: "99%", key: "rollouts/environment_p99_s", ...THIRD }], { zero: true, format: seconds }],
  ["speed", "Engine's batch", "sequences decoded at once", [{ key: "engine/batch_size_mean", smooth: true }], { zero: true }],
  ["speed", "KV cache", "peak use", [{ key: "engine/kv_use_peak" }], { zero: true, format: percent }],
  ["speed", "Prefix cache", "prompt tokens found there", [{ key: "engine/prefix_hit_rate" }], { zero: true, format: percent }],
  ["speed", "Weight sync", "bytes moved", [{ key: "weight_sync/bytes_moved" }], { zero: true, format: bytes }],
];
const MEMORY_COLOURS = ["generation", "training", "weight-sync", "environment", "reward", "data", "other"];
const BESIDE = ["peak", "activations_peak", "activations_planned", "offloaded"];
const NONE = [];

class Run {
  constructor() {
    this.clear();
    this.axis = new Axis((step, from) => (from < step ? `steps ${grouped.format(from)}–${grouped.format(step)}` : `step ${grouped.format(step)}`), (ticks) => ticks.map((tick) => (Number.isInteger(tick) ? grouped.format(tick) : "")));
    this.clock = new Axis((time) => `after ${seconds(time)}`, (ticks) => ticksOf(ticks, seconds));
  }

  clear() {
    Object.assign(this, { cursor: "", head: null, config: {}, environment: {}, steps: { step: [] }, samples: { time: [] }, evaluations: [], alerts: [], thinned: { steps: null, samples: null } });
  }

  take(document) {
    if (document.whole) this.clear();
    this.cursor = document.cursor;
    for (const name of ["head", "config", "environment"]) if (document[name]) this[name] = document[name];
    this.evaluations.push(...(document.evaluations ?? []));
    this.alerts.push(...(document.alerts ?? []));
    if (document.steps) append(this.steps, document.steps, "step");
    if (document.samples) append(this.samples, document.samples, "time");
    if (document.whole) for (const name of ["steps", "samples"]) this.thinned[name] = bands(document[`${name}_thinned`]);
    this.axis.x = this.steps.step;
    this.axis.thinned = this.thinned.steps;
    this.clock.thinned = this.thinned.samples;
    this.axis.marks = this.alerts.map((alert) => alert.step).filter(Number.isFinite);
    const begin = this.samples.time[0] ?? 0;
    this.clock.x = this.samples.time.map((time) => time - begin);
  }
}

// New rows of a column: a list, one value that they all have, or none at all.
function append(columns, rows, index) {
  const before = columns[index].length, count = rows[index].length;
  for (const [key, values] of Object.entries(rows)) {
    const column = (columns[key] ??= new Array(before).fill(NaN));
    for (let i = 0; i < count; i++) column.push((Array.isArray(values) ? values[i] : values) ?? NaN);
  }
  for (const column of Object.values(columns)) while (column.length < before + count) column.push(NaN);
}

// Of a long run the older rows come in buckets: their means are rows, their extremes lie beside them.
function bands(thinned) {
  for (const columns of thinned ? [thinned.low, thinned.high] : []) for (const [key, values] of Object.entries(columns)) columns[key] = values.map((value) => value ?? NaN);
  return thinned ?? null;
}

function bandOf(thinned, key) {
  return thinned?.low[key] ? { low: thinned.low[key], high: thinned.high[key] } : null;
}

class RunPage {
  constructor(run, trajectories) {
    this.run = run;
    this.made = new Map();
    this.texts = new Map();
    this.flat = { learning: h("p", { class: "flat muted" }), speed: h("p", { class: "flat muted" }) };
    const part = (name) => (this[name] = h("div"));
    const grid = (name) => (this[name] = h("div", { class: "charts" }));
    this.zoom = h("div", { class: "zoom", hidden: true }, h("button", { type: "button", on: { click: () => run.axis.zoom(null) } }, "show all steps"));
    run.axis.onzoom = (range) => {
      this.zoom.hidden = !range;
      this.percentiles.replaceChildren(percentilesPart(run));
    };
    this.sections = {
      alerts: section("Alerts", null, part("alerts")),
      learned: section("Did it learn?", null, part("outcome"), grid("learned")),
      bound: section("What took the time?", null, part("bound")),
      doctor: section("What to change", "the most recoverable time first", part("doctor")),
      cost: section("What does it cost?", null, part("cost")),
      targets: section("Key metrics", "against their targets", part("targets")),
      learning: section("Learning", h("span", { class: "on-screen" }, "Drag over a chart to zoom, double-click to see all."), grid("learning"), this.flat.learning),
      timeline: section("Steps", "where each step's time went, in the lane of the loop", grid("timeline")),
      ledger: section("Ledger", "Each nanosecond of a lane has one owner, and what has none is shown as unaccounted.", part("ledger")),
      speed: section("Speed and freshness", null, grid("speed"), this.flat.speed),
      memory: section("Memory and machine", "sampled over the run", grid("memory")),
      machines: section("Other machines", "their newest samples; the charts are of rank 0's", part("machines")),
      percentiles: section("Percentiles", null, part("percentiles")),
      trajectories: section("Trajectories", "What the policy was asked and what it said, as text. Where an attempt has several turns, an ochre bar stands beside what is trained on.", trajectories),
      settings: section("Everything else", null, metricsPart(run), part("settings")),
    };
    this.head = h("div");
    this.settings.append(...settingsPart(run));
    this.notice = h("p", { class: "flat muted notice", hidden: true });
    this.element = h("div", {}, this.head, this.zoom, ...Object.values(this.sections), this.notice);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      palette = new Map();
      run.axis.redraw();
      run.clock.redraw();
    });
    this.update();
  }

  update() {
    const { run } = this, { head } = run;
    document.title = `${head.name} · redline`;
    this.head.replaceChildren(...headPart(run).filter(Boolean));
    this.outcome.replaceChildren(...learnedPart(run).filter(Boolean));
    this.bound.replaceChildren(...verdictPart(run).filter(Boolean));
    this.notice.textContent = noticeOf(run);
    this.notice.hidden = !this.notice.textContent;
    this.fillOnce("doctor", head.doctor, head.doctor?.verdict, () => doctorPart(run).filter(Boolean));
    this.fillOnce("cost", head.doctor?.cost ?? null, head.doctor?.cost, () => costPart(run));
    this.fill("targets", head.targets.length, () => targetsPart(run).filter(Boolean));
    this.fill("alerts", run.alerts.length, () => alertsPart(run));
    this.fillOnce("ledger", head.ledger, head.ledger?.length, () => ledgerPart(run));
    this.fill("machines", head.machines?.length, () => [machinesPart(run)]);
    this.fill("percentiles", run.steps.step.length, () => [percentilesPart(run)]);
    this.makeCharts();
    for (const name of ["learning", "timeline", "speed", "memory"]) this.sections[name].hidden = !this[name].childElementCount;
    run.axis.redraw();
    run.clock.redraw();
  }

  fill(name, is, make) {
    this.sections[name].hidden = !is;
    if (is) this[name].replaceChildren(...make());
  }

  // Only where it has changed: what a person has opened stays open meanwhile.
  fillOnce(name, value, is, make) {
    const text = JSON.stringify(value);
    if (text === this.texts.get(name)) return;
    this.texts.set(name, text);
    this.fill(name, is, make);
  }

  // What never changes is a sentence, not a chart.
  makeCharts() {
    const { run } = this, flat = { learning: [], speed: [] };
    for (const [place, title, note, lines, options] of [...CHARTS, ...roleCharts(run)]) {
      const found = lines.filter((line) => run.steps[line.key]?.some(Number.isFinite));
      if (!found.length) continue;
      const levels = found.map((line) => (bandOf(run.thinned.steps, line.key) ? null : constant(run.steps[line.key])));
      if (!options?.evaluations && !this.made.has(title) && run.steps.step.length > 1 && levels.every((level) => level !== null)) {
        flat[place].push(`${title.toLowerCase()} ${(options?.format ?? number)(levels[0])}`);
        continue;
      }
      this.make(place, title, () => new LineChart(run.axis, title, note, found.map((line) => ({ ...line, values: () => run.steps[line.key] ?? NONE, band: () => bandOf(run.thinned.steps, line.key) })), {
        ...options,
        dots: options?.evaluations ? () => run.evaluations.map((row) => [row.step, row["evaluation/reward_mean"]]) : null,
      }));
    }
    for (const [place, texts] of Object.entries(flat)) this.flat[place].textContent = texts.length ? `The same in every step: ${texts.join(", ")}.` : "";
    if (Object.keys(run.steps).some((key) => key.startsWith("timeline/"))) this.make("timeline", "Seconds per step", () => new StackChart(run.axis, "Seconds per step", "mean of those shown, or of the one under the pointer", () => timelineLayers(run), { format: seconds, bars: true }));
    this.makeSampleCharts();
  }

  makeSampleCharts() {
    const { run } = this, keys = Object.keys(run.samples);
    if (memoryKinds(run).length) this.make("memory", "Memory by kind", () => new StackChart(run.clock, "Memory by kind", "over the run", () => memoryLayers(run), { format: bytes }));
    for (const [title, note, pattern, format] of [
      ["GPU use", "percent", /^gpu\/\d+\/(utilization|sm_activity|tensor_activity)_percent$/, number],
      ["GPU memory", "bytes used", /^gpu\/\d+\/memory_used_bytes$/, bytes],
      ["GPU power", "watts", /^gpu\/\d+\/power_w$/, number],
      ["GPU clock", "MHz", /^gpu\/\d+\/sm_clock_mhz$/, number],
      ["PCIe", "bytes per second", /^gpu\/\d+\/pcie_\w+_bytes_per_s$/, bytes],
      ["Host memory", "resident", /^host\/(children_)?rss_bytes$/, bytes],
      ["Processor", "percent of a core", /^host\/(children_|machine_)?cpu_percent$/, number],
      ["Disk", "bytes per second", /^host\/disk_\w+_bytes_per_s$/, bytes],
      ["Network", "bytes per second", /^host\/network_\w+_bytes_per_s$/, bytes],
    ]) {
      const found = keys.filter((key) => pattern.test(key) && run.samples[key].some((value) => value > 0)).sort().slice(0, MEMORY_COLOURS.length);
      if (found.length) this.make("memory", title, () => new LineChart(run.clock, title, note, found.map((key, i) => {
        const name = MEMORY_COLOURS[i % MEMORY_COLOURS.length];
        return { label: sampleLabel(key), key, colour: name, swatch: `p-${name.replace("-", "_")}`, values: () => run.samples[key] ?? NONE, band: () => bandOf(run.thinned.samples, key) };
      }), { format, zero: true }));
    }
  }

  make(place, name, build) {
    if (this.made.has(name)) return;
    const chart = build();
    this.made.set(name, chart);
    this[place].append(chart.element);
  }
}

// Rewards of the roles of a game, beside each other.
function roleCharts(run) {
  const roles = Object.keys(run.steps).flatMap((key) => key.match(/^rollouts\/role_(.*)_reward_mean$/)?.[1] ?? []).sort().slice(0, MEMORY_COLOURS.length);
  const line = (role, i) => ({ label: role, key: `rollouts/role_${role}_reward_mean`, colour: MEMORY_COLOURS[i], swatch: `p-${MEMORY_COLOURS[i].replace("-", "_")}` });
  return roles.length ? [["learning", "Reward by role", "mean of a step's attempts", roles.map(line)]] : [];
}

// What the page does not show one by one, and what the run's files no longer hold.
function noticeOf({ head, thinned }) {
  const { size, rows } = thinned.steps ?? {};
  const shown = thinned.steps ? [`Of the first ${grouped.format(rows)} steps, a point of a chart stands for ${grouped.format(size)}, with their mean and a band from the least to the greatest; the newest stand for themselves. metrics.jsonl has every step.`] : [];
  return [...shown, ...(head.left_out ?? [])].join(" ");
}

function constant(values) {
  const finite = values.filter(Number.isFinite);
  return finite.every((value) => value === finite[0]) ? finite[0] : null;
}

function timelineLayers(run) {
  const phases = phaseOrder(Object.keys(run.steps).filter((key) => key.startsWith("timeline/")).map((key) => key.slice(9, -2)));
  return phases.map((phase) => {
    const swatch = phaseClass(phase);
    return { label: phaseWords(phase), swatch, colour: swatch.slice(2).replace("_", "-"), hatched: swatch === "p-wait", values: run.steps[`timeline/${phase}_s`] };
  });
}

// `gpu/0/sm_activity_percent` → `0 sm activity`; `host/rss_bytes` → `rss`: the unit is in the note.
function sampleLabel(key) {
  return key.replace(/^(gpu|host)\//, "").replace(/_(percent|bytes|bytes_per_s|w|mhz)$/, "").replace(/[/_]/g, " ");
}

// Those that add up; peaks, plans and what was moved elsewhere stand beside the sum.
function memoryKinds(run) {
  return Object.keys(run.samples).flatMap((key) => key.match(/^memory\/(.*)_bytes$/)?.[1] ?? []).filter((kind) => !BESIDE.includes(kind));
}

function memoryLayers(run) {
  return memoryKinds(run).map((kind, i) => {
    const name = kind === "other" ? "other" : MEMORY_COLOURS[i % MEMORY_COLOURS.length];
    return { label: kind.replaceAll("_", " "), swatch: `p-${name.replace("-", "_")}`, colour: name, values: run.samples[`memory/${kind}_bytes`] };
  });
}

// ── in a report ──

function chosenGroups({ groups, failed, missing, command }) {
  if (missing) return h("p", { class: "muted" }, missing);
  return h("div", {}, h("p", { class: "picker muted" }, "Some groups of some steps;", h("code", {}, command), "tells any attempt turn by turn."), groups.map(groupPart), failed.length ? [h("p", { class: "picker muted" }, "Attempts that failed"), failed.map(groupPart)] : null);
}

function openReport(document_) {
  const run = new Run();
  run.take(document_);
  mount(new RunPage(run, chosenGroups(document_.trajectories)).element);
}

// ── in the dashboard ──

async function ask(url) {
  const answer = await fetch(url, { headers: { accept: "application/json" } });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer.json();
}

// The attempts of one step: the last, until another is chosen or something is being read.
class StepPicker {
  constructor(source, run) {
    Object.assign(this, { source, run, following: true, shown: null });
    this.groups = h("div");
    this.input = h("input", { type: "number", min: "1", "aria-label": "step", on: { change: () => this.choose(Number(this.input.value)) } });
    const button = (text, step) => h("button", { type: "button", on: { click: () => this.choose(step()) } }, text);
    const move = (by) => () => Number(this.input.value) + by;
    this.element = h("div", {}, h("div", { class: "picker" }, "step", button("‹", move(-1)), this.input, button("›", move(1)), button("last", () => Infinity)), this.groups);
  }

  get last() { return this.run.steps.step.at(-1) ?? 1; }

  choose(step) {
    this.following = step >= this.last;
    this.show(Math.max(1, Math.min(this.last, step || 1)));
  }

  update() {
    if (this.following && this.shown !== this.last && !this.groups.querySelector("details[open]")) this.show(this.last);
  }

  async show(step) {
    this.input.value = this.shown = step;
    try {
      const found = await ask(`${this.source}/trajectories?step=${step}`);
      if (this.shown !== step) return;
      const note = found.missing ?? (found.left_out ? `${found.left_out} more groups of this step are not shown` : null);
      this.groups.replaceChildren(...found.groups.map(groupPart), ...(note ? [h("p", { class: "flat muted" }, note)] : []));
    } catch (error) {
      this.groups.replaceChildren(h("p", { class: "flat muted" }, `the dashboard does not answer: ${error.message}`));
    }
  }
}

async function followRun(source) {
  const run = new Run(), picker = new StepPicker(source, run);
  let page = null;
  const look = async () => {
    if (document.hidden && page) return;
    const found = await ask(`${source}?after=${encodeURIComponent(run.cursor)}`);
    const changed = found.cursor !== run.cursor;
    run.take(found);
    if (!page) {
      page = new RunPage(run, picker.element);
      mount(page.element);
    } else if (changed) page.update();
    picker.update();
  };
  await follow(look);
}

// Ask, wait, ask again; when the server is gone, say so and keep asking.
async function follow(look) {
  const lost = h("p", { class: "problem", role: "status", hidden: true });
  document.querySelector("main").prepend(lost);
  for (;;) {
    try {
      await look();
      lost.hidden = true;
    } catch (error) {
      lost.textContent = `The dashboard does not answer (${error.message}); what is shown may be old.`;
      lost.hidden = false;
    }
    await new Promise((done) => setTimeout(done, POLL_MS));
  }
}

function mount(element) {
  document.querySelector("#page").replaceChildren(element);
}
