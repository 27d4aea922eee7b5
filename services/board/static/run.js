"use strict";
// One run.
{
const {html, useEffect, useState} = htmPreact;

const Evaluations = ({rows}) => {
  if (!rows.length) return html`<p class="dim">No evaluation yet.</p>`;
  const heads = ["Steps", "Time", "Version", "Games", "Mean return", "± deviation", "Least", "Most", "Mean length"];
  return html`<div class="scroll short"><table><thead><tr>${heads.map((head) => html`<th scope="col" class="number">${head}</th>`)}</tr></thead>
    <tbody>${[...rows].reverse().map((row) => html`<tr>${[Board.count(row.steps), Board.minutes(row.minutes), row.version, row.games, Board.figure(row.mean), Board.figure(row.deviation), Board.figure(row.least), Board.figure(row.most), Board.figure(row.length)]
      .map((cell) => html`<td class="number">${cell}</td>`)}</tr>`)}</tbody></table></div>`;
};

const Configuration = ({config}) => html`<details><summary>Configuration (${Object.keys(config).length} fields)</summary>
  <div class="scroll short"><table><tbody>${Object.entries(config).map(([name, value]) => html`<tr><th scope="row"><code>${name}</code></th><td>${value}</td></tr>`)}</tbody></table></div></details>`;

Board.Run = ({id, tick, shown, change}) => {
  const [run, setRun] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => {
    let isOver = false;
    Board.get(`runs/${id}`).then((found) => isOver || (setRun(found), setError("")), (failure) => isOver || setError(failure.message));
    return () => (isOver = true);
  }, [id, tick]);
  useEffect(() => setRun(null), [id]);
  if (error && !run) return html`<section><p class="error" role="alert">${error}</p></section>`;
  if (!run) return html`<section><p class="dim">Reading.</p></section>`;
  const share = run.total_steps ? Math.min(1, run.steps / run.total_steps) : 0;
  return html`
    <section aria-labelledby="run"><h2 id="run">${run.name} <span class=${`state ${run.state}`}>${run.state}</span></h2>
      ${run.problem ? html`<p class="error">${run.problem}</p>` : html`<p class="facts">
        <span>${run.algorithm} on ${run.env}</span><span>seed ${run.seed}</span>
        <span>${Board.count(run.steps)} of ${Board.count(run.total_steps)} steps (${Math.floor(100 * share)} %)</span>
        <span>${Board.minutes(run.minutes)}</span><span>score ${Board.figure(run.score) || "none yet"}</span></p>
        <progress max="1" value=${share} aria-label="steps made">${Math.floor(100 * share)} %</progress>`}
    </section>
    <section aria-labelledby="timeline"><h2 id="timeline">Timeline</h2><${Board.Timeline} run=${id} state=${run.state} tick=${tick}/></section>
    <section aria-labelledby="curves"><h2 id="curves">${shown.metric || "Return"}</h2>
      <${Board.Controls} shown=${shown} change=${change} names=${run.names ?? []}/>
      <${Board.Chart} runs=${[id]} ...${shown} tick=${tick} labelOf=${(curve) => curve.tag}/></section>
    <section aria-labelledby="replay"><h2 id="replay">Replay</h2><${Board.Replay} run=${Board.isExport ? {...run, names: []} : run} id=${id} tick=${tick} axis=${shown.axis}/></section>
    <section aria-labelledby="services"><h2 id="services">Services</h2><${Board.Services} run=${run}/></section>
    <section aria-labelledby="film"><h2 id="film">Videos</h2><${Board.Films} run=${run} id=${id}/></section>
    <section aria-labelledby="evaluations"><h2 id="evaluations">Evaluations</h2><${Evaluations} rows=${run.evaluations ?? []}/></section>
    <section aria-labelledby="note"><h2 id="note">Note</h2><${Board.Note} run=${id} text=${run.note ?? ""} readOnly=${Board.isExport}/></section>
    <section aria-label="Configuration"><${Configuration} config=${run.config ?? {}}/></section>`;
};
}
