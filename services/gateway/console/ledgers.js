// The pages of ledgers: the list, and one ledger with its copies, its recovery and its entries.

import { may, mayOnLedger } from "./access.js";
import { Problem, call, get, useGet, useLoad, usePages } from "./api.js";
import { Payload, VIEWS } from "./payload.js";
import { Drawing, gaps, standings } from "./stripes.js";
import {
  Act, Ago, Choice, Facts, Failure, Field, Fragment, Loaded, Pager, State, Table,
  bytes, count, html, to, useEffect, useState,
} from "./ui.js";

const STATES = ["OPEN", "IN_RECOVERY", "CLOSED"];
const ROWS = 50;
const ENTRIES = 20;
const ENTRIES_BYTES = 256 * 1024;
const FINDINGS = 50;
const EVERY_MS = 5000;
const NEXT_TRY = "Autorecovery tries again by itself, usually within a minute. This page then shows the ledger CLOSED.";

const isId = (text) => /^(0|[1-9][0-9]{0,18})$/.test(text);
const range = (first, last) => (String(first) === String(last) ? `entry ${first}` : `entries ${first} to ${last}`);
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const Log = ({ name }) => html`<a href=${to("logs", name)}>${name}</a>`;

/** Whether a caller may create a ledger in any namespace; the gateway checks the chosen namespace. */
const mayCreate = (caller) => caller.grants.some((grant) => /^(append|admin):(\*$|ledgers\/)/.test(grant));

/** Inputs for names and values. `pairs`: [[name, value], …]. */
function Pairs({ label, pairs, set, help }) {
  const change = (at, part, text) => set(pairs.map((pair, i) => (i === at ? pair.with(part, text) : pair)));
  return html`<fieldset class="pairs">
    <legend>${label}</legend>
    ${help && html`<small>${help}</small>`}
    ${pairs.map(([name, value], at) => html`<div class="row" key=${at}>
      <${Field} label="Name" value=${name} set=${(text) => change(at, 0, text)} />
      <${Field} label="Value" value=${value} set=${(text) => change(at, 1, text)} />
      <button type="button" onClick=${() => set(pairs.toSpliced(at, 1))}>Remove</button>
    </div>`)}
    <button type="button" onClick=${() => set([...pairs, ["", ""]])}>Add a pair</button>
  </fieldset>`;
}

function Filters({ query }) {
  const [state, setState] = useState(query.get("state") || "");
  const [bookie, setBookie] = useState(query.get("bookie") || "");
  const [log, setLog] = useState(query.get("log") || "");
  const [pairs, setPairs] = useState(() =>
    [...query].filter(([name]) => name.startsWith("metadata[")).map(([name, value]) => [name.slice(9, -1), value]));
  const apply = (event) => {
    event.preventDefault();
    const given = [["state", state], ["bookie", bookie.trim()], ["log", log.trim()]].filter(([, value]) => value);
    for (const [name, value] of pairs) if (name) given.push([`metadata[${name}]`, value]);
    location.hash = given.length ? `#/ledgers?${new URLSearchParams(given)}` : "#/ledgers";
  };
  return html`<form onSubmit=${apply} aria-label="Filters">
    <div class="row">
      <${Choice} label="State" value=${state} set=${setState} options=${[["", "All states"], ...STATES.map((one) => [one, one])]} />
      <${Field} label="Bookie" value=${bookie} set=${setBookie} placeholder="bookie-1 or bookie-1@1" />
      <${Field} label="Log" value=${log} set=${setLog} />
      <button class="main">Apply the filters</button>
      ${query.size > 0 && html`<a href="#/ledgers">Remove all filters</a>`}
    </div>
    <details open=${pairs.length > 0}><summary>Filter by custom metadata</summary>
      <${Pairs} label="Custom metadata that a ledger must have" pairs=${pairs} set=${setPairs} />
    </details>
  </form>`;
}

function GoTo() {
  const [id, setId] = useState("");
  const go = (event) => {
    event.preventDefault();
    location.hash = to("ledgers", id.trim());
  };
  return html`<form class="row" onSubmit=${go} aria-label="Go to a ledger">
    <${Field} label="Ledger id" value=${id} set=${setId} inputmode="numeric" pattern="\\s*(0|[1-9][0-9]{0,18})\\s*" required />
    <button>Go to the ledger</button>
  </form>`;
}

const DIGESTS = [
  ["crc32c", "crc32c: detects damage"],
  ["hmac-sha256", "hmac-sha256: detects forgery too, and needs a password"],
  ["none", "none: entries are not verified"],
];

function Create() {
  const [form, setForm] = useState({ ensemble_size: "3", write_quorum: "3", ack_quorum: "2", digest: "crc32c", password: "" });
  const [pairs, setPairs] = useState([]);
  const field = (name) => ({ value: form[name], set: (text) => setForm({ ...form, [name]: text }) });
  const size = { type: "number", min: 1, max: 255, required: true };
  const create = () => {
    const json = { digest: form.digest, metadata: Object.fromEntries(pairs.filter(([name]) => name)) };
    for (const name of ["ensemble_size", "write_quorum", "ack_quorum"]) json[name] = Number(form[name]);
    if (form.password) json.password = form.password;
    return call("POST", "/v1/ledgers", { json });
  };
  return html`<${Act} label="Create a ledger" act=${create} done=${(ledger) => { location.hash = to("ledgers", String(ledger.ledger_id)); }}>
    <p>This gateway becomes the writer of the ledger. The sizes and the digest can't be changed later.</p>
    <${Field} label="Ensemble size (E)" ...${field("ensemble_size")} ...${size}
      help="The number of bookies that store the ledger. With more bookies than the write quorum, entries are striped over them." />
    <${Field} label="Write quorum (Qw)" ...${field("write_quorum")} ...${size}
      help="The number of bookies that store each entry, at most E." />
    <${Field} label="Ack quorum (Qa)" ...${field("ack_quorum")} ...${size}
      help="The number of bookies that must have an entry on disk before an append is acknowledged, at most Qw. Any Qa - 1 bookies may be lost without the loss of an acknowledged entry." />
    <${Choice} label="Digest, with which readers verify entries" ...${field("digest")} options=${DIGESTS} />
    <${Field} label="Password (optional)" type="password" ...${field("password")} required=${form.digest === "hmac-sha256"}
      help="If set, each append and each read of the ledger needs the password. A lost password can't be recovered." />
    <${Pairs} label="Custom metadata" pairs=${pairs} set=${setPairs}
      help="For your own use. The value of the name “namespace” decides which access tokens may use the ledger." />
  <//>`;
}

/** Notes about a ledger in addition to its state. */
function Marks({ ledger }) {
  return html`<${Fragment}>
    ${ledger.degraded && html` <${State} of="degraded" />`}
    ${ledger.may_lack_entries && html` <${State} of="may lack entries" tone="bad" />`}
  <//>`;
}

const COLUMNS = [
  { name: "Id", isNumber: true, show: (row) => html`<a href=${to("ledgers", String(row.ledger_id))}>${row.ledger_id}</a>` },
  { name: "State", show: (row) => html`<${State} of=${row.state} /><${Marks} ledger=${row} />` },
  { name: "Entries", isNumber: true, show: (row) => (row.last_entry === null ? "—" : count(row.last_entry + 1)) },
  { name: "Length", isNumber: true, show: (row) => bytes(row.length) },
  { name: "E / Qw / Qa", show: (row) => `${row.ensemble_size} / ${row.write_quorum} / ${row.ack_quorum}` },
  { name: "Bookies", show: (row) => row.fragments[row.fragments.length - 1].bookies.slice(0, 5).join(", ") + (row.ensemble_size > 5 ? ", …" : "") },
  { name: "Log", show: (row) => (row.log === null ? "—" : html`<${Log} name=${row.log} />`) },
  { name: "Created", show: (row) => html`<${Ago} time=${row.created_at} />` },
];

/** The list of ledgers. The filters are in the address, so that other pages can link to them. */
export function Ledgers({ caller, query }) {
  const list = usePages("/v1/ledgers", "ledgers", { ...Object.fromEntries(query), limit: ROWS });
  return html`
    <h1>Ledgers</h1>
    <div class="row split"><${GoTo} />${mayCreate(caller) && html`<${Create} />`}</div>
    <${Filters} query=${query} key=${query.toString()} />
    <${Loaded} loaded=${list}>
      ${() => html`<${Fragment}>
        <${Table} caption="Ledgers, sorted by id" columns=${COLUMNS} rows=${list.rows} of=${(row) => row.ledger_id}
          empty=${query.size ? "No ledger matches the filters, or the token allows none of them." : "There are no ledgers that the token allows."} />
        <${Pager} pager=${list.pager} />
      <//>`}
    <//>`;
}

/** One ledger, by the id in the address. */
export function Ledger({ name, caller }) {
  if (isId(name)) return html`<${One} id=${name} caller=${caller} />`;
  return html`<h1>No such ledger</h1><p>The id of a ledger is a number. <a href="#/ledgers">Go to the list of ledgers</a>.</p>`;
}

/** Loads nothing if the caller's token does not allow reading the cluster's state. */
const useCluster = (caller, path, params) =>
  useLoad((signal) => (may(caller, "read", "cluster") ? get(path, params, signal) : Promise.resolve(null)), [path], EVERY_MS);

/** Encode a header's value for `fetch`, which expects one character per byte. */
const octets = (text) => String.fromCharCode(...new TextEncoder().encode(text));

function One({ id, caller }) {
  const path = `/v1/ledgers/${id}`;
  const [password, setPassword] = useState("");
  const [refused, setRefused] = useState(false);
  const loaded = useGet(path, null, EVERY_MS);
  const cluster = useCluster(caller, "/v1/cluster");
  const healers = useCluster(caller, "/v1/autorecovery");
  // The queue is sorted by ledger and bookie: begin after the items of the previous ledger.
  const after = id === "0" ? null : `${BigInt(id) - 1n}:zzzz@1`;
  const queue = useCluster(caller, "/v1/repairs", { after });
  const ask = (method, rest = "", options = {}) =>
    call(method, path + rest, { ...options, headers: password ? { "Ledger-Password": octets(password) } : {} }).catch((problem) => {
      if (problem.code === "wrong-password") setRefused(true);
      throw problem;
    });
  const enter = (text) => {
    setRefused(false);
    setPassword(text);
  };
  const context = {
    id, caller, ask, password, setPassword: enter, reload: loaded.reload, isRefused: refused,
    known: standings(cluster.data?.bookies),
    services: cluster.data?.services,
    blocked: (healers.data?.autorecovery || []).flatMap((one) => one.blocked_recoveries || []).find((one) => String(one.ledger_id) === id),
    repairs: (queue.data?.repairs || []).filter((one) => String(one.ledger_id) === id),
  };
  return html`
    <h1>Ledger ${id}</h1>
    ${refused && html`<${AskPassword} isAgain=${password !== ""} enter=${enter} />`}
    <${Loaded} loaded=${loaded}>${(ledger) => html`<${Shown} ...${context} ledger=${ledger} />`}<//>
    ${[cluster, healers, queue].map(({ error }) => error && html`<${Failure} error=${error} />`)}`;
}

function AskPassword({ isAgain, enter }) {
  const [text, setText] = useState("");
  const submit = (event) => {
    event.preventDefault();
    enter(text);
  };
  return html`<form class="notice" onSubmit=${submit} aria-label="Password of the ledger">
    <strong>${isAgain ? "The password is wrong" : "This ledger has a password"}</strong>
    <p>Entries and changes need the password. The page forgets it when you leave it.</p>
    <div class="row"><${Field} label="Ledger password" type="password" value=${text} set=${setText} required />
      <button class="main">Use the password</button></div>
  </form>`;
}

function Shown(context) {
  const { ledger, caller } = context;
  const isReader = mayOnLedger(caller, "read", ledger);
  return html`<${Fragment}>
    <${Recovery} ...${context} />
    <${Overview} ...${context} />
    <${Doings} ...${context} />
    <${Losses} ...${context} />
    <h2>Fragments</h2>
    <${Drawing} ledger=${ledger} known=${context.known} />
    <${Copies} ...${context} />
    ${isReader && html`<${Entries} ...${context} key=${`${context.password} ${ledger.lost_entries?.length}`} />`}
  <//>`;
}

function Overview({ ledger, caller, ask, password, isRefused, services }) {
  const isShown = mayOnLedger(caller, "read|append", ledger) && !isRefused;
  const lac = useLoad(
    (signal) => (isShown ? ask("GET", "/last-add-confirmed", { signal }) : Promise.resolve(null)),
    [isShown, password, ledger.state], ledger.state === "CLOSED" ? 0 : EVERY_MS,
  );
  const { ensemble_size: e, write_quorum: qw, ack_quorum: qa, writer } = ledger;
  const custom = Object.entries(ledger.metadata);
  const confirmed = lac.data ? (lac.data.last_add_confirmed < 0 ? "none" : count(lac.data.last_add_confirmed)) : lac.error ? "unknown" : "—";
  return html`<${Fragment}>
    <${Facts} of=${[
      ["State", html`<${State} of=${ledger.state} /><${Marks} ledger=${ledger} />`],
      ["Quorums", `E ${e}, Qw ${qw}, Qa ${qa}: each entry is on ${qw} of ${e} bookies, and acknowledged by ${qa}`],
      ["Last add confirmed", html`<span title=${lac.error?.message}>${confirmed}</span>`],
      ["Last entry", ledger.last_entry === null ? "not known before the ledger is CLOSED" : ledger.last_entry < 0 ? "the ledger is empty" : count(ledger.last_entry)],
      ["Length", ledger.length === null ? "—" : bytes(ledger.length)],
      ["Digest", ledger.digest],
      ["Created", html`<${Ago} time=${ledger.created_at} />`],
      ["Log", ledger.log === null ? undefined : html`<${Log} name=${ledger.log} />`],
      ["Writer", writer ? html`${writer.url} ${isGone(writer, services) && html`<${State} of="gone" />`}<br /><small>${writer.id}</small>` : "none"],
      ["Transaction", ledger.transaction ?? undefined],
      ["Version of the metadata", ledger.version],
    ]} />
    ${custom.length > 0 && html`<h2>Custom metadata</h2>
      <${Table} caption="Custom metadata" rows=${custom} of=${([name]) => name}
        columns=${[{ name: "Name", show: ([name]) => name }, { name: "Value", show: ([, value]) => value }]} />`}
  <//>`;
}

/** Whether a ledger's writer is known not to be a running gateway. */
const isGone = (writer, services) =>
  Boolean(services?.length) && !services.some((one) => one.kind === "gateway" && one.id === writer.id && one.state !== "gone");

/** Choose bookies that never return. `members`: the bookies to choose from. */
function Gone({ members, known, chosen, set }) {
  return html`<fieldset>
    <legend>Bookies that never return</legend>
    ${members.map((member) => html`<label class="check"><input type="checkbox" checked=${chosen.includes(member)}
      onChange=${(event) => set(event.target.checked ? [...chosen, member] : chosen.filter((one) => one !== member))} />
      ${member} <${Standing} member=${member} known=${known} /></label>`)}
  </fieldset>`;
}

function Standing({ member, known }) {
  const found = known(member);
  return found && html`<${State} of=${found.text} tone=${found.tone} />`;
}

/** Explains why the ledger is not closed although its writer is gone, and how to close the ledger. */
function Recovery({ ledger, caller, ask, reload, known, blocked, services, id }) {
  const [chosen, setChosen] = useState([]);
  const isAbandoned = ledger.state === "OPEN" && ledger.writer && isGone(ledger.writer, services);
  if (ledger.state === "CLOSED" || !(blocked || isAbandoned || ledger.state === "IN_RECOVERY")) return null;
  const members = ledger.fragments[ledger.fragments.length - 1].bookies;
  const away = members.filter((member) => known(member)?.isAway);
  const declare = () => {
    if (!chosen.length) throw new Problem(0, { title: "No bookie is chosen", detail: "Choose the bookies that never return." });
    return ask("POST", "/recover", { json: { declare_lost: chosen } });
  };
  const waits = blocked
    ? html`<p>The writer of this ledger is gone, and the recovery can't find the last entry without${" "}
        ${blocked.bookie ? html`<strong>${blocked.bookie}</strong>` : "more bookies"}${blocked.entry_id !== null && html`, because of <strong>entry ${blocked.entry_id}</strong>`}:
        whether the bookie stored an acknowledged entry is not known.</p>
      <p>Reason: ${blocked.why}</p>`
    : isAbandoned
      ? html`<p>The writer of this ledger is gone. Autorecovery recovers the ledger by itself: after 30 seconds if the writer's address refuses connections, otherwise after 5 minutes. You don't need to wait.</p>`
      : html`<p>A recovery fences the ledger and finds its last entry. This takes seconds. If the process that recovers it ends, another recovery begins after 30 seconds.</p>`;
  return html`<section class=${blocked ? "failure" : "notice"} aria-label="Recovery">
    <h2>${blocked ? "The recovery is blocked" : isAbandoned ? "The ledger needs a recovery" : "A recovery is under way"}</h2>
    ${waits}
    ${(blocked || away.length > 0) && html`<h3>1. Start the bookies again</h3>
      ${away.length > 0
        ? html`<p>These bookies store the last entries and do not answer. Start their processes with their data directories:</p>
          <ul>${away.map((member) => html`<li><strong>${member}</strong>${known(member).url && html`, at ${known(member).url}`} <${Standing} member=${member} known=${known} /></li>`)}</ul>`
        : html`<p>All bookies of the last fragment report that they run. A bookie in limbo or with damage can't say which entries it had: look at the <a href="#/">overview</a>, and at the bookies' logs.</p>`}
      <p>${NEXT_TRY}</p>`}
    ${mayOnLedger(caller, "append|manage", ledger) && html`<${Act} label="Recover the ledger now" act=${() => ask("POST", "/recover", { json: {} })} done=${reload}>
      <p>A recovery fences the ledger at its bookies, finds its last entry, and closes the ledger for ever. Acknowledged entries are kept. A writer that still runs can't append any more.</p><//>`}
    ${(blocked || away.length > 0) && html`<h3>2. Only if a bookie never returns: recover without it</h3>
      <p>The recovery then assumes that the bookie has no entries. Acknowledged entries that only this bookie had are lost for ever, and the ledger reports for ever that it may lack entries.</p>
      ${mayOnLedger(caller, "admin", ledger)
        ? html`<${Act} label="Recover without these bookies" isDanger typed=${id} act=${declare} done=${reload}>
            <p>This can't be undone. First look for the bookie's disk: a bookie that is started on another machine with this disk has the entries.</p>
            <${Gone} members=${members} known=${known} chosen=${chosen} set=${setChosen} />
          <//>`
        : html`<p class="quiet">This needs a token with the scope admin on the ledger.</p>`}`}
  </section>`;
}

/** Accept the loss of entries of a closed ledger. */
function AcceptLoss({ ledger, caller, ask, reload, known, id, first, last, done = reload }) {
  const members = [...new Set(ledger.fragments.flatMap((fragment) => fragment.bookies))].filter((member) => known(member)?.isAway !== false);
  const [from, setFrom] = useState(String(first));
  const [end, setEnd] = useState(String(last));
  const [chosen, setChosen] = useState([]);
  useEffect(() => { setFrom(String(first)); setEnd(String(last)); }, [String(first), String(last)]);
  if (ledger.state !== "CLOSED" || !mayOnLedger(caller, "admin", ledger)) return null;
  const accept = () => ask("POST", "/accept-loss", { json: { first: Number(from), last: Number(end), declare_lost: chosen } });
  const number = { type: "number", min: 0, max: ledger.last_entry, required: true };
  return html`<${Act} label="Accept the loss" isDanger typed=${id} act=${accept} done=${done}>
    <p>This can't be undone. Reads of these entries report from then on that they are lost, even if a copy turns up later. The request is refused while a bookie has one of the entries, or does not answer and is not chosen below.</p>
    <div class="row"><${Field} label="First lost entry" value=${from} set=${setFrom} ...${number} />
      <${Field} label="Last lost entry" value=${end} set=${setEnd} ...${number} /></div>
    ${members.length > 0 && html`<${Gone} members=${members} known=${known} chosen=${chosen} set=${setChosen} />`}
  <//>`;
}

/** The first rows of a table, with the number of further rows. */
const Short = ({ rows, ...table }) => html`<${Table} ...${table} rows=${rows.slice(0, FINDINGS)} />
  ${rows.length > FINDINGS && html`<p class="quiet">${count(rows.length - FINDINGS)} more rows are not shown.</p>`}`;

/** Lost entries, bookies that currently lack entries, and queued repairs. */
function Losses(context) {
  const { ledger, known, repairs, caller } = context;
  const lost = ledger.lost_entries || [];
  const missing = gaps(ledger, known);
  const hasNone = missing.some((one) => one.copies === 0);
  return html`<${Fragment}>
    ${ledger.may_lack_entries && !lost.length && html`<div class="notice"><p><strong>This ledger may lack entries.</strong> An operator declared bookies lost for ever. Acknowledged entries that only they had are missing.</p></div>`}
    ${lost.length > 0 && html`<h2>Lost entries</h2>
      <p>An operator accepted the loss of these entries. Reads of them report that they are lost (410 <a href="/problems/entry-lost">entry-lost</a>).</p>
      <${Short} caption="Lost entries" rows=${lost} of=${(one) => one.first} columns=${[
        { name: "Entries", show: (one) => capital(range(one.first, one.last)) },
        { name: "Number", isNumber: true, show: (one) => count(one.last - one.first + 1) },
        { name: "State", show: () => html`<${State} of="lost" />` }]} />`}
    ${missing.length > 0 && html`<h2>Copies that can't be reached</h2>
      ${hasNone && html`<div class="failure"><p><strong>No running bookie stores some of the entries.</strong> Start their bookies again, with their disks. Only if the bookies never return, accept the loss of these entries${ledger.state === "CLOSED" ? "" : " after the ledger is CLOSED"}.</p></div>`}
      <${Short} caption="Copies that can't be reached" rows=${missing} of=${(one) => one.first} columns=${[
        { name: "Entries", show: (one) => (one.end === null ? `from ${one.first} on` : `${one.first} to ${one.end}`) },
        { name: "Bookies that are away", show: (one) => one.away.join(", ") },
        { name: "Fewest copies left", show: (one) => (one.copies ? `${one.copies} of ${ledger.write_quorum}` : html`<${State} of="none" tone="bad" /> of entry ${one.entry}`) },
        ...(hasNone && ledger.state === "CLOSED" && mayOnLedger(caller, "admin", ledger)
          ? [{ name: "Last resort", show: (one) => one.copies === 0 && html`<${AcceptLoss} ...${context} first=${one.entry} last=${one.last} />` }] : []),
      ]} />`}
    ${repairs.length > 0 && html`<h2>Queued repairs</h2>
      <${Table} caption="Queued repairs" rows=${repairs} of=${(one) => one.member} columns=${[
        { name: "Bookie", show: (one) => html`${one.member} <${Standing} member=${one.member} known=${known} />` },
        { name: "Lacks", show: (one) => one.ranges.slice(0, 5).map(([first, last]) => range(first, last)).join(", ") + (one.ranges.length > 5 ? ", …" : "") },
        { name: "Failed tries", isNumber: true, show: (one) => count(one.failures) },
        { name: "Why it waits", show: (one) => one.detail || (one.worker ? "a worker copies it now" : "it waits for a worker") }]} />
      <p><a href="#/repair">Go to all repairs</a></p>`}
  <//>`;
}

/** Buttons that close or delete the ledger, or change its password. */
function Doings({ ledger, caller, ask, reload, id, setPassword }) {
  const [text, setText] = useState("");
  const change = () => ask("PUT", "/password", { json: { password: text } });
  const changed = () => {
    setPassword(text);
    setText("");
    reload();
  };
  if (ledger.log !== null) return html`<p class="quiet">This ledger belongs to the log <${Log} name=${ledger.log} />. To close or delete the ledger, close or delete the log.</p>`;
  return html`<div class="row">
    ${ledger.state === "OPEN" && mayOnLedger(caller, "append", ledger) && html`<${Act} label="Close" title=${`Close ledger ${id}`} act=${() => ask("POST", "/close")} done=${reload}>
      <p>The writer closes the ledger at its last acknowledged entry. A CLOSED ledger accepts no more entries.</p><//>`}
    ${mayOnLedger(caller, "append|manage", ledger) && html`<${Act} label="Change the password" act=${change} done=${changed}>
      <p>Only a ledger that was created with a password has one. Within seconds all gateways refuse the old password. Entries stay readable with the new one.</p>
      <${Field} label="New password" type="password" value=${text} set=${setText} required maxlength="1024" /><//>`}
    ${mayOnLedger(caller, "manage", ledger) && html`<${Act} label="Delete" title=${`Delete ledger ${id}`} isDanger typed=${id} act=${() => ask("DELETE")} done=${() => { location.hash = "#/ledgers"; }}>
      <p>All entries of the ledger are deleted for ever, and its id is never used again.${ledger.state !== "CLOSED" && " The ledger is recovered first."}</p><//>`}
  </div>`;
}

/** A check of the ledger's copies: its button and its result. */
function Copies(context) {
  const { ledger, caller, ask, known } = context;
  const [found, setFound] = useState({});
  const [busy, setBusy] = useState("");
  if (!mayOnLedger(caller, "manage", ledger)) return null;
  const compare = async (method) => {
    setBusy(method);
    try {
      setFound({ report: await ask(method, "/check"), method });
    } catch (error) {
      setFound({ error });
    }
    setBusy("");
  };
  const { report, error, method } = found;
  const lacks = report && [
    ...report.lacking.map((one) => ({ ...one, what: one.why === "damaged" ? "unreadable on the bookie" : "missing on the bookie" })),
    ...report.differing.map((one) => ({ ...one, bookie: "several", what: "the copies differ, which is a defect: keep the data of these bookies" })),
    ...report.lost.map((one) => ({ ...one, bookie: Object.keys(one.answers).join(", "), what: "lost: every bookie answers that it does not have them", isLost: true })),
    ...report.silent.map((bookie) => ({ bookie, what: "the bookie does not answer" })),
  ];
  return html`<section aria-label="Check of the copies">
    <h2>Check of the copies</h2>
    <p>Each bookie computes digests of the entries that it stores, and autorecovery compares them. No entry is transferred.</p>
    <div class="row">
      <button type="button" disabled=${busy !== ""} onClick=${() => compare("GET")}>${busy === "GET" ? "Comparing …" : "Compare the copies"}</button>
      ${lacks?.length > 0 && html`<button type="button" class="main" disabled=${busy !== ""} onClick=${() => compare("POST")}>${busy === "POST" ? "Comparing …" : "Repair what is missing"}</button>`}
    </div>
    <div role="status">
      <${Failure} error=${error} />
      ${report && html`<p><${State} of=${report.whole ? "whole" : "not whole"} tone=${report.whole ? "good" : "bad"} /> ${count(report.entries)} entries were compared.
        ${report.open_from !== null && ` Entries from ${report.open_from} on are still being written, and were not compared.`}
        ${report.whole ? " Each bookie has all of its entries." : method === "POST" ? " Repairs of what the bookies lack are queued." : ""}</p>`}
    </div>
    ${lacks?.length > 0 && html`<${Short} caption="What the check found" rows=${lacks} of=${(one) => `${one.bookie} ${one.first} ${one.what}`} columns=${[
      { name: "Bookie", show: (one) => html`${one.bookie} <${Standing} member=${one.bookie} known=${known} />` },
      { name: "Entries", show: (one) => (one.first === undefined ? "all that it should store" : capital(range(one.first, one.last))) },
      { name: "Finding", show: (one) => one.what },
      ...(report.lost.length ? [{ name: "Last resort", show: (one) => one.isLost && html`<${AcceptLoss} ...${context} first=${one.first} last=${one.last} done=${() => { context.reload(); compare("GET"); }} />` }] : []),
    ]} />`}
  </section>`;
}

/** The entries, page by page. */
function Entries({ ledger, ask, isRefused }) {
  const [view, setView] = useState("auto");
  const [places, setPlaces] = useState([0]);
  const [start, setStart] = useState("0");
  const from = places[places.length - 1];
  const loaded = useLoad(
    (signal) => (isRefused ? Promise.resolve(null) : ask("GET", "/entries", { signal, params: { from, limit: ENTRIES, max_bytes: ENTRIES_BYTES } })),
    [from, isRefused, ledger.state],
  );
  const { data, error } = loaded;
  const go = (event) => {
    event.preventDefault();
    setPlaces([Number(start)]);
  };
  const resume = error?.code === "entry-lost" ? error.body.next : null;
  const pager = {
    page: places.length,
    hasNext: Boolean(data) && !error && data.next <= data.last_add_confirmed,
    toNext: () => setPlaces([...places, data.next]),
    toPrevious: () => setPlaces(places.slice(0, -1)),
  };
  return html`<section aria-label="Entries">
    <h2>Entries</h2>
    <form class="row" onSubmit=${go} aria-label="Where to begin">
      <${Field} label="From entry" type="number" min="0" value=${start} set=${setStart} required />
      <button>Show the entries</button>
      <${Choice} label="Show payloads as" value=${view} set=${setView} options=${VIEWS} />
      ${ledger.state !== "CLOSED" && html`<button type="button" onClick=${loaded.reload}>Load again</button>`}
    </form>
    ${isRefused ? html`<p class="quiet">The entries need the ledger's password.</p>` : resume !== null
      ? html`<div class="notice"><p>${capital(error.message)}: an operator accepted the loss.</p>
          ${resume <= ledger.last_entry && html`<button type="button" onClick=${() => setPlaces([...places, resume])}>Continue at entry ${resume}</button>`}</div>`
      : html`<${Loaded} loaded=${loaded}>
        ${() => html`<${Table} caption=${`Entries from ${from}`} rows=${data.entries} of=${(one) => one.entry_id}
          empty=${from ? `There is no confirmed entry from ${from} on.` : "The ledger has no confirmed entries."} columns=${[
            { name: "Entry", isNumber: true, show: (one) => one.entry_id },
            { name: "Payload", show: (one) => html`<${Payload} base64=${one.data} view=${view} file=${`ledger-${ledger.ledger_id}-entry-${one.entry_id}`} />` }]} />`}
      <//>`}
    <${Pager} pager=${pager} />
  </section>`;
}
