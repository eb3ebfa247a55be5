// The list of logs, the consumers of all logs, and the form that creates a log.

import { may } from "./access.js";
import { get, quoted, send, useLoad, usePages } from "./api.js";
import { DeleteConsumer, Lag, Lease, Rate } from "./consumers.js";
import { LimitFields, isName, limitTexts, limitsOf, pairs, parsed, refuse, retention, useForm } from "./logform.js";
import { ledgersBetween, sizeOf } from "./timeline.js";
import { Act, Ago, Choice, Facts, Field, Fragment, Loaded, Pager, State, Table, bytes, count, html, to, useEffect, useMemo, useRef, useState } from "./ui.js";

export { Log } from "./log.js";

const PAGE = 50;
/** Ledgers of a log whose bytes an open row adds up. */
const MEASURED = 200;

/** A text once it has not changed for a moment. */
function useSettled(text) {
  const [settled, setSettled] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(text), 250);
    return () => clearTimeout(timer);
  }, [text]);
  return settled;
}

/** Records per second of each log, by name, between the last two loads of the list. */
function useRates(rows, at) {
  const before = useRef(new Map());
  return useMemo(() => {
    const rates = new Map();
    const now = new Map();
    for (const { name, next_offset: next, created_at: created } of rows) {
      const old = before.current.get(name);
      if (old && old.created === created && at > old.at) rates.set(name, ((next - old.next) * 1000) / (at - old.at));
      now.set(name, { next, at, created });
    }
    before.current = now;
    return rates;
  }, [at]);
}

export function Logs({ caller, query }) {
  const [prefix, setPrefix] = useState(query.get("prefix") || "");
  const settled = useSettled(prefix.trim());
  const mayCreate = caller.grants.some((grant) => /^(admin|manage):(\*|logs\/)/.test(grant));
  return html`<${Fragment}>
    <h1>Logs</h1>
    <div class="row">
      <${Field} label="Name begins with" type="search" value=${prefix} set=${setPrefix} />
      ${mayCreate && html`<${Create} />`}
    </div>
    ${settled && !isName(settled)
      ? html`<p class="quiet" role="status">No log's name begins like this. Names have letters, digits, dots, hyphens and underscores.</p>`
      : html`<${List} prefix=${settled} />`}
    <${AllConsumers} caller=${caller} />
  <//>`;
}

function List({ prefix }) {
  const logs = usePages("/v1/logs", "logs", { prefix, limit: PAGE }, 10_000);
  const rates = useRates(logs.rows, logs.at);
  return html`<${Loaded} loaded=${logs}>${() => html`<${Fragment}>
    ${logs.rows.length === 0
      ? html`<p class="quiet">${prefix ? "No log has a name with this beginning." : "There is no log that you may see."}</p>`
      : html`<div class="table" role="region" aria-label="Logs" tabIndex="0"><table>
          <caption class="hidden">Logs</caption>
          <thead><tr>
            <th scope="col"><span class="hidden">Details</span></th><th scope="col">Name</th><th scope="col">State</th>
            <th scope="col" class="number">Records</th><th scope="col" class="number">Records/s</th><th scope="col" class="number">Ledgers</th>
            <th scope="col">Owner</th><th scope="col">Created</th><th scope="col">Kept</th>
          </tr></thead>
          <tbody>${logs.rows.map((log) => html`<${Row} key=${log.name} log=${log} rate=${rates.get(log.name)} />`)}</tbody>
        </table></div>`}
    <${Pager} pager=${logs.pager} />
  <//>`}<//>`;
}

function Row({ log, rate }) {
  const [isOpen, setOpen] = useState(false);
  return html`<${Fragment}>
    <tr>
      <td><button type="button" class="plain" aria-expanded=${isOpen} aria-label=${`Details of ${log.name}`} onClick=${() => setOpen(!isOpen)}>${isOpen ? "▾" : "▸"}</button></td>
      <th scope="row"><a href=${to("logs", log.name)}>${log.name}</a></th>
      <td><${State} of=${log.state} tone=${log.state === "OPEN" ? "good" : "busy"} />${log.deletion_protection && html` <span title="The log can't be deleted or truncated.">protected</span>`}</td>
      <td class="number">${count(log.next_offset - log.first_offset)}</td>
      <td class="number"><${Rate} value=${rate} /></td>
      <td class="number">${count(log.ledgers.length)}</td>
      <td>${log.owner ? log.owner.url : "none"}</td>
      <td><${Ago} time=${log.created_at} /></td>
      <td>${retention(log.settings)}</td>
    </tr>
    ${isOpen && html`<tr><td></td><td colSpan="8"><${Peek} log=${log} /></td></tr>`}
  <//>`;
}

/** What needs requests of its own: the bytes of a log, and its consumers. */
function Peek({ log }) {
  const path = `/v1/logs/${quoted(log.name)}/consumers`;
  const consumers = useLoad((signal) => get(path, { limit: 20 }, signal), [path]);
  const size = useLoad(
    (signal) => (log.ledgers.length > MEASURED ? Promise.resolve(null) : ledgersBetween(log, log.ledgers, signal)),
    [log.name, log.ledgers.length],
  );
  return html`<div class="peek">
    <${Facts} of=${[
      ["Bytes in closed ledgers", size.error ? size.error.message : size.data ? bytes(sizeOf(size.data)) : size.isLoading ? "…" : "see the log's page"],
      ["Offsets", `${count(log.first_offset)} to ${count(log.next_offset)}`],
      ["Copies of each entry", count(log.settings.write_quorum)],
    ]} />
    <${Loaded} loaded=${consumers}>${(data) => html`<${Fragment}>
      <${Table} caption=${`Consumers of ${log.name}`} rows=${data.consumers} of=${(row) => row.consumer} empty="The log has no consumer."
        columns=${[
          { name: "Consumer", show: (row) => row.consumer },
          { name: "Committed offset", isNumber: true, show: (row) => count(row.offset) },
          { name: "Lag", isNumber: true, show: (row) => html`<${Lag} of=${row} />` },
          { name: "Worker", show: (row) => html`<${Lease} of=${row.lease} />` },
        ]} />
      ${data.next && html`<a href=${to("logs", log.name, "consumers")}>All consumers of the log</a>`}
    <//>`}<//>
  </div>`;
}

/** The consumers of all logs, loaded once the section is open. Consumers of deleted logs are here too. */
function AllConsumers({ caller }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details class="section" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><h2>Consumers of all logs</h2></summary>
    ${isOpen && html`<${ConsumerList} caller=${caller} />`}
  </details>`;
}

function ConsumerList({ caller }) {
  const consumers = usePages("/v1/consumers", "consumers", { limit: PAGE });
  return html`<${Loaded} loaded=${consumers}>${() => html`<${Fragment}>
    <p class="quiet">Consumers of deleted logs are listed until they expire. A log's own page shows how far its consumers are behind.</p>
    <${Table} caption="Consumers of all logs" rows=${consumers.rows} of=${(row) => `${row.log}/${row.consumer}`} empty="There is no consumer that you may see."
      columns=${[
        { name: "Log", show: (row) => html`<a href=${to("logs", row.log, "consumers")}>${row.log}</a>` },
        { name: "Consumer", show: (row) => row.consumer },
        { name: "Committed offset", isNumber: true, show: (row) => count(row.offset) },
        { name: "Last commit", show: (row) => html`<${Ago} time=${row.committed_at} />` },
        { name: "Worker", show: (row) => html`<${Lease} of=${row.lease} />` },
        { name: "Actions", show: (row) => may(caller, "manage", "logs", row.log) && html`<${DeleteConsumer} of=${row} done=${consumers.reload} />` },
      ]} />
    <${Pager} pager=${consumers.pager} />
  <//>`}<//>`;
}

const NEW = { roll_bytes: 2 ** 28, roll_entries: 0, roll_seconds: 0, retention_bytes: 0, retention_seconds: 0 };
const QUORUMS = {
  ensemble_size: ["Ensemble size", "Bookies among which the entries of a ledger are spread. Empty: 3."],
  write_quorum: ["Write quorum", "Copies of each entry. Empty: 3."],
  ack_quorum: ["Ack quorum", "Copies that are on disk before an append is acknowledged. Empty: more than half of the write quorum."],
};

function Create() {
  const kept = useRef(null);
  const act = async () => {
    const form = kept.current;
    if (!isName(form.name)) refuse("A name has 1 to 200 letters, digits, dots, hyphens and underscores, and begins with a letter or digit.");
    const json = { ...limitsOf(form), batch_compression: form.compression, digest: form.digest, metadata: pairs(form.metadata, "=", "entry of the metadata") };
    for (const [member, [title]] of Object.entries(QUORUMS)) {
      if (form[member].trim()) json[member] = parsed({ title, unit: "count" }, form[member]);
    }
    const response = await send("PUT", `/v1/logs/${quoted(form.name)}`, { json });
    if (response.status === 200) refuse(`A log with the name ${form.name} and these settings exists already.`, "Nothing was created");
    return form.name;
  };
  return html`<${Act} label="Create a log" act=${act} done=${(name) => { location.hash = to("logs", name); }}><${CreateFields} kept=${kept} /><//>`;
}

function CreateFields({ kept }) {
  const [form, change] = useForm(kept, () => ({
    name: "", compression: "none", digest: "crc32c", ensemble_size: "", write_quorum: "", ack_quorum: "", metadata: "", ...limitTexts(NEW, false),
  }));
  return html`<${Fragment}>
    <${Field} label="Name" value=${form.name} set=${(name) => change({ name })} required maxLength="200" help="It never changes. Tokens can allow all logs whose names have one beginning, so begin related names alike." />
    <h3>Settings that can change later</h3>
    <${LimitFields} form=${form} change=${change} />
    <h3>Settings that never change</h3>
    <${Choice} label="Compression of record batches" value=${form.compression} set=${(compression) => change({ compression })}
      options=${[["none", "none"], ["zstd", "zstd: less space, a quarter more CPU for appends"]]} />
    ${Object.entries(QUORUMS).map(([member, [label, help]]) => html`<${Field} label=${label} help=${help} inputMode="numeric" value=${form[member]} set=${(text) => change({ [member]: text })} />`)}
    <${Choice} label="Digest of entries" value=${form.digest} set=${(digest) => change({ digest })} options=${[["crc32c", "crc32c: readers detect damaged entries"], ["none", "none"]]} />
    <label class="field">Metadata <textarea class="short" value=${form.metadata} onInput=${(event) => change({ metadata: event.target.value })} placeholder="team=billing" />
      <small>One name=value on each line, stored with each ledger of the log.</small></label>
  <//>`;
}
