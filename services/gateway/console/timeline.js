// A log's ledgers as a time line, in pages, and their sizes.

import { get, useLoad } from "./api.js";
import { Ago, Failure, Fragment, Pager, State, Table, bytes, count, html, to, useState } from "./ui.js";

const PAGE = 50;
const ASKED = 500;
/** Maximum ledgers whose sizes a page adds up without a click. */
const MEASURED = 200;
/** Requests for one page at most: ledgers with ids between those of the page may belong to an earlier log of the name. */
const REQUESTS_MAX = 25;

/** The metadata of those `ledgers` of a log that the API lists, by their ids. */
async function ledgersBetween(log, ledgers, signal) {
  const found = new Map();
  if (!ledgers.length) return found;
  const ids = new Set(ledgers.map((one) => one.ledger_id));
  const last = Math.max(...ids);
  let after = Math.min(...ids) - 1;
  for (let asked = 0; asked < REQUESTS_MAX && after !== null && after < last; asked += 1) {
    const params = { log: log.name, limit: Math.min(ASKED, ledgers.length + 1), after: after < 0 ? null : after };
    const page = await get("/v1/ledgers", params, signal);
    for (const one of page.ledgers) if (ids.has(one.ledger_id)) found.set(one.ledger_id, one);
    after = page.next;
  }
  return found;
}

/** The bytes of all closed ledgers. A log with many ledgers is measured only after a click. */
export function Size({ log }) {
  const [isAsked, setAsked] = useState(log.ledgers.length <= MEASURED);
  const size = useLoad((signal) => (isAsked ? ledgersBetween(log, log.ledgers, signal) : Promise.resolve(null)), [log.name, log.ledgers.length, isAsked]);
  if (!isAsked) return html`<button type="button" onClick=${() => setAsked(true)}>Add up ${count(log.ledgers.length)} ledgers</button>`;
  if (size.error) return size.error.message;
  return size.data ? html`<span title="Stored bytes of one copy">${bytes([...size.data.values()].reduce((sum, one) => sum + (one.length || 0), 0))}</span>` : "…";
}

const ended = (log, one) => one.last_offset ?? (one.first_offset === null ? null : log.next_offset - 1);
const recordsOf = (log, one) => (one.first_offset === null || ended(log, one) === null ? null : Math.max(ended(log, one) - one.first_offset + 1, 0));

function archived(log, one) {
  if (log.archived_through === null) return "no";
  if (log.archived_through > (ended(log, one) ?? Infinity)) return "yes";
  return log.archived_through > one.first_offset ? `up to ${count(log.archived_through - 1)}` : "no";
}

function offsets(log, one) {
  if (one.first_offset === null) return "not known yet";
  if (recordsOf(log, one) === 0) return `none (at ${count(one.first_offset)})`;
  return `${count(one.first_offset)} to ${count(ended(log, one))}${one.last_offset === null ? ", growing" : ""}`;
}

function notes(ledger) {
  return [
    ledger.degraded && "created with a bookie missing",
    ledger.lost_entries?.length > 0 && "the loss of entries was accepted",
    ledger.may_lack_entries && "may lack entries",
    ledger.transaction && "written by a transaction",
  ].filter(Boolean).join(", ");
}

/** `mayRead`: whether the caller may list ledgers, which have the bytes and times. */
export function Timeline({ log, mayRead }) {
  const pages = Math.max(Math.ceil(log.ledgers.length / PAGE), 1);
  const [back, setBack] = useState(0);
  const page = Math.min(back, pages - 1);
  const end = log.ledgers.length - page * PAGE;
  const shown = log.ledgers.slice(Math.max(end - PAGE, 0), end);
  const key = shown.map((one) => `${one.ledger_id}${one.state}`).join();
  const loaded = useLoad((signal) => (mayRead ? ledgersBetween(log, shown, signal) : Promise.resolve(new Map())), [log.name, key]);
  const of = (one) => loaded.data?.get(one.ledger_id);
  return html`<section aria-label="Ledgers">
    <h2>Ledgers</h2>
    ${!shown.length && html`<p class="quiet">The log has no ledger yet: the first append creates one.</p>`}
    ${shown.length > 0 && html`<${Fragment}>
      <p class="quiet">Ledgers ${count(Math.max(end - PAGE, 0) + 1)} to ${count(end)} of ${count(log.ledgers.length)}, the oldest on the left. A ledger with more records is wider.</p>
      <div class="timeline" aria-hidden="true">${shown.map((one) => html`<a tabIndex="-1" href=${to("ledgers", String(one.ledger_id))}
        class=${`${one.state}${archived(log, one) === "yes" ? " archived" : ""}`} style=${{ flexGrow: recordsOf(log, one) || 0 }}
        title=${`Ledger ${one.ledger_id}: offsets ${offsets(log, one)}, ${one.state}`}></a>`)}</div>
      <${Failure} error=${loaded.error} retry=${loaded.reload} />
      <${Table} caption="Ledgers of the log, newest first" rows=${[...shown].reverse()} of=${(one) => one.ledger_id}
        columns=${[
          { name: "Ledger", show: (one) => html`<a href=${to("ledgers", String(one.ledger_id))}>${one.ledger_id}</a>` },
          { name: "Offsets", show: (one) => offsets(log, one) },
          { name: "Records", isNumber: true, show: (one) => count(recordsOf(log, one)) },
          { name: "Bytes", isNumber: true, show: (one) => (of(one) ? (of(one).length === null ? "when closed" : bytes(of(one).length)) : "—") },
          { name: "Created", show: (one) => html`<${Ago} time=${of(one)?.created_at} />` },
          { name: "State", show: (one) => html`<${State} of=${one.state} />` },
          ...(log.archived_through === null ? [] : [{ name: "Archived", show: (one) => archived(log, one) }]),
          { name: "Notes", show: (one) => (of(one) ? notes(of(one)) : "") },
        ]} />
      <${Pager} pager=${{ page: page + 1, hasNext: page + 1 < pages, toNext: () => setBack(page + 1), toPrevious: () => setBack(page - 1) }} />
    <//>`}
  </section>`;
}
