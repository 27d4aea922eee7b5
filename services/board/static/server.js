"use strict";
// What the server is asked, and how figures are written.
{
const Board = (window.Board = {});

// A page that was exported has the answers in it, and asks nobody.
const exported = JSON.parse(document.getElementById("exported")?.textContent ?? "null");
Board.isExport = exported !== null;
Board.chosen = exported?.chosen;

const kept = (path, query) => {
  const key = path === "chart" ? `chart ${query.runs} ${query.metric} ${query.x} ${query.bands}` : path;
  if (!(key in exported)) throw new Error("this is not in the page that was exported");
  return exported[key];
};

Board.get = async (path, query = {}) => {
  if (Board.isExport) return kept(path, query);
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query))
    if (value !== "" && value !== undefined && value !== null) words.set(name, value);
  const answer = await fetch(`api/${path}${[...words].length ? `?${words}` : ""}`);
  const found = await answer.json().catch(() => ({error: `the server answers ${answer.status}`}));
  if (!answer.ok) throw new Error(found.error || `the server answers ${answer.status}`);
  return found;
};

Board.putNote = async (run, text) => {
  const options = {method: "PUT", headers: {"content-type": "application/json"}, body: JSON.stringify({text})};
  const answer = await fetch(`api/runs/${run}/note`, options);
  const found = await answer.json().catch(() => ({error: `the server answers ${answer.status}`}));
  if (!answer.ok) throw new Error(found.error || `the server answers ${answer.status}`);
  return found.note;
};

// Calls back with each new version of the runs; `down` with whether the server is away.
Board.watch = (after, changed, down) => {
  if (Board.isExport) return () => {};
  const events = new EventSource(`api/events?after=${after}`);
  events.addEventListener("change", (event) => changed(Number(event.data)));
  events.onopen = () => down(false);
  events.onerror = () => down(true);
  return () => events.close();
};

const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

Board.count = (value) => {
  if (value === undefined || value === null) return "";
  for (const [size, letter] of PREFIXES)
    if (Math.abs(value) >= 10 * size || (size >= 1e6 && Math.abs(value) >= size))
      return `${trim((value / size).toPrecision(3))} ${letter}`;
  return Math.abs(value) < 10000 && Number.isInteger(value) ? String(value) : Board.figure(value);
};

Board.figure = (value) => {
  if (value === undefined || value === null || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return trim(value.toPrecision(size >= 1000 ? 6 : 4));
};

Board.bytes = (value) => (value >= 2 ** 30 ? `${trim((value / 2 ** 30).toPrecision(3))} GiB` : `${trim((value / 2 ** 20).toFixed(value < 10 * 2 ** 20 ? 1 : 0))} MiB`);

Board.minutes = (value) => {
  if (!value) return "";
  return value < 1 ? `${Math.round(value * 60)} s` : value < 120 ? `${trim(value.toPrecision(3))} min` : `${(value / 60).toFixed(1)} h`;
};

Board.ago = (seconds) => {
  const age = Math.max(0, Date.now() / 1000 - seconds);
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (age >= 2 * length) return `${Math.round(age / length)} ${unit} ago`;
  return `${Math.round(age)} s ago`;
};

const trim = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text);
}
