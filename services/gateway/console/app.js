// The console's frame: which page is shown, the login, and the colours.

import { may, mayOnAny } from "./access.js";
import { call, onRefused, setToken, token } from "./api.js";
import { render, h } from "./preact.js";
import { Failure, Field, html, useEffect, useRef, useState } from "./ui.js";
import { Api } from "./docs.js";
import { Ledger, Ledgers } from "./ledgers.js";
import { Log, Logs } from "./logs.js";
import { Overview } from "./overview.js";
import { Repair } from "./repair.js";
import { Audit, Tokens } from "./tokens.js";

const PAGES = [
  { name: "", title: "Overview", show: Overview, isFor: (caller) => may(caller, "read", "cluster") },
  { name: "logs", title: "Logs", show: Logs, one: Log, isFor: (caller) => mayOnAny(caller, "logs") },
  { name: "ledgers", title: "Ledgers", show: Ledgers, one: Ledger, isFor: (caller) => mayOnAny(caller, "logs", "ledgers") },
  { name: "repair", title: "Repair", show: Repair, isFor: (caller) => may(caller, "read", "cluster") },
  // Every user may see the token's permissions on this page; the name at the top links to it.
  { name: "tokens", title: "Tokens", show: Tokens, isHidden: (caller) => !may(caller, "admin", "everything") },
  { name: "audit", title: "Audit", show: Audit, isFor: (caller) => may(caller, "admin", "everything") },
];

/** The parts of the address behind "#/", decoded, and its query. */
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { parts, query: new URLSearchParams(query || "") };
}

function usePlace() {
  const [now, setNow] = useState(place);
  useEffect(() => {
    const moved = () => setNow(place());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return now;
}

function Theme() {
  const [chosen, setChosen] = useState(localStorage.getItem("quorumlog-theme") || "");
  useEffect(() => {
    document.documentElement.dataset.theme = chosen;
    localStorage.setItem("quorumlog-theme", chosen);
  }, [chosen]);
  return html`<label class="theme"><span class="hidden">Colours</span>
    <select value=${chosen} onChange=${(event) => setChosen(event.target.value)}>
      <option value="" selected=${chosen === ""}>System colours</option>
      <option value="light" selected=${chosen === "light"}>Light</option>
      <option value="dark" selected=${chosen === "dark"}>Dark</option>
    </select></label>`;
}

function Login({ error, enter }) {
  const [text, setText] = useState("");
  const [wrong, setWrong] = useState(null);
  useEffect(() => document.querySelector(".login input").focus(), []);
  const submit = (event) => {
    event.preventDefault();
    const given = text.trim();
    // The browser can't put other characters into a header.
    if (/^[!-~]+$/.test(given)) enter(given);
    else setWrong({ title: "This is not a token", message: "A token has no spaces, and only letters, digits and punctuation of ASCII." });
  };
  return html`<main id="main" class="login">
    <h1>Log in to quorumlog</h1>
    <p>This gateway needs an access token. The console shows what the token allows, and forgets the token when this tab closes.</p>
    <form onSubmit=${submit}>
      <${Field} label="Token" type="password" value=${text} set=${setText} required
        help="An administrator creates tokens with “quorumlog token create” or on the page Tokens." />
      <button class="main">Log in</button>
    </form>
    <${Failure} error=${wrong || error} />
  </main>`;
}

function Frame({ caller, enter, leave, children, here, pages }) {
  return html`<div class="frame">
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <header class="top">
      <a class="brand" href="/#/"><img src="/console/icon.svg" alt="" width="20" height="20" /> quorumlog</a>
      <nav aria-label="Pages">${pages.map((page) => html`<a href=${`/#/${page.name}`} aria-current=${page.name === here ? "page" : undefined}>${page.title}</a>`)}
        <a href="/docs" aria-current=${here === "docs" ? "page" : undefined}>API</a></nav>
      <div class="who">
        <${Theme} />
        ${caller && caller.requires_tokens && html`<a class="quiet" href="/#/tokens"><bdi>${caller.who}</bdi></a> <button type="button" onClick=${leave}>Log out</button>`}
        ${enter && html`<button type="button" onClick=${enter}>Log in</button>`}
      </div>
    </header>
    ${children}
  </div>`;
}

const RETRY_MS = 3_000;

function App() {
  const { parts, query } = usePlace();
  const [{ caller, error, isIn }, setState] = useState({ caller: null, error: null, isIn: true });
  const [wantsLogin, setWantsLogin] = useState(false);
  const main = useRef(null);
  const isShown = useRef(false);
  const isDocs = location.pathname === "/docs";
  /** Show the login, with the reason if a token was refused. */
  const showLogin = (problem) => {
    setToken("");
    setState({ caller: null, error: problem, isIn: false });
  };
  const learn = () => {
    const sent = token();
    return call("GET", "/v1/caller").then((found) => {
      if (sent !== token()) return;
      setState({ caller: found, error: null, isIn: true });
      setWantsLogin(false);
    }, (failed) => {
      // A JWT without a grant is refused with 403. The reason of a 401 is shown by `onRefused`.
      if (failed.status === 403) showLogin(failed);
      else if (failed.status !== 401) setState((old) => ({ ...old, error: failed }));
    });
  };
  useEffect(() => {
    onRefused.call = (problem) => showLogin(token() ? problem : null);
    learn();
  }, []);
  useEffect(() => {
    if (caller || !error?.retryable) return undefined;
    const timer = setTimeout(learn, RETRY_MS);
    return () => clearTimeout(timer);
  }, [error]);
  const pages = caller ? PAGES.filter((one) => !one.isFor || one.isFor(caller)) : [];
  const page = PAGES.find((one) => one.name === parts[0]);
  const isAllowed = page && pages.includes(page);
  const asksLogin = !isIn && (!isDocs || wantsLogin);
  const title = asksLogin ? "Log in" : isDocs ? "API" : page ? [parts[1], page.title].filter(Boolean).join(" · ") : "No such page";
  useEffect(() => {
    document.title = `${title} · quorumlog`;
    // On the first page, the focus stays at the top, where the link to the content is.
    if (isShown.current) main.current?.focus({ preventScroll: true });
    isShown.current = true;
  }, [title]);
  useEffect(() => {
    // Users whose token has no grant on the cluster start at the first page that the token allows.
    if (caller && !isDocs && parts[0] === "" && !isAllowed) location.replace(`#/${pages[0].name}`);
  });
  const enter = (text) => {
    setToken(text);
    setState({ caller: null, error: null, isIn: true });
    learn();
  };
  const leave = () => showLogin(null);
  if (asksLogin) return html`<${Login} error=${error} enter=${enter} />`;
  const frame = { caller, leave, here: isDocs ? "docs" : parts[0], pages: pages.filter((one) => !one.isHidden?.(caller)) };
  if (isDocs) {
    return html`<${Frame} ...${frame} enter=${!isIn && (() => setWantsLogin(true))}>
      <main id="main" ref=${main} tabIndex="-1"><${Api} caller=${caller} /></main><//>`;
  }
  if (!caller) {
    return html`<main id="main">${error
      ? html`<h1>quorumlog</h1><${Failure} error=${error} retry=${learn} />`
      : html`<p class="quiet" role="status">Loading …</p>`}</main>`;
  }
  return html`<${Frame} ...${frame}>
    <main id="main" ref=${main} tabIndex="-1" key=${parts.join("/")}>
      ${!page && html`<h1>No such page</h1><p>The console has no page with this address. <a href=${`#/${pages[0].name}`}>Go to the page ${pages[0].title}</a>.</p>`}
      ${page && !isAllowed && parts[0] !== "" && html`<h1>${page.title}</h1><p>This page needs more than the token allows. You are logged in with ${caller.who}.
        <a href="#/tokens">See what the token allows</a>.</p>`}
      ${isAllowed && (parts[1] && page.one
        ? html`<${page.one} name=${parts[1]} rest=${parts.slice(2)} caller=${caller} query=${query} />`
        : html`<${page.show} caller=${caller} query=${query} />`)}
    </main>
  <//>`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(h(App), root);
