// Work queues of one log: their remaining and claimed records, and how to create, redrive or delete a queue.

import { may } from "./access.js";
import { call, quoted, useGet, usePages } from "./api.js";
import { PlaceFields, isName, placeOf, refuse, useForm } from "./logform.js";
import { Act, Ago, Choice, Facts, Field, Fragment, Loaded, Pager, State, Table, count, duration, html, to, useRef, useState } from "./ui.js";

/** Maximum number of dead letters that one request moves back. */
const REDRIVE_MAX = 1000;

const pathOf = (log, queue) => `/v1/logs/${quoted(log)}/queues/${quoted(queue)}`;

/** The age of the first unsettled record. */
function Oldest({ row, log }) {
  const from = Math.max(row.floor, log.first_offset);
  const { data } = useGet(`/v1/logs/${quoted(row.log)}/records`, { from, limit: 1, created: log.created_at });
  return data?.records.length ? html`<${Ago} time=${data.records[0].timestamp} />` : "—";
}

/** The number of unsettled records, or why the queue delivers no records. */
function Depth({ of: row }) {
  if (row.state !== "ok") return html`<${State} of=${row.state} tone="bad" />`;
  return count(row.depth);
}

function Dead({ of: row }) {
  return html`<${Fragment}>${count(row.dead)}${row.dying > 0 && html` <small>(${count(row.dying)} on the way)</small>`}
    ${row.dead_letter_error && html` <${State} of=${row.dead_letter_error} tone="bad" />`}<//>`;
}

function Details({ of: row }) {
  const dead = row.dead_letter_log;
  return html`<${Facts} of=${[
    ["Lease", duration(row.lease_ms / 1000)],
    ["Attempts", row.max_attempts ? `at most ${count(row.max_attempts)}` : "no limit"],
    ["Dead-letter log", dead ? html`<a href=${to("logs", dead)}>${dead}</a>` : "none"],
    ["Order", row.order === "key" ? "one record of a key at a time" : "none"],
    ["Given and not done", `${count(row.unsettled)} of at most ${count(row.max_in_flight)}`],
    ["All done below offset", count(row.floor)],
    ["Next new offset", count(row.next)],
    ["Lost to retention", row.lost ? count(row.lost) : undefined],
  ]} />`;
}

function Redrive({ of: row, done }) {
  return html`<${Act} label="Redrive" title=${`Send dead letters of ${row.queue} back`} done=${done}
    act=${() => call("POST", `${pathOf(row.log, row.queue)}/redrive`, { json: { max: REDRIVE_MAX } })}>
    <p>Appends the queue's oldest dead letters, at most ${count(REDRIVE_MAX)}, to the log again as new records, each once. Other readers of the log see them again, too.</p>
  <//>`;
}

function Delete({ of: row, done }) {
  // With the version, the request does not delete a queue that was created again in between.
  const headers = row.version === undefined ? {} : { "If-Match": `"${row.version}"` };
  return html`<${Act} label="Delete" title=${`Delete the queue ${row.queue}`} typed=${row.queue} isDanger done=${done}
    act=${() => call("DELETE", pathOf(row.log, row.queue), { headers })}>
    <p>The cluster forgets which records are done, and ends the claims of all workers. The log's records and the dead letters stay.</p>
  <//>`;
}

/** A whole number from a form; undefined if the text is empty. */
function whole(text, title) {
  if (text.trim() && !/^[1-9]\d{0,8}$/.test(text.trim())) refuse(`“${title}” must be a whole number from 1 on.`);
  return text.trim() ? Number(text) : undefined;
}

function Create({ name, done }) {
  const kept = useRef(null);
  const act = () => {
    const form = kept.current;
    const queue = form.queue.trim();
    const dead = form.dead.trim();
    if (!isName(queue)) refuse("A queue's name has letters, digits, “.”, “_” and “-”, and begins with a letter or digit.");
    const place = placeOf(form);
    const json = {
      lease_ms: 1000 * (whole(form.lease, "Lease in seconds") ?? 30),
      max_attempts: whole(form.attempts, "Attempts"),
      dead_letter_log: dead || undefined,
      order: form.order,
      max_in_flight: whole(form.most, "Records in flight"),
      from: /^-?\d+$/.test(place) ? Number(place) : place,
    };
    return call("PUT", pathOf(name, queue), { json, headers: { "If-None-Match": "*" } });
  };
  return html`<${Act} label="Create a queue" act=${act} done=${done}><${CreateFields} kept=${kept} /><//>`;
}

function CreateFields({ kept }) {
  const [form, change] = useForm(kept, { queue: "", lease: "30", attempts: "", dead: "", order: "none", most: "1000", place: "earliest", offset: "", time: "" });
  const field = (member) => ({ value: form[member], set: (text) => change({ [member]: text }) });
  return html`<${Fragment}>
    <${Field} label="Name" ...${field("queue")} required />
    <${Field} label="Lease in seconds" inputMode="numeric" ...${field("lease")} help="How long a worker has for its records, unless it extends the claim." />
    <${Field} label="Attempts" inputMode="numeric" ...${field("attempts")} help="How often a record is given before it becomes a dead letter. Empty: no limit." />
    <${Field} label="Dead-letter log" ...${field("dead")} help="An existing log, required with a number of attempts." />
    <${Choice} label="Order" ...${field("order")} options=${[["none", "None: about the log's order"], ["key", "One record of a key at a time, in order"]]} />
    <${Field} label="Records in flight" inputMode="numeric" ...${field("most")} help="The most records that were given and are not done." />
    <${PlaceFields} label="Begin at" ...${{ form, change }} options=${[["earliest", "The first record"], ["latest", "The end: only new records"]]} />
  <//>`;
}

/** A page of the queues of a log. */
export function Queues({ name, caller, log }) {
  const [notice, setNotice] = useState(null);
  const queues = usePages(`/v1/logs/${quoted(name)}/queues`, "queues", { limit: 50 }, 5000);
  const mayManage = may(caller, "manage", "logs", name);
  const done = (text) => (result) => {
    setNotice(text(result));
    return queues.reload();
  };
  const actions = (row) => html`<span class="row">
    ${row.dead > 0 && may(caller, "append", "logs", name) && html`<${Redrive} of=${row} done=${done(({ redriven }) => `Dead letters that were sent back: ${count(redriven)}.`)} />`}
    <${Delete} of=${row} done=${done(() => `The queue ${row.queue} is deleted.`)} /></span>`;
  return html`<section aria-label="Queues">
    <h2>Queues</h2>
    ${notice && html`<div class="notice good" role="status"><p>${notice}</p></div>`}
    ${mayManage && html`<div class="row"><${Create} name=${name} done=${done((made) => `The queue ${made.queue} gives records to workers now.`)} /></div>`}
    <${Loaded} loaded=${queues}>${() => html`<${Fragment}>
      <${Table} caption="Queues of the log" rows=${queues.rows} of=${(row) => row.queue} more=${(row) => html`<${Details} of=${row} />`}
        empty="No queue. A queue gives the log's records to many workers, each record to one worker at a time."
        columns=${[
          { name: "Queue", show: (row) => row.queue },
          { name: "Not done", isNumber: true, show: (row) => html`<${Depth} of=${row} />` },
          { name: "Workers have", isNumber: true, show: (row) => count(row.in_flight) },
          ...(may(caller, "read", "logs", name) ? [{ name: "Oldest", show: (row) => (row.state === "ok" && row.depth > 0 ? html`<${Oldest} ...${{ row, log }} />` : "—") }] : []),
          { name: "Given again", isNumber: true, show: (row) => count(row.redelivered) },
          { name: "Dead letters", isNumber: true, show: (row) => html`<${Dead} of=${row} />` },
          ...(mayManage ? [{ name: "Actions", show: actions }] : []),
        ]} />
      <${Pager} pager=${queues.pager} />
    <//>`}<//>
  </section>`;
}
