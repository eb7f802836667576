// The list of runs.

function runRow(run, now) {
  const canvas = h("canvas", { class: "spark", role: "img", "aria-label": "reward over the steps" }), done = run.steps_done / (run.total_steps || 1);
  spark(canvas, run.reward);
  return h("tr", { "data-run": run.id },
    h("td", {}, h("a", { href: `/run/${encodeURIComponent(run.id)}` }, run.name), h("span", { class: "sub" }, [run.model, run.task].filter(Boolean).join(" · "))),
    h("td", {}, h("span", { class: `status ${run.status}` }, run.status), h("span", { class: "sub" }, run.updated ? ago(run.updated, now) : ""), run.failure ? h("span", { class: "sub failure" }, run.failure.line) : null),
    h("td", {}, `${grouped.format(run.steps_done)} / ${grouped.format(run.total_steps)}`, h("div", { class: "track" }, h("div", { width: `${Math.min(100, 100 * done)}%` })), h("span", { class: "sub" }, run.eta_s ? `${seconds(run.eta_s)} to go` : "")),
    h("td", {}, canvas),
    h("td", { class: "number" }, number(run.reward.at(-1)), h("span", { class: "sub" }, run.evaluation === null ? "" : `held out ${number(run.evaluation)}`)),
    h("td", { class: "number" }, number(run.tokens_per_s)),
    h("td", {}, run.bottleneck ? [h("span", { class: `swatch ${phaseClass(run.bottleneck.phase)}`, role: "presentation" }), ` ${run.bottleneck.words} ${percent(run.bottleneck.share)}`] : "–"),
    h("td", { class: `number ${run.alerts ? "failure" : "muted"}` }, String(run.alerts)));
}

async function followList() {
  const known = new Map(), body = h("tbody"), empty = h("p", { class: "loading" }, "reading …");
  const columns = [["run"], ["status"], ["steps"], ["reward"], ["last", "number"], ["tokens/s", "number"], ["now mostly"], ["alerts", "number"]];
  const table = h("div", { class: "scroll" }, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, columns.map(([name, kind]) => h("th", { class: kind }, name)))), body));
  mount(h("div", {}, h("div", { class: "title" }, h("h1", {}, "Runs")), h("section", {}, table, empty)));
  table.hidden = true;
  let cursor = "";
  await follow(async () => {
    if (document.hidden && known.size) return;
    const found = await ask(`/data/runs?after=${encodeURIComponent(cursor)}`);
    cursor = found.cursor;
    if (found.whole) known.clear();
    for (const id of found.gone) known.delete(id);
    for (const run of found.runs) known.set(run.id, run);
    const order = [...known.values()].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0));
    body.replaceChildren(...order.map((run) => runRow(run, found.now)));
    table.hidden = !known.size;
    empty.textContent = "No run yet. One appears here when it starts.";
    empty.hidden = known.size > 0;
  });
}
