"use strict";
// Panels of one run: replay, who is in it, and films.
{
const {html, useState} = htmPreact;

const SMALL = [
  ["replay/item_age_s", "Median age of items, seconds"],
  ["replay/item_priority", "Median priority"],
  ["replay/item_staleness", "Median versions behind the newest"],
  ["replay/samples_per_insert_offset", "Samples per insert within the band, -1 to 1"],
];
const WHOLE = [
  ["replay/inserts_per_s", "Items inserted a second"],
  ["replay/samples_per_s", "Items sampled a second"],
  ["replay/sampled_staleness", "Versions behind, of what is learned from"],
];

// Where the ratio stands between its ends: to the left samples wait for inserts, to the right writers pause.
const Band = ({offset}) => {
  const at = 60 + 50 * Math.max(-1.15, Math.min(1.15, offset));
  return html`<svg class="band" viewBox="0 0 120 14" width="120" height="14" role="img" aria-label=${`${Board.figure(offset)} of its band from -1 to 1`}>
    <rect x="10" y="4" width="100" height="6" class="inside"/><line x1="60" x2="60" y1="2" y2="12" class="middle"/>
    <circle cx=${at} cy="7" r="4.5" class=${Math.abs(offset) >= 0.98 ? "mark end" : "mark"}/></svg>`;
};

Board.Replay = ({run, id, tick, axis}) => {
  const metrics = run.metrics ?? {};
  const tables = Object.keys(metrics).map((name) => name.match(/^replay\/fill_share\/(.+)$/)?.[1]).filter(Boolean);
  const present = (name) => run.names?.includes(name);
  const figure = (name, table) => Board.figure(metrics[`replay/${name}/${table}`]);
  const both = (name, table) => (figure(name, table) ? `${figure(name, table)} (${figure(`${name}_p90`, table)})` : "");
  const charts = [...tables.flatMap((table) => SMALL.map(([name, title]) => [`${name}/${table}`, tables.length > 1 ? `${title}: ${table}` : title])), ...WHOLE].filter(([name]) => present(name));
  if (metrics["replay/items"] === undefined && !charts.length) return html`<p class="dim">Replay has reported nothing yet.</p>`;
  return html`
    <p class="facts"><span>${Board.count(metrics["replay/items"])} items</span><span>${Board.figure((metrics["replay/bytes"] ?? 0) / 2 ** 20)} MiB</span>
      <span>${Board.figure(metrics["replay/inserts_per_s"])} inserted a second</span><span>${Board.figure(metrics["replay/samples_per_s"])} sampled a second</span></p>
    ${tables.length > 0 && html`<div class="scroll"><table><thead><tr><th scope="col">Table</th><th scope="col" class="number">Filled</th><th scope="col" class="number">Samples per insert</th><th scope="col">Within its band</th>
      ${["Age, s", "Priority", "Versions behind"].map((head) => html`<th scope="col" class="number">${head}, median (90 %)</th>`)}</tr></thead>
      <tbody>${tables.map((table) => html`<tr><th scope="row">${table}</th><td class="number">${Math.round(100 * metrics[`replay/fill_share/${table}`])} %</td>
        <td class="number">${figure("samples_per_insert", table)}</td>
        <td>${metrics[`replay/samples_per_insert_offset/${table}`] === undefined ? "no limit" : html`<${Band} offset=${metrics[`replay/samples_per_insert_offset/${table}`]}/>`}</td>
        ${["item_age_s", "item_priority", "item_staleness"].map((name) => html`<td class="number">${both(name, table)}</td>`)}</tr>`)}</tbody></table></div>`}
    <div class="small">${charts.map(([name, title]) => html`<${Board.Chart} key=${name} runs=${[id]} metric=${name} axis=${axis} tick=${tick} title=${title} height=${170} labelOf=${(curve) => curve.tag.slice(name.length + 1) || "replay"}/>`)}</div>`;
};

Board.Services = ({run}) => {
  const rows = run.services ?? [];
  const {failures, hangs, last} = run.environments ?? {};
  if (!rows.length) return html`<p class="dim">The learner has not said who is in the run.</p>`;
  const heads = ["Service", "Host", "Slots", "Versions behind", "Cores", "Cores missed", "Memory", "Heard", "Last error"];
  return html`<div class="scroll short"><table><thead><tr>${heads.map((head, at) => html`<th scope="col" class=${at > 1 && at < 8 ? "number" : ""}>${head}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr><th scope="row">${row.name}</th><td>${row.host}</td><td class="number">${row.slots || ""}</td><td class="number">${Board.figure(row.behind)}</td>
      <td class="number">${Board.figure(row.cores)}</td><td class="number">${Board.figure(row.starved)}</td>
      <td class=${`number ${row.memory_share > 0.9 ? "error" : row.memory_share > 0.75 ? "warn" : ""}`}>${row.memory_bytes ? `${Math.round(row.memory_bytes / 2 ** 20)} MiB (${Math.round(100 * (row.memory_share ?? 0))} %)` : ""}</td>
      <td class=${`number ${row.seen_s_ago > 10 ? "error" : ""}`}>${row.seen_s_ago === undefined ? "" : `${Board.figure(row.seen_s_ago)} s ago`}</td><td class="error">${row.error}</td></tr>`)}</tbody></table></div>
    ${failures || hangs ? html`<p class="warn">Environments: ${failures} failures, ${hangs} hangs, the last: ${last}</p>` : null}`;
};

Board.Films = ({run, id}) => {
  const films = run.films ?? [];
  const [name, setName] = useState("");
  if (!films.length) return html`<p class="dim">No film yet.</p>`;
  const chosen = films.find((film) => film.name === name) ?? films[0];
  const address = `api/runs/${id}/films/${encodeURIComponent(chosen.name)}`;
  return html`<div class="controls"><label>Film at <select onChange=${(event) => setName(event.target.value)} value=${chosen.name}>
      ${films.map((film) => html`<option value=${film.name}>${Board.count(film.steps)} steps (${film.name})</option>`)}</select></label></div>
    ${chosen.name.endsWith(".gif") ? html`<img class="film" src=${address} alt=${`a game at ${chosen.steps} steps`}/>`
      : html`<video class="film" key=${address} src=${address} controls muted preload="metadata"></video>`}`;
};
}
