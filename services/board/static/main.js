"use strict";
// The page: which part is shown, and what is kept up to date.
{
const {html, render, useEffect, useMemo, useRef, useState} = htmPreact;
const FIRST_CHOSEN = 12;

const route = () => {
  const [, kind, id] = location.hash.match(/^#\/(run|sweep)\/([0-9a-f]+)$/) ?? [];
  return {kind, id};
};

const Page = () => {
  const [{kind, id}, setRoute] = useState(route());
  const [library, setLibrary] = useState({version: 0, complete: false, byId: new Map(), sweeps: []});
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
      known.current = {version: answer.version, complete: answer.complete, byId, sweeps: answer.sweeps};
      setLibrary(known.current);
      setAway(false);
      if (!answer.complete) setTimeout(refresh, 300);
    } catch {
      setAway(true);
    }
  };

  useEffect(() => {
    const moved = () => (setRoute(route()), scrollTo(0, 0));
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
    if (first && !id) Board.get(`runs/${first}`).then((run) => setNames(run.names), () => {});
  }, [first, id]);
  const change = (part) => setShown((old) => ({...old, ...part}));
  const here = kind === "sweep" ? library.sweeps.find((sweep) => sweep.id === id)?.name : library.byId.get(id)?.name;
  document.title = here ? `${here} · Troupe` : "Troupe board";
  const showCurves = (ids) => (setChosen(new Set(ids)), (location.hash = "#/"));
  return html`
    <header><a class="brand" href="#/">Troupe</a>
      <nav aria-label="Runs"><a href="#/" aria-current=${id ? undefined : "page"}>All runs</a>
      ${id && html`<span aria-current="page">${here ?? ""}</span>`}</nav>
      <span class="dim connection" role="status">${isAway ? "the server does not answer" : ""}</span></header>
    <main>${kind === "sweep"
      ? html`<${Board.Sweep} key=${id} id=${id} tick=${library.version} showCurves=${showCurves}/>`
      : kind === "run"
      ? html`<${Board.Run} id=${id} tick=${library.version} shown=${{...shown, bands: false}} change=${change}/>`
      : html`<${Board.Runs} runs=${runs} sweeps=${library.sweeps} byId=${library.byId} complete=${library.complete} tick=${library.version}
          chosen=${selection} choose=${setChosen} shown=${shown} change=${change} names=${names}/>`}</main>`;
};

render(html`<${Page}/>`, document.getElementById("page"));
}
