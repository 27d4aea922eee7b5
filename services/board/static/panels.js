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
    <p class="facts"><span>${Board.count(metrics["replay/items"])} items</span><span>${Board.bytes(metrics["replay/bytes"] ?? 0)}</span>
      <span>${Board.figure(metrics["replay/inserts_per_s"])} inserted a second</span><span>${Board.figure(metrics["replay/samples_per_s"])} sampled a second</span></p>
    ${tables.length > 0 && html`<div class="scroll"><table><thead><tr><th scope="col">Table</th><th scope="col" class="number">Filled</th><th scope="col" class="number">Samples per insert</th><th scope="col">Within its band</th>
      ${["Age, s", "Priority", "Versions behind"].map((head) => html`<th scope="col" class="number">${head}, median (90 %)</th>`)}</tr></thead>
      <tbody>${tables.map((table) => html`<tr><th scope="row">${table}</th><td class="number">${Math.round(100 * metrics[`replay/fill_share/${table}`])} %</td>
        <td class="number">${figure("samples_per_insert", table)}</td>
        <td>${metrics[`replay/samples_per_insert_offset/${table}`] === undefined ? "no limit" : html`<${Band} offset=${metrics[`replay/samples_per_insert_offset/${table}`]}/>`}</td>
        ${["item_age_s", "item_priority", "item_staleness"].map((name) => html`<td class="number">${both(name, table)}</td>`)}</tr>`)}</tbody></table></div>`}
    <div class="small">${charts.map(([name, title]) => html`<${Board.Chart} key=${name} runs=${[id]} metric=${name} axis=${axis} tick=${tick} title=${title} height=${170} labelOf=${(curve) => curve.tag.slice(name.length + 1) || "replay"}/>`)}</div>`;
};

const HIGH = 0.75, TOO_HIGH = 0.9;

// Of the memory that a machine or a container has.
const Memory = ({bytes, share}) => html`${bytes ? Board.bytes(bytes) : ""}${share === undefined ? "" : html` <span class=${`share ${share > TOO_HIGH ? "error" : share > HIGH ? "warn" : ""}`}>${Math.round(100 * share)} %</span>
  <meter min="0" max="1" low=${HIGH} high=${TOO_HIGH} optimum="0" value=${share} aria-hidden="true"/>`}`;

const cores = (value) => value?.toFixed(2);

const sum = (rows, name) => (rows.some((row) => row[name] !== undefined) ? rows.reduce((all, row) => all + (row[name] ?? 0), 0) : undefined);

// What services take together where they share a machine.
const Hosts = ({rows}) => {
  const hosts = new Map();
  for (const row of rows) if (row.host) hosts.set(row.host, [...(hosts.get(row.host) ?? []), row]);
  if (![...hosts.values()].some((members) => members.length > 1)) return null;
  return html`<h3>Hosts</h3><div class="scroll short"><table><thead><tr><th scope="col">Host</th>${["Services", "Slots", "Cores", "Cores missed", "Memory"].map((head) => html`<th scope="col" class="number">${head}</th>`)}</tr></thead>
    <tbody>${[...hosts].map(([host, members]) => html`<tr><th scope="row">${host}</th><td class="number">${members.length}</td><td class="number">${sum(members, "slots") || ""}</td>
      <td class="number">${cores(sum(members, "cores"))}</td><td class="number">${cores(sum(members, "starved"))}</td>
      <td class="number"><${Memory} bytes=${sum(members, "memory_bytes")} share=${sum(members, "memory_share")}/></td></tr>`)}</tbody></table></div>`;
};

Board.Services = ({run}) => {
  const rows = run.services ?? [];
  const {failures, hangs, last} = run.environments ?? {};
  if (!rows.length) return html`<p class="dim">The learner has not said who is in the run.</p>`;
  const heads = ["Service", "Host", "Slots", "Versions behind", "Restarts", "Cores", "Cores missed", "Memory", "Heard", "Last error"];
  return html`<div class="scroll short"><table class="services"><thead><tr>${heads.map((head, at) => html`<th scope="col" class=${at > 1 && at < 9 ? "number" : ""}>${head}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr><th scope="row">${row.name}</th><td>${row.host}</td><td class="number">${row.slots || ""}</td><td class="number">${Board.figure(row.behind)}</td>
      <td class=${`number ${row.restarts ? "warn" : ""}`}>${row.restarts}</td>
      <td class="number">${cores(row.cores)}</td><td class="number">${cores(row.starved)}</td>
      <td class="number"><${Memory} bytes=${row.memory_bytes} share=${row.memory_share}/></td>
      <td class=${`number ${row.silent ? "error" : ""}`}>${row.seen_s_ago === undefined ? "" : `${row.seen_s_ago.toFixed(row.seen_s_ago < 10 ? 1 : 0)} s ago`}</td><td class="error">${row.error}</td></tr>`)}</tbody></table></div>
    <${Hosts} rows=${rows}/>
    <p class="dim">Memory is of what the machine or container has: above ${100 * HIGH} % it is high, above ${100 * TOO_HIGH} % nearly used up. A restart is another process under the same name.</p>
    ${failures || hangs ? html`<p class="warn">Environments: ${failures} failures, ${hangs} hangs, the last: ${last}</p>` : null}`;
};

// All episodes of the evaluation that a film is from; it shows the first one.
const Episodes = ({games, steps}) => {
  const {returns, lengths, levels} = games;
  const low = Math.min(0, ...returns), high = Math.max(0, ...returns), span = high - low || 1;
  const bar = (value) => html`<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true"><rect x=${(100 * (Math.min(0, value) - low)) / span} width=${Math.max(1, (100 * Math.abs(value)) / span)} y="1" height="8"/></svg>`;
  return html`<div class="episodes"><p>Evaluation at ${Board.count(steps)} steps; the video is of its first episode.</p>
    <div class="scroll short"><table><thead><tr><th scope="col" class="number">Episode</th><th scope="col" class="number">Return</th><td></td><th scope="col" class="number">Length</th>${levels.length ? html`<th scope="col">Level</th>` : null}</tr></thead>
    <tbody>${returns.map((value, at) => html`<tr class=${at ? "" : "chosen"}><th scope="row" class="number">${at ? "" : "▶ "}${at + 1}</th><td class="number">${Board.figure(value)}</td><td>${bar(value)}</td><td class="number">${lengths[at]}</td>
      ${levels.length ? html`<td>${levels[at]}</td>` : null}</tr>`)}</tbody></table></div></div>`;
};

Board.Films = ({run, id}) => {
  const films = run.films ?? [];
  const [name, setName] = useState("");
  if (!films.length) return html`<p class="dim">${Board.isExport ? "No video is small enough for this page." : "No video yet."}</p>`;
  const at = Math.max(0, films.findIndex((film) => film.name === name));
  const chosen = films[at];
  const address = chosen.data ?? `api/runs/${id}/films/${encodeURIComponent(chosen.name)}`;
  const step = (by, text) => html`<button class="plain" disabled=${!films[at + by]} onClick=${() => setName(films[at + by].name)}>${text}</button>`;
  return html`${films.length > 1 && html`<div class="controls"><label>Video at <select onChange=${(event) => setName(event.target.value)} value=${chosen.name}>
      ${films.map((film) => html`<option value=${film.name}>${Board.count(film.steps)} steps${film === films[0] ? ", the newest" : ""}</option>`)}</select></label>${step(1, "Older")}${step(-1, "Newer")}</div>`}
    <div class="watch">${chosen.name.endsWith(".gif") ? html`<img class="film" src=${address} alt=${`an episode at ${chosen.steps} steps`}/>`
      : html`<video class="film" key=${address} src=${address} controls muted preload="metadata"></video>`}
      ${chosen.games ? html`<${Episodes} games=${chosen.games} steps=${chosen.steps}/>` : null}</div>`;
};
}
