// One log: its state, settings, ledgers, consumers and queues, and the actions on the log.

import { may } from "./access.js";
import { Problem, call, get, quoted, useGet } from "./api.js";
import { Consumers, Rate, useRates } from "./consumers.js";
import { LIMITS, LimitFields, isName, limitTexts, limited, limitsOf, refuse, useForm } from "./logform.js";
import { Queues } from "./queues.js";
import { Append, Browse } from "./records.js";
import { Tail } from "./tail.js";
import { Size, Timeline } from "./timeline.js";
import { Act, Ago, Facts, Failure, Field, Fragment, Spark, State, count, html, to, useRef, useState } from "./ui.js";

const versioned = (log) => ({ "If-Match": `"${log.version}"` });

export function Log({ name, rest, caller, query }) {
  if (!isName(name)) {
    return html`<h1>Log</h1><p>No log can have the name <code><bdi>${name}</bdi></code>. <a href="#/logs">All logs</a></p>`;
  }
  return html`<${Shown} ...${{ name, caller, query, tab: rest[0] || "" }} />`;
}

function Shown({ name, caller, query, tab }) {
  const loaded = useGet(`/v1/logs/${quoted(name)}`, {}, 5000);
  const [notice, setNotice] = useState(null);
  const rates = useRates(loaded.data ? [loaded.data] : [], loaded.at).get(name) || [];
  const mayRead = may(caller, "read", "logs", name);
  const log = loaded.data;
  const tabs = [["", "Overview"], ...(mayRead ? [["records", "Records"], ["tail", "Live tail"]] : []), ["consumers", "Consumers"], ["queues", "Queues"]];
  const known = tabs.some(([one]) => one === tab);
  const shared = { name, caller, query, log };
  return html`<${Fragment}>
    <h1>${name} ${log && html`<${State} of=${log.state} tone=${log.state === "OPEN" ? "good" : "busy"} />`}</h1>
    <nav class="tabs" aria-label="Parts of the log">${tabs.map(([one, title]) => html`
      <a href=${one ? to("logs", name, one) : to("logs", name)} aria-current=${one === tab ? "page" : undefined}>${title}</a>`)}</nav>
    <${Failure} error=${loaded.error} retry=${loaded.reload} />
    ${loaded.error?.code === "no-such-log" && html`<p><a href="#/logs">All logs</a></p>`}
    ${notice && html`<div class="notice good" role="status"><p>${notice}</p></div>`}
    ${!known && html`<p>${tab === "records" || tab === "tail" ? `The token of ${caller.who} does not allow reading the records of this log.` : "The log has no such page."}</p>`}
    ${!log && !loaded.error && html`<p class="quiet" role="status">Loading …</p>`}
    ${log && tab === "" && html`<${Overview} ...${{ ...shared, rates, mayRead, reload: loaded.reload, setNotice }} />`}
    ${log && known && tab === "records" && html`<${Browse} key=${`${log.created_at} ${query.get("from")}`} ...${shared} reload=${loaded.reload} />`}
    ${log && known && tab === "tail" && html`<${Tail} key=${log.created_at} ...${shared} reload=${loaded.reload} />`}
    ${tab === "consumers" && html`<${Consumers} name=${name} caller=${caller} />`}
    ${log && tab === "queues" && html`<${Queues} ...${shared} />`}
  <//>`;
}

function Overview({ name, caller, log, rates, mayRead, reload, setNotice }) {
  const mayManage = may(caller, "manage", "logs", name);
  const mayAppend = may(caller, "append", "logs", name);
  const { settings } = log;
  const done = (text) => () => {
    setNotice(text);
    return reload();
  };
  const isOpen = log.state === "OPEN";
  return html`<${Fragment}>
    <${Facts} of=${[
      ["Records", count(log.next_offset - log.first_offset)],
      ["Offsets", log.next_offset === log.first_offset ? `none; the next is ${count(log.next_offset)}` : `${count(log.first_offset)} to ${count(log.next_offset - 1)}`],
      ["Bytes in closed ledgers", mayRead ? html`<${Size} key=${log.created_at} log=${log} />` : undefined],
      ["Records/s", html`<${Rate} of=${rates} />`],
      ["Owner", log.owner ? log.owner.url : "none: the next append or read makes a gateway the owner"],
      ["Created", html`<${Ago} time=${log.created_at} />`],
      ["Archived", log.archived_through === null ? undefined : `below offset ${count(log.archived_through)}`],
      ["Version", count(log.version)],
    ]} />
    ${rates.length > 1 && html`<div class="rate"><${Spark} name="Records/s since the page was opened" values=${rates} show=${(value) => count(Math.round(value))} /></div>`}
    <div class="row">
      ${mayAppend && isOpen && html`<${Append} name=${name} log=${log} done=${(text) => done(text)()} />`}
      ${mayManage && isOpen && html`<${Act} label="Roll" title="Begin a new ledger" act=${() => call("POST", `/v1/logs/${quoted(name)}/roll`)} done=${done("The log continues in a new ledger.")}>
        <p>The log closes its open ledger and continues in a new one. Appends continue. Retention, truncation and archiving can then drop or archive the closed ledger.</p><//>`}
    </div>
    <h2>Settings</h2>
    <${Facts} of=${[
      ...LIMITS.map((one) => [one.title, limited(one, settings[one.name])]),
      ["Deletion protection", log.deletion_protection ? "on" : "off"],
      ["Copies", `${settings.write_quorum} on ${settings.ensemble_size} bookies; ${settings.ack_quorum} before an append is acknowledged`],
      ["Compression", settings.batch_compression],
      ["Digest", settings.digest],
      ...Object.entries(settings.metadata).map(([key, value]) => [key, html`<bdi>${value}</bdi>`]),
    ]} />
    ${mayManage && html`<${Change} ...${{ name, caller, log, reload }} done=${done("The settings are changed.")} />`}
    <${Timeline} key=${log.created_at} log=${log} mayRead=${mayRead} />
    ${mayManage && html`<${End} ...${{ name, log, mayRead, done }} />`}
  <//>`;
}

/** Describes the differences between a log's current and earlier state, in sentences. */
function differences(before, now) {
  const found = LIMITS.filter((one) => before.settings[one.name] !== now.settings[one.name])
    .map((one) => `“${one.title}” is ${limited(one, now.settings[one.name])} now.`);
  if (before.deletion_protection !== now.deletion_protection) found.push(`The deletion protection is ${now.deletion_protection ? "on" : "off"} now.`);
  if (!found.length) found.push("No setting has changed, but the log has another ledger, owner or writer.");
  return found;
}

/** The sender of the last change to a log, if the caller may read the audit log. */
async function changer(caller, name, since) {
  if (!may(caller, "admin", "everything")) return "";
  const page = await get("/v1/audit", { target: `logs/${name}`, since, limit: 1000 }).catch(() => null);
  const last = page?.audit[page.audit.length - 1];
  return last ? ` ${last.who} sent the last change (${last.operation}) at ${last.at}.` : "";
}

function Change({ name, caller, log, reload, done }) {
  const kept = useRef(null);
  const act = async () => {
    const { base: from, ...form } = kept.current;
    const was = { ...from.shown.settings, deletion_protection: from.shown.deletion_protection };
    const json = Object.fromEntries(Object.entries(limitsOf(form)).filter(([member, value]) => value !== was[member]));
    if (!Object.keys(json).length) refuse("No setting in the form differs from the log's.", "There is nothing to change");
    try {
      await call("PATCH", `/v1/logs/${quoted(name)}`, { json, headers: versioned(from.now), params: { created: log.created_at } });
    } catch (error) {
      if (error.code !== "version-conflict") throw error;
      const now = await get(`/v1/logs/${quoted(name)}`);
      const told = [...differences(from.now, now), await changer(caller, name, from.openedAt)].join(" ");
      from.now = now;
      reload();
      throw new Problem(0, { title: "The log was changed while this form was open", detail: `${told} Nothing in this form was saved. Check the form, and save again to apply it to the log as it is now.` });
    }
  };
  return html`<${Act} label="Change settings" act=${act} done=${done}>
    <${ChangeFields} kept=${kept} log=${log} />
  <//>`;
}

/** `base` in the form's state: the log that the form shows, the current log, and when the form was opened. */
function ChangeFields({ kept, log }) {
  const [form, change] = useForm(kept, () => ({
    ...limitTexts(log.settings, log.deletion_protection),
    base: { shown: log, now: log, openedAt: new Date(Date.now() - 60_000).toISOString() },
  }));
  return html`<${LimitFields} form=${form} change=${change} />`;
}

/** Actions that can't be undone: truncate, close, delete. */
function End({ name, log, mayRead, done }) {
  const path = `/v1/logs/${quoted(name)}`;
  const params = { created: log.created_at };
  const kept = useRef(null);
  const truncate = () => {
    const before = kept.current.offset.trim();
    if (!/^\d{1,15}$/.test(before)) refuse("Give the offset before which records are dropped.");
    return call("POST", `${path}/truncate`, { params, json: { before: Number(before) } });
  };
  return html`<section aria-label="What can't be undone">
    <h2>What can't be undone</h2>
    ${log.deletion_protection && html`<div class="notice"><p>The deletion protection is on: the log can't be truncated or deleted until “Change settings” switches it off.</p></div>`}
    <div class="row">
      <${Act} label="Truncate" title="Drop old records" typed=${name} isDanger disabled=${log.deletion_protection} act=${truncate}
        done=${(now) => done(`The log begins at offset ${count(now.first_offset)} now.`)()}>
        <p>Drops whole ledgers whose records are all below an offset. These records can't be restored.</p>
        <${TruncateFields} ...${{ name, log, mayRead }} kept=${kept} />
      <//>
      ${log.state === "OPEN" && html`<${Act} label="Close for good" title="Close the log for good" typed=${name} isDanger
        act=${() => call("POST", `${path}/close`, { params })} done=${done("The log is closed for good.")}>
        <p>The log accepts no more records, and can't be opened again. Its records stay readable; readers of the tail learn that the log has ended.</p>
      <//>`}
      <${Act} label="Delete" title="Delete the log" typed=${name} isDanger disabled=${log.deletion_protection}
        act=${() => call("DELETE", path, { params })} done=${() => { location.hash = "#/logs"; }}>
        <p>Deletes the log with all ${count(log.next_offset - log.first_offset)} records, its ${count(log.ledgers.length)} ledgers, its consumers and its queues. They can't be restored. The name is then free for a new log.</p>
      <//>
    </div>
  </section>`;
}

function TruncateFields({ name, log, mayRead, kept }) {
  const [form, change] = useForm(kept, { offset: "", time: "", error: null });
  const { offset, time } = form;
  const find = () => get(`/v1/logs/${quoted(name)}/records`, { from: new Date(time).toISOString(), limit: 1, created: log.created_at }).then(
    (page) => change({ offset: String(page.records.length ? page.records[0].offset : page.next), error: null }),
    (error) => change({ error }),
  );
  const at = /^\d{1,15}$/.test(offset.trim()) ? Number(offset) : null;
  const dropped = log.ledgers.filter((one) => at !== null && one.last_offset !== null && one.last_offset < at);
  const begin = dropped.length ? dropped[dropped.length - 1].last_offset + 1 : log.first_offset;
  return html`<${Fragment}>
    <${Field} label="Drop records below offset" inputMode="numeric" value=${offset} set=${(text) => change({ offset: text })} help=${`The log has the offsets ${count(log.first_offset)} to ${count(log.next_offset - 1)}.`} />
    ${mayRead && html`<div class="row"><${Field} label="Or find the offset of a time (your zone)" type="datetime-local" step="1" value=${time} set=${(text) => change({ time: text })} />
      <button type="button" disabled=${!time} onClick=${find}>Find the offset</button></div>`}
    <${Failure} error=${form.error} />
    ${at !== null && html`<p role="status">${dropped.length
      ? `This drops ${count(dropped.length)} of ${count(log.ledgers.length)} ledgers, at most ${count(Math.max(begin - log.first_offset, 0))} records.`
      : "No closed ledger ends below this offset. Roll the log first if the records are in its open ledger."}</p>`}
  <//>`;
}
