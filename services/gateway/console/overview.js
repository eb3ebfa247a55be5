// The page Overview: the cluster's health, its problems with remedies, rates, bookies and processes.

import { may } from "./access.js";
import { get, quoted, useGet, useLoad } from "./api.js";
import { Audit, Drain, Maintenance, Pause, ReadOnly, Writable, nameOf, plural, some, usePaged } from "./cluster.js";
import { Ago, Dialog, Facts, Failure, Fragment, Loaded, Pager, Spark, State, Table, bytes, count, duration, html, to, useRef, useState } from "./ui.js";

const EVERY_MS = 5000;
const COPIES = 3;
const SERIES = [
  ["requests", "Requests per second"],
  ["errors", "Server errors per second"],
  ["appends", "HTTP appends per second"],
  ["append_ms", "Mean latency of HTTP appends", (value) => `${count(value)} ms`],
  ["reads", "Reads per second"],
  ["records", "Records appended to logs per second"],
  ["append_bytes", "Bytes appended to logs per second", (value) => `${bytes(value)}/s`],
];

const theBookies = (names) => `the bookie${names.length === 1 ? "" : "s"} ${some(names)}`;
const toRepair = (text) => html`<a href=${to("repair")}>${text}</a>`;
const toLedger = (id) => html`<a href=${to("ledgers", String(id))}>ledger ${id}</a>`;
const atMost = (list, show, most = 10) => html`${list.slice(0, most).map(show)}
  ${list.length > most && html`<li>and ${count(list.length - most)} more</li>`}`;

/** The problems that the API's responses show: [{key, tone, what, why, help}], the most severe first.
 * `what` ends the sentence at the top of the page. `help`: links, and buttons that only admins see. */
function problemsOf({ cluster, stale, processes, infos, rates, isAdmin, reload }) {
  const found = [];
  const add = (key, tone, what, why, help) => found.push({ key, tone, what, why, help });
  const named = (state) => cluster.bookies.filter((one) => one.state === state);
  const be = (list) => (list.length === 1 ? "is" : "are");
  const each = (list, button) => isAdmin && list.slice(0, 5).map((one) => button(nameOf(one.id)));
  const auditor = processes?.find((one) => one.auditor) || null;
  const status = auditor || processes?.find((one) => !one.error) || null;

  const missing = cluster.missing_witnesses;
  if (missing.length) {
    add("witnesses", "bad", `the database lacks ${plural(missing.length, "acknowledged change")}`,
      `Postgres went back to an older state: a backup was restored, or a lagging standby took over. Until this is settled, nothing is
      created, changed, recovered or deleted. Reads, and appends to open ledgers, continue. Reported by ${some(missing.map((one) => one.holder))}.`,
      html`Restore the newest database. Only if there is none: ${toRepair("rebuild the metadata, then accept the loss")}.`);
  }
  const lost = named("lost");
  if (lost.length) {
    const delay = status ? duration(status.lost_bookie_delay_s) : "the repair delay";
    add("lost", "bad", `${theBookies(lost.map((one) => nameOf(one.id)))} ${be(lost)} lost`, html`
      No heartbeat came in time: the process has ended, or the network is interrupted. Writers have chosen other bookies. When a bookie has
      been away for ${delay}, autorecovery copies its entries to other bookies.
      ${lost.slice(0, 5).map((one) => one.last_seen_at && html` ${nameOf(one.id)} was last seen <${Ago} time=${one.last_seen_at} />.`)}`,
      html`Start the bookie again. If it never returns, ${toRepair("decommission it")} after the repair.`);
  }
  const writable = named("writable").length;
  if (writable < COPIES) {
    add("few", "bad", `only ${plural(writable, "bookie")} ${writable === 1 ? "is" : "are"} writable`,
      `A ledger with default settings needs ${COPIES} writable bookies, so no such ledger can be created.`, "Start bookies, or make them writable.");
  }
  const gone = cluster.services.filter((one) => one.state === "gone");
  if (gone.length) {
    add("gone", "bad", `${some(gone.map((one) => `the ${one.kind} process at ${one.url}`))} ${be(gone)} gone`,
      html`The process sends no heartbeat.${gone.slice(0, 5).map((one) => html` ${one.url} was last seen <${Ago} time=${one.last_seen_at} />.`)}`,
      "Start the process again. A process that was removed on purpose disappears from this page after an hour.");
  }
  if (processes && !processes.length) {
    add("none", "bad", "no autorecovery process runs", "Lost copies are not replaced, and abandoned ledgers are not recovered.", "Start a process of autorecovery.");
  }
  const silent = (processes || []).filter((one) => one.error);
  if (silent.length) {
    add("silent", "bad", `${plural(silent.length, "autorecovery process", "autorecovery processes")} did not answer`,
      some(silent.map((one) => `${one.url}: ${one.error}`), 3), "Look at the log of the process, and restart it if it hangs.");
  }
  if (status?.blocked) {
    add("blocked", "bad", `${plural(status.blocked, "recovery is", "recoveries are")} blocked`, html`
      A recovery cannot find the end of these ledgers, so they stay open or in recovery. Autorecovery retries again and again.
      <ul>${atMost(status.blocked_recoveries, (one) => html`<li>${toLedger(one.ledger_id)}: ${one.why}</li>`)}</ul>`,
      "Bring back the bookie that is named. Only if it is gone for ever, declare it lost on the page of the ledger.");
  }
  if (status?.lost_entries?.length) {
    add("entries", "bad", `${plural(status.lost_entries.length, "range")} of entries ${be(status.lost_entries)} on no bookie`, html`
      Each bookie that could have these entries answers that it does not have them. Reads of these entries fail.
      <ul>${atMost(status.lost_entries, (one) => html`<li>${toLedger(one.ledger_id)}: entries ${one.first} to ${one.last}</li>`)}</ul>`,
      "Restore a copy of a disk that had these entries. Only if there is none, accept the loss on the page of the ledger.");
  }
  const entries = [...(infos || [])].filter(([, info]) => !info.error);
  const damaged = entries.filter(([, info]) => info.damages);
  if (damaged.length) {
    add("damage", "bad", `${theBookies(damaged.map(([name]) => name))} ${damaged.length === 1 ? "has" : "have"} damaged files`,
      "Bytes on the disk fail their checksum. Reads use other copies, and autorecovery queues repairs of the damaged entries.",
      html`${damaged.slice(0, 5).map(([name]) => html`<${Damage} name=${name} label=${`Damage of ${name}`} />`)} Replace the disk if files are damaged again.`);
  }
  const low = entries.filter(([, info]) => info.disk_low);
  if (low.length) {
    add("disk", "bad", `the ${low.length === 1 ? "disk" : "disks"} of ${some(low.map(([name]) => name))} ${low.length === 1 ? "is" : "are"} nearly full`,
      html`${low.slice(0, 5).map(([name, info]) => `${name} has ${bytes(info.free_bytes)} left and becomes read-only below ${bytes(info.read_only_below_bytes)}. `)}`,
      "Add bookies or disk space, shorten the retention of logs, or delete logs and ledgers that nobody needs.");
  }
  if (cluster.degraded_ledgers.length) {
    const list = cluster.degraded_ledgers;
    add("degraded", "bad", `${plural(list.length, "ledger")} ${be(list)} degraded`, html`
      A bookie of the ensemble accepts no appends, and there is no other bookie that could replace it, or the copies are in too few zones.
      Appends continue with fewer copies.<ul>${atMost(list, (id) => html`<li>${toLedger(id)}</li>`)}</ul>`,
      "Start the lost bookies, or add bookies.");
  }
  if (cluster.under_replicated_count) {
    const list = [...new Map(cluster.under_replicated.map((one) => [one.ledger_id, one])).values()];
    add("copies", "bad", `${plural(cluster.under_replicated_count, "ledger")} ${cluster.under_replicated_count === 1 ? "lacks" : "lack"} copies`, html`
      They wait in the queue of repairs.<ul>${list.slice(0, 5).map((one) => html`<li>${toLedger(one.ledger_id)} on ${one.bookie}</li>`)}</ul>`,
      html`${toRepair("Show the queue and the reasons")} ${isAdmin && html`<${Audit} done=${reload} />`}`);
  }
  if (status?.paused) {
    add("paused", "bad", "repairs are paused", "An operator has paused copying. Missing copies are found and queued, but not replaced.",
      isAdmin ? html`<${Pause} isPaused=${true} done=${reload} />` : "An administrator can resume them.");
  }
  if (cluster.kept_count) {
    add("kept", "bad", `${plural(cluster.kept_count, "ledger")} ${cluster.kept_count === 1 ? "is" : "are"} kept because the database lacks a change`, html`
      Bookies have copies of later metadata than the database, so they delete nothing of these ledgers.
      <ul>${cluster.kept_ledgers.slice(0, 10).map((one) => html`<li>${toLedger(one.ledger_id)} on ${some(one.holders)}</li>`)}</ul>`,
      toRepair("Rebuild the metadata"));
  }
  if (stale) {
    add("stale", "bad", "Redis does not answer", "This page shows the last known states of bookies and processes. Reads and appends continue.", "Start Redis again.");
  }
  const silentGateways = rates?.missing || [];
  if (silentGateways.length) {
    add("rates", "busy", `the ${silentGateways.length === 1 ? "gateway" : "gateways"} ${some(silentGateways)} did not report rates`, "The sums of the rates below lack these gateways.", "Look at the log of the gateway.");
  }
  // A gateway that has been idle since its start has compared no clocks, which is no problem.
  if (cluster.clock_doubt && !cluster.clock_doubt.includes("not heard yet")) {
    add("clock", "busy", "a clock is in doubt", `This gateway compares its clock with the database's: ${cluster.clock_doubt}.`,
      "If this stays, check the time service of the gateway's and the database's hosts.");
  }
  if (cluster.quarantined.length) {
    add("quarantine", "busy", `${theBookies(cluster.quarantined)} ${be(cluster.quarantined)} quarantined`,
      "Requests of this gateway to the bookie failed repeatedly. The gateway chooses it for new ensembles only if there are too few others. This ends by itself.",
      "Look at the log of the bookie.");
  }
  const readOnly = named("read-only");
  if (readOnly.length) {
    const full = readOnly.filter((one) => one.free_bytes < infos?.get(nameOf(one.id))?.read_only_below_bytes);
    add("read-only", "busy", `${theBookies(readOnly.map((one) => nameOf(one.id)))} ${be(readOnly)} read-only`,
      full.length ? `The disk of ${some(full.map((one) => nameOf(one.id)))} is full. It accepts entries again when there is room.`
        : "An operator has made it read-only. It keeps its entries, answers reads, and accepts no entries from writers.",
      each(readOnly.filter((one) => !full.includes(one)), (name) => html`<${Writable} name=${name} label=${`Make ${name} writable`} done=${reload} />`));
  }
  const draining = named("draining");
  if (draining.length) {
    add("draining", "busy", `${theBookies(draining.map((one) => nameOf(one.id)))} ${be(draining)} draining`,
      "Autorecovery moves its entries to other bookies. The bookie accepts no entries from writers.", toRepair("Show the progress of the drain"));
  }
  const limbo = entries.filter(([, info]) => info.limbo?.ledgers);
  if (limbo.length) {
    add("limbo", "busy", `${theBookies(limbo.map(([name]) => name))} ${be(limbo)} in limbo after a possible loss of data`,
      html`${limbo.slice(0, 5).map(([name, info]) => `${name} has ${plural(info.limbo.ledgers, "ledger")} left to check. `)}Until then the bookie reports no entry of these ledgers as absent.`,
      "This ends by itself.");
  }
  if (status?.misplaced) {
    add("zones", "busy", `${plural(status.misplaced, "ledger")} ${status.misplaced === 1 ? "is" : "are"} in too few zones`,
      "These ledgers were created or repaired while a zone was away. The last check of all copies found them.", "Drain one of their bookies to move them.");
  }
  return found;
}

function sentence(problems, cluster) {
  const bad = problems.filter((one) => one.tone === "bad");
  if (!bad.length) {
    const writable = cluster.bookies.filter((one) => one.state === "writable").length;
    const notes = problems.length ? ` Also: ${some(problems.map((one) => one.what), 3)}.` : "";
    return `All is well: ${plural(writable, "bookie")} ${writable === 1 ? "is" : "are"} writable, and no ledger lacks copies.${notes}`;
  }
  return `${plural(bad.length, "problem needs", "problems need")} attention: ${some(bad.map((one) => one.what), 3)}.`;
}

function Problems({ problems, cluster }) {
  const isBad = problems.some((one) => one.tone === "bad");
  return html`<${Fragment}>
    <p class=${`notice verdict ${isBad ? "bad" : "good"}`} role="status">${sentence(problems, cluster)}</p>
    ${problems.length > 0 && html`<section aria-label="Problems">${problems.map((one) => html`
      <article key=${one.key} class=${`notice problem ${one.tone}`} aria-label=${one.what}>
        <h3>${one.what[0].toUpperCase() + one.what.slice(1)}</h3>
        <div>${one.why}</div>
        <div class="help">${one.help}</div>
      </article>`)}</section>`}
  <//>`;
}

/** A button that shows a bookie's damage. */
function Damage({ name, label }) {
  const [isOpen, setOpen] = useState(false);
  return html`<${Fragment}>
    <button type="button" onClick=${() => setOpen(true)}>${label}</button>
    ${isOpen && html`<${Dialog} title=${`Damage of ${name}`} onClose=${() => setOpen(false)}><${DamageList} name=${name} /><//>`}
  <//>`;
}

function DamageList({ name }) {
  const loaded = useGet(`/v1/bookies/${quoted(name)}/damage`);
  return html`<${Loaded} loaded=${loaded}>${(found) => html`<${Fragment}>
    <ul>
      ${atMost(found.entries, (one) => html`<li>${toLedger(one.ledger_id)}: ${plural(one.ranges.length, "range")} of entries,
        in segment ${one.segment} at byte ${count(one.offset)}</li>`, 50)}
      ${atMost(found.stretches, (one) => html`<li>Segment ${one.segment}, bytes ${count(one.start)} to ${count(one.end)}: ${one.reason}</li>`, 50)}
    </ul>
    ${!found.entries.length && !found.stretches.length && html`<p>The damage was repaired.</p>`}
    ${found.is_cut && html`<p>There is more damage than this list shows.</p>`}
    <p class="quiet">Until they are repaired from other bookies, damaged entries count as unknown, never as absent.</p>
  <//>`}<//>`;
}

function Rates({ loaded }) {
  const [isEach, setEach] = useState(false);
  const sparks = (series) => html`<div class="cards rates">${SERIES.filter(([name]) => series[name]).map(([name, title, show]) => html`
    <div class="card" key=${name}><${Spark} name=${title} values=${series[name]} show=${show || count} /></div>`)}</div>`;
  return html`<section aria-labelledby="rates">
    <h2 id="rates">The last hour</h2>
    <${Loaded} loaded=${loaded}>${(rates) => html`<${Fragment}>
      ${sparks(rates.total)}
      <p><button type="button" aria-expanded=${String(isEach)} onClick=${() => setEach(!isEach)}>${isEach ? "Hide" : "Show"} each gateway</button></p>
      ${isEach && html`<${EachGateway} gateways=${rates.gateways} sparks=${sparks} />`}
    <//>`}<//>
  </section>`;
}

function EachGateway({ gateways, sparks }) {
  const { rows, pager } = usePaged(gateways, 5);
  return html`<${Fragment}>
    ${rows.map((one) => html`<section key=${one.id} aria-label=${one.url}><h3>${one.url}</h3>${sparks(one.series)}</section>`)}
    <${Pager} pager=${pager} />
  <//>`;
}

/** The bookies' own reports, with rates since the previous report: a Map by name. Lost bookies get no request. */
function useInfos(names, lost) {
  const before = useRef(new Map());
  const away = useRef(lost);
  away.current = lost;
  const ask = async (name, signal) => {
    try {
      const info = { ...(await get(`/v1/bookies/${quoted(name)}`, {}, signal)), at: performance.now() };
      const old = before.current.get(name);
      const grown = (counter) => (info.counters[counter] || 0) - (old?.counters[counter] || 0);
      // A bookie that started again counts from zero.
      if (old && grown("log_syncs") >= 0) {
        const spent = (info.at - old.at) / 1000;
        info.bytes_per_s = grown("log_bytes") / spent;
        info.records_per_s = grown("log_records") / spent;
        if (grown("log_syncs")) info.sync_us = grown("log_sync_us") / grown("log_syncs");
      }
      before.current.set(name, info);
      return [name, info];
    } catch (error) {
      if (signal.aborted) throw error;
      const old = before.current.get(name);
      // Without metadata, the gateway can't reach the bookie, which may be healthy.
      return [name, old && error.code === "metadata-unavailable" ? old : { error }];
    }
  };
  return useLoad(
    async (signal) => new Map(await Promise.all(names.filter((name) => !away.current.has(name)).map((name) => ask(name, signal)))),
    [names.join(",")], names.length > 10 ? 3 * EVERY_MS : EVERY_MS,
  );
}

function sync(info) {
  const all = info.counters.log_syncs ? info.counters.log_sync_us / info.counters.log_syncs : null;
  const [us, why] = info.sync_us ? [info.sync_us, "mean since the last refresh"] : [all, "mean since the bookie started"];
  return us ? html`<span title=${why}>${(us / 1000).toFixed(us < 10_000 ? 2 : 0)} ms</span>` : "—";
}

/** The bookies of one page, by zone. */
function Bookies({ bookies, pager, infos, isAdmin, reload }) {
  const zones = [...new Set(bookies.map((one) => one.zone))];
  const of = (row) => infos?.get(nameOf(row.id));
  const known = (show) => (row) => (of(row) && !of(row).error ? show(of(row), nameOf(row.id)) : "—");
  const columns = [
    { name: "Bookie", show: (row) => html`<span class="whole">${row.id}</span><br /><small class="whole">${row.url}</small>${of(row)?.error && html`<br /><small>${of(row).error.message}</small>`}` },
    { name: "State", show: (row) => html`<${State} of=${row.state} />${row.last_seen_at && row.state === "lost" && html`<br /><small>seen <${Ago} time=${row.last_seen_at} /></small>`}` },
    { name: "Free", isNumber: true, show: (row) => (row.state === "lost" ? "—" : html`${bytes(row.free_bytes)}${of(row)?.disk_low ? html` <${State} of="low" tone="bad" />` : ""}`) },
    { name: "Written", isNumber: true, show: known((info) => (info.bytes_per_s === undefined ? "…" : html`${bytes(info.bytes_per_s)}/s<br /><small>${count(Math.round(info.records_per_s))} records/s</small>`)) },
    { name: "Sync", isNumber: true, show: known(sync) },
    { name: "Damage", show: known((info, name) => (info.damages ? html`<${Damage} name=${name} label=${count(info.damages)} />` : "none")) },
    { name: "Limbo", show: known((info) => (info.limbo?.ledgers ? plural(info.limbo.ledgers, "ledger") : "none")) },
    { name: "Scrub", show: known((info) => (info.scrub.paused ? html`<${State} of="paused" />` : `${plural(info.scrub.passes, "pass", "passes")}, ${bytes(info.scrub.checked_bytes)}`)) },
  ];
  if (isAdmin) {
    columns.push({
      name: "Change",
      show: (row) => row.state !== "lost" && html`<div class="acts">
        ${row.state !== "writable" && html`<${Writable} name=${nameOf(row.id)} done=${reload} />`}
        ${row.state === "writable" && html`<${ReadOnly} name=${nameOf(row.id)} done=${reload} />`}
        ${row.state !== "draining" && html`<${Drain} name=${nameOf(row.id)} done=${reload} />`}
        ${of(row)?.scrub && html`<${Maintenance} name=${nameOf(row.id)} isPaused=${of(row).scrub.paused} done=${reload} />`}
      </div>`,
    });
  }
  return html`<section aria-labelledby="bookies">
    <h2 id="bookies">Bookies</h2>
    ${zones.map((zone) => {
      const rows = bookies.filter((one) => one.zone === zone);
      const title = zone ? `Zone ${zone}` : rows.every((one) => one.state === "lost") ? "Zone not known" : "Without a zone";
      return html`<${Fragment} key=${zone}>
        <h3>${title} <small>${plural(rows.length, "bookie")}</small></h3>
        <${Table} caption=${title} columns=${columns} rows=${rows} of=${(row) => nameOf(row.id)} />
      <//>`;
    })}
    ${!bookies.length && html`<p class="quiet">No bookie is registered.</p>`}
    <${Pager} pager=${pager} />
  </section>`;
}

function Processes({ services, processes, stale, error }) {
  const { rows, pager } = usePaged(services);
  const auditor = processes?.find((one) => one.auditor)?.id;
  const isAway = error && error.status !== 0;
  return html`<section aria-labelledby="processes">
    <h2 id="processes">Gateways, metadata and autorecovery</h2>
    <${Facts} of=${[
      ["Postgres", html`<${State} of=${isAway ? "unavailable" : "ready"} /> ${isAway ? "The metadata service or its database does not answer." : "The metadata service reads it."}`],
      ["Redis", html`<${State} of=${stale ? "unavailable" : "ready"} /> ${stale ? "The states are the last known ones." : "It records heartbeats."}`],
    ]} />
    <${Table} caption="Processes" rows=${rows} of=${(row) => row.kind + row.id + row.url} columns=${[
      { name: "Kind", show: (row) => html`<span class="whole">${row.kind}</span>` },
      { name: "Address", show: (row) => html`<span class="whole">${row.url}</span>` },
      { name: "State", show: (row) => html`<${State} of=${row.state} />${row.state === "gone" && html` <small>since <${Ago} time=${row.last_seen_at} /></small>`}
        ${row.id === auditor && html` <small>audits</small>`}` },
      { name: "Process", show: (row) => html`<small class="whole">${row.id}</small>` },
    ]} />
    <${Pager} pager=${pager} />
  </section>`;
}

/** While the metadata service is unavailable, the page shows the last loaded data. */
function Away({ loaded }) {
  const { error, at, reload } = loaded;
  if (!error) return null;
  return html`<${Fragment}>
    <p class="notice bad verdict" role="status">${error.status ? "The metadata service or its database cannot be reached." : "This gateway cannot be reached."}
      ${at > 0 && ` This page shows what was known at ${new Date(at).toLocaleTimeString()}.`}</p>
    <${Failure} error=${error} retry=${reload} />
    ${error.code === "metadata-unavailable" && html`<p>Reads, and appends to open ledgers, continue. Nothing can be created, recovered or closed. Start the
      metadata service again; if it runs, look at its log, and start Postgres.</p>`}
  <//>`;
}

export function Overview({ caller }) {
  const cluster = useGet("/v1/cluster", {}, EVERY_MS);
  const liveness = useGet("/v1/bookies", {}, EVERY_MS);
  const autorecovery = useGet("/v1/autorecovery", {}, EVERY_MS);
  const rates = useGet("/v1/rates", {}, 3 * EVERY_MS);
  const zones = useRef(new Map());
  const bookies = (cluster.data?.bookies || []).map((one) => {
    // A lost bookie reports no zone, so the page keeps the bookie's last known zone.
    if (one.zone) zones.current.set(one.id, one.zone);
    return { ...one, zone: one.zone || zones.current.get(one.id) || "" };
  });
  bookies.sort((a, b) => a.zone.localeCompare(b.zone) || a.id.localeCompare(b.id, "en", { numeric: true }));
  const { rows, pager } = usePaged(bookies);
  const lost = new Set(bookies.filter((one) => one.state === "lost").map((one) => nameOf(one.id)));
  const infos = useInfos(rows.map((one) => nameOf(one.id)), lost);
  const isAdmin = may(caller, "admin", "everything");
  const reload = () => [cluster, liveness, autorecovery, infos].forEach((one) => one.reload());
  const stale = Boolean(liveness.data?.stale);
  const processes = autorecovery.data?.autorecovery;
  const problems = cluster.data && problemsOf({
    cluster: cluster.data, stale, processes, infos: infos.data, rates: rates.data, isAdmin, reload,
  });
  return html`<${Fragment}>
    <h1>Overview</h1>
    <${Away} loaded=${cluster} />
    ${!cluster.data && !cluster.error && html`<p class="quiet" role="status">Loading …</p>`}
    ${cluster.data && html`<${Fragment}>
      ${!cluster.error && html`<${Problems} problems=${problems} cluster=${cluster.data} />`}
      <${Rates} loaded=${rates} />
      <${Bookies} bookies=${rows} pager=${pager} infos=${infos.data} isAdmin=${isAdmin} reload=${reload} />
      <${Processes} services=${cluster.data.services} processes=${processes} stale=${stale} error=${cluster.error} />
      <p class="quiet">Cluster <code>${cluster.data.cluster_id}</code></p>
    <//>`}
  <//>`;
}
