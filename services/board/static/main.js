"use strict";
// The page: which part is shown, and what is kept up to date.
{
const {html, render, useEffect, useMemo, useRef, useState} = htmPreact;
const FIRST_CHOSEN = 12;

const route = () => {
  const found = location.hash.match(/^#\/run\/([0-9a-f]+)$/);
  return found ? found[1] : "";
};

const Page = () => {
  const [runId, setRunId] = useState(route());
  const [library, setLibrary] = useState({version: 0, complete: false, byId: new Map(), fields: []});
  const [chosen, setChosen] = useState(null);
  const [shown, setShown] = useState({metric: "", axis: "steps", smooth: 0, bands: true});
  const [names, setNames] = useState([]);
  const [isAway, setAway] = useState(false);
  const known = useRef(library);

  const refresh = async () => {
    try {
      const answer = await Board.get("runs", {after: known.current.version});
      const byId = new Map(known.current.byId);
      for (const run of answer.runs) byId.set(run.id, run);
      for (const gone of answer.gone) byId.delete(gone);
      known.current = {version: answer.version, complete: answer.complete, byId, fields: answer.fields};
      setLibrary(known.current);
      setAway(false);
      if (!answer.complete) setTimeout(refresh, 300);
    } catch {
      setAway(true);
    }
  };

  useEffect(() => {
    const moved = () => (setRunId(route()), scrollTo(0, 0));
    addEventListener("hashchange", moved);
    let stop = () => {};
    refresh().then(() => (stop = Board.watch(known.current.version, refresh, setAway)));
    return () => (removeEventListener("hashchange", moved), stop());
  }, []);

  const runs = useMemo(() => [...library.byId.values()], [library]);
  // Until somebody chooses, the newest runs are shown.
  const selection = useMemo(() => chosen ?? new Set(Board.chosen ?? [...runs].filter((run) => !run.problem)
    .sort((a, b) => b.changed_s - a.changed_s).slice(0, FIRST_CHOSEN).map((run) => run.id)), [chosen, runs]);
  const first = [...selection][0];
  useEffect(() => {
    if (first && !runId) Board.get(`runs/${first}`).then((run) => setNames(run.names), () => {});
  }, [first, runId]);
  const change = (part) => setShown((old) => ({...old, ...part}));
  document.title = runId && library.byId.has(runId) ? `${library.byId.get(runId).name} · Troupe` : "Troupe board";

  return html`
    <header><a class="brand" href="#/">Troupe</a>
      <nav aria-label="Runs"><a href="#/" aria-current=${runId ? undefined : "page"}>All runs</a>
      ${runId && html`<span aria-current="page">${library.byId.get(runId)?.name ?? ""}</span>`}</nav>
      <span class="dim connection" role="status">${isAway ? "the server does not answer" : ""}</span></header>
    <main>${runId
      ? html`<${Board.Run} id=${runId} tick=${library.version} shown=${{...shown, bands: false}} change=${change}/>`
      : html`<${Board.Runs} runs=${runs} byId=${library.byId} complete=${library.complete} tick=${library.version}
          chosen=${selection} choose=${setChosen} shown=${shown} change=${change} names=${names}/>`}</main>`;
};

render(html`<${Page}/>`, document.getElementById("page"));
}
