// The parts of a run's page that are tables and text. Each is a function of the run, called again when it has changed.

function headPart(run) {
  const { head, environment } = run;
  const words = { starting: "starting", running: "running", finished: "finished", stopped: "stopped", failed: "failed", killed: "ended without closing its files", unreadable: "config.json cannot be read", log: head.why };
  const device = environment.gpus?.length ? `${environment.gpus.length} × ${environment.gpus[0].name ?? "GPU"}` : environment.cpu?.model ? `${environment.cpu.usable_cores} cores, ${environment.cpu.model}` : null;
  const facts = [
    ["model", head.model],
    ["task", head.task],
    ["algorithm", [head.algorithm, head.status === "log" ? "" : head.max_lag ? `lag ≤ ${head.max_lag}` : "lockstep"].filter(Boolean).join(", ")],
    ["device", device],
    ["started", head.started?.replace("T", " ").replace(/(\+00:00|Z)$/, " UTC")],
    ["time in steps", seconds(head.train_s)],
    ["per step", seconds(head.step_s)],
    head.eta_s ? ["to go", seconds(head.eta_s)] : null,
  ];
  return [
    h("div", { class: "title" }, h("h1", {}, head.name), h("span", { class: `status ${head.status}` }, head.status === "log" ? words.log : `${words[head.status]}, step ${grouped.format(head.steps_done)} of ${grouped.format(head.total_steps)}`)),
    head.failure ? failurePart(head.failure) : null,
    h("dl", { class: "facts" }, facts.filter((fact) => fact?.[1]).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    head.total_steps || head.status !== "log" ? h("div", { class: "progress" }, h("div", { width: `${Math.min(100, (100 * head.steps_done) / (head.total_steps || 1))}%` })) : null,
  ];
}

function failurePart(failure) {
  return h("div", { class: "failed", role: "alert" },
    h("p", {}, failure.line),
    failure.hint ? h("p", { class: "muted" }, `hint: ${failure.hint}`) : null,
    h("details", { class: "fold" }, h("summary", {}, "traceback"), h("pre", {}, failure.traceback)));
}

// Did it learn: one sentence, then the figures behind it.
function learnedPart({ head }) {
  const { headline, word, held_out: found, target } = head.learned;
  const of = found?.measure === "accuracy" ? (value) => `${(100 * value).toFixed(1)}%` : (value) => value.toFixed(3);
  const by = (value) => `${value < 0 ? "−" : "+"}${found.measure === "accuracy" ? (100 * Math.abs(value)).toFixed(1) : Math.abs(value).toFixed(3)}`;
  const tile = (name, value, note, kind = "") => h("div", { class: "target" }, h("dt", {}, name), h("dd", { class: kind }, value), h("dd", { class: "mark" }, note));
  const side = (name, { step, answers }, value) => tile(`held-out ${found.measure}, ${name}`, of(value), `step ${grouped.format(step)}${answers ? `, ${grouped.format(answers)} answers` : ""}`);
  const tiles = found ? [side(found.word === "once" ? "so far" : "before", found.before, found.values[0])] : [];
  if (found && found.word !== "once") {
    tiles.push(side("after", found.after, found.values[1]));
    const sure = found.interval ? `95% interval ${found.interval.map(by).join(" to ")}` : "without an interval";
    tiles.push(tile("change", `${by(found.change)}${found.measure === "accuracy" ? " points" : ""}`, sure, { rose: "good", fell: "bad" }[found.word]));
  }
  if (target) tiles.push(tile("target", `reward ≥ ${number(target.reward)}`, target.reached_at === null ? "▲ not reached" : `● reached at step ${grouped.format(target.reached_at)}`));
  return [h("p", { class: `headline ${word.replaceAll(" ", "-")}` }, headline), tiles.length ? h("dl", { class: "targets figures" }, tiles) : null];
}

function verdictPart({ head }) {
  const parts = phaseOrder(Object.keys(head.phases)).map((phase) => ({ phase, value: head.phases[phase] }));
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  return [
    h("p", { class: "headline" }, head.verdict.headline),
    total ? phaseBar(parts, total, seconds) : null,
    total ? phaseLegend(parts, total, seconds) : null,
    h("p", { class: "details" }, head.verdict.details.join(" ")),
  ];
}

// Findings of the doctor: the first is open, since it is the one to begin with.
function doctorPart({ head: { doctor } }) {
  const share = (value) => percent(doctor.wall_s ? value / doctor.wall_s : 0);
  const finding = (found, place) => h("details", { class: "finding", open: place === 0 },
    h("summary", {}, h("b", {}, found.title), h("span", { class: "gain" }, `about ${share(found.gain.likely_s)} of the time`)),
    h("p", {}, `${found.why} Predicted: ${share(found.gain.low_s)} to ${share(found.gain.high_s)}, if ${found.gain.assumption}.`),
    h("dl", { class: "evidence" }, found.evidence.map((each) => [
      h("dt", {}, each.name), h("dd", {}, typeof each.value === "number" ? number(each.value) : String(each.value), h("small", {}, ` ${each.says}`), seriesOf(each))])),
    found.advice ? h("p", {}, found.advice) : null,
    found.prove ? h("pre", { class: "prove" }, found.prove) : null);
  const causes = new Map();
  for (const { cause, why } of doctor.abstentions) causes.set(why, [...(causes.get(why) ?? []), cause.replaceAll("_", " ")]);
  const untold = [...causes].map(([why, each]) => `${each.join(", ")} (${why})`);
  return [
    h("p", { class: "details" }, doctor.verdict),
    ...doctor.findings.map(finding),
    untold.length ? h("p", { class: "flat muted" }, `What the recording cannot tell: ${untold.join("; ")}.`) : null,
  ];
}

// What it has cost, and what a target takes; only where somebody gave a price or a target.
function costPart({ head: { doctor: { cost } } }) {
  const [first, ...rest] = cost.sentences;
  return [h("p", { class: "headline" }, first), ...rest.map((sentence) => h("p", { class: "details" }, sentence))];
}

function seriesOf({ series, name }) {
  if (series.length < 2) return null;
  const canvas = h("canvas", { class: "spark", role: "img", "aria-label": `${name} over the steps` });
  spark(canvas, series, "muted");
  return canvas;
}

function targetsPart({ head }) {
  const words = { true: ["met", "●"], false: ["missed", "▲"] };
  const shown = head.targets.filter((target) => target.value !== null), rest = head.targets.filter((target) => target.value === null);
  const tile = (target) => {
    const [kind, mark] = words[String(target.met)] ?? ["", ""];
    return h("div", { class: "target", title: target.why }, h("dt", {}, target.name), h("dd", {}, ...targetValue(target)),
      h("dd", { class: `mark ${kind}` }, target.met === null ? target.target : `${mark} ${kind}, ${target.target}${targetUnits[target.unit] ?? ""}`));
  };
  const missing = rest.filter((target) => target.target).map((target) => `${target.name} (${target.target}${targetUnits[target.unit] ?? ""}; ${target.why})`);
  return [h("dl", { class: "targets" }, shown.map(tile)), missing.length ? h("p", { class: "flat muted" }, `Not measured: ${missing.join(", ")}.`) : null];
}

const targetUnits = { "%": "%", s: " s" };

function targetValue({ value, unit }) {
  if (unit === "s") return [seconds(value)];
  if (unit === "%") return [percent(value / 100)];
  return [number(value), unit ? h("small", {}, ` ${unit}`) : null];
}

const STAGE_LANES = ["main", "rollouts"];

function ledgerPart({ head }) {
  return head.ledger.map((lane) => {
    const spans = [...lane.spans, { name: "unaccounted", phase: "unaccounted", ns: lane.unaccounted_ns }];
    const byPhase = new Map();
    for (const span of spans) byPhase.set(span.phase, (byPhase.get(span.phase) ?? 0) + span.ns);
    const parts = phaseOrder(byPhase.keys()).map((phase) => ({ phase, value: byPhase.get(phase) / 1e9 }));
    const isHelper = !STAGE_LANES.includes(lane.lane), wall = lane.wall_ns / 1e9, most = Math.max(...spans.map((span) => span.ns));
    return h("details", { class: "lane" },
      h("summary", {}, h("span", { class: "name" }, lane.lane), phaseBar(parts, wall, seconds, isHelper),
        h("span", { class: "unaccounted" }, `${seconds(wall)}, unaccounted ${percent(lane.unaccounted_ns / (lane.wall_ns || 1))}`)),
      h("table", { class: "spans" }, h("tbody", {}, spans.map((span) => h("tr", {},
        h("td", { class: "mono" }, span.name), h("td", { class: "number" }, seconds(span.ns / 1e9)), h("td", { class: "number muted" }, percent(span.ns / (lane.wall_ns || 1))),
        h("td", { class: "meter" }, h("div", { class: phaseClass(span.phase, isHelper), width: `${(100 * span.ns) / most}%` })))))));
  });
}

const DISTRIBUTIONS = [
  ["step", "run/step_s"],
  ["generation", "timeline/generation_s"],
  ["training", "timeline/training_s"],
  ["waiting for rollouts", "timeline/wait_for_rollouts_s"],
  ["waiting for late groups", "timeline/wait_for_late_groups_s"],
  ["weight sync", "timeline/weight_sync_s"],
  ["environment", "timeline/environment_s"],
  ["reward", "timeline/reward_s"],
  ["generated tokens per second", "engine/tokens_per_s"],
  ["trained tokens per second", "trainer/tokens_per_s"],
  ["turns per attempt", "rollouts/turns_mean"],
  ["tokens per answer", "rollouts/completion_tokens_mean"],
  ["tokens per answer trained on", "buffer/trained_tokens_mean"],
  ["tokens per answer dropped as late (at least)", "buffer/dropped_tokens_mean"],
  ["groups dropped as late", "buffer/dropped_late"],
  ["lag, steps", "buffer/policy_lag_steps"],
];

function percentilesPart(run) {
  const [first, end] = run.axis.visible, columns = [["least", 0], ["median", 0.5], ["90%", 0.9], ["99%", 0.99], ["greatest", 1]];
  const thinned = run.thinned.steps, exact = thinned && !run.axis.zoomed ? thinned.quantiles : null;
  const rows = DISTRIBUTIONS.filter(([, key]) => run.steps[key]).map(([name, key]) => {
    const sorted = Float64Array.from(run.steps[key].slice(first, end).filter(Number.isFinite)).sort(), format = formatOf(key);
    return h("tr", {}, h("td", {}, name), columns.map(([, q], k) => h("td", { class: "number" }, format(exact ? exact[key]?.[k] ?? NaN : quantile(sorted, q)))));
  });
  const of = exact ? `of the first ${grouped.format(thinned.rows)} steps` : thinned && first < thinned.points ? `of the points shown, means of ${grouped.format(thinned.size)} steps` : "of all steps shown";
  const table = (head, names, body) => h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, head), names.map((name) => h("th", { class: "number" }, name)))), h("tbody", {}, body)));
  const phases = turnPhases(run, first, end);
  return h("div", {}, table(of, columns.map(([name]) => name), rows), phases.length ? h("div", { class: "turn-phases" }, table("of the turns of a step, the median step", TURN_RANKS, phases)) : null);
}

// What the machines beside rank 0's did lately, one line each.
function machinesPart({ head }) {
  const shown = (format, value) => h("td", { class: "number" }, Number.isFinite(value) ? format(value) : "");
  const used = ({ available_bytes: available, total_bytes: total }) => (Number.isFinite(available) && Number.isFinite(total) ? total - available : NaN);
  const rows = head.machines.map((one) => h("tr", {}, h("td", {}, one.host), h("td", {}, one.process),
    shown(number, one.cores), shown(number, one.cpu_percent), shown(bytes, used(one)), shown(bytes, one.total_bytes),
    shown(number, one.gpus), shown(number, one.gpu_percent)));
  const names = ["cores", "busy, %", "memory used", "of", "GPUs", "GPUs busy, %"];
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "machine"), h("th", {}, "sampled by"), names.map((name) => h("th", { class: "number" }, name)))), h("tbody", {}, rows)));
}

const TURN_RANKS = ["50%", "90%", "99%"];
const TURN_PHASES = [["environment", "rollouts/environment"], ["prompt", "rollouts/prompt"], ["queue", "engine/queue"], ["prefill", "engine/prefill"], ["decode", "engine/decode"], ["parse", "rollouts/parse"], ["scoring of an attempt", "rollouts/score"]];

// Where the time of a turn goes.
function turnPhases(run, first, end) {
  return TURN_PHASES.filter(([, key]) => run.steps[`${key}_p50_s`]).map(([name, key]) => h("tr", {}, h("td", {}, name), TURN_RANKS.map((rank) => {
    const values = run.steps[`${key}_p${rank.slice(0, -1)}_s`] ?? [];
    return h("td", { class: "number" }, seconds(quantile(Float64Array.from(values.slice(first, end).filter(Number.isFinite)).sort(), 0.5)));
  })));
}

const ALERTS_SHOWN = 3;

// The newest are there to be seen; the others unfold.
function alertsPart({ alerts, head }) {
  const plain = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const all = head.alerts > 100 ? [h("p", { class: "flat muted" }, `The last 100 of ${grouped.format(head.alerts)}; alerts.jsonl has all.`)] : [];
  const shown = alerts.slice(-100).reverse().map((alert) => h("div", { class: "alert" },
    h("span", { class: "muted" }, `step ${plain(alert.step)}`), h("b", {}, plain(alert.kind).replaceAll("_", " ")),
    h("div", { class: "what" }, h("p", {}, plain(alert.seen)), h("p", {}, [alert.since ? `since ${plain(alert.since)}` : "", plain(alert.look_at)].filter(Boolean).join(" · ")))));
  const rest = shown.slice(ALERTS_SHOWN).concat(all);
  return [...shown.slice(0, ALERTS_SHOWN), ...(rest.length ? [h("details", { class: "fold" }, h("summary", {}, `${grouped.format(head.alerts - ALERTS_SHOWN)} earlier alerts`), rest)] : [])];
}

// ── what was sampled ──

const versionsOf = ([oldest, newest]) => (oldest === newest ? `v${oldest}` : `v${oldest}–v${newest}`);
const counted = (count, what) => `${grouped.format(count)} ${what}${count === 1 ? "" : "s"}`;
const said = (by, text, kind = by) => (by === kind ? h("pre", { class: `said ${kind}` }, text || " ") : h("div", { class: `said ${kind}` }, spoken(by, text)));
const spoken = (by, text) => h("div", { class: "spoken" }, h("span", { class: "by" }, by), h("pre", {}, text || " "));

function groupPart(group) {
  const single = group.attempts.every((attempt) => attempt.is_single);
  const prompt = group.prompt ? [promptPart(group.prompt)] : group.has_texts ? [] : [said("prompt", "the tokenizer is not at hand, so what the policy was told cannot be shown")];
  const body = group.let_go ? h("p", { class: "muted" }, `its attempts were let go, ${group.let_go}`)
    : !group.attempts.length ? h("p", { class: "muted" }, "no attempt is complete")
    : [...prompt, h("div", { class: single ? "attempts" : "games" }, group.attempts.map(single ? answerPart : gamePart))];
  return h("details", { class: "group" },
    h("summary", {}, h("span", {}, group.step === null ? group.state : `step ${group.step}`), h("span", { class: "muted" }, `group ${group.index}`), h("span", { class: "task" }, group.about ?? group.task ?? ""), h("span", {}, group.reward === null ? "" : `reward ${number(group.reward)}`)), body);
}

// What all attempts of a group were asked: the text as it is where its messages are not known.
function promptPart(messages) {
  return messages.length === 1 && messages[0].by === "prompt" ? said("prompt", messages[0].text) : h("div", { class: "said prompt" }, messages.map((message) => spoken(message.by, message.text)));
}

function rewardPart({ role, reward, parts, advantage }, failed) {
  return [
    role ? h("span", { class: "role" }, role) : null,
    h("b", { class: reward > 0 ? "good" : "" }, failed ? "no reward" : `reward ${number(reward)}`),
    Object.entries(parts).map(([name, value]) => h("span", {}, `${name} ${number(value)}`)),
    h("span", {}, `advantage ${number(advantage)}`),
  ];
}

// An attempt that is one reply: a card.
function answerPart(attempt) {
  const [sequence] = attempt.sequences;
  return h("article", { class: "attempt" },
    h("div", { class: "line" }, rewardPart(attempt.roles[0], attempt.failure), sequence ? h("span", {}, versionsOf(sequence.versions)) : null,
      h("span", {}, sequence ? `${counted(attempt.tokens, "token")}, ended by ${sequence.finish}` : counted(attempt.tokens, "token"))),
    attempt.failure ? h("p", { class: "failure" }, attempt.failure) : null,
    sequence ? sequence.messages.map((message) => said(message.by, message.text)) : h("p", { class: "muted" }, LEFT_OUT));
}

const LEFT_OUT = "Its messages are left out of this page, which has room for so many; `redline show RUN --group N --attempt M` has them.";

// An attempt of several turns or roles: a line that opens into its conversations.
function gamePart(attempt) {
  const won = (own) => h("span", {}, h("span", { class: "role" }, `${own.role || "reward"} `), h("b", { class: own.reward > 0 ? "good" : "" }, attempt.failure ? "–" : number(own.reward)));
  const summary = h("summary", {},
    h("span", {}, `attempt ${attempt.index}`), h("span", { class: "won" }, attempt.failure ? h("span", { class: "failure" }, "failed") : attempt.roles.map(won)),
    h("span", { class: "muted" }, `${counted(attempt.turns, "turn")}, ${counted(attempt.tokens, "token")}`));
  const facts = [
    attempt.retries ? `begun ${attempt.retries + 1} times` : "",
    attempt.score_s ? `scored ${seconds(attempt.score_s)} after the last reply` : "",
  ].filter(Boolean);
  return h("details", { class: "game" }, summary,
    attempt.failure ? h("p", { class: "failure" }, attempt.failure) : null,
    h("div", { class: "scores" }, attempt.roles.map((own) => h("div", { class: "line" }, rewardPart(own, attempt.failure)))),
    facts.length ? h("p", { class: "muted" }, facts.join(", ")) : null,
    attempt.sequences.length ? attempt.sequences.map((sequence) => sequencePart(sequence, attempt)) : h("p", { class: "muted" }, LEFT_OUT));
}

function sequencePart(sequence, attempt) {
  const title = [sequence.role, versionsOf(sequence.versions), `${grouped.format(sequence.tokens)} of ${counted(sequence.length, "token")} by the policy`].filter(Boolean).join(" · ");
  const trained = !attempt.failure && attempt.roles.find((own) => own.role === sequence.role)?.advantage !== 0;
  return h("section", { class: "sequence", "aria-label": title }, h("p", { class: "muted" }, title, trained ? "" : attempt.failure ? ", not trained on: the attempt failed" : ", without a gradient: its advantage is 0"),
    sequence.messages.map((message) => (message.by === "policy" ? turnPart(message, sequence, trained) : said(message.by, message.text, "told"))));
}

// What the policy said: its tokens are those that the loss is over.
function turnPart(turn, sequence, trained) {
  const spent = Object.entries(turn.seconds ?? {}).map(([phase, value]) => `${phase} ${seconds(value)}`);
  const facts = [turn.tokens === undefined ? "" : counted(turn.tokens, "token"), turn.finish && turn.finish !== "stop" ? `ended by ${turn.finish}` : "", ...spent].filter(Boolean);
  return h("div", { class: `turn ${trained ? "trained" : ""}` },
    h("div", { class: "said policy" }, spoken(sequence.role || "policy", turn.text)),
    turn.calls?.length ? h("ul", { class: "calls" }, turn.calls.map((call) => h("li", {}, call))) : null,
    facts.length ? h("p", { class: "spent" }, facts.map((fact) => h("span", {}, fact))) : null);
}

// ── every metric ──

function metricsPart(run) {
  const body = h("tbody"), filter = h("input", { type: "search", placeholder: "filter by name", "aria-label": "filter metrics by name" });
  const fill = () => {
    const wanted = filter.value.trim().toLowerCase();
    const keys = Object.keys(run.steps).filter((key) => !["step", "run/time_s"].includes(key) && key.toLowerCase().includes(wanted)).sort();
    body.replaceChildren(...keys.map((key) => {
      const values = run.steps[key], format = formatOf(key), sorted = Float64Array.from(values.filter(Number.isFinite)).sort(), canvas = h("canvas", { class: "spark" });
      const [least, median, , , greatest] = run.thinned.steps?.quantiles[key] ?? [quantile(sorted, 0), quantile(sorted, 0.5), 0, 0, quantile(sorted, 1)];
      spark(canvas, thinned(values, 160), "muted");
      return h("tr", {}, h("td", { class: "mono" }, key), h("td", {}, canvas), [least ?? NaN, median ?? NaN, greatest ?? NaN, values[lastFinite(values)]].map((value) => h("td", { class: "number" }, format(value))));
    }));
  };
  filter.addEventListener("input", fill);
  return h("details", { class: "fold metrics", on: { toggle: (event) => event.target.open && fill() } }, h("summary", {}, "every metric of every step"), filter,
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["metric", ""].map((name) => h("th", {}, name)), ["least", "median", "greatest", "last"].map((name) => h("th", { class: "number" }, name)))), body)));
}

function thinned(values, most) {
  const size = Math.ceil(values.length / most) || 1, thin = [];
  for (let i = 0; i < values.length; i += size) thin.push(mean(values, i, Math.min(i + size, values.length)));
  return thin;
}

function settingsPart({ config, environment, head }) {
  const fold = (name, value) => h("details", { class: "fold" }, h("summary", {}, name), h("pre", {}, JSON.stringify(value, null, 2)));
  if (head.status === "log") return [fold("settings, as far as the log holds them", config)];
  return [fold("config.json, the resolved recipe", config), fold("environment.json, the machine and the versions", environment)];
}
