"use strict";
// What each service did over the last minutes: colour is work, hatching is waiting, and white is idle.
{
const {html, useEffect, useRef, useState} = htmPreact;
const HEIGHT = 26;

const hatch = (context, stroke) => {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = stroke;
  pen.globalAlpha = 0.55;
  for (const off of [-6, 0, 6]) {
    pen.moveTo(off, 6);
    pen.lineTo(off + 6, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
};

const fills = (context, work, kinds) =>
  kinds.map((_, index) => (index < work ? Board.colourOf(index) : hatch(context, Board.colourOf(index - work))));

const percent = (share) => `${share < 0.095 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;

const words = (mean) => {
  const parts = Object.entries(mean).filter(([, share]) => share >= 0.005).sort((a, b) => b[1] - a[1]);
  const idle = 1 - parts.reduce((sum, [, share]) => sum + share, 0);
  if (idle >= 0.005) parts.push(["idle", idle]);
  return parts.sort((a, b) => b[1] - a[1]).map(([kind, share]) => `${kind} ${percent(share)}`);
};

const Row = ({row, found, scheme}) => {
  const canvas = useRef();
  useEffect(() => {
    const width = (canvas.current.width = Math.max(120, canvas.current.clientWidth));
    canvas.current.height = HEIGHT;
    const context = canvas.current.getContext("2d");
    const ink = fills(context, found.work, found.kinds);
    for (const [column, shares] of row.spans) {
      const left = Math.round((column * width) / found.columns), right = Math.round(((column + 1) * width) / found.columns);
      let top = HEIGHT;
      shares.forEach((share, kind) => {
        const next = top - share * HEIGHT;
        context.fillStyle = ink[kind];
        if (share > 0) context.fillRect(left, next, right - left, top - next);
        top = next;
      });
    }
  }, [found, scheme]);
  const said = words(row.mean);
  return html`<span>${row.name}</span><canvas ref=${canvas} role="img" aria-label=${`${row.name}: ${said.join(", ")}`}/>
    <span class="most" title=${said.join(", ")}>${said.slice(0, 2).join(", ")}</span>`;
};

const Swatch = ({index, found, scheme}) => {
  const canvas = useRef();
  useEffect(() => {
    const context = canvas.current.getContext("2d");
    context.clearRect(0, 0, 14, 12);
    context.fillStyle = fills(context, found.work, found.kinds)[index];
    context.fillRect(0, 0, 14, 12);
  }, [index, scheme]);
  return html`<canvas class="swatch" width="14" height="12" ref=${canvas} aria-hidden="true"/>`;
};

Board.Timeline = ({run, state, tick}) => {
  const [found, setFound] = useState(null);
  const [scheme, setScheme] = useState(0);
  const known = useRef(null);
  useEffect(() => {
    let isOver = false;
    const after = known.current?.run === run ? known.current.version : 0;
    Board.get(`runs/${run}/timeline`, {after}).then((answer) => {
      if (isOver) return;
      known.current = {...(after ? known.current : {}), ...answer, run};
      setFound(known.current);
    }, () => {});
    return () => (isOver = true);
  }, [run, tick]);
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => setScheme((count) => count + 1);
    dark.addEventListener("change", redraw);
    addEventListener("resize", redraw);
    return () => (dark.removeEventListener("change", redraw), removeEventListener("resize", redraw));
  }, []);
  if (!found || found.run !== run) return html`<p class="dim">Reading.</p>`;
  const rows = found.rows ?? [];
  const present = (found.kinds ?? []).map((kind, index) => [kind, index]).filter(([kind]) => rows.some((row) => row.mean[kind] >= 0.005));
  const minutes = found.window_s / 60;
  return html`
    ${rows.length ? html`<div class="timeline">${rows.map((row) => html`<${Row} key=${row.name} row=${row} found=${found} scheme=${scheme}/>`)}
      <span class="ends"></span><span class="ends"><span>${minutes} min before</span><span>${state === "running" ? "now" : "its end"}</span></span><span class="ends"></span></div>
      ${found.more ? html`<p class="dim">and ${found.more} more services</p>` : null}
      <ul class="legend">${present.map(([kind, index]) => html`<li><${Swatch} index=${index} found=${found} scheme=${scheme}/> ${kind}</li>`)}
        <li><span class="swatch"></span> idle</li></ul>`
      : html`<p class="dim">No service has reported of its time yet.</p>`}
    ${found.verdict && html`<p class="verdict">${found.verdict}</p>`}
    ${found.others?.length ? html`<ul>${found.others.map((each) => html`<li>${each}</li>`)}</ul>` : null}`;
};
}
