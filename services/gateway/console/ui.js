// Components that all pages use: tables, dialogs, states, sparklines, and how values are shown.

import htm from "./htm.js";
import { Fragment, h } from "./preact.js";
import { useEffect, useId, useMemo, useRef, useState } from "./preact-hooks.js";

export const html = htm.bind(h);
export { Fragment, useEffect, useMemo, useRef, useState };

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Format a number of bytes for display. */
export function bytes(value) {
  if (value === null || value === undefined) return "—";
  let unit = 0;
  let left = Number(value);
  while (left >= 1024 && unit < UNITS.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit && left < 100 ? left.toFixed(1) : Math.round(left)} ${UNITS[unit]}`;
}

/** Format a number with separators, and an unknown value as a dash. */
export function count(value) {
  if (value === null || value === undefined) return "—";
  return typeof value === "number" && !Number.isInteger(value)
    ? value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 1 })
    : BigInt(value).toLocaleString("en");
}

/** Format a duration in seconds for display. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "—";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${Math.round(seconds)} s`;
}

/** How long ago a time was; the exact time is its title. */
export function Ago({ time }) {
  if (!time) return "—";
  const past = (Date.now() - new Date(time)) / 1000;
  return html`<time dateTime=${time} title=${time}>${past < 1 ? "now" : `${duration(past)} ago`}</time>`;
}

/** A time in the reader's zone; the time in UTC is its title. */
export function When({ time }) {
  if (!time) return "—";
  // The Swedish time format is that of RFC 3339.
  const text = new Date(time).toLocaleString("sv", { dateStyle: "short", timeStyle: "medium" });
  return html`<time dateTime=${time} title=${time}>${text}.${/\.(\d{3})/.exec(time)?.[1] || "000"}</time>`;
}

/** A page's address within the console. */
export const to = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

/** A state with a colour and a text, so that the colour is never the only sign. */
const TONES = {
  good: ["writable", "ready", "CLOSED", "open", "done", "whole"],
  busy: ["draining", "read-only", "IN_RECOVERY", "OPEN", "paused", "closed", "running", "seeding"],
  bad: ["lost", "gone", "stuck", "failed", "degraded", "unavailable", "missing", "quarantined"],
};
export function State({ of, tone }) {
  const found = tone || Object.keys(TONES).find((name) => TONES[name].includes(of)) || "busy";
  return html`<span class=${`state ${found}`}>${of}</span>`;
}

/** An error with its code, the explanation of the code, and a button to retry. */
export function Failure({ error, retry }) {
  if (!error) return null;
  const explained = error.code && error.status ? `/problems/${error.code}` : null;
  return html`<div class="failure" role="alert">
    <strong>${error.title || "The console failed"}</strong>
    <p>${error.message}</p>
    ${(error.errors || []).slice(0, 5).map((one) => html`<p><code>${one.pointer || ""}</code> ${one.detail}</p>`)}
    ${error.outcome === "unknown" && html`<p>The request may have been carried out. Check before you try again.</p>`}
    ${explained && html`<a href=${explained} target="_blank" rel="noreferrer">${error.code}</a>`}
    ${retry && html` <button type="button" onClick=${retry}>Try again</button>`}
  </div>`;
}

/** Shows `children(data)` once data has been loaded, with errors above. `loaded`: the result of `useLoad`. */
export function Loaded({ loaded, children }) {
  const { data, error, reload } = loaded;
  return html`<${Fragment}>
    <${Failure} error=${error} retry=${reload} />
    ${data !== null ? children(data) : !error && html`<p class="quiet" role="status">Loading …</p>`}
  <//>`;
}

/** A table. `columns`: [{name, show(row), isNumber}]; `of` returns a row's key. Long tables scroll separately.
 * `more(row)`: details below a row, which a button opens. */
export function Table({ caption, columns, rows, of = (row) => row.id, more, empty = "There is nothing here." }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  return html`<div class="table" role="region" aria-label=${caption} tabIndex="0">
    <table>
      <caption class="hidden">${caption}</caption>
      <thead><tr>${more && html`<th scope="col"><span class="hidden">Details</span></th>`}${columns.map((one) => html`<th scope="col" class=${one.isNumber ? "number" : ""}>${one.name}</th>`)}</tr></thead>
      <tbody>
        ${rows.map((row) => html`<${Row} key=${of(row)} ...${{ row, columns, of, more }} />`)}
      </tbody>
    </table>
  </div>`;
}

function Row({ row, columns, of, more }) {
  const [isOpen, setOpen] = useState(false);
  return html`<${Fragment}>
    <tr>
      ${more && html`<td><button type="button" class="plain" aria-expanded=${isOpen} aria-label=${`Details of ${of(row)}`} onClick=${() => setOpen(!isOpen)}>${isOpen ? "▾" : "▸"}</button></td>`}
      ${columns.map((one) => html`<td class=${one.isNumber ? "number" : ""} data-name=${one.name}>${one.show(row)}</td>`)}
    </tr>
    ${isOpen && html`<tr><td /><td colSpan=${columns.length}>${more(row)}</td></tr>`}
  <//>`;
}

/** Moves between the pages of a list; `pager` is from `usePages`. */
export function Pager({ pager }) {
  if (pager.page === 1 && !pager.hasNext) return null;
  return html`<nav class="pager" aria-label="Pages of the list">
    <button type="button" disabled=${pager.page === 1} onClick=${pager.toPrevious}>Previous</button>
    <span>Page ${pager.page}</span>
    <button type="button" disabled=${!pager.hasNext} onClick=${pager.toNext}>Next</button>
  </nav>`;
}

/** A line of the last values, oldest first. Values that are null leave gaps; the line begins with the first known
 * value. The newest value is a text beside it. */
export function Spark({ name, values: given, show = count }) {
  const values = given.slice(Math.max(0, Math.min(given.findIndex((value) => value !== null), given.length - 8)));
  const width = 160;
  const height = 32;
  const known = values.filter((value) => value !== null);
  const top = Math.max(...known, 0) || 1;
  const step = width / Math.max(values.length - 1, 1);
  let path = "";
  let isPen = false;
  values.forEach((value, at) => {
    if (value === null) {
      isPen = false;
      return;
    }
    path += `${isPen ? "L" : "M"}${(at * step).toFixed(1)} ${(height - 2 - (value / top) * (height - 4)).toFixed(1)}`;
    isPen = true;
  });
  const newest = known.length ? show(known[known.length - 1]) : "—";
  return html`<figure class="spark">
    <figcaption>${name}</figcaption>
    <svg viewBox=${`0 0 ${width} ${height}`} preserveAspectRatio="none" role="img"
      aria-label=${`${name} over the last hour: now ${newest}, at most ${show(top)}`}><path d=${path} /></svg>
    <output>${newest}</output>
  </figure>`;
}

/** A progress bar, from 0 to 1. */
export function Progress({ label, value }) {
  const shown = Math.round(Math.min(Math.max(value, 0), 1) * 100);
  return html`<span class="progress"><progress aria-label=${label} max="100" value=${shown} /> ${shown} %</span>`;
}

/** A dialog, open as long as it is rendered. Escape and the button close it. */
export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${element} aria-label=${title} onCancel=${(event) => { event.preventDefault(); onClose(); }} onClose=${onClose}>
    <header><h2>${title}</h2><button type="button" class="plain" aria-label="Close" onClick=${onClose}>×</button></header>
    ${children}
  </dialog>`;
}

/** A button that asks before it acts, and shows the error if the action fails.
 * `typed`: a text that the user must type first, if the action can't be undone. `children`: what the dialog explains.
 * `act()` returns a promise; `done` is called with its result, and `onOpen` when the dialog opens. */
export function Act({ label, title = label, act, done = () => {}, onOpen = () => {}, typed = "", isDanger = false, disabled, children }) {
  const [isOpen, setOpen] = useState(false);
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const [text, setText] = useState("");
  const open = () => {
    onOpen();
    setOpen(true);
  };
  const close = () => {
    setOpen(false);
    setError(null);
    setText("");
  };
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const result = await act();
      close();
      done(result);
    } catch (failed) {
      setError(failed);
    } finally {
      setBusy(false);
    }
  };
  return html`<${Fragment}>
    <button type="button" class=${isDanger ? "danger" : ""} disabled=${disabled} onClick=${open}>${label}</button>
    ${isOpen && html`<${Dialog} title=${title} onClose=${close}>
      <form onSubmit=${submit}>
        ${children}
        ${typed && html`<label>Type <code>${typed}</code> to confirm
          <input value=${text} onInput=${(event) => setText(event.target.value)} autocomplete="off" spellcheck=${false} /></label>`}
        <${Failure} error=${error} />
        <footer>
          <button type="button" onClick=${close}>Cancel</button>
          <button class=${isDanger ? "danger" : "main"} disabled=${isBusy || (typed && text !== typed)}>${isBusy ? "Working …" : label}</button>
        </footer>
      </form>
    <//>`}
  <//>`;
}

/** A labelled input. `set` gets the new text. */
export function Field({ label, value, set, help, type = "text", ...more }) {
  const id = useId();
  return html`<div class="field"><label for=${id}>${label}</label>
    <input id=${id} type=${type} value=${value} onInput=${(event) => set(event.target.value)} spellcheck=${false} autocomplete="off"
      aria-describedby=${help ? `${id}-help` : undefined} ...${more} />
    ${help && html`<small id=${`${id}-help`}>${help}</small>`}
  </div>`;
}

/** A labelled choice. `options`: [value, text] pairs. */
export function Choice({ label, value, set, options }) {
  const id = useId();
  return html`<div class="field"><label for=${id}>${label}</label>
    <select id=${id} value=${value} onChange=${(event) => set(event.target.value)}>
      ${options.map(([name, text]) => html`<option value=${name} selected=${name === value}>${text}</option>`)}
    </select>
  </div>`;
}

/** Names and values. `of`: [[name, value], …]; pairs whose value is undefined are left out. */
export function Facts({ of }) {
  return html`<dl class="facts">
    ${of.filter(([, value]) => value !== undefined).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/** A command to copy. */
export function Command({ text }) {
  const [isCopied, setCopied] = useState(false);
  const copy = () => navigator.clipboard.writeText(text).then(() => setCopied(true));
  return html`<span class="command"><code>${text}</code>
    ${navigator.clipboard && html`<button type="button" class="plain" onClick=${copy}>${isCopied ? "Copied" : "Copy"}</button>`}</span>`;
}
