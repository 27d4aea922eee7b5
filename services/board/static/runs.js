"use strict";
// All runs: the table, the curves of those that are chosen, and what they differ in.
{
const {html, useEffect, useMemo, useState} = htmPreact;

const COLUMNS = [
  ["name", "Run", (run) => run.name],
  ["state", "State", (run) => run.state],
  ["score", "Score", (run) => Board.figure(run.score), true],
  ["steps", "Steps", (run) => Board.count(run.steps), true],
  ["minutes", "Time", (run) => Board.minutes(run.minutes), true],
  ["algorithm", "Algorithm", (run) => run.algorithm],
  ["env", "Environment", (run) => run.env],
  ["seed", "Seed", (run) => run.seed, true],
  ["differs", "Differs in", (run) => run.differs],
  ["note", "Note", (run) => run.note],
  ["changed_s", "Written", (run) => (run.changed_s ? Board.ago(run.changed_s) : ""), true],
];
const FIRST_ROWS = 100;
const MAX_CHOSEN = 200;

// Of two values: what is not there comes last, whichever way is up.
Board.compare = (a, b, sign) => {
  if (a === b) return 0;
  if (a === undefined || a === null || a === "") return 1;
  if (b === undefined || b === null || b === "") return -1;
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true}));
};

const compare = (name, sign) => (one, other) => Board.compare(one[name], other[name], sign);

const matches = (run, words) =>
  words.every((word) => [run.name, run.state, run.algorithm, run.env, run.preset, run.differs, run.note, run.problem].some((text) => text && text.toLowerCase().includes(word)));

Board.Controls = ({shown, change, names}) => html`<div class="controls">
  <label>Metric <input list="names" value=${shown.metric} placeholder="return" spellcheck="false"
    onChange=${(event) => change({metric: event.target.value.trim()})}/></label>
  <datalist id="names">${names.map((name) => html`<option value=${name}/>`)}</datalist>
  <fieldset><legend class="hidden">Axis</legend>${["steps", "minutes", "updates"].map((axis) => html`<label class="choice"><input type="radio" name="axis"
    checked=${shown.axis === axis} onChange=${() => change({axis})}/> ${axis}</label>`)}</fieldset>
  ${!Board.isExport && html`<label>Smoothing <input type="range" min="0" max="0.3" step="0.01" value=${shown.smooth} aria-valuetext=${`${Math.round(shown.smooth * 100)} %`}
    onInput=${(event) => change({smooth: Number(event.target.value)})}/></label>`}
  <label class="choice"><input type="checkbox" checked=${shown.bands} onChange=${(event) => change({bands: event.target.checked})}/> bands over seeds</label>
</div>`;

const Differences = ({runs, byId, tick}) => {
  const [found, setFound] = useState(null);
  const key = runs.join(",");
  useEffect(() => {
    let isOver = false;
    if (runs.length > 1) Board.get("differences", {runs: key}).then((answer) => isOver || setFound(answer), () => {});
    return () => (isOver = true);
  }, [key]);
  if (runs.length < 2 || !found) return null;
  if (!found.fields.length) return html`<p class="dim">The configurations of these runs do not differ.</p>`;
  return html`<details class="differences" open=${runs.length <= 12}><summary>What differs in their configurations (${found.fields.length})</summary>
    <div class="scroll"><table><thead><tr><th scope="col">Field</th>${found.runs.map((each) => html`<th scope="col">${byId.get(each.id)?.name ?? ""}</th>`)}</tr></thead>
    <tbody>${found.fields.map((field, row) => html`<tr><th scope="row"><code>${field}</code></th>${found.runs.map((each) => html`<td>${each.values[row]}</td>`)}</tr>`)}</tbody></table></div>
  </details>`;
};

const Sweeps = ({sweeps}) => html`<section aria-labelledby="sweeps"><h2 id="sweeps">Sweeps <span class="dim">${sweeps.length}</span></h2>
  <div class="scroll short"><table class="sweeps"><thead><tr><th scope="col">Sweep</th><th scope="col">Kind</th><th scope="col" class="number">Runs that are over</th><th scope="col" class="number">Best score</th></tr></thead>
  <tbody>${sweeps.map((sweep) => html`<tr><td class="name"><a href=${`#/sweep/${sweep.id}`}>${sweep.name}</a></td>${sweep.problem ? html`<td class="error" colspan="3">${sweep.problem}</td>`
    : html`<td>${sweep.kind}</td><td class="number">${sweep.over} of ${sweep.runs}</td><td class="number">${Board.figure(sweep.best)}</td>`}</tr>`)}</tbody></table></div></section>`;

Board.Runs = ({runs, sweeps, byId, complete, tick, chosen, choose, shown, change, names}) => {
  const [filter, setFilter] = useState("");
  const [order, setOrder] = useState(["changed_s", -1]);
  const [most, setMost] = useState(FIRST_ROWS);
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = useMemo(() => runs.filter((run) => matches(run, words)).sort(compare(...order)), [runs, filter, order]);
  const selected = useMemo(() => [...chosen].filter((id) => byId.has(id)), [chosen, byId]);
  const toggle = (id, on) => {
    const next = new Set(chosen);
    if (on && next.size < MAX_CHOSEN) next.add(id);
    else next.delete(id);
    choose(next);
  };
  const all = found.slice(0, MAX_CHOSEN).every((run) => chosen.has(run.id)) && found.length > 0;
  const heads = COLUMNS.map(([name, label, , isNumber]) => html`<th scope="col" class=${isNumber ? "number" : ""}
    aria-sort=${order[0] === name ? (order[1] > 0 ? "ascending" : "descending") : "none"}>
    <button class="sort" onClick=${() => setOrder([name, order[0] === name ? -order[1] : isNumber ? -1 : 1])}>${label}${order[0] === name ? (order[1] > 0 ? " ▴" : " ▾") : ""}</button></th>`);
  const rows = found.slice(0, most).map((run) => html`<tr key=${run.id} class=${chosen.has(run.id) ? "chosen" : ""}>
    <td><input type="checkbox" disabled=${Board.isExport} aria-label=${`show ${run.name}`} checked=${chosen.has(run.id)} onChange=${(event) => toggle(run.id, event.target.checked)}/></td>
    ${COLUMNS.map(([name, , text, isNumber]) => name === "name"
      ? html`<td class="name"><a href=${`#/run/${run.id}`}>${run.name}</a></td>`
      : run.problem && name === "differs" ? html`<td class="error">${run.problem}</td>`
      : html`<td class=${isNumber ? "number" : name}>${name === "state" ? html`<span class=${`state ${run.state}`}>${text(run)}</span>` : text(run)}</td>`)}</tr>`);
  return html`
    <section aria-labelledby="curves"><h2 id="curves">${shown.metric || "Return"}</h2>
      <${Board.Controls} shown=${shown} change=${change} names=${names}/>
      <${Board.Chart} runs=${selected} ...${shown} tick=${tick} labelOf=${(curve) => `${byId.get(curve.run)?.name ?? curve.run}${curve.tag.includes("/", curve.tag.indexOf("/") + 1) ? ` ${curve.tag}` : ""}`}/>
      <${Differences} runs=${selected} byId=${byId} tick=${tick}/></section>
    ${sweeps.length > 0 && html`<${Sweeps} sweeps=${sweeps}/>`}
    <section aria-labelledby="runs"><h2 id="runs">All runs <span class="dim">${runs.length}${complete ? "" : ", still reading"}</span></h2>
      <div class="controls"><label>Filter <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} placeholder="running ppo pong"/></label>
        <span class="dim">${selected.length} shown above</span>
        ${!Board.isExport && html`<button class="plain" onClick=${() => choose(new Set())}>None</button>`}</div>
      <div class="scroll"><table class="runs"><thead><tr>
        <th scope="col"><input type="checkbox" aria-label="show all that the filter leaves" checked=${all} disabled=${Board.isExport}
          onChange=${(event) => choose(new Set(event.target.checked ? found.slice(0, MAX_CHOSEN).map((run) => run.id) : []))}/></th>${heads}</tr></thead>
        <tbody>${rows}</tbody></table></div>
      ${found.length > most && html`<p><button class="plain" onClick=${() => setMost(found.length)}>Show all ${found.length}</button></p>`}
      ${!runs.length && html`<p class="dim">${complete ? "There is no run in these directories yet." : "Reading."}</p>`}
    </section>`;
};
}
