// The console's frame: which page is shown, the login, and the colours.

import { may } from "./access.js";
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
  { name: "logs", title: "Logs", show: Logs, one: Log },
  { name: "ledgers", title: "Ledgers", show: Ledgers, one: Ledger },
  { name: "repair", title: "Repair", show: Repair, isFor: (caller) => may(caller, "read", "cluster") },
  { name: "tokens", title: "Tokens", show: Tokens, isFor: (caller) => may(caller, "admin", "everything") },
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
  return html`<main id="main" class="login" tabIndex="-1">
    <h1>Log in to quorumlog</h1>
    <p>This gateway needs an access token. The console shows what the token allows, and forgets it when this tab closes.</p>
    <form onSubmit=${(event) => { event.preventDefault(); enter(text.trim()); }}>
      <${Field} label="Token" type="password" value=${text} set=${setText} required
        help="An administrator creates tokens with “quorumlog token create” or on the page Tokens." />
      <button class="main">Log in</button>
    </form>
    ${error && error.status === 401 && !token() ? null : html`<${Failure} error=${error} />`}
  </main>`;
}

function Frame({ caller, leave, children, here, pages }) {
  return html`<div class="frame">
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <header class="top">
      <a class="brand" href="/#/"><img src="/console/icon.svg" alt="" width="20" height="20" /> quorumlog</a>
      <nav aria-label="Pages">${pages.map((page) => html`<a href=${`/#/${page.name}`} aria-current=${page.name === here ? "page" : undefined}>${page.title}</a>`)}
        <a href="/docs" aria-current=${here === "docs" ? "page" : undefined}>API</a></nav>
      <div class="who">
        <${Theme} />
        ${caller && caller.requires_tokens && html`<span class="quiet">${caller.who}</span> <button type="button" onClick=${leave}>Log out</button>`}
      </div>
    </header>
    ${children}
  </div>`;
}

function App() {
  const { parts, query } = usePlace();
  const [caller, setCaller] = useState(null);
  const [error, setError] = useState(null);
  const main = useRef(null);
  const isDocs = location.pathname === "/docs";
  const learn = () => call("GET", "/v1/caller").then(setCaller).then(() => setError(null), setError);
  useEffect(() => {
    onRefused.call = (problem) => {
      setToken("");
      setCaller(null);
      setError(problem);
    };
    learn();
  }, []);
  const page = PAGES.find((one) => one.name === parts[0]);
  const title = isDocs ? "API" : page ? [parts[1], page.title].filter(Boolean).join(" · ") : "No such page";
  useEffect(() => {
    document.title = `${title} · quorumlog`;
    main.current?.focus({ preventScroll: true });
  }, [title]);
  const enter = (text) => {
    const before = token();
    setToken(text);
    learn();
    return before;
  };
  const leave = () => {
    setToken("");
    setCaller(null);
    setError(null);
    learn();
  };
  const pages = caller ? PAGES.filter((one) => !one.isFor || one.isFor(caller)) : [];
  const here = isDocs ? "docs" : parts[0];
  if (isDocs) {
    return html`<${Frame} ...${{ caller, leave, here, pages: caller ? pages : [PAGES[0]] }}>
      <main id="main" ref=${main} tabIndex="-1"><${Api} /></main><//>`;
  }
  if (!caller) {
    if (!error) return html`<main id="main"><p class="quiet" role="status">Loading …</p></main>`;
    if (error.status === 401) return html`<${Login} error=${error} enter=${enter} />`;
    return html`<main id="main"><h1>quorumlog</h1><${Failure} error=${error} retry=${learn} /></main>`;
  }
  const isAllowed = page && pages.includes(page);
  // A person whose token allows nothing on the cluster begins with the logs.
  if (!isAllowed && here === "") location.replace("#/logs");
  return html`<${Frame} ...${{ caller, leave, here, pages }}>
    <main id="main" ref=${main} tabIndex="-1" key=${parts.join("/")}>
      ${!page && html`<h1>No such page</h1><p>The console has no page with this address. <a href="#/">Go to the overview</a>.</p>`}
      ${page && !isAllowed && html`<h1>${page.title}</h1><p>The token of ${caller.who} does not allow this page.</p>`}
      ${isAllowed && (parts[1] && page.one
        ? html`<${page.one} name=${parts[1]} rest=${parts.slice(2)} caller=${caller} query=${query} />`
        : html`<${page.show} caller=${caller} query=${query} />`)}
    </main>
  <//>`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(h(App), root);
