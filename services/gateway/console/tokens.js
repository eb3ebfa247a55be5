import { html } from "./ui.js";
export function Audit() { return html`<h1>Audit</h1>`; }
export function Tokens() { return html`<h1>Tokens</h1>`; }
