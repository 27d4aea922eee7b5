"use strict";
// One sweep: its history, what decides, and what every trial tried.
{
const {html, useEffect, useMemo, useRef, useState} = htmPreact;
const FIRST_ROWS = 50;

const useWidth = () => {
  const box = useRef();
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const measure = () => setWidth((old) => (Math.abs(old - box.current.clientWidth) < 8 ? old : box.current.clientWidth));
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  return [box, width];
};

const useScheme = () => {
  const [scheme, setScheme] = useState(0);
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => setScheme((count) => count + 1);
    dark.addEventListener("change", redraw);
    return () => dark.removeEventListener("change", redraw);
  }, []);
  return scheme;
};

// From the worst to the best of those that have a score.
const ink = (rank) => `color-mix(in oklab, var(--line-1) ${Math.round(100 * rank)}%, var(--line-0))`;

const ranked = (trials) => {
  const known = trials.filter((trial) => trial.score !== null);
  const scores = known.map((trial) => trial.score).sort((a, b) => a - b);
  // Equal ones are as good as the best of them.
  return new Map(known.map((trial) => [trial.number, scores.length > 1 ? scores.lastIndexOf(trial.score) / (scores.length - 1) : 1]));
};

const said = (axis, at) => (at === null ? "" : axis.values ? axis.values[at] : Board.figure(at));
const words = (axes, trial) => axes.map((axis, index) => `${axis.label} ${said(axis, trial.at[index])}`).join(", ");

// Each trial by its number, and the best of those that were completed until then.
const History = ({trials, axes, chosen, choose}) => {
  const [box, width] = useWidth();
  const plot = useRef(), text = useRef();
  const scheme = useScheme();
  const known = useMemo(() => trials.filter((trial) => trial.score !== null), [trials]);
  const tell = (trial) => (text.current.textContent = trial ? `Trial ${trial.number}: ${Board.figure(trial.score)}, ${trial.state}${axes.length ? ` (${words(axes, trial)})` : ""}` : "");

  useEffect(() => {
    if (!width || !known.length) return;
    const css = getComputedStyle(document.documentElement), colour = (name) => css.getPropertyValue(name).trim();
    let top = null;
    const best = known.map((trial) => (trial.state === "done" ? (top = Math.max(top ?? -Infinity, trial.score)) : top));
    const of = (isDone) => known.map((trial) => ((trial.state === "done") === isDone ? trial.score : null));
    const dots = (stroke, fill) => ({stroke, paths: () => null, points: {show: true, size: 7, width: 1.5, stroke, fill}});
    const series = [{}, {stroke: colour("--line-1"), width: 1.5, paths: uPlot.paths.stepped({align: 1}), points: {show: false}},
      dots(colour("--line-0"), colour("--line-0")), dots(colour("--line-7"), colour("--panel"))];
    const wanted = Board.options({width, height: 260}, {series, bands: []}, "trial", () => {});
    wanted.cursor = {drag: {x: false, y: false}};
    // A place to each side, that no point stands on the edge.
    wanted.scales.x.range = (_, low, high) => [low - 0.5, high + 0.5];
    wanted.axes[0].incrs = [1, 2, 5, 10, 20, 50, 100, 200, 500];
    wanted.hooks = {setCursor: [(each) => tell(known[each.cursor.idx])]};
    plot.current = new uPlot(wanted, [known.map((trial) => trial.number), best, of(true), of(false)], box.current);
    const click = () => choose(known[plot.current.cursor.idx]?.number ?? null);
    plot.current.over.addEventListener("click", click);
    box.current.dataset.points = known.length;
    return () => (plot.current.destroy(), (plot.current = null));
  }, [known, width, scheme]);

  useEffect(() => {
    const trial = known.find((each) => each.number === chosen);
    if (!trial || !plot.current) return;
    plot.current.setCursor({left: plot.current.valToPos(trial.number, "x"), top: plot.current.valToPos(trial.score, "y")});
    tell(trial);
  }, [chosen, known, width]);

  const keys = (event) => {
    const at = known.findIndex((trial) => trial.number === chosen), last = known.length - 1;
    const next = {ArrowLeft: Math.max(0, at < 0 ? last : at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last}[event.key];
    if (event.key === "Escape") choose(null);
    else if (next !== undefined && known.length) choose(known[next].number);
    else return;
    event.preventDefault();
  };
  return html`<figure class="chart">
    <div ref=${box} class="plot history" tabindex="0" role="img" aria-label="score against trial; arrow keys choose a trial" onKeyDown=${keys}>${!known.length && html`<p class="dim empty">No trial has a score yet.</p>`}</div>
    <p class="reading" aria-live="polite" ref=${text}></p>
    <ul class="legend"><li><svg width="14" height="10" aria-hidden="true"><circle cx="7" cy="5" r="3.5" class="dot"/></svg> completed</li>
      <li><svg width="14" height="10" aria-hidden="true"><circle cx="7" cy="5" r="3.5" class="dot hollow"/></svg> pruned, or not over</li>
      <li><svg width="14" height="10" aria-hidden="true"><line x1="0" x2="14" y1="5" y2="5" stroke="var(--line-1)" stroke-width="2"/></svg> best so far</li></ul></figure>`;
};

const Importances = ({found, axes}) => {
  if (!found) return null;
  if (!found.shares.length) return html`<p class="dim">${found.why}</p>`;
  const rows = axes.map((axis, at) => [axis, found.shares[at]]).sort((a, b) => b[1] - a[1]);
  return html`<table class="importances"><tbody>${rows.map(([axis, share]) => html`<tr><th scope="row"><code>${axis.label}</code></th>
      <td class="wide"><svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true"><rect width=${Math.max(0.5, 100 * share)} y="1" height="8"/></svg></td><td class="number">${Math.round(100 * share)} %</td></tr>`)}</tbody></table>
    <p class="dim">How much each field decides whether a trial is among the best tenth, from ${found.trials} completed trials: PED-ANOVA, by Optuna.</p>`;
};

// Where a value stands on its axis, 0 to 1.
const share = (axis, at) => {
  if (at === null) return null;
  if (axis.values) return (at + 0.5) / axis.values.length;
  if (axis.high === axis.low) return 0.5;
  return axis.log ? Math.log(at / axis.low) / Math.log(axis.high / axis.low) : (at - axis.low) / (axis.high - axis.low);
};

const ticks = (axis, most) => {
  if (axis.values) {
    const step = Math.ceil(axis.values.length / most);
    return axis.values.map((text, at) => [text, at]).filter((_, at) => at % step === 0);
  }
  const middle = axis.log ? Math.sqrt(axis.low * axis.high) : (axis.low + axis.high) / 2;
  return (axis.high > axis.low ? [axis.low, Number(middle.toPrecision(3)), axis.high] : [axis.low]).map((at) => [Board.figure(at), at]);
};

// A line for each trial across an axis for each field; side by side, or one below the other where there is no room.
const Parallel = ({trials, axes: fields, ranks, least, chosen, choose}) => {
  const [box, width] = useWidth();
  const known = trials.filter((trial) => trial.score !== null);
  const scores = known.map((trial) => trial.score);
  const axes = [...fields, {label: "score", low: Math.min(...scores), high: Math.max(...scores)}];
  const gap = (width - 24) / (axes.length - 1 || 1);
  const isDown = gap < 30 + 7 * Math.max(...axes.map((axis) => axis.label.length));
  const height = isDown ? 74 * axes.length : 320;
  const place = (index, part) => (isDown ? [12 + part * (width - 24), 30 + 74 * index] : [12 + index * gap, 290 - part * 250]);
  const side = (index, part) => (isDown ? (part < 0.15 ? "start" : part > 0.85 ? "end" : "middle") : index === axes.length - 1 ? "end" : "start");
  const isFaint = (trial) => ranks.get(trial.number) < least;
  const line = (trial) => {
    const points = [...trial.at, trial.score].map((at, index) => share(axes[index], at)).map((part, index) => (part === null ? null : place(index, part)));
    return points.map((point, index) => point && `${index && points[index - 1] ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`).filter(Boolean).join("");
  };
  // The best ones last, that they lie on top; and above all the one that is chosen.
  const order = [...known].sort((a, b) => (a.number === chosen) - (b.number === chosen) || isFaint(b) - isFaint(a) || a.score - b.score);
  return html`<div class="parallel" ref=${box}>${width > 0 && known.length > 0 && html`<svg width=${width} height=${height} role="img" aria-label=${`${known.length} trials across ${axes.map((axis) => axis.label).join(", ")}; the table has their values`}>
    ${axes.map((_, index) => {
      const [[x1, y1], [x2, y2]] = [place(index, 0), place(index, 1)];
      return html`<line class="axis" x1=${x1} y1=${y1} x2=${x2} y2=${y2}/>`;
    })}
    ${order.map((trial) => html`<path key=${trial.number} d=${line(trial)} stroke=${ink(ranks.get(trial.number))} class=${`trial ${trial.state === "done" ? "" : "cut"} ${isFaint(trial) ? "faint" : ""} ${trial.number === chosen ? "chosen" : ""}`}
      onClick=${() => choose(trial.number)}><title>Trial ${trial.number}: ${Board.figure(trial.score)} (${words(fields, trial)})</title></path>`)}
    ${axes.map((axis, index) => {
      const [x, y] = place(index, isDown ? 0 : 1);
      return html`<text class="name" x=${x} y=${y - 16} text-anchor=${isDown ? "start" : index === 0 ? "start" : index === axes.length - 1 ? "end" : "middle"}>${axis.label}</text>
        ${ticks(axis, isDown ? Math.max(2, Math.floor(width / (12 + 7 * Math.max(...(axis.values ?? [""]).map((text) => text.length))))) : 16).map(([text, at]) => {
          const part = share(axis, at), [tx, ty] = place(index, part);
          return html`<text x=${isDown ? tx : tx + (index === axes.length - 1 ? -5 : 5)} y=${isDown ? ty + 16 : ty + 4} text-anchor=${side(index, part)}>${text}</text>`;
        })}`;
    })}</svg>`}</div>`;
};

const Trials = ({trials, axes, ranks, chosen, choose}) => {
  const [order, setOrder] = useState(["score", -1]);
  const [most, setMost] = useState(FIRST_ROWS);
  const value = (trial, name) => (typeof name === "number" ? trial.at[name] : trial[name]);
  const rows = [...trials].sort((a, b) => Board.compare(value(a, order[0]), value(b, order[0]), order[1]) || a.number - b.number);
  const columns = [["number", "Trial", 1], ["score", "Score", -1], ["state", "State", 1], ...axes.map((axis, index) => [index, axis.label, 1])];
  const isNumber = (name) => name === "number" || name === "score" || (typeof name === "number" && (!axes[name].values || axes[name].values.every((text) => Number.isFinite(Number(text)))));
  return html`<div class="scroll"><table class="trials"><thead><tr>${columns.map(([name, label, first]) => html`<th scope="col" class=${isNumber(name) ? "number" : ""} aria-sort=${order[0] === name ? (order[1] > 0 ? "ascending" : "descending") : "none"}>
      <button class="sort" onClick=${() => setOrder([name, order[0] === name ? -order[1] : first])}>${label}${order[0] === name ? (order[1] > 0 ? " ▴" : " ▾") : ""}</button></th>`)}<th scope="col">Runs</th></tr></thead>
    <tbody>${rows.slice(0, most).map((trial) => html`<tr key=${trial.number} class=${trial.number === chosen ? "chosen" : ""}>
      <td class="number"><button class="sort" aria-pressed=${trial.number === chosen} aria-label=${`trial ${trial.number}`} onClick=${() => choose(trial.number === chosen ? null : trial.number)}>${trial.number} <svg width="10" height="10" aria-hidden="true">${ranks.has(trial.number) && html`<circle cx="5" cy="5" r="4" fill=${ink(ranks.get(trial.number))}/>`}</svg></button></td>
      <td class="number">${Board.figure(trial.score ?? undefined)}</td><td><span class=${`state ${trial.state}`} title=${trial.error}>${trial.state}</span></td>
      ${axes.map((axis, index) => html`<td class=${isNumber(index) ? "number" : ""}>${said(axis, trial.at[index])}</td>`)}
      <td class="name">${trial.runs.map(([id, name], index) => html`${index ? ", " : ""}${id ? html`<a href=${`#/run/${id}`}>${trial.runs.length > 1 ? `seed ${name.match(/seed=(-?\d+)$/)?.[1] ?? index}` : name}</a>` : html`<span class="dim">${name}</span>`}`)}
        ${trial.copies && html`<span class="dim"> ${trial.copies}</span>`}${trial.error && html`<span class="error"> ${trial.error}</span>`}</td></tr>`)}</tbody></table></div>
    ${rows.length > most && html`<p><button class="plain" onClick=${() => setMost(rows.length)}>Show all ${rows.length}</button></p>`}`;
};

Board.Sweep = ({id, tick, showCurves}) => {
  const [sweep, setSweep] = useState(null);
  const [error, setError] = useState("");
  const [task, setTask] = useState("");
  const [chosen, choose] = useState(null);
  const [percent, setPercent] = useState(100);
  const known = useRef(null);
  useEffect(() => {
    let isOver = false;
    Board.get(`sweeps/${id}`, {after: known.current?.state}).then((found) => {
      if (isOver || !(found.trials || known.current)) return;
      if (found.trials) setSweep((known.current = found));
      setError("");
    }, (failure) => isOver || setError(failure.message));
    return () => (isOver = true);
  }, [id, tick]);
  const tasks = useMemo(() => [...new Set(sweep?.trials.map((trial) => trial.task))], [sweep]);
  const here = tasks.includes(task) ? task : tasks[0];
  const trials = useMemo(() => sweep?.trials.filter((trial) => trial.task === here) ?? [], [sweep, here]);
  const ranks = useMemo(() => ranked(trials), [trials]);
  if (error) return html`<section><p class="error" role="alert">${error}</p></section>`;
  if (!sweep) return html`<section><p class="dim">Reading.</p></section>`;
  const {axes, counts} = sweep;
  const total = Object.values(counts).reduce((all, count) => all + count, 0);
  const best = trials.filter((trial) => trial.state === "done" && trial.score !== null).reduce((top, trial) => (top && top.score >= trial.score ? top : trial), null);
  const ids = trials.flatMap((trial) => trial.runs.map(([run]) => run)).filter(Boolean);
  return html`
    <section aria-labelledby="sweep"><h2 id="sweep">${sweep.name} <span class="state">${sweep.kind}</span></h2>
      <p class="facts"><span>${sweep.preset}</span><span>${total} runs: ${Object.entries(counts).map(([state, count]) => `${count} ${state}`).join(", ")}</span></p>
      ${best && html`<p>Best: trial ${best.number}, score ${Board.figure(best.score)}${axes.length ? ` (${words(axes, best)})` : ""}</p>`}
      <div class="controls">${tasks.length > 1 && html`<label>Environment <select value=${here} onChange=${(event) => setTask(event.target.value)}>${tasks.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>`}
        ${!Board.isExport && ids.length > 0 && html`<button class="plain" onClick=${() => showCurves(ids.slice(0, 200))}>Show their curves</button>`}</div>
      ${sweep.more ? html`<p class="dim">and ${sweep.more} more trials, which are not shown</p>` : null}</section>
    <section aria-labelledby="history"><h2 id="history">History</h2><${History} trials=${trials} axes=${axes} chosen=${chosen} choose=${choose}/></section>
    ${axes.length > 0 && html`<section aria-labelledby="importances"><h2 id="importances">Importances</h2><${Importances} found=${sweep.importances[here]} axes=${axes}/></section>
    <section aria-labelledby="parallel"><h2 id="parallel">What was tried</h2>
      <div class="controls"><label>The best <input type="range" min="1" max="100" value=${percent} aria-valuetext=${`${percent} %`} onInput=${(event) => setPercent(Number(event.target.value))}/> ${percent} %</label>
        <span class="scale">worst <svg width="80" height="8" aria-hidden="true">${[...Array(8).keys()].map((at) => html`<rect x=${10 * at} width="10.5" height="8" fill=${ink(at / 7)}/>`)}</svg> best</span></div>
      <${Parallel} trials=${trials} axes=${axes} ranks=${ranks} least=${1 - percent / 100} chosen=${chosen} choose=${choose}/></section>`}
    <section aria-labelledby="trials"><h2 id="trials">Trials <span class="dim">${trials.length}</span></h2><${Trials} trials=${trials} axes=${axes} ranks=${ranks} chosen=${chosen} choose=${choose}/></section>`;
};
}
