// The page Tokens: the permissions of the current token, and all tokens. The page Audit: the changes and their senders.

import { may } from "./access.js";
import { call, quoted, useGet, usePages } from "./api.js";
import { Act, Ago, Choice, Command, Dialog, Facts, Field, Fragment, Loaded, Pager, State, Table } from "./ui.js";
import { bytes, count, duration, html, to, useEffect, useMemo, useState } from "./ui.js";

const SCOPES = {
  read: ["read", "Read"],
  append: ["append", "Append to"],
  manage: ["manage", "Create, change and delete"],
  admin: ["admin", "Do everything with"],
};
// The choices for a grant: [value, text of the choice, in words, whether it has a name].
const TARGETS = [
  ["logs/=", "one log", (name) => html`the log <b><bdi>${name}</bdi></b>`, true],
  ["logs/^", "logs that begin with …", (name) => html`the logs whose names begin with <b><bdi>${name}</bdi></b>`, true],
  ["logs/*", "all logs", () => "all logs", false],
  ["ledgers/=", "ledgers of one namespace", (name) => html`the ledgers of the namespace <b><bdi>${name}</bdi></b>`, true],
  ["ledgers/^", "namespaces that begin with …",
    (name) => html`the ledgers whose namespaces begin with <b><bdi>${name}</bdi></b>`, true],
  ["ledgers/*", "all ledgers outside logs", () => "all ledgers that belong to no log", false],
  ["cluster", "the cluster's state", () => "the state of the cluster: bookies, services and metrics", false],
  ["*", "everything", () => "everything", false],
];
const QUOTAS = [
  ["requests_per_s", "Requests per second", (value) => `${count(value)} requests per second`],
  ["bytes_per_s", "Bytes per second", (value) => `${bytes(value)} per second`],
  ["connections", "Connections in use", (value) => `${count(value)} connections`],
  ["open_ledgers", "Open ledgers", (value) => `${count(value)} open ledgers`],
];
const GRANTS_MAX = 32;
const ROWS = 50;

/** A grant such as "read:logs/orders-*" as a sentence. */
function InWords({ grant }) {
  const at = grant.indexOf(":");
  const [scope, where] = [grant.slice(0, at), grant.slice(at + 1)];
  if (grant === "admin:*") return "Do everything, and create and revoke tokens";
  const slash = where.indexOf("/");
  const name = where.slice(slash + 1);
  const kind = slash < 0 || name === "*" ? where : where.slice(0, slash + 1) + (name.endsWith("*") ? "^" : "=");
  const target = TARGETS.find((one) => one[0] === kind);
  return html`${SCOPES[scope]?.[1] || scope} ${target ? target[2](name.replace(/\*$/, "")) : where}`;
}

const Grants = ({ of }) => html`<ul class="plain">${of.map((grant) => html`<li><code><bdi>${grant}</bdi></code></li>`)}</ul>`;

function Quotas({ of }) {
  const set = QUOTAS.filter(([name]) => of && of[name] !== null && of[name] !== undefined);
  return set.length ? html`<ul class="plain">${set.map(([name, , show]) => html`<li>${show(of[name])}</li>`)}</ul>` : "No limit";
}

function Until({ time }) {
  if (!time) return "When it is revoked";
  const left = (new Date(time) - Date.now()) / 1000;
  if (left <= 0) return html`<${State} of="expired" tone="bad" /> <${Ago} time=${time} />`;
  return html`<time dateTime=${time} title=${time}>in ${duration(left)}</time>`;
}

function Own({ caller }) {
  if (!caller.requires_tokens) {
    return html`<p class="notice">This gateway requires no tokens, so everyone may do everything. To require tokens,
      create one with the scope admin on everything, then start the gateways with <code>REQUIRE_TOKENS=1</code>.</p>`;
  }
  return html`<section class="card" aria-labelledby="own"><h2 id="own">You are logged in with ${caller.who}</h2>
    <p>The token allows you to:</p>
    <ul>${caller.grants.map((grant) => html`<li><${InWords} grant=${grant} /> <code class="quiet"><bdi>${grant}</bdi></code></li>`)}</ul>
    <${Facts} of=${[["Limits at each gateway", html`<${Quotas} of=${caller.quotas} />`], ["Expires", html`<${Until} time=${caller.expires_at} />`]]} />
  </section>`;
}

const NEW_GRANT = { scope: "read", target: "logs/=", name: "" };

/** The text of a grant that the form describes. */
function textOf({ scope, target, name }) {
  if (target.endsWith("=")) return `${scope}:${target.slice(0, -1)}${name}`;
  if (target.endsWith("^")) return `${scope}:${target.slice(0, -1)}${name}*`;
  return `${scope}:${target}`;
}

function GrantFields({ grant, number, set, remove }) {
  const hasName = TARGETS.find(([value]) => value === grant.target)[3];
  return html`<fieldset><legend>Grant ${number}</legend>
    <div class="row">
      <${Choice} label="Scope" value=${grant.scope} set=${(scope) => set({ ...grant, scope })} options=${Object.values(SCOPES).map(([name]) => [name, name])} />
      <${Choice} label="On" value=${grant.target} set=${(target) => set({ ...grant, target })} options=${TARGETS} />
      ${hasName && html`<${Field} label=${grant.target.endsWith("^") ? "Beginning of the name" : grant.target === "logs/=" ? "Log" : "Namespace"} value=${grant.name}
        set=${(name) => set({ ...grant, name })} required maxLength="200" pattern="[A-Za-z0-9._\\-]+" title="Letters, digits, dots, underscores and hyphens" />`}
      ${remove && html`<button type="button" aria-label=${`Remove grant ${number}`} onClick=${remove}>Remove</button>`}
    </div>
    ${hasName && !grant.name ? null : html`<small><${InWords} grant=${textOf(grant)} />: <code>${textOf(grant)}</code></small>`}
  </fieldset>`;
}

function Create({ done }) {
  const [name, setName] = useState("");
  const [grants, setGrants] = useState([NEW_GRANT]);
  const [quotas, setQuotas] = useState({});
  const [days, setDays] = useState("90");
  const create = () => call("POST", "/v1/tokens", {
    json: {
      name,
      grants: [...new Set(grants.map(textOf))],
      quotas: Object.fromEntries(Object.entries(quotas).filter(([, text]) => text).map(([key, text]) => [key, Number(text)])),
      ...(days ? { expires_in_s: Math.round(Number(days) * 86400) } : {}),
    },
  });
  const clear = (token) => {
    setName("");
    setGrants([NEW_GRANT]);
    setQuotas({});
    setDays("90");
    done(token);
  };
  const change = (at, ...now) => setGrants((old) => old.toSpliced(at, 1, ...now));
  return html`<${Act} label="Create a token" act=${create} done=${clear}>
    <${Field} label="Name" value=${name} set=${setName} required maxLength="100" help="Who uses the token, or for what." />
    ${grants.map((grant, at) => html`<${GrantFields} key=${at} grant=${grant} number=${at + 1} set=${(now) => change(at, now)}
      remove=${grants.length > 1 && (() => change(at))} />`)}
    <button type="button" disabled=${grants.length >= GRANTS_MAX} onClick=${() => setGrants([...grants, NEW_GRANT])}>Add a grant</button>
    <${Choice} label="Lifetime" value=${days} set=${setDays} options=${[
      [String(1 / 24), "1 hour"], ["1", "1 day"], ["30", "30 days"], ["90", "90 days"], ["365", "1 year"], ["", "until it is revoked"]]} />
    <details><summary>Limits</summary>
      <p><small>Each gateway counts separately. Beyond a limit, requests get 429. An empty field means no limit.</small></p>
      ${QUOTAS.map(([key, label]) => html`<${Field} label=${label} type="number" min="1" max=${2 ** 53} step="1" value=${quotas[key] || ""}
        set=${(text) => setQuotas((old) => ({ ...old, [key]: text }))} />`)}
    </details>
  <//>`;
}

/** The secret of a new token. A separate dialog, which the page behind can't replace or hide. */
function Secret({ token, close }) {
  return html`<${Dialog} title="The new token" onClose=${close}>
    <p>This is the token <b><bdi>${token.name}</bdi></b>. Copy it now: <strong>it can’t be shown again</strong>, because the cluster stores only its hash.</p>
    <${Command} text=${token.token} />
    <footer><button type="button" class="main" onClick=${close}>I have copied the token</button></footer>
  <//>`;
}

/** Shows `ROWS` rows at a time of a list that the API returns whole. */
function usePart(rows, key) {
  const [page, setPage] = useState(1);
  useEffect(() => setPage(1), [key]);
  return {
    part: rows.slice((page - 1) * ROWS, page * ROWS),
    pager: { page, hasNext: page * ROWS < rows.length, toNext: () => setPage(page + 1), toPrevious: () => setPage(page - 1) },
  };
}

function All({ caller, query }) {
  const loaded = useGet("/v1/tokens");
  const [search, setSearch] = useState(query.get("search") || "");
  const [created, setCreated] = useState(null);
  const found = (loaded.data?.tokens || []).filter((one) => `${one.name}\n${one.id}\n${one.grants.join("\n")}`.toLowerCase().includes(search.toLowerCase()));
  const { part, pager } = usePart(found, search);
  const columns = [
    { name: "Name", show: (one) => html`<bdi>${one.name}</bdi>` },
    { name: "Id", show: (one) => html`<a href=${`${to("audit")}?target=${quoted(`tokens/${one.id}`)}`}><code>${one.id}</code></a>` },
    { name: "Grants", show: (one) => html`<${Grants} of=${one.grants} />` },
    { name: "Limits", show: (one) => html`<${Quotas} of=${one.quotas} />` },
    { name: "Created", show: (one) => html`<${Ago} time=${one.created_at} />` },
    { name: "Expires", show: (one) => html`<${Until} time=${one.expires_at} />` },
    { name: "", show: (one) => html`<${Act} label="Revoke" title="Revoke a token" isDanger typed=${one.name} done=${loaded.reload}
      act=${() => call("DELETE", `/v1/tokens/${quoted(one.id)}`)}>
      <p>Within seconds all gateways refuse this token and close its connections. A token that is revoked can’t be restored.</p>
      ${caller.who.endsWith(`(${one.id})`) && html`<p><strong>You are logged in with this token.</strong></p>`}
    <//>` },
  ];
  return html`<${Fragment}>
    <h2>All tokens</h2>
    <div class="row"><${Field} label="Search" type="search" value=${search} set=${setSearch} /> <${Create} done=${(token) => { setCreated(token); loaded.reload(); }} /></div>
    ${created && html`<${Secret} token=${created} close=${() => setCreated(null)} />`}
    <${Loaded} loaded=${loaded}>${() => html`
      <${Table} caption="Access tokens" columns=${columns} rows=${part} empty=${search ? "No token matches the search." : "There are no tokens."} />
      <${Pager} pager=${pager} />`}<//>
  <//>`;
}

export function Tokens({ caller, query }) {
  return html`<h1>Tokens</h1><${Own} caller=${caller} />
    ${may(caller, "admin", "everything")
      ? html`<${All} caller=${caller} query=${query} />`
      : html`<p class="quiet">Only a token with the grant <code>admin:*</code> can list, create and revoke tokens.</p>`}`;
}

const PERIODS = [["3600", "Last hour"], ["86400", "Last day"], ["604800", "Last week"], ["", "All"], ["time", "Since …"]];

/** The target of an audited request as a link, if the console has a page for it. */
function Target({ of }) {
  const [kind, name] = of.split("/");
  const isPage = name && ["logs", "ledgers"].includes(kind);
  const href = kind === "tokens" ? `${to("tokens")}?search=${quoted(name)}` : isPage ? to(kind, unquoted(name)) : null;
  return href ? html`<a href=${href}><bdi>${of}</bdi></a>` : html`<bdi>${of || "—"}</bdi>`;
}

function unquoted(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The value of an input of the type "datetime-local" for a time of the API. */
const local = (time) => new Date(new Date(time) - new Date(time).getTimezoneOffset() * 60_000).toISOString().slice(0, 19);

export function Audit({ query }) {
  const [given, target] = [query.get("since") || "", query.get("target") || ""];
  const isTime = given && !Number.isNaN(Date.parse(given));
  const last = query.get("last") ?? (isTime || target ? "" : "86400");
  const [searches, setSearches] = useState(0);
  const since = useMemo(() => isTime ? new Date(given).toISOString() : Number(last) > 0 ? new Date(Date.now() - last * 1000).toISOString() : null, [given, last, searches]);
  const loaded = usePages("/v1/audit", "audit", { since, target });
  const [period, setPeriod] = useState(isTime ? "time" : last);
  const [time, setTime] = useState(since ? local(since) : "");
  const [wanted, setWanted] = useState(target);
  const search = (event) => {
    event.preventDefault();
    const parts = new URLSearchParams(wanted ? { target: wanted } : {});
    if (period === "time") parts.set("since", new Date(time).toISOString());
    else parts.set("last", period);
    location.hash = `${to("audit")}?${parts}`;
    setSearches(searches + 1);
  };
  // Repeating the search shows newer requests.
  useEffect(() => {
    if (searches) loaded.reload();
  }, [searches]);
  useEffect(() => setWanted(target), [target]);
  const columns = [
    { name: "Number", isNumber: true, show: (one) => count(one.number) },
    { name: "When", show: (one) => html`<time dateTime=${one.at} title=${one.at}>${new Date(one.at).toLocaleString()}</time>` },
    { name: "Who", show: (one) => html`<bdi>${one.who}</bdi>` },
    { name: "From", show: (one) => html`${one.remote}${one.via && html`<br /><small>via ${one.via}</small>`}` },
    { name: "Operation", show: (one) => {
      const name = html`<code>${one.operation}</code>`;
      // Requests between services have names with underscores, which the public API does not describe.
      return /^[a-z]+[A-Z]\w*$/.test(one.operation) ? html`<a href=${`/docs#${one.operation}`}>${name}</a>` : name;
    } },
    { name: "Target", show: (one) => html`<${Target} of=${one.target} />` },
  ];
  return html`<h1>Audit</h1>
    <p>The cluster records who changed what. The oldest change comes first: to see the newest changes, choose a recent period.
      Reads and appends are not recorded.</p>
    <form class="row" onSubmit=${search}>
      <${Choice} label="Period" value=${period} set=${setPeriod} options=${PERIODS} />
      ${period === "time" && html`<${Field} label="Since" type="datetime-local" step="1" required value=${time} set=${setTime} />`}
      <${Field} label="Target" value=${wanted} set=${setWanted} maxLength="300" placeholder="logs/orders" title="logs/NAME, ledgers/ID, tokens/ID or bookies/NAME" />
      <button class="main">Search</button>
    </form>
    <${Loaded} loaded=${loaded}>${() => html`
      <${Table} caption="Changes" columns=${columns} rows=${loaded.rows} of=${(one) => one.number} empty="No change matches the search." />
      <${Pager} pager=${loaded.pager} />`}<//>`;
}
