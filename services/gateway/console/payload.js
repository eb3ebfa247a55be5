// How a record's bytes are shown: as text, as a tree of JSON, or in hexadecimal.

import { Fragment, count, html, useMemo, useState } from "./ui.js";

const TEXT_SHOWN = 4096;
const HEX_SHOWN = 512;
const HEX_MAX = 65_536;
const NODES_MAX = 20_000;
const DEPTH_MAX = 32;
const MEMBERS_SHOWN = 100;

/** The bytes of a text in base64. */
export const bytesOf = (text) => Uint8Array.from(atob(text), (one) => one.charCodeAt(0));

/** The text of bytes, or null if they are not UTF-8. */
export function textOf(data, isCut = false) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data, { stream: isCut });
  } catch {
    return null;
  }
}

const hexOf = (data) => Array.from(data, (one) => one.toString(16).padStart(2, "0")).join(" ");

/** The first characters of a value in base64, on one line. */
export function preview(base64, chars) {
  const isCut = base64.length > chars * 8;
  const data = bytesOf(isCut ? base64.slice(0, chars * 8) : base64);
  const text = textOf(data, isCut);
  const shown = text === null ? hexOf(data.subarray(0, chars / 4)) : text.slice(0, chars).replace(/\s+/g, " ");
  return shown + (isCut || (text === null ? data.length > chars / 4 : text.length > chars) ? " …" : "");
}

const TOKEN = /\s*([{}[\],:]|"[^"\\]*(?:\\[^][^"\\]*)*"|[^\s{}[\],:"]+)/y;

/** A JSON text as a tree whose leaves are the text as it was stored: nothing is rounded, reordered or left out.
 * JSON.parse would change large integers and numeric or repeated names. Null if the text is not JSON, or too large. */
export function treeOf(text) {
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  const top = { items: [] };
  const open = [top];
  let key = null;
  let isKey = false;
  let nodes = 0;
  TOKEN.lastIndex = 0;
  for (let found = TOKEN.exec(text); found; found = TOKEN.exec(text)) {
    const [, token] = found;
    const inside = open[open.length - 1];
    if (token === "," || token === ":") isKey = token === "," && inside.isObject;
    else if (token === "}" || token === "]") {
      open.pop().end = TOKEN.lastIndex;
      isKey = false;
    } else if (isKey) {
      key = token;
    } else {
      nodes += 1;
      if (nodes > NODES_MAX) return null;
      const node = { key: inside.isObject ? key : null, text: token };
      inside.items.push(node);
      if (token === "{" || token === "[") {
        Object.assign(node, { items: [], isObject: token === "{", start: TOKEN.lastIndex - 1 });
        open.push(node);
        isKey = node.isObject;
      }
    }
  }
  return top.items[0];
}

/** A text, truncated if it is long, with a button that shows the whole text. */
export function Cut({ text, chars = TEXT_SHOWN }) {
  const [isWhole, setWhole] = useState(false);
  if (text.length <= chars || isWhole) return html`<bdi>${text}</bdi>`;
  return html`<bdi>${text.slice(0, chars)}</bdi> … <button type="button" class="plain" onClick=${() => setWhole(true)}>Show all ${count(text.length)} characters</button>`;
}

function Tree({ node, source, depth = 0 }) {
  const [isOpen, setOpen] = useState(depth < 2);
  const [shown, setShown] = useState(MEMBERS_SHOWN);
  const label = node.key !== null && html`<span class="key"><${Cut} text=${node.key} chars=${200} /></span>: `;
  if (!node.items) return html`<span class="leaf">${label}<${Cut} text=${node.text} chars=${1000} /></span>`;
  const [before, after] = node.isObject ? "{}" : "[]";
  if (!node.items.length) return html`<span class="leaf">${label}${before}${after}</span>`;
  if (depth >= DEPTH_MAX) return html`<span class="leaf">${label}<${Cut} text=${source.slice(node.start, node.end)} chars=${1000} /></span>`;
  return html`<details open=${isOpen} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${label}${before} <small>${count(node.items.length)}</small> ${after}</summary>
    ${isOpen && html`<ul>${node.items.slice(0, shown).map((one) => html`<li><${Tree} node=${one} source=${source} depth=${depth + 1} /></li>`)}</ul>
      ${node.items.length > shown && html`<button type="button" class="plain" onClick=${() => setShown(shown + MEMBERS_SHOWN)}>Show more of ${count(node.items.length)}</button>`}`}
  </details>`;
}

function Hex({ data }) {
  const [size, setSize] = useState(HEX_SHOWN);
  const lines = [];
  for (let at = 0; at < Math.min(size, data.length); at += 16) {
    const part = data.subarray(at, Math.min(at + 16, size));
    const chars = Array.from(part, (one) => (one > 31 && one < 127 ? String.fromCharCode(one) : ".")).join("");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${hexOf(part).padEnd(47)}  ${chars}`);
  }
  return html`<${Fragment}>
    <pre class="hex" tabIndex="0">${lines.join("\n")}</pre>
    ${data.length > size && (size < HEX_MAX
      ? html`<button type="button" class="plain" onClick=${() => setSize(HEX_MAX)}>Show ${data.length > HEX_MAX ? "more" : "all"} of ${count(data.length)} bytes</button>`
      : html`<p class="quiet">Download the value to see all ${count(data.length)} bytes.</p>`)}
  <//>`;
}

export const VIEWS = [["auto", "Automatic"], ["text", "Text"], ["json", "JSON tree"], ["hex", "Hexadecimal"]];

function download(data, name) {
  const url = URL.createObjectURL(new Blob([data], { type: "application/octet-stream" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** A value in the chosen view, or in the best view that its bytes allow. */
export function Payload({ base64, view, file }) {
  const data = useMemo(() => bytesOf(base64), [base64]);
  const text = useMemo(() => textOf(data), [data]);
  const tree = useMemo(() => (text !== null && (view === "json" || (view === "auto" && /^\s*[[{]/.test(text))) ? treeOf(text) : null), [text, view]);
  const isHex = view === "hex" || text === null;
  return html`<div class="payload">
    ${text === null && (view === "text" || view === "json") && html`<p class="quiet">The value is not UTF-8.</p>`}
    ${text !== null && view === "json" && !tree && html`<p class="quiet">The value is not JSON, or has too many members for a tree. It is shown as it was stored.</p>`}
    ${isHex ? html`<${Hex} data=${data} />` : tree ? html`<div class="tree"><${Tree} node=${tree} source=${text} /></div>` : html`<pre><${Cut} text=${text} /></pre>`}
    <p><small>${count(data.length)} bytes</small> <button type="button" class="plain" onClick=${() => download(data, file)}>Download</button></p>
  </div>`;
}
