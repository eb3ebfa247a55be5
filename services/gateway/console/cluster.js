// Code that the pages Overview and Repair share: names, pages of complete lists, and actions on bookies.

import { call, quoted } from "./api.js";
import { Act, count, html, useEffect, useRef, useState } from "./ui.js";

/** A bookie's name, without its incarnation. */
export const nameOf = (member) => member.split("@")[0];

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** The first names of a list, and the number of further names. */
export function some(names, most = 5) {
  const more = names.length - most;
  return names.slice(0, most).join(", ") + (more > 0 ? ` and ${count(more)} more` : "");
}

/** Pages of a completely loaded list: the rows to show, and `pager` for the component Pager. */
export function usePaged(rows, size = 50) {
  const [page, setPage] = useState(1);
  const last = Math.max(1, Math.ceil(rows.length / size));
  const now = Math.min(page, last);
  return {
    rows: rows.slice((now - 1) * size, now * size),
    pager: { page: now, hasNext: now < last, toNext: () => setPage(now + 1), toPrevious: () => setPage(now - 1) },
  };
}

/** The first value that each key had on this page, to show the progress since. Removes keys that are gone. */
export function useFirst(pairs) {
  const first = useRef(new Map());
  useEffect(() => {
    first.current = new Map(pairs.map(([key, value]) => [key, Math.max(value, first.current.get(key) ?? value)]));
  });
  return (key, value) => Math.max(value, first.current.get(key) ?? value);
}

/** Sends a state to a bookie. */
export const setState = (name, state) => () =>
  call("PUT", `/v1/bookies/${quoted(name)}/state`, { json: { state } });

export function Drain({ name, done }) {
  return html`<${Act} label="Drain" title=${`Drain ${name}`} act=${setState(name, "draining")} done=${done}>
    <p>${name} accepts no more entries from writers, and autorecovery moves its entries to other bookies. It still answers reads.
      No ledger is fenced. The state survives restarts.</p>
    <p>The page Repair shows the progress. When the drain is done, stop the bookie and decommission it there.
      The other bookies need enough free space.</p>
  <//>`;
}

export function ReadOnly({ name, done }) {
  return html`<${Act} label="Make read-only" title=${`Make ${name} read-only`} act=${setState(name, "read-only")} done=${done}>
    <p>${name} accepts no more entries from writers and keeps the entries that it has. Writers use other bookies.
      Use this for the maintenance of its machine. The state survives restarts.</p>
  <//>`;
}

export function Writable({ name, label = "Make writable", done }) {
  return html`<${Act} label=${label} title=${`Make ${name} writable`} act=${setState(name, "writable")} done=${done}>
    <p>${name} accepts entries from writers again. This ends a drain; entries that were already moved stay where they are.</p>
  <//>`;
}

export function Maintenance({ name, isPaused, done }) {
  return html`<${Act} label=${isPaused ? "Resume maintenance" : "Pause maintenance"}
    title=${`${isPaused ? "Resume" : "Pause"} the maintenance of ${name}`} done=${done}
    act=${() => call("PUT", `/v1/bookies/${quoted(name)}/maintenance`, { json: { paused: !isPaused } })}>
    <p>${isPaused
      ? `${name} resumes checking its files (scrub) and compacting them.`
      : `${name} stops checking its files (scrub) and compacting them, which reduces the load on its disk. A restart of the bookie resumes both.`}</p>
  <//>`;
}

/** Pauses the copies of autorecovery, or resumes them. */
export function Pause({ isPaused, done }) {
  return html`<${Act} label=${isPaused ? "Resume repairs" : "Pause repairs"} done=${done}
    act=${() => call("PATCH", "/v1/autorecovery", { json: { paused: !isPaused } })}>
    <p>${isPaused
      ? "Autorecovery copies entries again, in all of its processes."
      : "Autorecovery stops copying, in all of its processes, until repairs are resumed. It still finds missing copies and queues them."}</p>
  <//>`;
}

export function Audit({ done }) {
  return html`<${Act} label="Start an audit" act=${() => call("POST", "/v1/audits")} done=${done}>
    <p>Autorecovery looks for lost bookies, drains and abandoned ledgers in all ledger metadata now, and retries repairs that wait
      after a failure.</p>
  <//>`;
}
