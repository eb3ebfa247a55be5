// The page of the API: operations by resource, from /openapi.json, each with a form that sends a request.

import { token, useGet } from "./api.js";
import { bytes, Choice, Command, Dialog, Failure, Field, Fragment, html, Loaded, State, useEffect, useMemo, useRef, useState } from "./ui.js";

const SHOWN_BYTES_MAX = 256 * 1024;
const STREAM_MS = 8_000;
const STREAMS = ["text/event-stream", "application/x-ndjson"];
const BINARY = ["application/vnd.quorumlog.frames", "application/vnd.apache.arrow.stream"];
// Properties of a schema beyond which a field has its own "fields" button, because schemas may refer to themselves.
const DEPTH_MAX = 6;

// Texts

const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\[([^\]]+)\]\(([^)\s]+)\)|(https?:\/\/[^\s)]+[^\s).,;:])/g;

/** The part of a text that `INLINE` found, as an element. `links`: addresses of codes and operations by their names. */
function inline([whole, code, bold, label, href, address], links) {
  if (code) return links[code] ? html`<a href=${links[code]}><code>${code}</code></a>` : html`<code>${code}</code>`;
  if (bold) return html`<strong>${bold}</strong>`;
  if (address) return html`<a href=${address} rel="noreferrer">${address}</a>`;
  // Gateways don't serve the documentation's files, so their names stay text. Other schemes are not linked.
  return /^(https?:\/\/|[/#])/.test(href) ? html`<a href=${href} rel="noreferrer">${label}</a>` : label ? html`${label} (<code>${href}</code>)` : whole;
}

function Line({ of, links }) {
  const parts = [];
  let end = 0;
  for (const found of of.matchAll(INLINE)) {
    parts.push(of.slice(end, found.index), inline(found, links));
    end = found.index + found[0].length;
  }
  return [...parts, of.slice(end)];
}

/** Simple Markdown: paragraphs, lists, code, bold and links. Makes elements, never HTML from text. */
function Text({ of = "", links }) {
  return of.split(/\n{2,}/).filter(Boolean).map((block) => {
    const lines = block.split("\n");
    if (block.startsWith("```")) return html`<pre>${lines.slice(1).join("\n").replace(/\n?```$/, "")}</pre>`;
    if (lines.every((line) => /^[-*] /.test(line))) return html`<ul>${lines.map((line) => html`<li><${Line} of=${line.slice(2)} links=${links} /></li>`)}</ul>`;
    return html`<p><${Line} of=${lines.join(" ")} links=${links} /></p>`;
  });
}

/** Details that are rendered only while they are open. */
function More({ title, children }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details class="more" onToggle=${(event) => { event.stopPropagation(); setOpen(event.currentTarget.open); }}>
    <summary>${title}</summary>${isOpen && children()}</details>`;
}

// Schemas

const pretty = (value) => JSON.stringify(value, null, 2);
const nameOf = (schema) => schema.$ref?.split("/").pop();
const resolved = (schema, schemas) => schemas[nameOf(schema)] || schema;
const choices = (schema) => schema.anyOf || schema.oneOf || null;

// JavaScript can't represent the bounds of 64-bit integers exactly.
const bound = (value) => Math.abs(value) >= 2 ** 63 ? (value < 0 ? "−2⁶³ + 1" : "2⁶³ − 1") : value?.toLocaleString("en");

function range(low, high, unit = "") {
  const [from, to] = [bound(low), bound(high)];
  if (low === undefined && high === undefined) return "";
  if (high === undefined) return `, at least ${from}${unit}`;
  if (low === undefined) return `, at most ${to}${unit}`;
  return `, ${from} to ${to}${unit}`;
}

/** The type of a value with its bounds, in words. */
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (choices(schema)) return choices(schema).map(typeOf).join(" or ");
  if (schema.type === "array") return `array of ${typeOf(schema.items || {})}${range(schema.minItems, schema.maxItems, " items")}`;
  const rest = schema.additionalProperties?.type || schema.patternProperties && Object.values(schema.patternProperties)[0].type;
  const type = [].concat(schema.type || "any value").join(" or ") + (rest ? ` of ${rest}s` : "");
  const form = schema.contentEncoding || (schema.format !== "int64" && schema.format);
  return `${type}${form ? ` (${form})` : ""}${range(schema.minimum, schema.maximum)}${range(schema.minLength, schema.maxLength, " characters")}${
    range(undefined, schema.maxProperties, " members")}`;
}

/** The pattern of a schema, or of one of its choices. */
const patternOf = (schema) => schema.pattern || (choices(schema) || []).map(patternOf).find(Boolean);

function Type({ schema }) {
  const pattern = patternOf(schema);
  return html`<span class="type">${typeOf(schema)}</span>
    ${schema.default !== undefined && schema.default !== null && html`<span class="quiet"> · default <code>${JSON.stringify(schema.default)}</code></span>`}
    ${pattern && html`<span class="quiet"> · matches <code>${pattern}</code></span>`}`;
}

/** The objects that a value of a schema may be or contain, to be opened on demand. */
function objectsOf(schema, schemas) {
  if (choices(schema)) return choices(schema).flatMap((one) => objectsOf(one, schemas));
  if (schema.items) return objectsOf(schema.items, schemas);
  if (typeof schema.additionalProperties === "object") return objectsOf(schema.additionalProperties, schemas);
  const found = resolved(schema, schemas);
  if (found.properties) return [[nameOf(schema) || found.title || "object", found]];
  return found !== schema ? objectsOf(found, schemas) : [];
}

function Fields({ of, schemas, links, depth = 0 }) {
  const required = of.required || [];
  return html`<${Fragment}><${Text} of=${of.description} links=${links} />
    <ul class="fields">${Object.entries(of.properties).map(([name, schema]) => html`<li>
      <code>${name}</code> ${required.includes(name) && html`<b>required</b>`} <${Type} schema=${schema} />
      <${Text} of=${schema.description} links=${links} />
      ${depth < DEPTH_MAX && objectsOf(schema, schemas).map(([title, one]) => html`<${More} title=${`Fields of ${title}`}>${() =>
        html`<${Fields} of=${one} schemas=${schemas} links=${links} depth=${depth + 1} />`}<//>`)}
    </li>`)}</ul><//>`;
}

/** The forms of a body: its media types, with their schemas and examples. */
function Content({ of, schemas, links }) {
  return Object.entries(of).map(([media, { schema, examples }]) => html`<div class="content">
    <code>${media}</code> ${!schema.format && !objectsOf(schema, schemas).length && html`<${Type} schema=${schema} />`}
    <${Text} of=${schema.description} links=${links} />
    ${objectsOf(schema, schemas).map(([title, one]) => html`<${More} title=${`Fields of ${title}`}>${() =>
      html`<${Fields} of=${one} schemas=${schemas} links=${links} />`}<//>`)}
    ${Object.entries(examples || {}).map(([name, { value }]) => html`<${More} title=${`Example: ${name}`}>${() => html`<pre tabIndex="0">${pretty(value)}</pre>`}<//>`)}
  </div>`);
}

// Trying an operation

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The request that the form describes: {url, method, headers, body}. `given`: texts by "place/name". */
function requestOf(one, given, media, accept, body) {
  let path = one.path;
  const query = new URLSearchParams();
  const headers = accept ? { Accept: accept } : {};
  for (const { name, in: place, schema, style } of one.parameters) {
    const text = given[`${place}/${name}`] ?? "";
    if (place === "path") {
      // The name of a stream contains slashes.
      const escaped = encodeURIComponent(text);
      path = path.replace(`{${name}}`, () => one.path.endsWith("{path}") ? escaped.replaceAll("%2F", "/") : escaped);
    } else if (text === "" || text === String(schema.default)) continue;
    else if (style === "deepObject") for (const [key, value] of new URLSearchParams(text)) query.append(`${name}[${key}]`, value);
    else if (place === "query") query.append(name, text);
    else headers[name] = text;
  }
  const hasBody = one.bodies.length > 0 && body !== "";
  if (hasBody && media !== "*/*" && !headers["Content-Type"]) headers["Content-Type"] = media;
  return { method: one.method, url: query.size ? `${path}?${query}` : path, headers, body: hasBody ? body : undefined };
}

/** The request as a command for a shell. */
function curlOf({ method, url, headers, body }) {
  const parts = [`curl ${method === "GET" ? "" : `-X ${method} `}${headers.Accept === STREAMS[0] ? "-N " : ""}${quote(location.origin + url)}`];
  if (token()) parts.push('-H "Authorization: Bearer $TOKEN"');
  for (const [name, value] of Object.entries(headers)) parts.push(`-H ${quote(`${name}: ${value}`)}`);
  if (body !== undefined) parts.push(`--data-binary ${quote(body)}`);
  return parts.join(" \\\n  ");
}

/** JSON with line breaks. Each number keeps its text, because ids and decimals may exceed what a double holds. */
function indented(text) {
  try {
    return JSON.rawJSON ? pretty(JSON.parse(text, (_, value, { source }) => typeof value === "number" ? JSON.rawJSON(source) : value)) : text;
  } catch {
    return text;
  }
}

/** Send a request, and report the response to `set` as it arrives, until the response ends. */
async function exchange({ method, url, headers, body }, set, abort) {
  const began = performance.now();
  const sent = token() ? { ...headers, Authorization: `Bearer ${token()}` } : headers;
  const response = await fetch(url, {
    method, headers: sent, body, signal: abort.signal, cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer",
  });
  const type = response.headers.get("Content-Type") || "";
  const isText = /^text\/|json|javascript|xml/.test(type);
  const shown = { status: response.status, reason: response.statusText, ms: performance.now() - began, headers: [...response.headers], size: 0, text: "", isText, end: "" };
  const timer = STREAMS.some((one) => type.startsWith(one)) && setTimeout(() => abort.abort("time"), STREAM_MS);
  const [reader, decoder] = [response.body?.getReader(), new TextDecoder()];
  set({ ...shown });
  try {
    while (reader) {
      const { value, done } = await reader.read();
      if (done) break;
      shown.size += value.length;
      if (isText) shown.text += decoder.decode(value, { stream: true });
      if (shown.size > SHOWN_BYTES_MAX) {
        shown.text = shown.text.slice(0, SHOWN_BYTES_MAX);
        shown.end = `Only the first ${bytes(SHOWN_BYTES_MAX)} were read.`;
        abort.abort("size");
        break;
      }
      set({ ...shown });
    }
  } catch (error) {
    if (!abort.signal.aborted) throw error;
    shown.end = abort.signal.reason === "time" ? `The stream was ended after ${STREAM_MS / 1000} seconds.` : "You stopped the request.";
  } finally {
    clearTimeout(timer);
  }
  shown.ms = performance.now() - began;
  if (!shown.end && type.includes("json") && !type.includes("ndjson")) shown.text = indented(shown.text);
  set({ ...shown });
}

function Answer({ of }) {
  return html`<section class="answer" aria-label="Response" aria-live="polite">
    <p><${State} of=${`${of.status} ${of.reason}`} tone=${of.status < 400 ? "good" : "bad"} /> <span class="quiet">${Math.round(of.ms)} ms, ${bytes(of.size)}</span></p>
    ${of.end && html`<p>${of.end}</p>`}
    <${More} title="Headers">${() => html`<pre>${of.headers.map(([name, value]) => `${name}: ${value}`).join("\n")}</pre>`}<//>
    ${of.size > 0 && (of.isText ? html`<pre class="body" tabIndex="0" aria-label="Body">${of.text}</pre>` : html`<p class="quiet">The body is binary and is not shown.</p>`)}
  </section>`;
}

const first = (examples) => examples ? Object.keys(examples)[0] : undefined;

function Try({ one, caller }) {
  const medias = one.bodies.map(([media]) => media).filter((media) => !BINARY.includes(media));
  const accepts = [...new Set(Object.entries(one.responses).filter(([status]) => status[0] === "2").flatMap(([, reply]) => Object.keys(reply.content || {})))];
  const parameters = one.parameters.filter(({ name }) => name !== "Content-Encoding");
  const [given, setGiven] = useState(() => Object.fromEntries(parameters.map((it) => [`${it.in}/${it.name}`, String(it.example ?? it.schema.default ?? "")])));
  const [media, setMedia] = useState(medias[0] || "");
  const examples = one.bodies.find(([name]) => name === media)?.[1].examples;
  const [example, setExample] = useState(first(examples));
  const [body, setBody] = useState(examples ? pretty(examples[example].value) : "");
  const [accept, setAccept] = useState("");
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  const [isAsking, setAsking] = useState(false);
  const [abort, setAbort] = useState(null);
  const request = requestOf({ ...one, parameters }, given, media, accept, body);
  const current = useRef(null);
  useEffect(() => () => current.current?.abort(), []);
  const send = async () => {
    const now = (current.current = new AbortController());
    setAsking(false);
    setAbort(now);
    setError(null);
    setAnswer(null);
    try {
      await exchange(request, setAnswer, now);
    } catch (failed) {
      if (now.signal.reason === "stop") setError({ title: "You stopped the request", message: "No response had arrived." });
      else if (!now.signal.aborted) setError({ title: "The browser got no response", message: `The gateway does not answer, or the browser can't send this request: ${failed.message}` });
    } finally {
      setAbort(null);
    }
  };
  const submit = (event) => {
    event.preventDefault();
    if (one.method === "DELETE") setAsking(true);
    else send();
  };
  const choose = (name, from = examples) => {
    setExample(name);
    setBody(name === undefined ? "" : pretty(from[name].value));
  };
  const chooseMedia = (name) => {
    const from = one.bodies.find(([its]) => its === name)[1].examples;
    setMedia(name);
    choose(first(from), from);
  };
  return html`<form class="try" onSubmit=${submit}>
    ${parameters.map((it) => {
      const key = `${it.in}/${it.name}`;
      const set = (text) => setGiven((old) => ({ ...old, [key]: text }));
      const label = `${it.name} (${it.in})`;
      return it.schema.enum && it.schema.enum.length < 20
        ? html`<${Choice} key=${key} label=${label} value=${given[key]} set=${set} options=${[...(it.schema.default ? [] : [["", "—"]]), ...it.schema.enum.map((value) => [value, value])]} />`
        : html`<${Field} key=${key} label=${label} value=${given[key]} set=${set} required=${it.required} placeholder=${it.style === "deepObject" ? "key=value" : ""} />`;
    })}
    ${accepts.length > 1 && html`<${Choice} label="Accept" value=${accept} set=${setAccept} options=${[["", "any"], ...accepts.map((name) => [name, name])]} />`}
    ${medias.length > 1 && html`<${Choice} label="Content-Type" value=${media} set=${chooseMedia} options=${medias.map((name) => [name, name])} />`}
    ${examples && Object.keys(examples).length > 1 && html`<${Choice} label="Example" value=${example} set=${(name) => choose(name)} options=${Object.keys(examples).map((name) => [name, name])} />`}
    ${medias.length > 0 && html`<label class="field wide">Body<textarea value=${body} onInput=${(event) => setBody(event.target.value)} spellcheck=${false} /></label>`}
    <div class="wide"><${Command} text=${curlOf(request)} /></div>
    <div class="row wide"><button class=${one.method === "DELETE" ? "danger" : "main"} disabled=${abort}>Send</button>
      ${abort && html`<button type="button" onClick=${() => abort.abort("stop")}>Stop</button>`}
      ${!caller && html`<span class="quiet">You are not logged in. Where tokens are required, most requests get 401.</span>`}</div>
  </form>
  ${isAsking && html`<${Dialog} title="Send this DELETE request?" onClose=${() => setAsking(false)}>
    <p><code>DELETE ${request.url}</code></p><p>The request deletes data of this cluster. This can’t be undone.</p>
    <footer><button type="button" onClick=${() => setAsking(false)}>Cancel</button><button type="button" class="danger" onClick=${send}>Delete</button></footer>
  <//>`}
  <${Failure} error=${error} />
  ${answer && html`<${Answer} of=${answer} />`}`;
}

// Operations

function Details({ one, schemas, links, caller }) {
  const replies = Object.entries(one.responses);
  const isProblem = ([, reply]) => reply.content?.["application/problem+json"];
  return html`<div class="inside">
    <${Text} of=${one.description} links=${links} />
    ${one.parameters.length > 0 && html`<h4>Parameters</h4><ul class="fields">${one.parameters.map((it) => html`<li>
      <code>${it.name}</code> <span class="quiet">in ${it.in}</span> ${it.required && html`<b>required</b>`} <${Type} schema=${it.schema} /><${Text} of=${it.description} links=${links} /></li>`)}</ul>`}
    ${one.bodies.length > 0 && html`<h4>Body ${one.requestBody.required ? "" : "(optional)"}</h4><${Content} of=${one.requestBody.content} schemas=${schemas} links=${links} />`}
    <h4>Responses</h4>
    <ul class="fields">${replies.map((entry) => html`<li><code>${entry[0]}</code> <${Line} of=${entry[1].description} links=${links} />
      ${!isProblem(entry) && entry[1].content && html`<${Content} of=${entry[1].content} schemas=${schemas} links=${links} />`}
      ${!isProblem(entry) && Object.entries(entry[1].headers || {}).filter(([, it]) => it.description).map(([name, it]) => html`<div><code>${name}</code> <${Line} of=${it.description} links=${links} /></div>`)}
    </li>`)}</ul>
    <h4>Try it</h4>
    ${one.responses["101"] ? html`<p class="quiet">This operation opens a WebSocket, which this page can’t send.</p>` : html`<${Try} one=${one} caller=${caller} />`}
  </div>`;
}

const METHODS = ["get", "put", "post", "delete", "patch"];

/** The operations of a document, grouped by tag in the document's order, and the addresses that texts link to. */
function read(openapi) {
  const all = Object.entries(openapi.paths).flatMap(([path, item]) => Object.keys(item).filter((key) => METHODS.includes(key)).map((method) => ({
    parameters: [], ...item[method], path, method: method.toUpperCase(), id: item[method].operationId, tag: item[method].tags?.[0] || "Other",
    bodies: Object.entries(item[method].requestBody?.content || {}),
  })));
  const links = {};
  for (const one of all) {
    links[`${one.method} ${one.path}`] = `#${one.id}`;
    for (const reply of Object.values(one.responses)) {
      for (const code of Object.keys(reply.content?.["application/problem+json"]?.examples || {})) links[code] = `/problems/${code}`;
    }
    one.text = `${one.method} ${one.path} ${one.id} ${one.summary} ${one.tag}`.toLowerCase();
  }
  const tags = [...new Set([...(openapi.tags || []).map((tag) => tag.name), ...all.map((one) => one.tag)])];
  return { groups: tags.map((tag) => [tag, all.filter((one) => one.tag === tag)]), links };
}

function Reference({ openapi, caller }) {
  const { groups, links } = useMemo(() => read(openapi), [openapi]);
  const schemas = openapi.components.schemas;
  const [filter, setFilter] = useState("");
  const [opened, setOpened] = useState({});
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = groups.map(([tag, all]) => [tag, all.filter((one) => words.every((word) => one.text.includes(word)))]).filter(([, all]) => all.length);
  const size = found.reduce((sum, [, all]) => sum + all.length, 0);
  const [target, setTarget] = useState({ id: location.hash.slice(1) });
  useEffect(() => {
    const moved = () => {
      setFilter("");
      setTarget({ id: location.hash.slice(1) });
    };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    const element = target.id && document.getElementById(target.id);
    if (!element) return;
    if (element.tagName === "DETAILS") setOpened((old) => ({ ...old, [target.id]: true }));
    element.scrollIntoView();
    (element.querySelector("summary") || element).focus({ preventScroll: true });
  }, [target]);
  const toggled = (one, isOpen) => {
    if (isOpen === Boolean(opened[one.id])) return;
    setOpened((old) => ({ ...old, [one.id]: isOpen }));
    if (isOpen) history.replaceState(null, "", `#${one.id}`);
  };
  // A link to the current address changes no address, so scroll to the operation here.
  const go = (id) => location.hash === `#${id}` && setTarget({ id });
  return html`<div class="docs">
    <aside>
      <${Field} label="Filter operations" type="search" value=${filter} set=${setFilter} />
      <p class="quiet" role="status">${size === 1 ? "1 operation" : `${size} operations`}</p>
      <details class="contents" open=${matchMedia("(min-width: 60rem)").matches}><summary>Contents</summary><nav aria-label="Operations">
        ${found.map(([tag, all]) => html`<h3>${tag}</h3><ul>${all.map((one) => html`<li><a href=${`#${one.id}`} onClick=${() => go(one.id)}>${one.summary}</a></li>`)}</ul>`)}
      </nav></details>
    </aside>
    <div>
      <${Text} of=${openapi.info.description} links=${links} />
      <p>Release ${openapi.info.version}. As a document for programs: <a href="/openapi.json">/openapi.json</a>.</p>
      ${found.map(([tag, all]) => html`<section key=${tag} aria-label=${tag}><h2>${tag}</h2>
        ${all.map((one) => html`<details class="operation" key=${one.id} id=${one.id} open=${Boolean(opened[one.id])} onToggle=${(event) => toggled(one, event.currentTarget.open)}>
          <summary><span class=${`method ${one.method.toLowerCase()}`}>${one.method}</span> <code>${one.path}</code> <span class="summary">${one.summary}</span></summary>
          ${opened[one.id] && html`<${Details} one=${one} schemas=${schemas} links=${links} caller=${caller} />`}
        </details>`)}
      </section>`)}
      ${size === 0 && html`<p class="quiet">No operation matches the filter.</p>`}
    </div>
  </div>`;
}

export function Api({ caller }) {
  const loaded = useGet("/openapi.json");
  return html`<h1>The HTTP API</h1><${Loaded} loaded=${loaded}>${(openapi) => html`<${Reference} openapi=${openapi} caller=${caller} />`}<//>`;
}
