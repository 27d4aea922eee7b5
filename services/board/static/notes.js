"use strict";
// A note: Markdown as elements. Text never becomes HTML: it is only ever the text of an element.
{
const {html, useState, useEffect} = htmPreact;

const SPANS = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*]+)\*|\[([^\]]+)\]\(([^)\s]+)\)|(https?:\/\/[^\s<>()]+)/g;

const link = (text, address) =>
  /^https?:\/\//i.test(address)
    ? html`<a href=${address} rel="noopener noreferrer" target="_blank">${text}</a>`
    : `[${text}](${address})`;

const spans = (text) => {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(SPANS)) {
    parts.push(text.slice(end, found.index));
    end = found.index + found[0].length;
    const [, code, strong, soft, name, address, bare] = found;
    if (code) parts.push(html`<code>${code}</code>`);
    else if (strong) parts.push(html`<strong>${strong}</strong>`);
    else if (soft) parts.push(html`<em>${soft}</em>`);
    else parts.push(bare ? link(bare, bare) : link(name, address));
  }
  return [...parts, text.slice(end)];
};

const isItem = (line) => /^\s*([-*+]|\d+\.)\s+/.test(line);
const isBlock = (line) => /^(#{1,6}\s|```|>\s?)/.test(line) || isItem(line) || !line.trim();

Board.markdown = (text) => {
  const lines = text.split("\n");
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    const line = lines[i];
    const from = i++;
    if (line.startsWith("```")) {
      while (i < lines.length && !lines[i].startsWith("```")) i++;
      blocks.push(html`<pre><code>${lines.slice(from + 1, i++).join("\n")}</code></pre>`);
    } else if (/^#{1,6}\s/.test(line)) {
      // The page's own headings come first: those of a note are below them.
      const level = Math.min(6, line.match(/^#+/)[0].length + 3);
      blocks.push(htmPreact.h(`h${level}`, null, spans(line.replace(/^#+\s+/, ""))));
    } else if (isItem(line)) {
      while (i < lines.length && isItem(lines[i])) i++;
      const items = lines.slice(from, i).map((item) => html`<li>${spans(item.replace(/^\s*([-*+]|\d+\.)\s+/, ""))}</li>`);
      blocks.push(/^\s*\d/.test(line) ? html`<ol>${items}</ol>` : html`<ul>${items}</ul>`);
    } else if (line.startsWith(">")) {
      while (i < lines.length && lines[i].startsWith(">")) i++;
      blocks.push(html`<blockquote>${spans(lines.slice(from, i).map((each) => each.replace(/^>\s?/, "")).join(" "))}</blockquote>`);
    } else if (line.trim()) {
      while (i < lines.length && !isBlock(lines[i])) i++;
      blocks.push(html`<p>${spans(lines.slice(from, i).join(" "))}</p>`);
    }
  }
  return blocks;
};

Board.Note = ({run, text, readOnly}) => {
  const [shown, setShown] = useState(text);
  const [draft, setDraft] = useState(null);
  const [error, setError] = useState("");
  // A note that somebody else has changed is shown, but never over what is being written here.
  useEffect(() => setShown(text), [text, run]);
  useEffect(() => setDraft(null), [run]);
  const save = async (event) => {
    event.preventDefault();
    try {
      setShown(await Board.putNote(run, draft));
      setDraft(null);
      setError("");
    } catch (failure) {
      setError(failure.message);
    }
  };
  if (draft !== null)
    return html`<div class="note">
      <label class="hidden" for="draft">Note, in Markdown</label>
      <textarea id="draft" rows="8" value=${draft} onInput=${(event) => setDraft(event.target.value)} maxlength="60000"></textarea>
      <p class="row"><button onClick=${save}>Save</button><button class="plain" onClick=${() => setDraft(null)}>Cancel</button>
      <span class="error" role="alert">${error}</span></p>
    </div>`;
  return html`<div class="note">
    ${shown ? Board.markdown(shown) : html`<p class="dim">No note.</p>`}
    ${readOnly ? null : html`<p><button class="plain" onClick=${() => setDraft(shown)}>${shown ? "Edit" : "Write a note"}</button></p>`}
  </div>`;
};
}
