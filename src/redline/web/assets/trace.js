// A capture of another program: what its engines lost, and for each cause the timeline of one stall.

const SVG = ["http:", "", "www.w3.org", "2000", "svg"].join("/"); // a name of elements, and no address: nothing is fetched
const ROW = 17, LABEL = 172, WIDE = 1160;

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const plain = (text) => text.replaceAll("`", "");

function openTrace(capture) {
  const name = capture.traces[0].split("/").pop();
  document.title = `${name} · redline`;
  const more = capture.traces.length - 1;
  mount(h("div", {},
    h("div", { class: "title" }, h("h1", {}, name), more ? h("span", { class: "muted" }, `and ${more} more`) : null),
    h("section", { "aria-label": "Verdict" }, h("p", { class: "headline" }, plain(capture.verdict))),
    capture.lacks.length ? lacksPart(capture.lacks) : null,
    capture.engines.map(enginePart)));
}

function lacksPart(lacks) {
  return h("section", { "aria-label": "What the capture lacks", class: "lacks" }, h("header", {}, h("h2", {}, "What the capture lacks")),
    h("ul", {}, lacks.map((sentence) => h("li", {}, sentence))));
}

function enginePart(engine) {
  const note = `${seconds(engine.window_s)} recorded, ${seconds(engine.lost_s)} lost in ${counted(engine.stalls, "stall")}, ${seconds(engine.short_pauses_s)} in short pauses`;
  return section(engine.name, note, ranksTable(engine), engine.causes.map((cause, place) => causePart(cause, place, engine)),
    engine.rest_s > 0 && engine.causes.length ? h("p", { class: "muted flat" }, `${seconds(engine.rest_s)} more in causes below 1% each.`) : null);
}

function ranksTable(engine) {
  const hasDevice = engine.ranks.some((rank) => rank.busy_s > 0);
  const share = (value) => percent(value / engine.window_s);
  const heads = hasDevice ? ["process", "device", "useful", "waiting for ranks", "idle", "graph launches", "late", "late by"] : ["process", "waited for others"];
  const row = (rank) => {
    if (!hasDevice) return [rank.process, seconds(rank.waiting_s)];
    const useful = Math.max(0, rank.busy_s - rank.waiting_s);
    const bar = h("div", { class: "bar thin" }, [["p-generation", useful], ["p-wait", rank.waiting_s], ["p-idle", rank.idle_s]].map(([name, value]) =>
      h("span", { class: name, width: `${(100 * value) / engine.window_s}%` })));
    return [rank.process, bar, share(useful), share(rank.waiting_s), share(rank.idle_s), number(rank.graph_launches), number(rank.late_launches), rank.late_launches ? seconds(rank.late_by_s) : "–"];
  };
  const isText = (index) => index === 0 || (hasDevice && index === 1);
  return h("div", { class: "scroll" }, h("table", { class: "ranks" },
    h("thead", {}, h("tr", {}, heads.map((head, index) => h("th", { class: isText(index) ? null : "number" }, head)))),
    h("tbody", {}, engine.ranks.map((rank) => h("tr", {}, row(rank).map((cell, index) => h("td", { class: isText(index) ? null : "number" }, cell)))))));
}

function causePart(cause, place, engine) {
  return h("details", { class: "finding cause", open: place < 3 },
    h("summary", {}, h("b", {}, plain(cause.title)), h("span", { class: "gain" }, `${cause.class} · ${seconds(cause.lost_s)} · ${percent(cause.share)} of the time`)),
    h("p", { class: "walk" }, cause.walk),
    cause.grows ? h("p", {}, `It grows ${cause.grows}.`) : null,
    cause.basis ? h("p", {}, `Why this class: ${cause.basis}.`) : null,
    h("p", {}, cause.advice),
    cause.timeline ? timelinePart(cause, cause.timeline) : null,
    cause.growth ? growthPart(cause.growth) : null);
}

// ── the timeline of one stall ──

function timelinePart(cause, cut) {
  const x = (time) => LABEL + ((time - cut.start_s) / (cut.end_s - cut.start_s)) * (WIDE - LABEL - 8);
  let top = 26;
  const placed = cut.lanes.map((lane) => {
    const at = top;
    top += lane.depth * ROW + (lane.what === "device" ? 5 : 13);
    return { lane, at };
  });
  const [from, to] = cut.stall.map(x);
  const picture = svg("svg", { viewBox: `0 0 ${WIDE} ${top + 6}`, class: "lanes", role: "img", "aria-label": `timeline of a stall of ${cause.title}` },
    svg("rect", { x: from, y: 20, width: Math.max(1, to - from), height: top - 20, class: "stall" }),
    svg("text", { x: (from + to) / 2, y: 13, class: "mark" }, `${seconds(cut.stall[1] - cut.stall[0])} lost`),
    placed.map(({ lane, at }, place) => laneOf(lane, at, x, cut.lanes[place - 1]?.name !== lane.name)));
  const left = cut.lanes.reduce((sum, lane) => sum + lane.left_out, 0);
  const legend = [["call", "call"], ["cause", "the cause"], ["launch", "call into CUDA"], ["kernel", "kernel"], ["collective", "collective"], ["copy", "copy"]].filter(([kind]) =>
    cut.lanes.some((lane) => lane.pieces.some((piece) => piece[3] === kind)));
  return h("figure", { class: "cut" }, picture,
    h("figcaption", {}, h("ul", { class: "legend" }, legend.map(([kind, words]) => h("li", {}, h("span", { class: `swatch t-${kind}` }), words))),
      h("small", {}, `${seconds(cut.end_s - cut.start_s)} of the capture from ${seconds(cut.start_s)} on, one stall of ${cause.stalls}${left ? `; ${counted(left, "shorter piece")} not drawn` : ""}`)));
}

function laneOf(lane, at, x, isFirst) {
  return svg("g", {},
    isFirst ? svg("text", { x: 0, y: at + 12, class: "lane-name" }, lane.name.length > 22 ? `${lane.name.slice(0, 21)}…` : lane.name, svg("title", {}, lane.name)) : null,
    svg("text", { x: LABEL - 10, y: at + 12, class: "lane-what" }, lane.what),
    svg("line", { x1: LABEL, x2: WIDE - 8, y1: at + lane.depth * ROW + 0.5, y2: at + lane.depth * ROW + 0.5, class: "under" }),
    lane.pieces.map((piece) => pieceOf(piece, at, x)));
}

function pieceOf([start, end, depth, kind, name], at, x) {
  const left = x(start), width = Math.max(0.7, x(end) - left), y = at + depth * ROW;
  const room = Math.floor((width - 6) / 6.1);
  const shown = name.length <= room ? name : room > 4 ? `${name.slice(0, room - 1)}…` : "";
  return svg("g", {}, svg("title", {}, `${name}\n${seconds(end - start)}`),
    svg("rect", { x: left, y: y + 1, width, height: ROW - 2, rx: width > 4 ? 2 : 0, class: `t-${kind}` }),
    shown ? svg("text", { x: left + 4, y: y + 12, class: `inside on-${kind}` }, shown) : null);
}

// ── growth ──

function growthPart({ by, points }) {
  const wide = 430, high = 150, left = 56, bottom = 26;
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  const low = Math.min(...xs), most = Math.max(...xs), top = Math.max(...ys);
  const x = (value) => left + ((value - low) / (most - low || 1)) * (wide - left - 12), y = (value) => high - bottom - (value / (top || 1)) * (high - bottom - 12);
  const unit = by === "size" ? "size" : "time in the capture", words = by === "size" ? number : seconds;
  return h("figure", { class: "cut growth" }, svg("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `time lost in a stall over ${unit}` },
    svg("line", { x1: left, x2: wide - 12, y1: y(0), y2: y(0), class: "under" }),
    svg("text", { x: left - 8, y: y(top) + 4, class: "lane-what" }, seconds(top)), svg("text", { x: left - 8, y: y(0) + 4, class: "lane-what" }, "0"),
    svg("text", { x: left, y: high - 8, class: "tick" }, words(low)), svg("text", { x: wide - 12, y: high - 8, class: "lane-what" }, words(most)),
    svg("text", { x: (left + wide) / 2, y: high - 8, class: "mark" }, unit),
    points.map((point) => svg("circle", { cx: x(point[0]), cy: y(point[1]), r: 2.4, class: "dot" }))),
    h("figcaption", {}, h("small", {}, `time lost in a stall, over the ${unit}`)));
}
