// The page Repair: the queue, limits and checks of autorecovery, bookies that leave, and the metadata's database.

import { may } from "./access.js";
import { call, get, lines, quoted, send, useGet, useLoad, usePages } from "./api.js";
import { Audit, Pause, Writable, nameOf, plural, some, useFirst, usePaged } from "./cluster.js";
import { Act, Ago, Command, Facts, Field, Failure, Fragment, Loaded, Pager, Progress, State, Table, bytes, count, duration, html, to, useEffect, useRef, useState } from "./ui.js";

const EVERY_MS = 5000;
/** Seconds of measurement before the rate of repairs is shown. */
const PACE_S = 30;
const NDJSON = "application/x-ndjson";

/** How many entries an item lacks; Infinity if its ledger is open, where all later entries count. */
const OPEN_END = 2 ** 62;
const entriesOf = (item) => item.ranges.reduce((sum, [first, last]) => (last >= OPEN_END ? Infinity : sum + last - first + 1), 0);
const keyOf = (item) => `${item.ledger_id}:${item.member}`;
const toLedger = (id) => html`<a href=${to("ledgers", String(id))}>${id}</a>`;
const sumOf = (processes, counter) => processes.reduce((sum, one) => sum + (one[counter] || 0), 0);
/** Names in a field, separated by commas or spaces. */
const split = (text) => text.split(/[\s,]+/).filter(Boolean);
/** The auditor's status, or the status of any process that responds. */
const chief = (processes) => processes.find((one) => one.auditor) || processes.find((one) => !one.error);

/** The rate of completed repairs since this page opened: {copied_per_s, repaired_per_s, seconds}. A process that
 * restarts counts from zero, so the measurement restarts, too. */
function usePace(processes, at) {
  const begun = useRef(null);
  if (!processes || !at) return null;
  const now = { at, ids: processes.map((one) => one.id + Boolean(one.error)).sort().join(), copied: sumOf(processes, "copied_bytes"), repaired: sumOf(processes, "repaired") };
  const old = begun.current;
  if (!old || old.ids !== now.ids || now.copied < old.copied || now.repaired < old.repaired) begun.current = now;
  const seconds = (now.at - begun.current.at) / 1000;
  if (seconds < 1) return { seconds: 0 };
  return {
    seconds, repaired: now.repaired - begun.current.repaired,
    copied_per_s: (now.copied - begun.current.copied) / seconds, repaired_per_s: (now.repaired - begun.current.repaired) / seconds,
  };
}

function timeLeft(status, pace) {
  if (!status.queue.items) return "nothing is queued";
  if (status.paused) return "not while repairs are paused";
  if (pace.seconds < PACE_S) return `not known: the page measures the pace for ${PACE_S} s first`;
  if (!pace.repaired) return `not known: no repair ended in the last ${duration(pace.seconds)}`;
  return `about ${duration(status.queue.items / pace.repaired_per_s)}, if the rest goes like the last ${plural(pace.repaired, "repair")}`;
}

function Totals({ processes, status, pace }) {
  const { queue } = status;
  return html`<${Fragment}>
    <p class=${`notice ${status.paused || queue.items ? "" : "good"}`} role="status">${status.paused
      ? `Repairs are paused. ${plural(queue.ledgers, "ledger")} ${queue.ledgers === 1 ? "lacks" : "lack"} copies.`
      : queue.items ? `Autorecovery repairs ${plural(queue.ledgers, "ledger")}.` : "No ledger lacks copies."}</p>
    <${Facts} of=${[
      ["Queued repairs", `${count(queue.items)} in ${plural(queue.ledgers, "ledger")}`],
      ["Waiting after a failure", count(queue.waiting)],
      ["Oldest", queue.items ? duration(queue.oldest_s) : "—"],
      ["Running", count(sumOf(processes, "working"))],
      ["Copied", `${bytes(sumOf(processes, "copied_bytes"))} since the processes started`],
      ["Pace", pace.seconds ? `${bytes(pace.copied_per_s)}/s` : "…"],
      ["Time left", timeLeft(status, pace)],
      ["Repaired, failed", `${count(sumOf(processes, "repaired"))}, ${count(sumOf(processes, "failed"))}`],
    ]} />
  <//>`;
}

const invalid = (text) => Object.assign(new Error(text), { title: "Correct the form" });

/** The number in a field; null if the field is empty, which restores the default. */
function number(text, label, min, max, isWhole = true) {
  if (!text.trim()) return null;
  const value = Number(text);
  if (!(value >= min && value <= max) || (isWhole && !Number.isInteger(value))) {
    throw invalid(`${label} must be a${isWhole ? " whole" : ""} number from ${count(min)} to ${count(max)}.`);
  }
  return value;
}

function Limits({ status, done }) {
  const now = { bytes_per_s: status.bytes_per_s, concurrency: status.concurrency, lost_bookie_delay_s: status.lost_bookie_delay_s };
  const [given, setGiven] = useState({ before: {} });
  const field = (name) => ({ value: given[name] ?? "", set: (text) => setGiven((old) => ({ ...old, [name]: text })) });
  const open = () => {
    const before = Object.fromEntries(Object.entries(now).map(([name, value]) => [name, String(value ?? "")]));
    setGiven({ ...before, before });
  };
  const act = () => {
    const read = {
      bytes_per_s: (text) => number(text, "The rate", 1, Number.MAX_SAFE_INTEGER),
      concurrency: (text) => number(text, "The number of concurrent repairs", 1, 64),
      lost_bookie_delay_s: (text) => number(text, "The delay", 0, 86400, false),
    };
    const changed = Object.keys(read).filter((name) => given[name] !== given.before[name]);
    if (!changed.length) throw invalid("You have not changed any limit.");
    return call("PATCH", "/v1/autorecovery", { json: Object.fromEntries(changed.map((name) => [name, read[name](given[name])])) });
  };
  return html`<${Act} label="Change limits" title="Change the limits of repairs" act=${act} done=${done} onOpen=${open}>
    <p>The limits apply at once to all processes of autorecovery, and survive restarts. An empty field restores the default of each process.</p>
    <${Field} label="Bytes per second" ...${field("bytes_per_s")} inputmode="numeric" help="For all processes together. Empty: no limit, unless the processes are configured with one." />
    <${Field} label="Concurrent repairs" ...${field("concurrency")} inputmode="numeric" help="In each process, 1 to 64." />
    <${Field} label="Lost-bookie delay in seconds" ...${field("lost_bookie_delay_s")} inputmode="decimal"
      help="How long a bookie may be absent before its entries are copied to other bookies. Raise it before the maintenance of a machine." />
  <//>`;
}

function Autorecovery({ loaded, isAdmin, reload }) {
  const processes = loaded.data?.autorecovery || [];
  const pace = usePace(loaded.data?.autorecovery, loaded.at) || { seconds: 0 };
  const status = chief(processes);
  const { rows, pager } = usePaged(processes);
  return html`<${Loaded} loaded=${loaded}>${() => (!status ? html`<p class="notice bad" role="status">No process of autorecovery answers: lost copies
    are not replaced. Start a process of autorecovery.</p>` : html`<${Fragment}>
    <${Totals} processes=${processes} status=${status} pace=${pace} />
    <${Facts} of=${[
      ["Limit", status.bytes_per_s ? `${bytes(status.bytes_per_s)}/s (${count(status.bytes_per_s)} bytes)` : "none"],
      ["Concurrent repairs", `${count(status.concurrency)} in each process`],
      ["Lost-bookie delay", duration(status.lost_bookie_delay_s)],
    ]} />
    ${isAdmin && html`<div class="row"><${Pause} isPaused=${status.paused} done=${reload} />
      <${Limits} status=${status} done=${reload} /><${Audit} done=${reload} /></div>`}
    <${Check} status=${status} isAdmin=${isAdmin} done=${reload} />
    <h3>Processes</h3>
    <${Table} caption="Processes of autorecovery" rows=${rows} columns=${[
      { name: "Process", show: (row) => html`<span class="whole">${row.url}</span><br /><small class="whole">${row.id}</small>` },
      { name: "State", show: (row) => (row.error ? html`<${State} of="missing" /> ${row.error}` : html`<${State} of=${row.paused ? "paused" : "running"} tone=${row.paused ? "busy" : "good"} />${row.auditor ? " audits" : ""}`) },
      { name: "Running", isNumber: true, show: (row) => count(row.working) },
      { name: "Repaired", isNumber: true, show: (row) => count(row.repaired) },
      { name: "Failed", isNumber: true, show: (row) => count(row.failed) },
      { name: "Copied", isNumber: true, show: (row) => bytes(row.copied_bytes) },
    ]} />
    <${Pager} pager=${pager} />
  <//>`)}<//>`;
}

/** The check of all copies: its progress, or the result of the last check. */
function Check({ status, isAdmin, done }) {
  const before = status.check_ledgers_before;
  return html`<section aria-labelledby="check">
    <h3 id="check">Check of all copies</h3>
    <p role="status">${status.check_runs
      ? html`A check runs: ${plural(status.check_ledgers, "ledger")} compared${before ? html`, of about ${count(before)} at the last check
          <${Progress} label="Check of all copies" value=${status.check_ledgers / before} />` : "; how many there are is not known."}`
      : before === null ? "The auditor has finished no check since it started."
        : `The last check compared ${plural(before, "ledger")} in ${duration(status.check_s)}.`}</p>
    ${isAdmin && html`<${Act} label="Check all copies" act=${() => call("POST", "/v1/checks")} done=${done} disabled=${status.check_runs}>
      <p>Autorecovery compares the digests of all copies of all ledgers, and queues repairs of entries that are missing or damaged. All bookies read all of their entries from their disks. Autorecovery makes this check once a day, unless configured otherwise.</p><//>`}
  </section>`;
}

function Queue() {
  const queue = usePages("/v1/repairs", "repairs", {}, EVERY_MS);
  const first = useFirst(queue.rows.map((item) => [keyOf(item), entriesOf(item)]));
  const isWhole = queue.pager.page === 1 && !queue.pager.hasNext;
  return html`<section aria-labelledby="queue">
    <h2 id="queue">Queue</h2>
    <${Loaded} loaded=${queue}>${() => html`<${Fragment}>
      <${Table} caption="Queue of repairs" rows=${queue.rows} of=${keyOf} empty=${isWhole ? "The queue is empty." : "This page of the queue is empty."} columns=${[
        { name: "Ledger", show: (item) => toLedger(item.ledger_id) },
        { name: "Bookie", show: (item) => html`<span class="whole">${item.member}</span>` },
        { name: "State", show: (item) => html`<${State} ...${item.worker ? { of: "running" } : item.failures ? { of: "waiting", tone: "bad" } : { of: "queued" }} />` },
        { name: "Entries left", isNumber: true, show: (item) => (entriesOf(item) === Infinity ? "to the end" : count(entriesOf(item))) },
        { name: "Progress", show: (item) => {
          const [left, all] = [entriesOf(item), first(keyOf(item), entriesOf(item))];
          return left < all && all < Infinity ? html`<${Progress} label=${`Ledger ${item.ledger_id} since this page opened`} value=${1 - left / all} />` : "—";
        } },
        { name: "Copies left", isNumber: true, show: (item) => count(item.survivors) },
        { name: "Failures", isNumber: true, show: (item) => count(item.failures) },
        { name: "Last reason", show: (item) => item.detail || "—" },
        { name: "Queued", show: (item) => html`<${Ago} time=${item.created_at} />` },
      ]} />
      <${Pager} pager=${queue.pager} />
    <//>`}<//>
  </section>`;
}

/** Draining or lost bookies, with what still references each bookie and how to remove it. */
function Leaving({ bookies, isAdmin, reload }) {
  const leaving = bookies.filter((one) => one.state === "draining" || one.state === "lost");
  const { rows, pager } = usePaged(leaving, 10);
  return html`<section aria-labelledby="leaving">
    <h2 id="leaving">Drains and lost bookies</h2>
    ${!rows.length && html`<p class="quiet">No bookie is draining or lost. A drain starts on the page Overview.</p>`}
    <div class="cards wide">${rows.map((one) => html`<${Leaver} key=${one.id} bookie=${one} isAdmin=${isAdmin} reload=${reload} />`)}</div>
    <${Pager} pager=${pager} />
  </section>`;
}

function Leaver({ bookie, isAdmin, reload }) {
  const name = nameOf(bookie.id);
  const loaded = useGet(`/v1/bookies/${quoted(name)}/drain`, {}, EVERY_MS);
  const drain = loaded.data;
  const first = useFirst(drain ? [[name, drain.ledgers]] : []);
  const isLost = bookie.state === "lost";
  const isEmpty = Boolean(drain?.done);
  return html`<article class="card" aria-label=${name}>
    <h3>${bookie.id} <${State} of=${bookie.state} /></h3>
    <${Loaded} loaded=${loaded}>${() => html`<${Fragment}>
      ${isEmpty
        ? html`<p role="status">No ledger names ${name}. ${isLost ? "It can be decommissioned." : "Stop its process, then decommission it."}</p>`
        : html`<p role="status">${plural(drain.ledgers, "ledger")} still ${drain.ledgers === 1 ? "names" : "name"} ${name}, and ${plural(drain.repairs, "repair")} ${drain.repairs === 1 ? "is" : "are"} queued for it.</p>
          ${drain.why && html`<p>It waits: ${drain.why}.</p>`}
          ${first(name, drain.ledgers) > drain.ledgers && html`<p><${Progress} label=${`Ledgers moved off ${name} since this page opened`} value=${1 - drain.ledgers / first(name, drain.ledgers)} /> since this page opened</p>`}
          <ul>${drain.first.slice(0, 10).map((one) => html`<li>Ledger ${toLedger(one.ledger_id)} (${one.state}): ${one.reason}</li>`)}</ul>
          ${drain.ledgers > Math.min(10, drain.first.length) && html`<p class="quiet">These are the first of ${count(drain.ledgers)}.</p>`}`}
    <//>`}<//>
    ${isAdmin && html`<div class="row">
      ${!isLost && html`<${Writable} name=${name} label="Cancel the drain" done=${reload} />`}
      <${Act} label="Decommission" title=${`Decommission ${name}`} isDanger typed=${name} done=${reload} disabled=${!isEmpty || !isLost}
        act=${() => call("DELETE", `/v1/bookies/${quoted(name)}`)}>
        <p>${name} is removed from the list of bookies. A bookie may use this name again only with an empty disk and the setting <code>AUTO_FIX_COOKIES=1</code>.</p>
        <p>The request is refused while the bookie runs, or while any ledger or repair names it.</p>
      <//></div>
    ${(!isEmpty || !isLost) && html`<p class="quiet">${isLost ? "Decommissioning is possible when no ledger names it." : "Decommissioning is possible when no ledger names it and its process is stopped."}</p>`}`}
  </article>`;
}

/** A long operation of the metadata service, which reports progress in lines. Leaving the page ends it.
 * Returns [line, run, cancel]; `run` returns the last line, and raises its error. */
function useWork() {
  const [line, setLine] = useState(null);
  const abort = useRef(null);
  const cancel = () => abort.current?.abort();
  useEffect(() => cancel, []);
  const run = async (path, json) => {
    const { signal } = (abort.current = new AbortController());
    setLine({ done: 0 });
    let last = {};
    try {
      const response = await send("POST", path, { json, signal, headers: { Accept: NDJSON } });
      for await (const each of lines(response)) setLine((last = { ...last, ...each }));
    } catch (error) {
      throw signal.aborted ? new Error("The work was cancelled. What was written stays.") : error;
    } finally {
      setLine(null);
    }
    if (last.error !== undefined) throw Object.assign(new Error(last.error), { code: last.code || "", title: "The work ended early", through: last.through });
    return last;
  };
  return [line, run, cancel];
}

function Working({ line }) {
  if (!line) return null;
  const phases = { survey: "Reading the copies of all bookies", ledgers: "Judging ledgers", logs: "Judging logs" };
  return html`<p role="status">${phases[line.phase] || "Starting"}: ${count(line.done || 0)} ${line.of ? html`of ${count(line.of)}
    <${Progress} label="Progress" value=${line.done / line.of} />` : "done"}</p>`;
}

function Report({ report }) {
  const actions = (counts) => Object.entries(counts).map(([action, number]) => `${count(number)} ${action}`).join(", ") || "none";
  const { rows, pager } = usePaged(report.findings, 20);
  return html`<section aria-label="Report of the rebuild" class="notice good">
    <h3>${report.dry_run ? "What a rebuild would do" : "What the rebuild did"}</h3>
    <${Facts} of=${[
      ["Ledgers", actions(report.ledgers)], ["Logs", actions(report.logs)],
      ["Bookies that answered", some(report.bookies.map((one) => one.bookie)) || "none"], ["Silent bookies", some(report.silent) || "none"],
      ["Open ledgers to recover", count(report.open_ledgers)], ["Ledgers that may have been deleted", count(report.may_be_deleted || 0)],
      ["Holes in logs", count(report.holes)], ["Next ledger id", count(report.next_ledger_id)],
    ]} />
    <p class="quiet">same: the database has the metadata. write: the metadata is missing or outdated. tombstone: the ledger or log was deleted. conflict, wait: nothing is written; see the findings.</p>
    ${rows.length > 0 && html`<${Table} caption="Findings" rows=${rows} of=${(row) => `${row.ledger_id} ${row.log} ${row.why}`} columns=${[
      { name: "Ledger or log", show: (row) => (row.log ? html`<a href=${to("logs", row.log)}>${row.log}</a>` : toLedger(row.ledger_id)) },
      { name: "Action", show: (row) => row.action }, { name: "Why", show: (row) => row.why },
    ]} />`}
    <${Pager} pager=${pager} />
    ${report.findings_left_out > 0 && html`<p class="quiet">${plural(report.findings_left_out, "more finding")} left out.</p>`}
    <p class="quiet">Not restored, because no bookie holds it: ${report.not_rebuilt.join(", ")}.</p>
  </section>`;
}

function Rebuild({ state, isAdmin, reload }) {
  const [takesOver, setTakesOver] = useState(false);
  const [without, setWithout] = useState("");
  const [report, setReport] = useState(null);
  const [error, setError] = useState(null);
  const [line, run, cancel] = useWork();
  const rebuild = (isDry) => async () => {
    setError(null);
    setReport(null);
    run("/v1/rebuild", { dry_run: isDry, take_over: takesOver && !isDry, without: split(without) }).then((last) => {
      setReport(last.report);
      reload();
    }, setError);
  };
  const options = html`<${Field} label="Bookies that are gone for ever" value=${without} set=${setWithout} placeholder="bookie-1, bookie-2"
    help="The rebuild does not wait for metadata that only these bookies hold. Leave this empty if they may come back." />`;
  return html`<section aria-labelledby="rebuild">
    <h3 id="rebuild">Rebuild of the metadata</h3>
    <p>${state.is_empty ? "The database never had a ledger, a log or a bookie." : "The database has metadata."} ${state.was_rebuilt ? "It was rebuilt before." : "It was never rebuilt."}${" "}
      A rebuild is for a database that was lost or went back to an older state: it writes the metadata that copies on bookies prove, and changes nothing else.</p>
    ${isAdmin && !line && html`<div class="row">
      <${Act} label="Show what a rebuild would write" act=${rebuild(true)}>
        <p>All bookies report their copies of metadata. Nothing is written. The report names ledgers that cannot be restored, and bookies that do not answer.</p>${options}
      <//>
      <${Act} label="Rebuild" title="Rebuild the metadata" isDanger typed="rebuild" act=${rebuild(false)}>
        <ol>
          <li>Restore the newest database if there is any: a rebuild cannot restore everything (tokens, settings of logs, logs without records, idempotency keys).</li>
          <li>Stop all other gateways and autorecovery, and start all bookies. Metadata that only a silent bookie holds is not restored.</li>
          <li>Look at what the rebuild would write, then start the rebuild. You may repeat it. It ends when you leave this page, and what was written stays.</li>
        </ol>
        ${options}
        <label><input type="checkbox" checked=${takesOver} onChange=${(event) => setTakesOver(event.target.checked)} />
          ${" "}The lost database is gone for ever: accept the loss of changes that bookies know of without a copy, and let an empty database take over the cluster of these bookies.</label>
      <//></div>`}
    ${line && html`<div class="notice" aria-label="Rebuild under way"><${Working} line=${line} /><button type="button" onClick=${cancel}>Cancel</button>
      <small> It also ends when you leave this page.</small></div>`}
    <${Failure} error=${error} />
    ${error?.through !== undefined && html`<p>Ledgers up to ${toLedger(error.through)} are written. Continue with <${Command} text=${`quorumlog metadata rebuild --after ${error.through}`} /></p>`}
    ${report && html`<${Report} report=${report} />`}
  </section>`;
}

function Witnesses({ witnesses, kept, isAdmin, reload }) {
  const [lost, setLost] = useState("");
  const [ledgers, setLedgers] = useState("");
  const [line, run, cancel] = useWork();
  const { missing } = witnesses;
  const { rows, pager } = usePaged(missing, 20);
  const ids = split(ledgers);
  const accept = () => {
    if (ids.some((id) => !/^\d+$/.test(id))) throw invalid("Ledgers must be ids: numbers separated by commas.");
    return run("/v1/witnesses/accept", { witnesses: missing.slice(0, 1000).map((one) => one.witness), lost: split(lost), ledgers: ids.map(Number) });
  };
  const isNeeded = missing.length > 0 || kept > 0;
  return html`<section aria-labelledby="witnesses">
    <h3 id="witnesses">Witnesses of changes</h3>
    <p>Processes keep witnesses of acknowledged changes, so that a database that goes back is noticed. The metadata service holds ${plural(witnesses.held.length, "witness", "witnesses")}.</p>
    <p class=${`notice ${missing.length ? "bad" : "good"}`} role="status">${missing.length
      ? `The database lacks ${plural(missing.length, "acknowledged change")}: it went back to an older state. Until this is settled, nothing is created, changed, recovered or deleted.`
      : "The database lacks no change that this metadata service knows of."}
      ${kept > 0 && ` Bookies keep ${plural(kept, "ledger")} whose later metadata the database lacks.`}</p>
    ${missing.length > 0 && html`<${Table} caption="Missing witnesses" rows=${rows} of=${(row) => row.witness} columns=${[
      { name: "Witness", show: (row) => html`<code>${row.witness}</code>` }, { name: "Reported by", show: (row) => row.holder },
    ]} /><${Pager} pager=${pager} />`}
    ${isNeeded && html`<ol>
      <li>Restore the newest database: the old primary, a later backup, the write-ahead log up to its end. When the database has all changes, this notice disappears by itself.</li>
      <li>Only if there is no newer database: stop the other gateways and autorecovery, start all bookies, and rebuild the metadata (below).</li>
      <li>Then accept the loss of the changes that are still missing. Each metadata service knows only the changes that were reported to it, so check this page again afterwards.</li>
    </ol>`}
    ${isAdmin && isNeeded && html`<${Act} label="Accept the loss" title="Accept the loss of these changes" isDanger act=${accept} done=${reload}
      typed=${missing.length ? `lose ${missing.length}` : "end ledgers"}>
      <p>${missing.length ? `${plural(missing.length, "acknowledged change")} ${missing.length === 1 ? "is" : "are"} lost for ever.` : "The database lacks no change, but bookies keep ledgers."}
        First all copies on bookies are read. The request is refused while a rebuild would write metadata, because a recovery by older metadata would cut off acknowledged entries.</p>
      <${Field} label="Bookies that never return" value=${lost} set=${setLost} placeholder="bookie-1"
        help="Every other registered bookie must answer. A ledger that is recovered meanwhile ends where the other bookies know its end." />
      <${Field} label="Ledgers to end by the database's metadata" value=${ledgers} set=${setLedgers} placeholder="7, 9"
        help="Only for ledgers whose copies show two histories (a conflict in the report of a rebuild). These ledgers may lack entries for ever." />
      <${Working} line=${line} />
      ${line && html`<button type="button" onClick=${cancel}>Stop</button>`}
    <//>`}
  </section>`;
}

function Database({ kept, isAdmin }) {
  const loaded = useLoad(async (signal) => {
    const [rebuild, witnesses] = await Promise.all([get("/v1/rebuild", {}, signal), get("/v1/witnesses", {}, signal)]);
    return { rebuild, witnesses };
  }, [], EVERY_MS);
  const { reload } = loaded;
  return html`<section aria-labelledby="database">
    <h2 id="database">Metadata</h2>
    <${Loaded} loaded=${loaded}>${({ rebuild, witnesses }) => html`<${Fragment}>
      <${Witnesses} witnesses=${witnesses} kept=${kept} isAdmin=${isAdmin} reload=${reload} />
      <${Rebuild} state=${rebuild} isAdmin=${isAdmin} reload=${reload} />
    <//>`}<//>
  </section>`;
}

export function Repair({ caller }) {
  const autorecovery = useGet("/v1/autorecovery", {}, EVERY_MS);
  const cluster = useGet("/v1/cluster", {}, EVERY_MS);
  const isAdmin = may(caller, "admin", "everything");
  const reload = () => [autorecovery, cluster].forEach((one) => one.reload());
  return html`<${Fragment}>
    <h1>Repair</h1>
    <${Autorecovery} loaded=${autorecovery} isAdmin=${isAdmin} reload=${reload} />
    <${Loaded} loaded=${cluster}>${(found) => html`<${Leaving} bookies=${found.bookies} isAdmin=${isAdmin} reload=${reload} />`}<//>
    <${Queue} />
    <${Database} kept=${cluster.data?.kept_count || 0} isAdmin=${isAdmin} />
    ${!isAdmin && html`<p class="quiet">The token of ${caller.who} allows reading this page. Changes need a token with admin on everything.</p>`}
  <//>`;
}
