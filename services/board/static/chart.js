"use strict";
// Curves. The server has reduced them to columns of pixels, two values each; all curves of a chart share them.
{
const {html, useEffect, useRef, useState} = htmPreact;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLOURS = 8;
Board.colourOf = (index) =>
  index < COLOURS ? colour(`--line-${index}`) : `hsl(${(index * 137.5) % 360} 60% ${colour("--line-lightness") || "45%"})`;

const pale = (stroke) => (stroke.startsWith("#") ? `${stroke}38` : stroke.replace(")", " / 22%)"));

const AXES = {steps: "environment steps", minutes: "wall clock, minutes", updates: "learner updates"};

// An answer over what is known of the same question: curves that it does not have again have not changed.
const merge = (known, answer) => {
  const curves = new Map();
  for (const name of answer.kept) if (known?.curves.has(name)) curves.set(name, known.curves.get(name));
  for (const curve of answer.curves) curves.set(curve.id, curve);
  const isSame = known && !answer.curves.length;
  return {...answer, curves, bands: isSame ? known.bands : answer.bands};
};

const places = ({first, last, columns}) => {
  const width = (last - first) / columns;
  return Float64Array.from({length: 2 * columns}, (_, half) => first + (half / 2 + 0.25) * width);
};

const spread = (columns, at, values, scale) => {
  const found = new Array(2 * columns).fill(null);
  for (let i = 0; i < at.length; i++) found[scale * at[i]] = values[i];
  return found;
};

// Series and data for uPlot: bands below, single curves over them, means on top.
const picture = (state, labelOf) => {
  const data = [places(state)], series = [{}], bands = [], entries = [];
  const add = (values, how) => (data.push(values), series.push({spanGaps: true, ...how}));
  const named = state.bands.map((band, index) => {
    const count = band.runs.length;
    return {...band, stroke: Board.colourOf(index), label: `${band.label} (${count} run${count > 1 ? "s" : ""})`};
  });
  const bandOf = new Map(named.flatMap((band) => band.runs.map((run) => [run, band])));
  for (const band of named) {
    entries.push(band);
    if (band.runs.length < 2) continue;
    bands.push({series: [series.length, series.length + 1], fill: pale(band.stroke)});
    for (const bound of ["high", "low"])
      add(spread(state.columns, band.at, band[bound], 2), {label: "", stroke: "transparent", points: {show: false}, isBand: true});
  }
  [...state.curves.values()].forEach((curve, index) => {
    const band = bandOf.get(curve.run);
    const label = labelOf(curve), points = {show: !band && curve.at.length < 60, size: 4};
    const stroke = band ? band.stroke : Board.colourOf(index);
    if (!band) entries.push({stroke, label});
    if (!band || band.runs.length > 1)
      add(spread(state.columns, curve.at, curve.y, 1), {label, stroke, width: band ? 0.6 : 1.4, alpha: band ? 0.45 : 1, points});
  });
  for (const band of named)
    add(spread(state.columns, band.at, band.y, 2), {label: band.label, stroke: band.stroke, width: 2, points: {show: band.at.length < 60 && band.runs.length < 2, size: 4}});
  return {data, series, bands, entries};
};

Board.options = (size, made, axis, zoom) => ({
  ...size,
  series: made.series,
  bands: made.bands,
  legend: {show: false},
  focus: {alpha: 0.35},
  cursor: {focus: {prox: 24}, drag: {x: true, y: false, setScale: false}},
  scales: {x: {time: false, range: (_, low, high) => [low, high]}},
  axes: [
    {stroke: colour("--text"), grid: {stroke: colour("--grid"), width: 1}, ticks: {stroke: colour("--grid")}, label: AXES[axis] ?? axis, labelSize: 18, size: 34, font: "12px system-ui", labelFont: "12px system-ui", values: (_, ticks) => ticks.map(Board.count)},
    {stroke: colour("--text"), grid: {stroke: colour("--grid"), width: 1}, ticks: {stroke: colour("--grid")}, size: 56, font: "12px system-ui", values: (_, ticks) => ticks.map(Board.figure)},
  ],
  hooks: {
    setSelect: [(plot) => {
      if (plot.select.width < 4) return;
      zoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
    }],
  },
});

// What stands under the cursor: the place, and the value of the curve that is nearest to it.
const reading = (plot, series, focused) => {
  const index = plot.cursor.idx;
  if (index === null || index === undefined) return "";
  const at = Board.count(plot.data[0][index]);
  const from = focused ?? series.findIndex((each, i) => i > 0 && !each.isBand);
  const column = plot.data[from];
  if (!column) return at;
  let near = null;
  for (let off = 0; off < 40 && near === null; off++)
    near = column[index - off] ?? column[index + off] ?? null;
  return near === null ? at : `${at}: ${Board.figure(near)}  ${series[from].label}`;
};

Board.Chart = ({runs, metric, axis = "steps", smooth = 0, bands = false, tick, labelOf, height = 300, onMetric, title}) => {
  const box = useRef(), text = useRef(), plot = useRef(), state = useRef();
  const [error, setError] = useState("");
  const [zoom, setZoom] = useState(null);
  const [drawn, setDrawn] = useState(0);
  const [size, setSize] = useState(null);
  const [entries, setEntries] = useState([]);
  const key = JSON.stringify([runs, metric, axis, smooth, bands, zoom, size?.width]);

  useEffect(() => {
    const measure = () => box.current && setSize((old) => {
      const width = Math.max(240, box.current.clientWidth);
      return old && Math.abs(old.width - width) < 8 ? old : {width, height};
    });
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => setDrawn((count) => count + 1);
    scheme.addEventListener("change", redraw);
    return () => {
      observer.disconnect();
      scheme.removeEventListener("change", redraw);
      plot.current?.destroy();
    };
  }, []);

  useEffect(() => setZoom(null), [metric, axis, JSON.stringify(runs)]);

  useEffect(() => {
    if (!size) return;
    let isOver = false;
    const ask = async () => {
      const known = state.current?.key === key ? state.current : null;
      const query = {runs: runs.join(","), metric, x: axis, columns: Math.round(size.width - 60), smooth, bands: bands ? 1 : 0};
      if (zoom) Object.assign(query, {from: zoom[0], to: zoom[1]});
      try {
        const answer = await Board.get("chart", {...query, after: known?.state});
        if (isOver) return;
        if (known && !answer.curves.length && answer.kept.length === known.curves.size) {
          state.current = {...known, state: answer.state};
        } else {
          state.current = {...merge(known, answer), key};
          setDrawn((count) => count + 1);
        }
        setError("");
        onMetric?.(answer.metric);
        if (!answer.complete) setTimeout(() => !isOver && ask(), 50);
      } catch (failure) {
        if (!isOver) setError(failure.message);
      }
    };
    if (runs.length) ask();
    else {
      state.current = null;
      setDrawn((count) => count + 1);
    }
    return () => (isOver = true);
  }, [key, tick]);

  useEffect(() => {
    plot.current?.destroy();
    plot.current = null;
    if (!state.current || !state.current.curves.size || !size) return setEntries([]);
    const made = picture(state.current, labelOf);
    const wanted = Board.options(size, made, axis, setZoom);
    let focused = null;
    const say = (each) => (text.current.textContent = reading(each, made.series, focused));
    wanted.hooks.setCursor = [say];
    wanted.hooks.setSeries = [(each, index) => ((focused = made.series[index]?.isBand ? null : index), say(each))];
    plot.current = new uPlot(wanted, made.data, box.current);
    box.current.dataset.curves = made.series.length - 1;
    setEntries(made.entries);
  }, [drawn, size]);

  const keys = (event) => {
    const chart = plot.current;
    if (!chart) return;
    const width = chart.bbox.width / devicePixelRatio;
    const at = chart.cursor.left >= 0 ? chart.cursor.left : width / 2;
    const steps = {ArrowLeft: -width / 50, ArrowRight: width / 50, Home: -width, End: width}[event.key];
    if (steps !== undefined) chart.setCursor({left: Math.min(width, Math.max(0, at + steps)), top: 10});
    else if (event.key === "+" || event.key === "=") {
      const place = chart.posToVal(at, "x"), half = (chart.scales.x.max - chart.scales.x.min) / 4;
      setZoom([place - half, place + half]);
    } else if (event.key === "-" || event.key === "0" || event.key === "Escape") setZoom(null);
    else return;
    event.preventDefault();
  };

  const empty = !state.current || !state.current.curves.size;
  return html`<figure class="chart">
    ${title ? html`<figcaption>${title}</figcaption>` : null}
    <div ref=${box} class="plot" tabindex="0" role="img" aria-label=${`${metric || "return"} against ${AXES[axis]}; arrow keys read values, + zooms, 0 shows all`}
      onKeyDown=${keys} onDblClick=${() => setZoom(null)}>
      ${empty && html`<p class="dim empty">${runs.length ? "No values yet." : "Choose runs in the table below."}</p>`}
    </div>
    <p class="reading" aria-live="polite" ref=${text}></p>
    ${zoom && html`<button class="plain" onClick=${() => setZoom(null)}>Show all</button>`}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <ul class="legend">${entries.slice(0, 16).map((entry) => html`<li><svg width="14" height="8" aria-hidden="true"><line x1="0" x2="14" y1="4" y2="4" stroke=${entry.stroke} stroke-width="3"/></svg> ${entry.label}</li>`)}
      ${entries.length > 16 && html`<li class="dim">and ${entries.length - 16} more</li>`}</ul>
  </figure>`;
};
}
