// Consumers of one log: their offsets and workers, and how to reset or delete a consumer.

import { may } from "./access.js";
import { call, quoted, usePages } from "./api.js";
import { PlaceFields, isName, placeOf, useForm } from "./logform.js";
import { Act, Ago, Field, Fragment, Loaded, Pager, State, Table, bytes, count, duration, html, useMemo, useRef, useState } from "./ui.js";

/** Number of loads whose rates are kept. */
const RATES = 120;

const pathOf = (one) => `/v1/logs/${quoted(one.log)}/consumers/${quoted(one.consumer)}`;

/** The rates of logs in records per second between loads, oldest first, by name. `at`: when the logs were loaded. */
export function useRates(logs, at) {
  const before = useRef(new Map());
  return useMemo(() => {
    const now = new Map();
    for (const { name, next_offset: next, created_at: created } of logs) {
      const old = before.current.get(name);
      const isSame = old && old.created === created && at > old.at;
      const rates = isSame ? [...old.rates, ((next - old.next) * 1000) / (at - old.at)].slice(-RATES) : [];
      now.set(name, { next, at, created, rates });
    }
    before.current = now;
    return new Map([...now].map(([name, { rates }]) => [name, rates]));
  }, [at]);
}

/** The last rate of a log. */
export function Rate({ of: rates = [] }) {
  return rates.length ? count(Math.round(rates[rates.length - 1] * 10) / 10) : html`<span title="The rate appears after the next refresh.">—</span>`;
}

/** A consumer's lag. */
export function Lag({ of: { lag, state } }) {
  if (state !== "ok") return html`<${State} of=${state} tone="bad" />`;
  if (!lag) return html`<span title="The log's end can't be read now.">unknown</span>`;
  const more = [lag.bytes !== null && bytes(lag.bytes), lag.ms !== null && lag.records > 0 && `oldest ${duration(lag.ms / 1000)}`].filter(Boolean);
  return html`<span title=${`${lag.records} records`}>${count(lag.records)} records${more.length ? ` (${more.join(", ")})` : ""}</span>`;
}

/** The current or last holder of a consumer's lease. */
export function Lease({ of: lease }) {
  if (!lease) return "none";
  return html`<span title=${`Fencing token ${lease.fencing_token}`}><bdi>${lease.holder}</bdi>
    <small> for ${duration(lease.lease_ms / 1000)} after each renewal or commit</small></span>`;
}

export function DeleteConsumer({ of: row, done }) {
  return html`<${Act} label="Delete" title=${`Delete the consumer ${row.consumer}`} typed=${row.consumer} isDanger done=${done} act=${() => call("DELETE", pathOf(row))}>
    <p>The cluster forgets how far the consumer has read. A new consumer of this name begins where its program says. While a worker holds the lease, the gateway refuses the deletion.</p>
  <//>`;
}

function Reset({ of: row, done }) {
  const kept = useRef(null);
  const act = () => {
    const place = placeOf(kept.current);
    return call("POST", `${pathOf(row)}/reset`, { json: { to: /^-?\d+$/.test(place) ? Number(place) : place } });
  };
  return html`<${Act} label="Reset" title=${`Reset the consumer ${row.consumer}`} act=${act} done=${done}>
    <p>The consumer continues at another record. Its worker loses the lease and must acquire it again. The committed offset is now ${count(row.offset)}.</p>
    <${ResetFields} kept=${kept} />
  <//>`;
}

function ResetFields({ kept }) {
  const [form, change] = useForm(kept, { place: "earliest", offset: "", time: "" });
  return html`<${PlaceFields} label="Continue at" ...${{ form, change }} options=${[["earliest", "The first record"], ["latest", "The end: skip all records"]]} />`;
}

/** A page of the consumers of a log, with lags. */
export function Consumers({ name, caller }) {
  const [prefix, setPrefix] = useState("");
  const asked = isName(prefix) ? prefix : "";
  const consumers = usePages(`/v1/logs/${quoted(name)}/consumers`, "consumers", { limit: 50, prefix: asked }, 5000);
  const mayManage = may(caller, "manage", "logs", name);
  return html`<section aria-label="Consumers">
    <h2>Consumers</h2>
    <div class="row"><${Field} label="Consumer's name begins with" type="search" value=${prefix} set=${setPrefix} /></div>
    ${prefix && !asked && html`<p class="quiet" role="status">No consumer's name begins like this, so all consumers are shown.</p>`}
    <${Loaded} loaded=${consumers}>${() => html`<${Fragment}>
      <${Table} caption="Consumers of the log" rows=${consumers.rows} of=${(row) => row.consumer}
        empty="No consumer. A program creates one by its first commit or lease; see the guide to consumers."
        columns=${[
          { name: "Consumer", show: (row) => row.consumer },
          { name: "Committed offset", isNumber: true, show: (row) => count(row.offset) },
          { name: "Lag", isNumber: true, show: (row) => html`<${Lag} of=${row} />` },
          { name: "Last commit", show: (row) => html`<${Ago} time=${row.committed_at} />` },
          { name: "Lease", show: (row) => html`<${Lease} of=${row.lease} />` },
          ...(mayManage ? [{ name: "Actions", show: (row) => html`<span class="row"><${Reset} of=${row} done=${consumers.reload} />
            <${DeleteConsumer} of=${row} done=${consumers.reload} /></span>` }] : []),
        ]} />
      <${Pager} pager=${consumers.pager} />
    <//>`}<//>
  </section>`;
}
