// The list of logs, the consumers of all logs, and the form that creates a log.

import { may } from "./access.js";
import { quoted, send, useGet, usePages } from "./api.js";
import { DeleteConsumer, Lag, Lease, Rate, useRates } from "./consumers.js";
import { LimitFields, isName, limitTexts, limitsOf, pairs, parsed, refuse, retention, useForm } from "./logform.js";
import { Size } from "./timeline.js";
import { Act, Ago, Choice, Facts, Field, Fragment, Loaded, Pager, State, Table, count, html, to, useEffect, useRef, useState } from "./ui.js";

export { Log } from "./log.js";

const PAGE = 50;

/** The text after it has stopped changing for a moment. */
function useSettled(text) {
  const [settled, setSettled] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(text), 250);
    return () => clearTimeout(timer);
  }, [text]);
  return settled;
}

export function Logs({ caller, query }) {
  const [prefix, setPrefix] = useState(query.get("prefix") || "");
  const [isOpen, setOpen] = useState(false);
  const settled = useSettled(prefix.trim());
  const mayCreate = caller.grants.some((grant) => /^(admin|manage):(\*|logs\/)/.test(grant));
  return html`<${Fragment}>
    <h1>Logs</h1>
    <div class="row">
      <${Field} label="Name begins with" type="search" value=${prefix} set=${setPrefix} />
      ${mayCreate && html`<${Create} />`}
    </div>
    ${settled && !isName(settled)
      ? html`<p class="quiet" role="status">No log's name begins like this. Names have letters, digits, dots, hyphens and underscores, and begin with a letter or digit.</p>`
      : html`<${List} prefix=${settled} />`}
    <details class="section" onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary><h2>Consumers of all logs</h2></summary>
      ${isOpen && html`<${ConsumerList} caller=${caller} />`}
    </details>
  <//>`;
}

function List({ prefix }) {
  const logs = usePages("/v1/logs", "logs", { prefix, limit: PAGE }, 10_000);
  const rates = useRates(logs.rows, logs.at);
  return html`<${Loaded} loaded=${logs}>${() => html`<${Fragment}>
    <${Table} caption="Logs" rows=${logs.rows} of=${(log) => log.name} more=${(log) => html`<${Peek} log=${log} />`}
      empty=${prefix ? "No log has a name with this beginning." : "There is no log that you may see."}
      columns=${[
        { name: "Name", show: (log) => html`<a href=${to("logs", log.name)}>${log.name}</a>` },
        { name: "State", show: (log) => html`<${State} of=${log.state} tone=${log.state === "OPEN" ? "good" : "busy"} />${log.deletion_protection && " protected"}` },
        { name: "Records", isNumber: true, show: (log) => count(log.next_offset - log.first_offset) },
        { name: "Records/s", isNumber: true, show: (log) => html`<${Rate} of=${rates.get(log.name)} />` },
        { name: "Ledgers", isNumber: true, show: (log) => count(log.ledgers.length) },
        { name: "Owner", show: (log) => log.owner?.url || "none" },
        { name: "Created", show: (log) => html`<${Ago} time=${log.created_at} />` },
        { name: "Kept", show: (log) => retention(log.settings) },
      ]} />
    <${Pager} pager=${logs.pager} />
  <//>`}<//>`;
}

/** The data that needs additional requests: the bytes of a log, and its consumers. */
function Peek({ log }) {
  const path = `/v1/logs/${quoted(log.name)}/consumers`;
  const consumers = useGet(path, { limit: 20 });
  return html`<div>
    <${Facts} of=${[
      ["Bytes in closed ledgers", html`<${Size} log=${log} />`],
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

/** The consumers of all logs, also of deleted ones. */
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

const NEW = {
  roll_bytes: 2 ** 28, roll_entries: 0, roll_seconds: 0, retention_bytes: 0, retention_seconds: 0, merge_below_bytes: 2 ** 26,
  cleanup_policy: "delete", min_compaction_lag_s: 0, delete_retention_s: 86_400, max_dirty_percent: 50,
};
const QUORUMS = {
  ensemble_size: ["Ensemble size", "Bookies among which the entries of a ledger are spread. Empty: 3."],
  write_quorum: ["Write quorum", "Copies of each entry. Empty: 3."],
  ack_quorum: ["Ack quorum", "Copies that must be on disk before an append is acknowledged. Empty: more than half of the write quorum."],
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
    <${Field} label="Name" value=${form.name} set=${(name) => change({ name })} required maxLength="200" help="The name never changes. A token can allow all logs whose names have a common beginning, so let related names begin alike." />
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
