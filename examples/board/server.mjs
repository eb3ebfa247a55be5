// A message board: a Node service without dependencies, and a page that follows the log by Server-Sent Events.
//
//   CORS_ORIGINS=http://127.0.0.1:3000 make run
//   node examples/board/server.mjs --port 3000 --gateway http://127.0.0.1:8080 --gateway http://127.0.0.1:8081
//   then open http://127.0.0.1:3000/ in two windows
//
// The service checks each message and appends it to the log. An acknowledged message is durable, and is in the log only
// once, although the service repeats requests when a gateway dies. Pages read the log from the gateways. The service
// stores no messages and keeps no connections open, so it may be restarted at any time. It needs Node 18.3 or later.
//
// If the gateways require tokens, set QUORUMLOG_TOKEN to a token with manage, append and read on the log. The token never
// leaves the service: a page gets a ticket instead, which allows one request to the log.

import { randomUUID } from "node:crypto";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { parseArgs } from "node:util";

const BATCH = 500; // messages of one request to the log
const BODY_BYTES_MAX = 4096;
const AUTHOR_MAX = 40; // characters
const TEXT_MAX = 500;
const TRY_S = 60; // time limit of a request with all its retries

const { values: given } = parseArgs({
  options: {
    port: { type: "string", default: "3000" },
    gateway: { type: "string", multiple: true, default: ["http://127.0.0.1:8080"] },
    log: { type: "string", default: "board" },
  },
});
const path = `/v1/logs/${encodeURIComponent(given.log)}`;
const token = process.env.QUORUMLOG_TOKEN;

/** A request that a gateway rejected, with `status`, `code`, `retryable` and `outcome` of the problem document. */
class Refused extends Error {}

/** Send a request to the gateways in turn until one responds. Every request must be safe to repeat. */
async function ask(method, where, body, headers = {}) {
  const deadline = Date.now() + TRY_S * 1000;
  for (let attempt = 0; ; attempt++) {
    try {
      const answer = await fetch(given.gateway[attempt % given.gateway.length] + where, {
        method,
        headers: {
          ...(token ? { Authorization: `Bearer ${token}` } : {}),
          ...(body === undefined ? {} : { "Content-Type": "application/json" }),
          ...headers,
        },
        body: body === undefined ? undefined : JSON.stringify(body),
        signal: AbortSignal.timeout(TRY_S * 1000),
      });
      const told = await answer.json();
      if (answer.ok) return told;
      throw Object.assign(new Refused(told.detail ?? told.title), told);
    } catch (error) {
      // No response, or a retryable error. A repeated append does no harm, because it has the producer's number.
      const isFinal = error instanceof Refused && !error.retryable && error.outcome !== "unknown";
      if (isFinal || Date.now() > deadline) throw error;
      await new Promise((done) => setTimeout(done, Math.min(100 * 2 ** attempt, 2000)));
    }
  }
}

/** Appends messages, each exactly once, in the order of the calls of `post`. */
class Board {
  #waiting = [];
  #isSending = false;
  #producer; // the headers that identify the producer; `since` is the log's end before its first request
  #seq = 0;

  async open() {
    await ask("PUT", path, {});
  }

  /** Returns the message's offset once the message is durable. */
  post(message) {
    return new Promise((done, failed) => {
      this.#waiting.push({ message, done, failed });
      if (!this.#isSending) this.#send();
    });
  }

  async #send() {
    this.#isSending = true;
    while (this.#waiting.length) {
      // One request appends all messages that arrived during the previous request.
      const batch = this.#waiting.splice(0, BATCH);
      try {
        const first = await this.#append(batch.map(({ message }) => ({ json: message })));
        batch.forEach(({ done }, index) => done(first + index));
      } catch (error) {
        // The append may have been carried out, so its number can't be used again: continue with a new producer.
        this.#producer = undefined;
        batch.forEach(({ failed }) => failed(error));
      }
    }
    this.#isSending = false;
  }

  async #append(records) {
    if (!this.#producer) {
      const { next_offset: since } = await ask("GET", path);
      this.#producer = { "Producer-Id": randomUUID(), "Producer-Epoch": "1", "Producer-Since": String(since) };
      this.#seq = 0;
    }
    const numbers = { ...this.#producer, "Producer-Seq": String(this.#seq) };
    const { first_offset: first } = await ask("POST", `${path}/records`, { records }, numbers);
    this.#seq += 1;
    return first;
  }
}

/** The URLs at which a page can follow the log, one for each gateway. */
async function follow(from) {
  const where = `${path}/records`;
  const query = new URLSearchParams({ from, encoding: "json" });
  if (token) query.set("ticket", (await ask("POST", "/v1/tickets", { path: where })).ticket);
  return given.gateway.map((gateway) => `${gateway}${where}?${query}`);
}

/** Parse a message from a request's body; an Error if it is not valid. */
function messageOf(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    return new Error("the body is not JSON");
  }
  const author = String(found?.author ?? "").trim();
  const written = String(found?.text ?? "").trim();
  if (!author || author.length > AUTHOR_MAX) return new Error(`author: 1 to ${AUTHOR_MAX} characters`);
  if (!written || written.length > TEXT_MAX) return new Error(`text: 1 to ${TEXT_MAX} characters`);
  return { author, text: written };
}

async function bodyOf(request) {
  const parts = [];
  let size = 0;
  for await (const part of request) {
    size += part.length;
    if (size > BODY_BYTES_MAX) return undefined;
    parts.push(part);
  }
  return Buffer.concat(parts).toString();
}

const board = new Board();
const page = await readFile(new URL("page.html", import.meta.url));

const routes = {
  "GET /": async () => [200, page, "text/html; charset=utf-8"],
  "GET /follow": async (request, url) => {
    const from = url.searchParams.get("from") ?? "0";
    return /^\d{1,18}$/.test(from) ? [200, { urls: await follow(from) }] : [400, { error: "from: an offset" }];
  },
  "POST /messages": async (request) => {
    // A page of another origin can't send this type without a preflight request, which this service rejects.
    if (request.headers["content-type"]?.split(";")[0] !== "application/json") return [415, { error: "send application/json" }];
    const text = await bodyOf(request);
    if (text === undefined) return [413, { error: `at most ${BODY_BYTES_MAX} bytes` }];
    const message = messageOf(text);
    if (message instanceof Error) return [400, { error: message.message }];
    return [201, { offset: await board.post(message) }];
  },
};

async function handle(request, response) {
  const url = new URL(request.url, "http://localhost");
  const route = routes[`${request.method} ${url.pathname}`];
  let [status, body, type] = [404, { error: "no such page" }];
  try {
    if (route) [status, body, type] = await route(request, url);
  } catch (error) {
    console.error(error);
    [status, body] = [503, { error: error.code ?? "the gateways do not answer" }];
  }
  response.writeHead(status, { "Content-Type": type ?? "application/json" });
  response.end(type ? body : JSON.stringify(body));
}

await board.open();
const server = createServer(handle);
server.listen(Number(given.port), "127.0.0.1", () => console.log(`http://127.0.0.1:${server.address().port}/`));
// Responds to the requests in progress, and then ends the process.
function stop() {
  server.close(() => process.exit(0));
  server.closeIdleConnections();
}
for (const signal of ["SIGTERM", "SIGINT"]) process.once(signal, stop);
