// Requests to the gateway's public API, with the token of the logged-in user.

import { useCallback, useEffect, useRef, useState } from "./preact-hooks.js";

const TOKEN = "quorumlog-token";

/** An error of the API (RFC 9457), or of the connection to the gateway. */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `The gateway answered with status ${status}.`);
    this.status = status;
    this.code = body.code || "";
    this.title = body.title || "The request failed";
    this.retryable = Boolean(body.retryable);
    this.outcome = body.outcome || "";
    this.errors = body.errors || [];
    /** All members of the response, such as `next_offset`. */
    this.body = body;
  }
}

/** The token of this browser tab, or "" before the login. Closing the tab deletes the token. */
export const token = () => sessionStorage.getItem(TOKEN) || "";

export function setToken(text) {
  if (text) sessionStorage.setItem(TOKEN, text);
  else sessionStorage.removeItem(TOKEN);
}

/** Called when the gateway refuses the token. */
export const onRefused = { call: () => {} };

/** Send a request and return the response; raise a Problem for any status of 400 or more.
 * `json` becomes the body, and `params` the query, without members that are null, undefined or "". */
export async function send(method, path, { json, body, params, headers = {}, signal } = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params || {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(name, one);
    }
  }
  const given = { Accept: "application/json", ...headers };
  const sent = token();
  if (sent) given.Authorization = `Bearer ${sent}`;
  if (json !== undefined) given["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(query.size ? `${path}?${query}` : path, {
      method, signal, headers: given, body: json === undefined ? body : JSON.stringify(json),
      cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem(0, {
      code: "no-answer", retryable: true, title: "The gateway does not answer",
      detail: "The gateway does not answer. It may have ended, or the network is interrupted.",
    });
  }
  if (response.ok) return response;
  const text = await response.text();
  const type = response.headers.get("Content-Type") || "";
  const problem = new Problem(response.status, type.includes("json") ? parsed(text) : {});
  // A late response to a request with an earlier token says nothing about the current token.
  if (response.status === 401 && sent === token()) onRefused.call(problem);
  throw problem;
}

/** Parse a problem document. A proxy's response may be truncated, or not be JSON. */
function parsed(text) {
  try {
    return JSON.parse(text) || {};
  } catch {
    return {};
  }
}

/** Send a request and return the JSON of the response, or null if the response has no body. */
export async function call(method, path, options) {
  const text = await (await send(method, path, options)).text();
  return text ? JSON.parse(text, exact) : null;
}

/** Parse JSON, but keep integers that JavaScript would round, such as ledger ids from 2^53 on, as strings. */
function exact(_name, value, { source } = {}) {
  return Number.isInteger(value) && !Number.isSafeInteger(value) && /^-?[0-9]+$/.test(source) ? source : value;
}

export const get = (path, params, signal) => call("GET", path, { params, signal });

/** Yield each parsed line of an NDJSON response when the line arrives. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) if (part) yield JSON.parse(part);
    }
    if (rest.trim()) yield JSON.parse(rest);
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/** Encode a name as a segment of a path. */
export const quoted = encodeURIComponent;

/** Load data with `load(signal)`, and reload when one of `inputs` changes and every `everyMs` milliseconds.
 * A hidden page does not load. After an error, the last data stays visible with the error. */
export function useLoad(load, inputs, everyMs = 0) {
  const [state, setState] = useState({ data: null, error: null, isLoading: true, at: 0 });
  const current = useRef(null);
  const run = useCallback(() => {
    current.current?.abort();
    const abort = (current.current = new AbortController());
    setState((old) => ({ ...old, isLoading: true }));
    return load(abort.signal).then(
      (data) => {
        if (!abort.signal.aborted) setState({ data, error: null, isLoading: false, at: Date.now() });
      },
      (error) => {
        if (!abort.signal.aborted) setState((old) => ({ ...old, error, isLoading: false }));
      },
    );
  }, inputs);
  useEffect(() => {
    let timer = 0;
    let isOver = false;
    const next = () => {
      if (!isOver && everyMs) timer = setTimeout(tick, everyMs);
    };
    const tick = () => (document.hidden ? next() : run().then(next));
    const seen = () => {
      if (!document.hidden && everyMs) {
        clearTimeout(timer);
        tick();
      }
    };
    setState({ data: null, error: null, isLoading: true, at: 0 });
    run().then(next);
    document.addEventListener("visibilitychange", seen);
    return () => {
      isOver = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
      current.current?.abort();
    };
  }, [run, everyMs]);
  return { ...state, reload: run };
}

/** Load one path; see `useLoad`. */
export function useGet(path, params, everyMs) {
  const key = JSON.stringify(params || {});
  return useLoad((signal) => get(path, params, signal), [path, key], everyMs);
}

/** Load a list page by page. The API's lists have `member`, an array, and `next`, the `after` of the next page.
 * Returns what `useLoad` returns, with `rows`, and `pager` for the component Pager. */
export function usePages(path, member, params, everyMs) {
  const key = JSON.stringify(params || {});
  const [places, setPlaces] = useState([null]);
  const seen = useRef(key + path);
  const isSame = seen.current === key + path;
  const after = isSame ? places[places.length - 1] : null;
  useEffect(() => {
    seen.current = key + path;
    setPlaces([null]);
  }, [path, key]);
  const loaded = useGet(path, { ...params, after }, everyMs);
  const next = loaded.data?.next ?? null;
  return {
    ...loaded,
    rows: loaded.data?.[member] || [],
    pager: {
      page: places.length,
      hasNext: next !== null,
      toNext: () => setPlaces((old) => [...old, next]),
      toPrevious: () => setPlaces((old) => old.slice(0, -1)),
    },
  };
}
