// How a ledger's entries are spread over bookies: by fragment, and by the striping rule (docs/protocol.md). Entry e is
// stored by the Qw bookies of its fragment's ensemble from position e mod E on.

import { Fragment, Pager, State, html, useState } from "./ui.js";

const FRAGMENTS = 5;
const COLUMNS = 16;

/** The current state of members: a function of a member such as bookie-1@1. It returns null if the state is
 * unknown, or {text, tone, isAway, url}; a bookie with `isAway` serves no entries. */
export function standings(bookies) {
  const known = new Map((bookies || []).map((one) => [one.id.split("@")[0], one]));
  return (member) => {
    if (!bookies) return null;
    const [name, incarnation] = member.split("@");
    const now = known.get(name);
    if (!now) return { text: "not registered", tone: "bad", isAway: true, url: "" };
    if (now.state === "lost") return { text: "lost", tone: "bad", isAway: true, url: now.url };
    if (incarnation !== undefined && now.id !== member) return { text: `now ${now.id}`, tone: "busy", isAway: false, url: now.url };
    return { text: now.state, tone: undefined, isAway: false, url: now.url };
  };
}

/** The positions of the ensemble that store an entry. */
function writeSet(ledger, entry) {
  return Array.from({ length: ledger.write_quorum }, (_, n) => (entry + n) % ledger.ensemble_size);
}

/** The last entry of a fragment, or null while it is open. */
function lastOf(ledger, at) {
  return at + 1 < ledger.fragments.length ? ledger.fragments[at + 1].first_entry - 1 : ledger.last_entry;
}

const isLost = (ledger, entry) => (ledger.lost_entries || []).some((one) => one.first <= entry && entry <= one.last);

/** The fragments of which copies can't be reached: [{first, end, away, copies, entry}]. `copies`: how many are left of
 * the entry that has the fewest. Entries whose loss was accepted are left out. */
export function gaps(ledger, known) {
  const step = ledger.write_quorum === ledger.ensemble_size ? 1 : ledger.ensemble_size;
  return ledger.fragments.flatMap(({ first_entry: begin, bookies }, at) => {
    const away = bookies.filter((member) => known(member)?.isAway);
    const end = lastOf(ledger, at);
    if (!away.length) return [];
    const entries = Array.from({ length: step }, (_, n) => unlost(ledger, begin + n, step)).filter((one) => end === null || one <= end);
    const copies = (entry) => writeSet(ledger, entry).filter((position) => !away.includes(bookies[position])).length;
    const entry = entries.reduce((fewest, one) => (fewest === null || copies(one) < copies(fewest) ? one : fewest), null);
    return entry === null ? [] : [{ first: begin, end, away, copies: copies(entry), entry, last: step === 1 ? end : entry }];
  });
}

/** The first of entry, entry + step, … whose loss was not accepted. */
function unlost(ledger, entry, step) {
  let first = entry;
  for (const lost of ledger.lost_entries || []) {
    if (lost.first <= first && first <= lost.last) first += Math.ceil((lost.last + 1 - first) / step) * step;
  }
  return first;
}

function Cell({ ledger, entry, position, isAway }) {
  if (!writeSet(ledger, entry).includes(position)) return html`<td><span class="hidden">not stored here</span></td>`;
  const [kind, sign, text] = isLost(ledger, entry) ? ["gone", "✕", "lost"] : isAway ? ["away", "○", "stored, and away"] : ["held", "●", "stored"];
  return html`<td class=${kind} title=${`entry ${entry}: ${text}`}><span aria-hidden="true">${sign}</span><span class="hidden">${text}</span></td>`;
}

function Stripes({ ledger, at, known }) {
  const fragment = ledger.fragments[at];
  const { ensemble_size: size, write_quorum: quorum } = ledger;
  const first = fragment.first_entry;
  const end = lastOf(ledger, at);
  const shown = Math.max(0, Math.min(size, COLUMNS, end === null ? size : end - first + 1));
  const entries = Array.from({ length: shown }, (_, n) => first + n);
  const title = end === null ? `Entries from ${first} on` : end < first ? "No entries" : first === end ? `Entry ${first}` : `Entries ${first} to ${end}`;
  const label = `Fragment ${at + 1}: which bookie stores which entries of the first round`;
  return html`<section class="card" aria-label=${`Fragment ${at + 1}`}>
    <h3>${title}</h3>
    <div class="table" role="region" aria-label=${label} tabIndex="0"><table class="stripes">
      <caption class="hidden">${label}</caption>
      <thead><tr><th scope="col">Bookie</th>${entries.map((entry) => html`<th scope="col"><span class="hidden">entry ${" "}</span>${entry}</th>`)}</tr></thead>
      <tbody>${fragment.bookies.map((member, position) => {
        const standing = known(member);
        return html`<tr key=${position}><th scope="row">${member}${standing && html` <${State} of=${standing.text} tone=${standing.tone} />`}</th>
          ${entries.map((entry) => html`<${Cell} ...${{ ledger, entry, position, isAway: standing?.isAway }} />`)}</tr>`;
      })}</tbody>
    </table></div>
    ${shown > 0 && html`<small>${quorum === size
      ? `Each bookie stores every entry.`
      : `Entry e is stored by ${quorum} of ${size} bookies, from position e mod ${size} on. The pattern repeats every ${size} entries.`}
      ${shown < size && shown === COLUMNS ? ` The first ${COLUMNS} entries of the round are shown.` : ""}</small>`}
  </section>`;
}

/** The fragments, page by page, each as stripes over its bookies. */
export function Drawing({ ledger, known }) {
  const [page, setPage] = useState(1);
  const begin = (page - 1) * FRAGMENTS;
  const shown = ledger.fragments.slice(begin, begin + FRAGMENTS);
  const pager = {
    page, hasNext: begin + FRAGMENTS < ledger.fragments.length,
    toNext: () => setPage(page + 1), toPrevious: () => setPage(page - 1),
  };
  return html`<${Fragment}>
    <p class="quiet">● stored, ○ stored by a bookie that is away, ✕ lost for ever. Each change of the ensemble begins a fragment.</p>
    <div class="fragments">${shown.map((fragment, n) => html`<${Stripes} key=${fragment.first_entry} ledger=${ledger} at=${begin + n} known=${known} />`)}</div>
    <${Pager} pager=${pager} />
  <//>`;
}
