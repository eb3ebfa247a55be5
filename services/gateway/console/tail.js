// The live tail of a log: long polls, which any reader may pause.

import { get } from "./api.js";
import { VIEWS } from "./payload.js";
import { Filter, Records, afterGap, matcher, recordsPath } from "./records.js";
import { Choice, Failure, State, count, html, useEffect, useRef, useState } from "./ui.js";

const SHOWN = 200;
const WAIT_MS = 20_000;
/** Minimum pause between two requests, so that a busy log does not keep the browser busy. */
const PACE_MS = 250;
const PAGE = 1000;
const RETRY_MS = [1000, 2000, 4000, 8000, 15_000];

const HINTS = {
  reconnecting: "The console tries again by itself, and continues at the same record.",
  ended: "The log is closed and ends here.",
  paused: "“Continue” shows the records that were appended meanwhile, from the last one that was shown.",
};

const slept = (ms, signal) => new Promise((done) => {
  const timer = setTimeout(done, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); done(); });
});

const isPassing = (error) => error.status === 0 || error.status === 429 || error.status >= 500 || error.retryable;

/** Follow a log from `at` until the signal. Calls `seen(page)`, and `told(state, error)` when the state changes. */
async function follow(name, place, signal, seen, told) {
  let failures = 0;
  for (;;) {
    const began = Date.now();
    try {
      const params = { from: place.at, created: place.created, limit: PAGE, encoding: "base64", max_bytes: 4 << 20 };
      // The first read resolves the offset, and does not wait for new records.
      const page = await get(recordsPath(name), { ...params, wait_ms: typeof place.at === "number" ? WAIT_MS : null }, signal);
      failures = 0;
      place.at = page.next;
      seen(page);
      told(page.closed ? "ended" : "live", null);
      if (page.closed) return;
      await slept(Math.max(PACE_MS - (Date.now() - began), 0), signal);
    } catch (error) {
      if (signal.aborted) return;
      const gap = error.body && afterGap(error);
      if (gap !== null && gap !== undefined && gap > place.at) {
        place.at = gap;
        told("live", error);
      } else if (!isPassing(error)) {
        told("stopped", error);
        return;
      } else {
        told("reconnecting", error);
        await slept(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)], signal);
        failures += 1;
      }
    }
    if (signal.aborted) return;
  }
}

export function Tail({ name, log }) {
  const [isPaused, setPaused] = useState(false);
  const [jumps, setJumps] = useState(0);
  const [view, setView] = useState("auto");
  const [filter, setFilter] = useState({ where: "value", text: "" });
  const [link, setLink] = useState({ state: "connecting", error: null });
  const [tail, setTail] = useState({ records: [], dropped: 0, unmatched: 0, received: 0, isBehind: false });
  const place = useRef({ at: "-10", created: log.created_at });
  const chosen = useRef(null);
  chosen.current = matcher(filter.where, filter.text);
  useEffect(() => {
    if (isPaused) return undefined;
    const abort = new AbortController();
    const seen = (page) => setTail((old) => {
      const matching = page.records.filter(chosen.current);
      const records = [...old.records, ...matching];
      return {
        records: records.slice(-SHOWN),
        dropped: old.dropped + Math.max(records.length - SHOWN, 0),
        unmatched: old.unmatched + page.records.length - matching.length,
        received: old.received + page.records.length,
        isBehind: page.records.length === PAGE,
      };
    });
    setLink({ state: "connecting", error: null });
    follow(name, place.current, abort.signal, seen, (state, error) => setLink({ state, error }));
    return () => abort.abort();
  }, [name, isPaused, jumps]);
  const jump = () => {
    place.current = { ...place.current, at: "-10" };
    setTail((old) => ({ ...old, records: [], dropped: old.dropped + old.records.length, isBehind: false }));
    setPaused(false);
    setJumps(jumps + 1);
  };
  const state = isPaused ? "paused" : link.state;
  return html`<section aria-label="Live tail">
    <div class="row">
      <button type="button" class="main" onClick=${() => setPaused(!isPaused)} disabled=${!isPaused && (state === "ended" || state === "stopped")}>${isPaused ? "Continue" : "Pause"}</button>
      <button type="button" onClick=${jump}>Jump to the end</button>
      <${Filter} of=${filter} set=${setFilter} />
      <${Choice} label="Show values as" value=${view} set=${setView} options=${VIEWS} />
    </div>
    <p><${State} of=${state} tone=${{ live: "good", stopped: "bad" }[state] || "busy"} />
      <span class="quiet"> ${count(tail.received)} records received${tail.unmatched ? `, ${count(tail.unmatched)} did not match the filter` : ""}${tail.dropped ? `, ${count(tail.dropped)} dropped from view` : ""}.</span></p>
    <p class="quiet" role="status">${HINTS[state] || (tail.isBehind && "More records arrive than are shown: the tail is behind the log’s end.")}</p>
    <${Failure} error=${link.error} />
    <${Records} records=${[...tail.records].reverse()} view=${view} name=${name} label="Newest records first" />
    ${!tail.records.length && html`<p class="quiet">No record yet. New records appear here.</p>`}
  </section>`;
}
