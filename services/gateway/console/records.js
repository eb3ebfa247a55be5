// The records of a log: pages of them, a search, and the form that appends.

import { may } from "./access.js";
import { call, get, quoted, useLoad } from "./api.js";
import { PlaceFields, pairs, placeOf, refuse, useForm } from "./logform.js";
import { Cut, Payload, VIEWS, bytesOf, preview, textOf } from "./payload.js";
import { Act, Choice, Facts, Failure, Field, Fragment, When, count, html, to, useEffect, useMemo, useRef, useState } from "./ui.js";

const PAGE = 50;
const PAGE_BYTES = 4 << 20;
/** Limit of one search, after which the user is asked whether to continue. */
const SEARCH = { page: 1000, records: 50_000, bytes: 64 << 20, hits: 50 };

export const recordsPath = (name) => `/v1/logs/${quoted(name)}/records`;

/** The offset at which a read may continue after this error, or null. */
export const afterGap = (error) => (error.status === 410 ? error.body.next_offset ?? error.body.first_offset ?? null : null);

const reads = (name, from, limit, created, signal) =>
  get(recordsPath(name), { from, limit, max_bytes: PAGE_BYTES, created, encoding: "base64" }, signal);

/** The page of at most `limit` records that ends before the offset `before`. Large records make it shorter. */
async function readBack(name, before, first, limit, created, signal) {
  for (let size = Math.min(limit, before - first); ; size = Math.ceil(size / 4)) {
    const page = await reads(name, before - size, size, created, signal);
    if (page.next >= before || size === 1) return { ...page, begin: before - size };
  }
}

const CRITERIA = [["value", "Value contains"], ["key", "Key is"], ["in-key", "Key contains"], ["header", "A header contains"]];

/** A function that returns whether a record contains the text. An empty text matches all records. */
export function matcher(where, wanted) {
  if (!wanted) return () => true;
  const decoded = (base64) => (base64 === null ? "" : new TextDecoder().decode(bytesOf(base64)));
  return (record) => {
    if (where === "key") return record.key !== null && decoded(record.key) === wanted;
    if (where === "in-key") return decoded(record.key).includes(wanted);
    if (where === "header") return Object.entries(record.headers).some(([name, value]) => `${name}: ${value}`.includes(wanted));
    return decoded(record.data).includes(wanted); // a tombstone has no value
  };
}

function keyText(record) {
  if (record.key === null) return "no key";
  return textOf(bytesOf(record.key)) ?? `0x${Array.from(bytesOf(record.key), (one) => one.toString(16).padStart(2, "0")).join("")}`;
}

function Record({ record, view, name }) {
  const [isOpen, setOpen] = useState(false);
  const key = useMemo(() => keyText(record), [record]);
  const headers = Object.entries(record.headers);
  return html`<li><details onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>
      <span class="offset">${count(record.offset)}</span> <${When} time=${record.timestamp} />
      <span class=${record.key === null ? "quiet" : "key"}><bdi>${key.length > 60 ? `${key.slice(0, 60)} …` : key}</bdi></span>
      ${record.data === null ? html`<span class="quiet">tombstone: the key is deleted</span>` : html`<code class="preview"><bdi>${preview(record.data, 160)}</bdi></code>`}
    </summary>
    ${isOpen && html`<div class="record">
      <${Facts} of=${[
        ["Key", html`<${Cut} text=${key} chars=${300} />`],
        ["Ledger and entry", html`<a href=${to("ledgers", String(record.ledger_id))}>${record.ledger_id}</a>, entry ${count(record.entry_id)}`],
        ["Time (UTC)", record.timestamp],
      ]} />
      ${headers.length > 0 && html`<h3>Headers</h3>
        <${Facts} of=${headers.slice(0, 100).map(([one, value]) => [html`<${Cut} text=${one} chars=${200} />`, html`<${Cut} text=${value} chars=${500} />`])} />
        ${headers.length > 100 && html`<p class="quiet">The record has ${count(headers.length)} headers; 100 are shown.</p>`}`}
      <h3>Value</h3>
      ${record.data === null ? html`<p class="quiet">None: the record is a tombstone, which deletes its key.</p>` : html`<${Payload} base64=${record.data} view=${view} file=${`${name}-${record.offset}.bin`} />`}
    </div>`}
  </details></li>`;
}

/** A table of records in the given order. */
export function Records({ records, view, name, label }) {
  return html`<ol class="records" aria-label=${label}>${records.map((record) => html`<${Record} key=${record.offset} ...${{ record, view, name }} />`)}</ol>`;
}

/** The inputs of a filter. `of`: {where, text}. */
export function Filter({ of, set }) {
  return html`<${Fragment}>
    <${Choice} label="Filter" value=${of.where} set=${(where) => set({ ...of, where })} options=${CRITERIA} />
    <${Field} label="Text" type="search" value=${of.text} set=${(text) => set({ ...of, text })} />
  <//>`;
}

function Start({ go, from }) {
  const isOffset = /^-?\d+$/.test(from || "");
  const [form, change] = useForm({}, { place: isOffset ? "offset" : "-50", offset: isOffset ? from : "", time: "" });
  return html`<form class="row" onSubmit=${(event) => { event.preventDefault(); go(placeOf(form)); }}>
    <${PlaceFields} label="Begin at" ...${{ form, change }} options=${[["-50", "The newest"], ["earliest", "The oldest"]]} />
    <button class="main">Show</button>
  </form>`;
}

/** Pages of records. `log`: the log as it is now. */
export function Browse({ name, log, caller, query, reload }) {
  const [at, setAt] = useState({ from: query.get("from") || "-50" });
  const [view, setView] = useState("auto");
  const [filter, setFilter] = useState({ where: "value", text: "" });
  const [notice, setNotice] = useState("");
  const search = useSearch(name, log.created_at);
  const created = log.created_at;
  const page = useLoad(
    (signal) => (at.before === undefined ? reads(name, at.from, PAGE, created, signal) : readBack(name, at.before, at.first, PAGE, created, signal)),
    [at, name],
  );
  const records = page.data?.records || [];
  const begin = records.length ? records[0].offset : page.data?.next;
  const matching = useMemo(() => records.filter(matcher(filter.where, filter.text)), [page.data, filter]);
  const gap = page.error && (afterGap(page.error) ?? (page.error.status === 416 ? page.error.body.next_offset : null));
  const go = (next) => {
    search.clear();
    setAt(next);
  };
  const appended = (text) => {
    setNotice(text);
    reload();
    go({ from: "-50" });
  };
  const first = page.data?.first_offset ?? 0;
  return html`<section aria-label="Records">
    <${Start} go=${(from) => go({ from })} from=${query.get("from")} />
    <div class="row">
      <${Filter} of=${filter} set=${setFilter} />
      <${Choice} label="Show values as" value=${view} set=${setView} options=${VIEWS} />
      ${may(caller, "append", "logs", name) && log.state === "OPEN" && html`<${Append} name=${name} log=${log} done=${appended} />`}
    </div>
    ${notice && html`<div class="notice good" role="status"><p>${notice}</p></div>`}
    <${Failure} error=${page.error} retry=${page.reload} />
    ${gap !== null && gap !== undefined && html`<p><button type="button" onClick=${() => go({ from: String(gap) })}>Go to offset ${count(gap)}</button></p>`}
    ${search.state ? html`<${Found} ...${{ search, view, name }} />` : page.data && html`<${Fragment}>
      ${!records.length && html`<p class="quiet" role="status">${page.data.closed ? "The log is closed and ends here." : `There is no record at offset ${count(page.data.next)} or later.`}</p>`}
      ${records.length > 0 && html`<p class="quiet" role="status">Offsets ${count(begin)} to ${count(page.data.next - 1)}${filter.text ? `: ${count(matching.length)} of ${count(records.length)} records match` : ""}.</p>`}
      <${Records} records=${matching} view=${view} name=${name} label="Records of this page" />
      <nav class="pager" aria-label="Pages of records">
        <button type="button" disabled=${begin <= first} onClick=${() => go({ before: begin, first })}>Older</button>
        <button type="button" disabled=${page.data.closed && !records.length} onClick=${() => go({ from: String(page.data.next) })}>Newer</button>
        ${filter.text && html`<button type="button" onClick=${() => search.run({ filter, back: true, at: begin, first })} disabled=${begin <= first}>Search older</button>
          <button type="button" onClick=${() => search.run({ filter, back: false, at: page.data.next, first })}>Search newer</button>`}
      </nav>
    <//>`}
    ${page.isLoading && !page.data && html`<p class="quiet" role="status">Loading …</p>`}
  </section>`;
}

/** The next page of a search: its records, the offset at which the search continues, and whether it is complete. */
async function step({ back, at, first }, name, created, signal) {
  if (back && at <= first) return { records: [], at, isOver: true };
  const search = (from) => (back ? readBack(name, at, from, SEARCH.page, created, signal) : reads(name, at, SEARCH.page, created, signal));
  try {
    const page = await search(first);
    return { records: page.records, at: back ? page.begin : page.next, isOver: !back && !page.records.length };
  } catch (error) {
    const gap = afterGap(error);
    if (gap === null) throw error;
    if (!back) return { records: [], at: gap, isOver: false };
    // The page begins in the gap: read after the gap, or continue before the page.
    if (gap >= at) return { records: [], at: Math.max(at - SEARCH.page, first), isOver: false };
    const page = await search(gap);
    return { records: page.records, at: page.begin, isOver: false };
  }
}

/** Looks for records page by page. A search ends at a limit, at the log's end, or when the user stops it. */
function useSearch(name, created) {
  const [state, setState] = useState(null);
  const abort = useRef(null);
  const stop = () => abort.current?.abort();
  useEffect(() => stop, []);
  const run = async (from) => {
    stop();
    const { signal } = (abort.current = new AbortController());
    const matches = matcher(from.filter.where, from.filter.text);
    let now = { ...from, hits: [], looked: 0, bytes: 0, isRunning: true, isOver: false, error: null };
    setState(now);
    try {
      while (!now.isOver && now.looked < SEARCH.records && now.bytes < SEARCH.bytes && now.hits.length < SEARCH.hits) {
        const { records, at, isOver } = await step(now, name, created, signal);
        const hits = records.filter(matches);
        const size = records.reduce((sum, one) => sum + one.data.length, 0);
        now = { ...now, at, isOver, looked: now.looked + records.length, bytes: now.bytes + size, hits: now.back ? [...hits, ...now.hits] : [...now.hits, ...hits] };
        setState(now);
      }
    } catch (error) {
      if (!signal.aborted) now = { ...now, error };
    }
    if (abort.current.signal === signal) setState((old) => old && { ...now, isRunning: false });
  };
  const clear = () => {
    stop();
    setState(null);
  };
  return { state, run, stop, clear };
}

function Found({ search, view, name }) {
  const { state } = search;
  const [from, until] = state.back ? ["down", state.at] : ["up", state.at - 1];
  return html`<section aria-label="Search">
    <p role="status">${state.isRunning ? "Searching: looked" : "Looked"} at ${count(state.looked)} records, ${from} to offset ${count(until)}. ${count(state.hits.length)} match.
      ${!state.isRunning && (state.isOver ? ` The log ${state.back ? "begins" : "ends"} here.` : " The search stopped before.")}</p>
    <${Failure} error=${state.error} />
    <div class="row">
      ${state.isRunning && html`<button type="button" onClick=${search.stop}>Stop</button>`}
      ${!state.isRunning && !state.isOver && html`<button type="button" class="main" onClick=${() => search.run(state)}>Search on</button>`}
      <button type="button" onClick=${search.clear}>Back to the page</button>
    </div>
    <${Records} records=${state.hits} view=${view} name=${name} label="Records that match" />
  </section>`;
}

const FORMS = [["text", "Text"], ["json", "JSON"], ["data", "Base64"]];
const EMPTY = { form: "text", value: "", key: "", headers: "" };
const APPENDED_MAX = 20;

/** The form's record for the API. JSON is sent as text, so that every byte is stored as typed. */
function recordOf({ form, value, key, headers }, number) {
  if (form === "json") {
    try {
      JSON.parse(value);
    } catch (error) {
      refuse(`The value of record ${number} is not JSON: ${error.message}`);
    }
  }
  const isData = form === "data";
  const keyed = isData ? btoa(String.fromCharCode(...new TextEncoder().encode(key))) : key;
  return { [isData ? "data" : "text"]: isData ? value.trim() : value, key: key ? keyed : null, headers: pairs(headers, ":", "header") };
}

/** The button and form that append records by hand. `done` is called with a sentence to show. */
export function Append({ name, log, done }) {
  const kept = useRef(null);
  const act = () => {
    const { records, writer } = kept.current;
    const headers = writer.trim() ? { "Writer-Token": writer.trim() } : {};
    return call("POST", recordsPath(name), { headers, params: { created: log.created_at }, json: { records: records.map((one, at) => recordOf(one, at + 1)) } });
  };
  const told = ({ first_offset: first, last_offset: last }) =>
    done(first === last ? `The record has offset ${count(first)}.` : `The records have the offsets ${count(first)} to ${count(last)}.`);
  return html`<${Act} label="Append" title="Append records" act=${act} done=${told}>
    <p>All records of the form are appended together, or none.</p>
    <${AppendFields} kept=${kept} />
  <//>`;
}

function AppendFields({ kept }) {
  const [{ records, writer }, set] = useForm(kept, { records: [EMPTY], writer: "" });
  const change = (at, more) => set({ records: records.map((one, index) => (index === at ? { ...one, ...more } : one)) });
  return html`<${Fragment}>
    ${records.map((one, at) => html`<fieldset key=${at}>
      <legend>Record ${at + 1}</legend>
      <${Choice} label="Value is" value=${one.form} set=${(form) => change(at, { form })} options=${FORMS} />
      <label class="field">Value <textarea value=${one.value} onInput=${(event) => change(at, { value: event.target.value })} spellcheck="false" /></label>
      <${Field} label="Key" value=${one.key} set=${(key) => change(at, { key })} help="Empty: no key." />
      <label class="field">Headers <textarea class="short" value=${one.headers} onInput=${(event) => change(at, { headers: event.target.value })} spellcheck="false" placeholder="trace: 5f3a9c" /></label>
    </fieldset>`)}
    <div class="row">
      <button type="button" disabled=${records.length >= APPENDED_MAX} onClick=${() => set({ records: [...records, EMPTY] })}>Another record</button>
      ${records.length > 1 && html`<button type="button" onClick=${() => set({ records: records.slice(0, -1) })}>Remove the last</button>`}
    </div>
    <${Field} label="Writer token" value=${writer} set=${(text) => set({ writer: text })} inputMode="numeric" help="Only for a log that a client opened as its only writer." />
  <//>`;
}
